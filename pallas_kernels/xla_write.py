"""Writes new keys and values into the pools with one row scatter each, in place where the pools are donated.

The scatter names page, head and offset of every vector. One that names page and offset and takes all heads costs a temporary of the
pool's size, and so does one on a flat view [L*C*K*P, H] where K is 1. Indices past the end are dropped (never -1, which wraps).
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.block_sizes import WriteBlocks, check_given
from pallas_kernels.heads import LANES
from pallas_kernels.quantise import to_pool


def write(
    k_pages, v_pages, kv_scales, k_new, v_new, page_table, lengths, chunk_lengths, page_offset,
    *, interpret=False, block_sizes=None, device=None,
):  # fmt: skip  # pools [L*C, K, P, H], k_new [L, B, T, K, H] -> (k_pages, v_pages, kv_scales)
    """Returns the pools with token t < chunk_lengths[b] of row b at position lengths[b] + t, in every layer."""
    del interpret, device
    check_given("xla", WriteBlocks, block_sizes, ())
    where = _places(k_pages.shape, k_new.shape, page_table, lengths, chunk_lengths, page_offset)
    k, k_scale = to_pool(k_new, k_pages.dtype)
    v, v_scale = to_pool(v_new, v_pages.dtype)
    if kv_scales is not None:
        kv_scales = _write_scales(kv_scales, k_scale, v_scale, where, k_pages.shape[2])
    return _scatter(k_pages, where, k), _scatter(v_pages, where, v), kv_scales


def _places(pool_shape, new_shape, page_table, lengths, chunk_lengths, page_offset):
    """Returns (page, head, offset) i32[L*B*T*K] of every new vector; those of tokens that do not count lie past the end."""
    rows, _, P, _ = pool_shape
    L, B, T, K, _ = new_shape
    tokens = jnp.arange(T, dtype=jnp.int32)
    positions = lengths[:, None] + tokens  # [B, T]
    columns = jnp.minimum(positions // P, page_table.shape[1] - 1)
    layer = page_offset + jnp.arange(L, dtype=jnp.int32)[:, None, None] * (rows // L)
    page = jnp.take_along_axis(page_table, columns, 1) + layer  # [L, B, T]
    # Distinct indices past the end keep the promise of unique indices.
    outside = rows + jnp.arange(L * B * T, dtype=jnp.int32).reshape(L, B, T)
    counts = (tokens < chunk_lengths[:, None]) & (positions < page_table.shape[1] * P)
    page = jnp.where(counts, page, outside)
    where = jnp.broadcast_arrays(page[..., None], jnp.arange(K, dtype=jnp.int32), (positions % P)[..., None])
    return tuple(index.reshape(-1) for index in where)


def _scatter(pages, where, new):
    return pages.at[where].set(new.reshape(-1, pages.shape[3]), mode="drop", unique_indices=True)


def _write_scales(kv_scales, k_scale, v_scale, where, P):
    """One scatter for both: two would each have to be proven in place."""
    page, head, offset = where
    flat = head * P + offset
    both = lambda index: jnp.concatenate([index, index])
    kind = jnp.repeat(jnp.arange(2, dtype=jnp.int32), page.size)
    at = (both(page), kind, both(flat // LANES), both(flat % LANES))
    new = jnp.concatenate([k_scale.reshape(-1), v_scale.reshape(-1)])
    return kv_scales.at[at].set(new, mode="drop", unique_indices=True)
