"""One forward pass for every family, for prefill and decode alike.

The layers of a segment are one body under `lax.scan`. No layer writes to the KV pool: each reads its pages at
`page_offset = layer * C`, takes the new tokens' keys and values as a term of their own, and hands them out as scan outputs, so
that one scatter after the scan writes them all (`jaxkv.kv.store`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.config import ModelConfig
from jaxkv.model.layers import mixture, mlp, rms_norm, rope_tables, rotate
from pallas_kernels import paged_decode, paged_prefill


def forward(
    config: ModelConfig,
    params,
    k_pages,
    v_pages,
    page_table,
    lengths,
    tokens,
    chunk_lengths,
    *,
    dtype="float32",
    implementation=None,
):
    """Runs `tokens` i32[B, T] behind the `lengths` i32[B] tokens already in the pages.

    Returns hidden f32[B, T, D] (before the final norm) and the new keys and values, f32[L, B, T, K, H] each, not yet written.
    """
    B, T = tokens.shape
    pages_per_layer = k_pages.shape[0] // config.num_layers
    positions = lengths[:, None] + jnp.arange(T, dtype=jnp.int32)
    cos, sin = rope_tables(config, positions)
    with jax.named_scope("embed"):
        x = params["embed"].take(tokens) * jnp.float32(config.embed_scale)

    def layer(moe: bool):
        def body(x, per_layer):
            w, index, window, kind = per_layer
            attend = lambda q, k, v: _attend(
                config,
                q,
                k,
                v,
                k_pages,
                v_pages,
                page_table,
                lengths,
                chunk_lengths,
                index * pages_per_layer,
                window,
                dtype,
                implementation,
            )
            return _layer(config, w, x, cos[kind], sin[kind], attend, moe, dtype)

        return body

    keys, values = [], []
    for (moe, first, stop), w in zip(config.segments(), params["layers"], strict=True):
        span = slice(first, stop)
        per_layer = (
            w,
            jnp.arange(first, stop, dtype=jnp.int32),
            jnp.asarray(config.layer_windows[span], jnp.int32),
            jnp.asarray(config.layer_ropes[span], jnp.int32),
        )
        x, (k, v) = jax.lax.scan(layer(moe), x, per_layer)
        keys.append(k)
        values.append(v)
    return x, jnp.concatenate(keys), jnp.concatenate(values)


def logits(config: ModelConfig, params, hidden, dtype: str = "float32"):
    """f32[.., V] from hidden f32[.., D]."""
    with jax.named_scope("head"):
        x = rms_norm(hidden, params["final_norm"], config.norm_eps)
        y = params.get("head", params["embed"])(x, dtype)
        return y if config.final_soft_cap is None else config.final_soft_cap * jnp.tanh(y / config.final_soft_cap)


def _layer(config, w, x, cos, sin, attend, moe, dtype):
    before = config.norm_placement in ("pre", "both")
    after = config.norm_placement in ("post", "both")
    norm = lambda name, y: rms_norm(y, w[name], config.norm_eps)
    with jax.named_scope("attention"):
        q, k, v = _qkv(config, w, norm("attn_norm", x) if before else x, cos, sin, dtype)
        o = w["o"](attend(q, k, v).reshape(*x.shape[:-1], -1), dtype)
        x = x + (norm("post_attn_norm", o) if after else o)
    with jax.named_scope("mlp"):
        h = (mixture if moe else mlp)(config, w, norm("mlp_norm", x) if before else x, dtype)
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


def _attend(config, q, k, v, k_pages, v_pages, page_table, lengths, chunk_lengths, page_offset, window, dtype, implementation):
    options = dict(
        page_offset=page_offset,
        scale=config.query_scale,
        window=window,
        soft_cap=config.attn_soft_cap,
        implementation=implementation,
    )
    if q.shape[1] == 1:
        # XLA:CPU computes one-token attention in f32 whatever dtype large products use.
        o = paged_decode(q[:, 0], k_pages, v_pages, page_table, lengths, k_new=k[:, 0], v_new=v[:, 0], **options)
        return o[:, None]
    o = paged_prefill(q.astype(dtype), k_pages, v_pages, page_table, lengths, chunk_lengths, k_new=k, v_new=v, **options)
    return o.astype(jnp.float32)
