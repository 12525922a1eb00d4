"""Writes into the pools, in place when they are donated: one row scatter for new tokens, one page scatter for copies.

A scatter with indices on two axes of the pool would cost a pool-sized temporary; a scatter of rows of the flat view
[L*C*K*P, H] does not. Indices past the end are dropped (never -1, which wraps).
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
    positions = lengths[:, None] + jnp.arange(T, dtype=jnp.int32)  # [B, T]
    columns = jnp.minimum(positions // P, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, columns, 1)
    layer = jnp.arange(L, dtype=jnp.int32)[:, None, None, None] * (rows // L)
    head = jnp.arange(K, dtype=jnp.int32)
    flat = ((page[:, :, None] + layer) * K + head) * P + (positions % P)[:, :, None]  # [L, B, T, K]
    dropped = jnp.arange(T, dtype=jnp.int32) >= counts[:, None]
    # Distinct indices past the end keep the promise of unique indices.
    outside = rows * K * P + jnp.arange(L * B * T * K, dtype=jnp.int32).reshape(L, B, T, K)
    flat = jnp.where(dropped[None, :, :, None], outside, flat)
    view = pages.reshape(rows * K * P, H)
    view = view.at[flat.reshape(-1)].set(_as(new.reshape(-1, H), pages), mode="drop", unique_indices=True)
    return view.reshape(pages.shape)


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
