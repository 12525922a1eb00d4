"""The parts of a decoder layer, each a function of arrays. Everything between products is f32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import ModelConfig, RopeConfig

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


def rms_norm(x, weight, eps: float):
    """x / rms(x) * weight over the last axis (arXiv:1910.07467)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """The angle a position adds to each rotated pair (f32[rotary_dim / 2], radians) and the factor on cos and sin."""
    dim = rope.rotary_dim or head_dim
    inverse = 1.0 / rope.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "linear":
        return (inverse / rope.factor).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse).astype(np.float32), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inverse, dim).astype(np.float32), _yarn_attention_factor(rope)
    return inverse.astype(np.float32), 1.0


def _llama3(rope: RopeConfig, inverse):
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_max_positions * inverse / (2 * math.pi)  # over the original context
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return keep * inverse + (1 - keep) * inverse / rope.factor


def _yarn(rope: RopeConfig, inverse, dim: int):
    """NTK-by-parts of YaRN (arXiv:2309.00071): dims that turn often are kept, slow ones interpolated."""

    def dim_with_turns(turns):
        return dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_with_turns(rope.beta_fast), dim_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return inverse * (1 - ramp) + inverse / rope.factor * ramp


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def rope_tables(config: ModelConfig, positions):
    """cos and sin of every kind of layer, f32[kinds, B, T, 1, rotary_dim / 2]; positions i32[B, T]."""
    tables = []
    for rope in config.ropes:
        frequencies, factor = rope_frequencies(rope, config.head_dim)
        angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
        tables.append((jnp.cos(angles) * factor, jnp.sin(angles) * factor))
    return jnp.stack([c for c, _ in tables]), jnp.stack([s for _, s in tables])


def rotate(x, cos, sin):  # x [B, T, heads, H], cos and sin [B, T, 1, R/2]
    """Rotates the leading R dims of every head, paired half against half; the others pass."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def mlp(config: ModelConfig, w, x, dtype: str):
    """down(act(gate x) * up x); `w.gate_up` holds both halves in one product."""
    gate, up = jnp.split(w["gate_up"](x, dtype), 2, -1)
    return w["down"](_ACTIVATIONS[config.activation](gate) * up, dtype)


def mixture(config: ModelConfig, w, x, dtype: str, valid):
    """The chosen experts' MLPs, weighted; rows [B, T, D] where valid bool[B, T] is False choose none and give 0."""
    del dtype  # Experts know theirs
    rows = x.reshape(-1, x.shape[-1])
    chances = jax.nn.softmax(w["router"](rows, "float32"), -1)
    weights, experts = jax.lax.top_k(chances, config.experts_per_token)  # [R, k]
    if config.normalize_router:
        weights = weights / jnp.sum(weights, -1, keepdims=True)
    mix = _expert_by_expert if w["experts_gate_up"].platform == "cpu" else _sorted_by_expert
    return mix(config, w, rows, weights, experts, valid.reshape(-1)).reshape(x.shape)


def _expert_by_expert(config: ModelConfig, w, rows, weights, experts, valid):
    """A loop over the experts that some row chose, each with all rows.

    XLA:CPU has no ragged product: it upcasts every expert's weights and multiplies all rows with each, and a decode step of a
    mixture of 8 experts of which 2 are chosen took over 100 times as long (docs/performance.md).
    """
    chosen = (experts[..., None] == jnp.arange(config.num_experts)) & valid[:, None, None]  # [R, k, E]
    share = jnp.sum(jnp.where(chosen, weights[..., None], 0), 1)  # [R, E]
    chosen = jnp.any(chosen, 1)
    used = jnp.any(chosen, 0)
    order = jnp.argsort(~used, stable=True)

    def add(i, total):
        expert = order[i]
        column = lambda a: jax.lax.dynamic_index_in_dim(a, expert, 1)  # [R, E] -> [R, 1]
        gate, up = jnp.split(w["experts_gate_up"].one(rows, expert), 2, -1)
        y = w["experts_down"].one(_ACTIVATIONS[config.activation](gate) * up, expert)
        return total + jnp.where(column(chosen), y * column(share), 0)  # a select: 0 * inf of a row that did not choose it is NaN

    return jax.lax.fori_loop(0, jnp.sum(used), add, jnp.zeros_like(rows))


def _sorted_by_expert(config: ModelConfig, w, rows, weights, experts, valid):
    """Rows are sorted by expert, so that each multiplies one ragged group."""
    k = config.experts_per_token
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.sum(experts.reshape(-1, 1) == jnp.arange(config.num_experts), 0, dtype=jnp.int32)
    gate, up = jnp.split(w["experts_gate_up"](rows[order // k], sizes), 2, -1)
    y = w["experts_down"](_ACTIVATIONS[config.activation](gate) * up, sizes)
    y = y[jnp.argsort(order)].reshape(rows.shape[0], k, -1)
    return jnp.where(valid[:, None], jnp.sum(y * weights[..., None], 1), 0)


def spread(x):  # [.., H] -> [.., H]
    """x with every channel spread over all of them: an orthogonal product with a Hadamard matrix, which is its own inverse.

    q.k does not change when both are spread. But an 8-bit vector has one scale, which its largest channel decides, and the keys of
    real models have a few channels that are much larger than the rest: spread, they no longer cost the others their bits
    (QuaRot, arXiv:2404.00456; figures in docs/quantisation.md). Where H is no power of two, channels spread within equal blocks.
    fp8 loses in proportion to each number, and so most where queries and keys are both large. With balanced keys (`key_balance`) the
    even loss of spread ones is less, but for what the factors' whole powers of two cost.
    """
    H = x.shape[-1]
    n = H & -H  # the largest power of two that divides H
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.float32(math.sqrt(2))
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], H // n, n)
    return jnp.matmul(blocks, matrix, precision="highest").reshape(x.shape)
