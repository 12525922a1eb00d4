"""Writes into the pools, in place when they are donated: one row scatter for new tokens, one page scatter for copies.

The scatter names page, head and offset of every row. One that names page and offset and takes all heads costs a temporary of the
pool's size, and so does one on a flat view [L*C*K*P, H] where K is 1. Indices past the end are dropped (never -1, which wraps).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_tokens(pages, new, page_table, lengths, counts):
    """Returns pages with `new` [L, B, T, K, H] stored at positions lengths[b] + t of each row, for t < counts[b].

    pages [L*C, K, P, H]; page_table i32[B, M] owns pages for all of them; lengths, counts i32[B].
    """
    L, B, T, K, H = new.shape
    rows, _, P, _ = pages.shape
    tokens = jnp.arange(T, dtype=jnp.int32)
    positions = lengths[:, None] + tokens  # [B, T]
    columns = jnp.minimum(positions // P, page_table.shape[1] - 1)
    layer = jnp.arange(L, dtype=jnp.int32)[:, None, None] * (rows // L)
    page = jnp.take_along_axis(page_table, columns, 1) + layer  # [L, B, T]
    # Distinct indices past the end keep the promise of unique indices.
    outside = rows + jnp.arange(L * B * T, dtype=jnp.int32).reshape(L, B, T)
    page = jnp.where(tokens < counts[:, None], page, outside)
    where = jnp.broadcast_arrays(page[..., None], jnp.arange(K, dtype=jnp.int32), (positions % P)[..., None])
    page, head, offset = (index.reshape(-1) for index in where)
    return pages.at[page, head, offset].set(_as(new.reshape(-1, H), pages), mode="drop", unique_indices=True)


def copy_pages(pages, src, dst, num_layers: int):
    """Returns pages with page src[i] copied to dst[i] in every layer; a dst of C or more is dropped."""
    C = pages.shape[0] // num_layers
    layer = jnp.arange(num_layers, dtype=jnp.int32)[:, None] * C
    to = jnp.where(dst < C, layer + dst, pages.shape[0])
    return pages.at[to.reshape(-1)].set(pages[(layer + src).reshape(-1)], mode="drop")


def _as(x, pages):
    """x in the pool's dtype, as bits where the pool is held as bits (uint16 for bf16)."""
    if pages.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(pages.dtype)
