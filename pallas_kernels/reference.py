"""The oracle: attention and writes as their definitions say, over the whole gathered table, in the widest float there is.

It shares no line with the implementations it judges but `quantise`, which is a definition of its own. Slow and large on purpose;
f64 under `jax.enable_x64`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantise import quantise


def attend(
    q, k_pages, v_pages, kv_scales, page_table, lengths, chunk_lengths, k_new, v_new, sinks,
    *, page_offset, scale, window, soft_cap,
):  # fmt: skip  # q [B, T, K, G, H] -> o [B, T, K, G, H], lse [B, T, K, G]
    """Returns attention of T queries a row; without k_new the one query's key is the last of its pages."""
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    B, T, K, G, H = q.shape
    P = k_pages.shape[2]
    S = page_table.shape[1] * P
    rows = jnp.clip(page_table + page_offset, 0, k_pages.shape[0] - 1)

    def gather(pages, kind):  # -> [B, S, K, H]
        stored = _numbers(pages[rows]).astype(wide)  # [B, M, K', P, H']
        if kv_scales is not None:
            heads = pages.shape[1]
            flat = kv_scales[rows, kind].reshape(*rows.shape, -1)[..., : heads * P]
            stored = stored * flat.reshape(*rows.shape, heads, P, 1).astype(wide)
        return _plain(jnp.moveaxis(stored, 2, 3), K, H).reshape(B, S, K, H)

    keys, values = gather(k_pages, 0), gather(v_pages, 1)
    key_positions = jnp.broadcast_to(jnp.arange(S), (B, S))
    exists = key_positions < lengths[:, None]
    if k_new is None:
        query_positions = lengths[:, None] - 1 + jnp.zeros((1, T), jnp.int32)
    else:
        own = lengths[:, None] + jnp.arange(T)[None]
        query_positions = own
        keys = jnp.concatenate([keys, _as_stored(k_new, k_pages, wide)], 1)
        values = jnp.concatenate([values, _as_stored(v_new, v_pages, wide)], 1)
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
    if sinks is not None:  # one more score a head, of a key whose value is zero
        sink = jnp.broadcast_to(sinks.astype(wide)[:, :, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], -1)
        visible = jnp.concatenate([jnp.broadcast_to(visible, scores[..., :-1].shape), jnp.ones_like(sink, bool)], -1)
    top = jnp.max(scores, -1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.where(visible, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, -1)
    values = jnp.where(seen[:, :, None, None], values, 0)  # 0 * NaN is NaN
    o = jnp.einsum("btkgs,bskh->btkgh", weights[..., : keys.shape[1]], values, precision="highest")
    empty = total == 0  # NaN, which a row may see, is not
    safe = jnp.where(empty, 1, total)
    o = jnp.where(empty[..., None], 0, o / safe[..., None])
    lse = jnp.where(empty, -jnp.inf, jnp.log(safe) + top[..., 0])
    return o.astype(q.dtype), lse


def write(k_pages, v_pages, kv_scales, k_new, v_new, page_table, lengths, chunk_lengths, *, page_offset):
    """Returns the pools and scales with every counted token stored: one token at a time, all heads of it."""
    L, B, T, _, _ = k_new.shape
    rows, heads, P, dim = k_pages.shape
    dtype = k_pages.dtype
    # Every store as bits: XLA:CPU would convert a whole fp8 pool back and forth for each token.
    bits = jnp.dtype(f"uint{8 * dtype.itemsize}")
    as_bits = lambda x: jax.lax.bitcast_convert_type(x, bits)

    def store(i, pools):
        k_pages, v_pages, kv_scales = pools
        l, b, t = i // (B * T), i // T % B, i % T
        counts = (t < chunk_lengths[b]) & (lengths[b] + t < page_table.shape[1] * P)
        position = jnp.where(counts, lengths[b] + t, 0)
        page, offset = page_offset + l * (rows // L) + page_table[b, position // P], position % P
        page = jnp.where(counts, page, 0)
        keep = lambda pages, at, new: pages.at[at].set(jnp.where(counts, new, pages[at]))
        k, k_scale = _stored(k_new[l, b, t], heads, dim, dtype)
        v, v_scale = _stored(v_new[l, b, t], heads, dim, dtype)
        for head in range(heads):
            k_pages = keep(k_pages, (page, head, offset), as_bits(k[head]))
            v_pages = keep(v_pages, (page, head, offset), as_bits(v[head]))
            if kv_scales is not None:
                place = divmod(head * P + offset, 128)
                kv_scales = keep(kv_scales, (page, 0, *place), k_scale[head])
                kv_scales = keep(kv_scales, (page, 1, *place), v_scale[head])
        return k_pages, v_pages, kv_scales

    k, v, kv_scales = jax.lax.fori_loop(0, L * B * T, store, (as_bits(k_pages), as_bits(v_pages), kv_scales))
    return jax.lax.bitcast_convert_type(k, dtype), jax.lax.bitcast_convert_type(v, dtype), kv_scales


def _numbers(stored):
    """What stored bits mean: bf16 may be held in uint16, fp8 in uint8."""
    meant = {"uint16": jnp.bfloat16, "uint8": jnp.float8_e4m3fn}.get(stored.dtype.name)
    return stored if meant is None else jax.lax.bitcast_convert_type(stored, meant)


def _stored(x, heads, dim, dtype):
    """(values dtype[.., K', H'], scale f32[.., K'] or None) of x [.., K, H]: heads side by side, then zeros."""
    x = x.reshape(*x.shape[:-2], heads, -1)
    x = jnp.concatenate([x, jnp.zeros((*x.shape[:-1], dim - x.shape[-1]), x.dtype)], -1)
    meant = jnp.dtype({"uint16": jnp.bfloat16, "uint8": jnp.float8_e4m3fn}.get(dtype.name, dtype))
    values, scale = quantise(x, meant) if meant.itemsize == 1 else (x.astype(meant), None)
    return jax.lax.bitcast_convert_type(values, dtype), scale


def _plain(x, K, H):  # [.., K', H'] -> [.., K, H]
    return x[..., :H] if x.shape[-2] == K else x.reshape(*x.shape[:-2], K, H)


def _as_stored(x, pages, wide):
    """x [.., K, H] as it would read back from `pages`."""
    _, heads, _, dim = pages.shape
    values, scale = _stored(x, heads, dim, pages.dtype)
    values = _numbers(values).astype(wide)
    return _plain(values if scale is None else values * scale[..., None].astype(wide), *x.shape[-2:])
