"""The oracle: attention as its definition says, over the whole gathered table, in the widest float there is.

It shares no line with the implementations it judges. Slow and large on purpose; f64 under `jax.enable_x64`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attend(
    q, k_pages, v_pages, page_table, lengths, chunk_lengths, k_new, v_new, *, page_offset, scale, window, soft_cap
):  # q [B, T, K, G, H] -> o [B, T, K, G, H], lse [B, T, K, G]
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    B, T, K, G, H = q.shape
    P = k_pages.shape[2]
    S = page_table.shape[1] * P

    def gather(pages):  # -> [B, S, K, H]
        if pages.dtype == jnp.uint16:
            pages = jax.lax.bitcast_convert_type(pages, jnp.bfloat16)
        rows = jnp.clip(page_table + page_offset, 0, pages.shape[0] - 1)
        return jnp.moveaxis(pages[rows], 2, 3).reshape(B, S, K, H).astype(wide)

    keys, values = gather(k_pages), gather(v_pages)
    key_positions = jnp.broadcast_to(jnp.arange(S), (B, S))
    exists = key_positions < lengths[:, None]
    if k_new is None:
        query_positions = lengths[:, None] - 1 + jnp.zeros((1, T), jnp.int32)
    else:
        own = lengths[:, None] + jnp.arange(T)[None]
        query_positions = own
        keys = jnp.concatenate([keys, k_new.astype(wide)], 1)
        values = jnp.concatenate([values, v_new.astype(wide)], 1)
        key_positions = jnp.concatenate([key_positions, own], 1)
        exists = jnp.concatenate([exists, jnp.arange(T)[None] < chunk_lengths[:, None]], 1)

    distance = query_positions[:, :, None] - key_positions[:, None, :]  # [B, T, S']
    visible = exists[:, None] & (distance >= 0) & ((window == 0) | (distance < window))
    seen = jnp.any(visible, 1)  # [B, S'] what any query of the row sees: the rest may hold NaN
    scores = jnp.einsum("btkgh,bskh->btkgs", q.astype(wide), keys, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    visible = visible[:, :, None, None, :]
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.max(scores, -1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.where(visible, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, -1)
    values = jnp.where(seen[:, :, None, None], values, 0)  # 0 * NaN is NaN
    o = jnp.einsum("btkgs,bskh->btkgh", weights, values, precision="highest")
    o = jnp.where(total[..., None] > 0, o / jnp.where(total > 0, total, 1)[..., None], 0)
    lse = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + top[..., 0], -jnp.inf)
    return o.astype(q.dtype), lse
