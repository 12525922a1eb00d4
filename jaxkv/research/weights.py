"""Weights as they are trained: one f32 array a name of `io.source`, those of layers stacked `[L, ..]`.

They become the decoder's params inside the loss, so that what is trained is what is stored, converted and served.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.io import checkpoint
from jaxkv.io.hf_source import open_hf_folder
from jaxkv.io.source import WeightSource, expected_shapes
from jaxkv.model import decoder
from jaxkv.model.layers import mlp, rope_tables
from jaxkv.model.linear import Linear
from jaxkv.model.params import GROUPS

Weights = dict[str, jax.Array]
# Queries that attend together. At T 256 and 8 heads of 16 on one AVX-512 core, forth and back: blocks of 32 take 13.5 us a token and
# layer, of 64 12.5, of 128 16, of 256 22; in many blocks a long row takes long to compile.
_BLOCK, _MOST_BLOCKS = 64, 16
# From this length on, what layers compute is computed anew on the way back: kept, the scores of 4,096 tokens would be gigabytes.
_LONG = 1024


def byte_config(
    num_kv_heads: int, *, model_dim: int, num_layers: int, num_q_heads: int, mlp_dim: int, max_positions: int
) -> ModelConfig:
    """A llama over bytes; heads share model_dim.

    Raises:
      ValueError: sizes that do not divide.
    """
    if model_dim % (2 * num_q_heads):
        raise ValueError(f"{model_dim=} must be a multiple of 2 * {num_q_heads=}: heads are rotated in pairs of dims")
    head_dim = model_dim // num_q_heads
    return ModelConfig(
        architecture="llama", vocab_size=256, model_dim=model_dim, num_layers=num_layers, num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, mlp_dim=mlp_dim, max_positions=max_positions, query_scale=head_dim**-0.5,
        layer_windows=(0,) * num_layers, layer_ropes=(0,) * num_layers, ropes=(RopeConfig(),),
    )  # fmt: skip


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every array by its name.

    Raises:
      ValueError: a model that cannot be trained here: layers that differ, or a vocabulary that is not the bytes.
    """
    if config.vocab_size != 256:
        raise ValueError(
            f"training reads a text's 256 bytes, and the model has vocab_size={config.vocab_size}: start from model/ of a run of"
            " scripts/train.py, or from nothing"
        )
    if any(config.moe_layers):
        raise ValueError("mixtures of experts are not trained here: only decoders whose layers are all dense")
    shapes = {}
    for (name, layer), shape in expected_shapes(config).items():
        shapes[name] = shape if layer is None else (config.num_layers, *shape)
    return shapes


def init_weights(config: ModelConfig, seed: int, stream: int = 0) -> Weights:
    """N(0, 1 / fan in), what ends a residual branch smaller by sqrt(2 L) (GPT-2); embedding and head N(0, 0.02^2), norms 1, biases 0.

    Another `stream` of the same seed draws other numbers.
    """
    weights = {}
    for index, (name, shape) in enumerate(weight_shapes(config).items()):
        if name.endswith("norm"):
            weights[name] = jnp.ones(shape, jnp.float32)
        elif name.endswith("bias"):
            weights[name] = jnp.zeros(shape, jnp.float32)
        else:
            size = 0.02 if name in ("embed", "head") else shape[-1] ** -0.5
            size /= math.sqrt(2 * config.num_layers) if name in ("o", "down") else 1
            normal = np.random.default_rng((seed, index, stream)).standard_normal(shape, np.float32)
            weights[name] = jnp.asarray(normal * np.float32(size))
    return weights


def read_weights(path: str | Path) -> tuple[ModelConfig, Weights]:
    """(config, weights) of a portable checkpoint or a Hugging Face folder.

    Raises:
      ValueError: it is neither, or a model that cannot be trained here.
    """
    path = Path(path)
    if checkpoint.is_checkpoint(path):
        portable = checkpoint.open_portable(path)
        if portable is None:
            raise ValueError(f"{path} holds weights in the forms of one backend: give the model they were converted from")
        source: WeightSource = portable[0]
    elif (path / "config.json").is_file():
        source = open_hf_folder(path)
    else:
        raise ValueError(f"{path} is neither a jaxkv checkpoint (jaxkv.json) nor a Hugging Face folder (config.json)")
    config = source.config
    read = lambda name, layer: np.asarray(source.read(name, layer), np.float32)
    top = {name for name, layer in expected_shapes(config) if layer is None}
    layers = range(config.num_layers)
    stack = lambda name: read(name, None) if name in top else np.stack([read(name, layer) for layer in layers])
    return config, {name: jnp.asarray(stack(name)) for name in weight_shapes(config)}


