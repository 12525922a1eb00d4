"""One forward pass for every family, for prefill and decode alike.

The layers of a segment are one body under `lax.scan`. No layer writes to the KV pool: each reads its pages at
`page_offset = layer * C`, takes the new tokens' keys and values as a term of their own, and hands them out as scan outputs, so
that one write after the scan stores them all (`pallas_kernels.write_kv`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.config import ModelConfig
from jaxkv.model.layers import mixture, mlp, rms_norm, rope_tables, rotate, spread
from jaxkv.model.linear import Experts
from jaxkv.model.params import stacks
from pallas_kernels import DEVICES, DeviceSpec, default_device, paged_decode, paged_prefill, present_spec


class Cache(NamedTuple):
    """The pages that come before a call's tokens, for all layers."""

    k_pages: jax.Array  # [L*C, K, P, H]
    v_pages: jax.Array  # [L*C, K, P, H]
    kv_scales: jax.Array | None  # f32[L*C, 2, R, 128] of 8-bit pools
    page_table: jax.Array  # i32[B, M]
    lengths: jax.Array  # i32[B] tokens stored


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which attention runs, and what it is built for: the static options of `pallas_kernels`."""

    implementation: str | None = None  # None: the device's
    interpret: bool = False
    device: DeviceSpec = DEVICES["cpu"]

    @classmethod
    def here(cls, platform: str, implementation: str | None = None, interpret: bool = False) -> Kernels:
        """For the device that jax has on this platform.

        Raises:
          ValueError: nobody described it, and the implementation is not one that runs anywhere.
        """
        try:
            device = present_spec(jax.devices(platform)[0])
        except ValueError as error:
            if implementation not in ("xla", "reference"):
                raise ValueError(f"{error}; implementation='xla' runs without") from error
            device = default_device(platform)
        return cls(implementation, interpret, device)

    @property
    def options(self) -> dict:
        """As keyword arguments of an op."""
        return {"implementation": self.implementation, "interpret": self.interpret, "device": self.device}


def forward(config: ModelConfig, params, cache: Cache, tokens, chunk_lengths, dtype: str, kernels: Kernels):
    """Runs `tokens` i32[B, T], of which chunk_lengths i32[B] count, behind the tokens in the cache.

    Returns hidden f32[B, T, D] (before the final norm) and the new keys and values, f32[L, B, T, K, H] each, not yet written.
    """
    pages_per_layer = cache.k_pages.shape[0] // config.num_layers
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    cos, sin = rope_tables(config, positions)
    with jax.named_scope("embed"):
        x = params["embed"].take(tokens) * jnp.float32(config.embed_scale)
    valid = jnp.arange(tokens.shape[1], dtype=jnp.int32) < chunk_lengths[:, None]

    def layer(first: int, experts):
        def body(x, per_layer):
            w, index, window, kind = per_layer
            w = w | {name: stack.of_layer(index - first) for name, stack in experts.items()}
            options = kernels.options | {"page_offset": index * pages_per_layer, "window": window}
            attend = lambda q, k, v: _attend(config, q, k, v, cache, chunk_lengths, dtype, options)
            mix = (lambda w, x: mixture(config, w, x, dtype, valid)) if experts else (lambda w, x: mlp(config, w, x, dtype))
            return _layer(config, w, x, cos[kind], sin[kind], attend, mix, dtype)

        return body

    keys, values = [], []
    for (first, stop), w in zip(stacks(config, kernels.device.platform), params["layers"], strict=True):
        span = slice(first, stop)
        experts = {name: product for name, product in w.items() if isinstance(product, Experts)}
        per_layer = (
            {name: product for name, product in w.items() if name not in experts},
            jnp.arange(first, stop, dtype=jnp.int32),
            jnp.asarray(config.layer_windows[span], jnp.int32),
            jnp.asarray(config.layer_ropes[span], jnp.int32),
        )
        x, (k, v) = jax.lax.scan(layer(first, experts), x, per_layer)
        keys.append(k)
        values.append(v)
    return x, jnp.concatenate(keys), jnp.concatenate(values)


def logits(config: ModelConfig, params, hidden, dtype: str = "float32"):
    """f32[.., V] from hidden f32[.., D]."""
    with jax.named_scope("head"):
        x = rms_norm(hidden, params["final_norm"], config.norm_eps)
        y = params.get("head", params["embed"])(x, dtype)
        return y if config.final_soft_cap is None else config.final_soft_cap * jnp.tanh(y / config.final_soft_cap)


def _layer(config, w, x, cos, sin, attend, mix, dtype):
    before = config.norm_placement in ("pre", "both")
    after = config.norm_placement in ("post", "both")
    norm = lambda name, y: rms_norm(y, w[name], config.norm_eps)
    with jax.named_scope("attention"):
        q, k, v = _qkv(config, w, norm("attn_norm", x) if before else x, cos, sin, dtype)
        o, k, v = attend(q, k, v)
        o = w["o"](o.reshape(*x.shape[:-1], -1), dtype)
        x = x + (norm("post_attn_norm", o) if after else o)
    with jax.named_scope("mlp"):
        h = mix(w, norm("mlp_norm", x) if before else x)
        x = x + (norm("post_mlp_norm", h) if after else h)
    return x, (k, v)


def _qkv(config, w, x, cos, sin, dtype):  # x [B, T, D] -> q [B, T, K, G, H], k and v [B, T, K, H]
    B, T, _ = x.shape
    N, K, H = config.num_q_heads, config.num_kv_heads, config.head_dim
    q, k, v = jnp.split(w["qkv"](x, dtype), (N * H, (N + K) * H), -1)
    if config.qk_norm == "projection":
        q, k = rms_norm(q, w["q_norm"], config.norm_eps), rms_norm(k, w["k_norm"], config.norm_eps)
    q, k = q.reshape(B, T, N, H), k.reshape(B, T, K, H)
    if config.qk_norm == "head":
        q, k = rms_norm(q, w["q_norm"], config.norm_eps), rms_norm(k, w["k_norm"], config.norm_eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q.reshape(B, T, K, N // K, H), k, v.reshape(B, T, K, H)


def _attend(config, q, k, v, cache: Cache, chunk_lengths, dtype, options):
    """f32 q [B, T, K, G, H], k and v [B, T, K, H] -> o f32[B, T, K, G, H], and k and v as they are to be stored."""
    # fp8 gains from it only where keys are well balanced (docs/quantisation.md): norms tell what channels to expect, biases do not.
    spreads = cache.k_pages.dtype == jnp.int8 or (cache.kv_scales is not None and config.qk_norm != "none")
    if spreads:
        q, k, v = spread(q), spread(k), spread(v)
    options = options | {"scale": config.query_scale, "soft_cap": config.attn_soft_cap, "kv_scales": cache.kv_scales}
    pages = (cache.k_pages, cache.v_pages, cache.page_table, cache.lengths)
    if q.shape[1] > 1:
        o = paged_prefill(q.astype(dtype), *pages, chunk_lengths, k_new=k, v_new=v, **options)
    else:
        # XLA:CPU computes one-token attention in f32 whatever dtype large products use.
        query = q if options["device"].platform == "cpu" else q.astype(dtype)
        o = paged_decode(query[:, 0], *pages, k_new=k[:, 0], v_new=v[:, 0], **options)[:, None]
    o = o.astype(jnp.float32)
    return spread(o) if spreads else o, k, v
