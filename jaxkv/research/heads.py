"""Fewer KV heads out of many: the conversion of Ainslie et al. 2023 (GQA, arXiv:2305.13245).

Query heads stay as they are. A group of consecutive KV heads becomes one, which serves the queries of all of them; a fraction of the
pretraining steps then teaches the queries to live with it (uptraining).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxkv.config import ModelConfig
from jaxkv.research.weights import Weights, init_weights

POOLINGS = ("mean", "first", "random")


def convert_heads(
    config: ModelConfig, weights: Weights, num_kv_heads: int, pooling: str, seed: int = 0
) -> tuple[ModelConfig, Weights]:
    """(config, weights) of the same model with `num_kv_heads` heads of keys and values.

    Args:
      config: what the weights are now, with any number of KV heads (MHA or already grouped).
      weights: as they are trained, f32, stacked over layers.
      num_kv_heads: a divisor of the heads there are.
      pooling: "mean" of a group's projections, the "first" of them, or "random" ones that know nothing of them.
      seed: of the random ones.

    Raises:
      ValueError: no divisor, or no such pooling; with the numbers.
    """
    K = config.num_kv_heads
    if num_kv_heads < 1 or K % num_kv_heads:
        divisors = ", ".join(str(n) for n in range(1, K + 1) if K % n == 0)
        raise ValueError(f"{num_kv_heads=} must divide the model's {K} KV heads: give one of {divisors}")
    if pooling not in POOLINGS:
        raise ValueError(f"{pooling=} is not one of {', '.join(POOLINGS)}")
    converted = dataclasses.replace(config, num_kv_heads=num_kv_heads)
    # A norm over the whole projection of keys (OLMo 2) has a weight a channel, which goes where its channel goes.
    names = {"k", "v", "k_bias", "v_bias"} | ({"k_norm"} if config.qk_norm == "projection" else set())
    names &= weights.keys()
    if pooling == "random":
        # Not the stream that new models are drawn from: with the parent's seed they would be the heads it began with.
        fresh = init_weights(converted, seed, stream=1)
        return converted, weights | {name: fresh[name] for name in names}
    return converted, weights | {name: _pooled(weights[name], K, num_kv_heads, pooling) for name in names}


def _pooled(array, heads: int, groups: int, pooling: str):  # [L, K*H, ..] -> [L, groups*H, ..]
    L, rows, *rest = array.shape
    H = rows // heads
    grouped = array.reshape(L, groups, heads // groups, H, *rest)
    one = jnp.mean(grouped, 2) if pooling == "mean" else grouped[:, :, 0]
    return one.reshape(L, groups * H, *rest)