def for_storage(weights: Weights) -> dict[str, np.ndarray]:
    """Weights as float16, where that holds all of one: half the bytes, and more of its bits than bfloat16."""
    stored = {}
    for name, array in weights.items():
        fits = bool(jnp.all(jnp.abs(array) <= 65504))
        stored[name] = np.asarray(array, np.float16 if fits else np.float32)
    return stored


def hidden_states(config: ModelConfig, weights: Weights, tokens, dtype: str) -> jax.Array:
    """f32[B, T, D] before the final norm, of tokens i32[B, T]: the decoder's layers over attention that has a gradient.

    The engine's attention loops over as many blocks as there are, and such a loop cannot be differentiated backwards.
    """
    x = weights["embed"].at[tokens].get(mode="clip") * jnp.float32(config.embed_scale)
    cos, sin = rope_tables(config, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])
    mix = lambda w, x: mlp(config, w, x, dtype)

    def body(x, per_layer):
        w, window, kind = per_layer
        attend = lambda q, k, v: (_attend(config, q, k, v, window, dtype), k, v)
        return decoder._layer(config, w, x, cos[kind], sin[kind], attend, mix, dtype)[0], None

    windows, kinds = jnp.asarray(config.layer_windows, jnp.int32), jnp.asarray(config.layer_ropes, jnp.int32)
    body = jax.checkpoint(body) if tokens.shape[1] >= _LONG else body
    return jax.lax.scan(body, x, (_layer_params(config, weights), windows, kinds))[0]


def mean_loss(config: ModelConfig, weights: Weights, tokens, dtype: str) -> jax.Array:
    """Mean negative log-likelihood, in nats, of tokens i32[B, T + 1] but the first of each row."""
    x = hidden_states(config, weights, tokens[:, :-1], dtype)
    params = {"final_norm": weights["final_norm"], "embed": _linear(weights["embed"])}
    if not config.tie_embeddings:
        params["head"] = _linear(weights["head"])
    scores = decoder.logits(config, params, x, dtype)
    top = jnp.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, -1) - top)


def _linear(weight, bias=None) -> Linear:
    # The form of no device in particular: one dot in the dtype that is asked for.
    return Linear(weight, bias=bias, platform="any")


def _layer_params(config: ModelConfig, weights: Weights) -> dict:
    """What a segment of the params tree holds (`model.params`), stacked over all layers."""
    top = {name for name, layer in expected_shapes(config) if layer is None}
    here = {name: array for name, array in weights.items() if name not in top}
    out: dict = {}
    for group, parts in GROUPS.items():
        if parts[0] in here:
            biases = [here.pop(f"{part}_bias") for part in parts if f"{part}_bias" in here]
            joined = jnp.concatenate([here.pop(part) for part in parts], 1)
            out[group] = _linear(joined, jnp.concatenate(biases, 1) if biases else None)
    return out | here


def _attend(config: ModelConfig, q, k, v, window, dtype: str):  # q [B, T, K, G, H], k and v [B, T, K, H] -> f32 as q
    """Causal attention within a window (0: none), a block of queries at a time: no score behind a block's last query is computed."""
    B, T, K, G, H = q.shape
    heads_first = lambda x: jnp.moveaxis(x, 1, -2).reshape(B * K, *x.shape[3:-1], T, H).astype(dtype)
    q, k, v = heads_first(q * config.query_scale), heads_first(k), heads_first(v)
    precision = "highest" if dtype == "float32" else None  # a TPU would round f32 operands to bf16
    product = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    block = max(_BLOCK, -(-T // _MOST_BLOCKS))
    rows = []
    for start in range(0, T, block):
        stop = min(start + block, T)
        scores = product("ngth,nsh->ngts", q[:, :, start:stop], k[:, :stop])
        if config.attn_soft_cap is not None:
            scores = config.attn_soft_cap * jnp.tanh(scores / config.attn_soft_cap)
        distance = jnp.arange(start, stop)[:, None] - jnp.arange(stop)[None]
        visible = (distance >= 0) & ((window == 0) | (distance < window))
        scores = scores + jnp.where(visible, jnp.float32(0), jnp.float32(-1e30))
        # Divided by its sum only after the product with values: that saves two passes over the scores, forth and back.
        chances = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True)))
        rows.append(product("ngts,nsh->ngth", chances.astype(dtype), v[:, :stop]) / jnp.sum(chances, -1, keepdims=True))
    return jnp.moveaxis(jnp.concatenate(rows, 2).reshape(B, K, G, T, H), 3, 1)
