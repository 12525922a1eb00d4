"""Copies of pages, in place when the pools are donated. (New tokens are written by `pallas_kernels.write_kv`.)"""

from __future__ import annotations

import jax.numpy as jnp


def copy_pages(pages, src, dst, num_layers: int):
    """Returns pages with page src[i] copied to dst[i] in every layer; a dst of C or more is dropped."""
    C = pages.shape[0] // num_layers
    layer = jnp.arange(num_layers, dtype=jnp.int32)[:, None] * C
    to = jnp.where(dst < C, layer + dst, pages.shape[0])
    return pages.at[to.reshape(-1)].set(pages[(layer + src).reshape(-1)], mode="drop")
