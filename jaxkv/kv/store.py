"""Copies of pages, in place when the pools are donated. (New tokens are written by `pallas_kernels.write_kv`.)"""

from __future__ import annotations

import jax.numpy as jnp


def copy_pages(pages, src, dst, num_layers: int):
    """Returns pages with page src[i] copied to dst[i] in every layer; a dst of C or more is dropped."""
    return put_pages(pages, dst, take_pages(pages, src, num_layers), num_layers)


def take_pages(pages, chosen, num_layers: int):
    """Returns the chosen pages i32[n] of every layer, [L, n, ..] of pages [L*C, ..]."""
    return pages[_rows(pages, chosen, num_layers)]


def put_pages(pages, chosen, new, num_layers: int):
    """Returns pages with the chosen ones of every layer set to new [L, n, ..]; a page of C or more is dropped."""
    C = pages.shape[0] // num_layers
    to = jnp.where(chosen < C, _rows(pages, chosen, num_layers), pages.shape[0])
    return pages.at[to].set(new, mode="drop")


def _rows(pages, chosen, num_layers: int):
    """i32[L, n]: where the chosen pages of every layer lie."""
    C = pages.shape[0] // num_layers
    return jnp.arange(num_layers, dtype=jnp.int32)[:, None] * C + chosen
