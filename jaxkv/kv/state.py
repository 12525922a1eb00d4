"""The KV state: two page pools on the device, and who owns which page on the host.

    KVState
      k_pages, v_pages   [L*C, K, P, H]   all layers in one flat pool: layer l's page c is row l*C + c; on CPU, bf16 pools
                                          are held as their bits in uint16 (docs/performance.md)
      kv_scales          None             scales of 8-bit pools will live here
      own                Ownership        page_table i32[B, M], lengths i32[B], refcounts i32[C]

A model whose layers all see the same tokens has one KVState. Layers that see only a window could form a second group with a C,
a table and refcounts of their own; everything a group needs is in this class and nothing else names it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.config import ModelConfig
from jaxkv.kv import pages
from jaxkv.kv.pages import Ownership
from jaxkv.model.linear import stored_dtype

KV_DTYPES = ("float32", "bfloat16", "float16")
_INT32_RANGE = 2**31  # non-negative int32 numbers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVState:
    """Keys and values of every slot, in pages. Immutable: a step returns a successor and the pages move into it."""

    k_pages: jax.Array  # [L*C, K, P, H]
    v_pages: jax.Array  # [L*C, K, P, H]
    kv_scales: jax.Array | None
    own: Ownership

    @property
    def page_table(self) -> pages.Array:
        """i32[B, M]: the page of slot b's logical page j; 0 is the null page."""
        return self.own.page_table

    @property
    def lengths(self) -> pages.Array:
        """i32[B]: tokens of slot b whose keys and values are stored."""
        return self.own.lengths

    @property
    def refcounts(self) -> pages.Array:
        """i32[C]: live references to a page; 0 is free."""
        return self.own.refcounts

    @property
    def page_size(self) -> int:
        """P, tokens a page."""
        return self.own.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of the two pools."""
        return self.k_pages.nbytes + self.v_pages.nbytes


def empty_kv(
    config: ModelConfig, num_slots: int, pages_per_slot: int, page_size: int, num_pages: int, dtype: str, platform: str
) -> KVState:
    """A zeroed pool of `num_pages` pages a layer (the null page among them) and empty slots."""
    if dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype={dtype!r} is not one of {', '.join(KV_DTYPES)}")
    rows = config.num_layers * num_pages
    vectors = rows * config.num_kv_heads * page_size
    # A write sends what it drops to page indices past the pool's end, one a token and layer (kv/store.py): at most the larger of
    # one token of every slot and one slot's whole history, padded to a power of two.
    spare = config.num_layers * max(num_slots, 2 * pages_per_slot * page_size)
    if vectors + spare > _INT32_RANGE:
        raise ValueError(
            f"num_layers={config.num_layers} * {num_pages=} * num_kv_heads={config.num_kv_heads} * {page_size=} = {vectors:,}"
            f" vectors of the pool and {spare:,} indices to spare for the longest write do not fit int32: {vectors + spare:,} of at"
            f" most {_INT32_RANGE:,}; use fewer pages"
        )
    shape = (rows, config.num_kv_heads, page_size, config.head_dim)
    make = lambda: jnp.zeros(shape, stored_dtype(dtype, platform))
    return KVState(make(), make(), None, pages.empty(num_slots, pages_per_slot, num_pages, page_size))
