"""The KV state: two page pools on the device, and who owns which page on the host.

    KVState
      k_pages, v_pages   [L*C, K, P, H]   all layers in one flat pool: layer l's page c is row l*C + c; on TPU heads are padded
                                          or paired to 128 lanes (pallas_kernels.pool_heads); on CPU bf16 and fp8 pools are held
                                          as their bits in unsigned integers (docs/performance.md)
      kv_scales          f32[L*C, 2, R, 128], the scales of 8-bit pools (pallas_kernels.scales_shape); else None
      own                Ownership        page_table i32[B, M], lengths i32[B], refcounts i32[C]

A model whose layers all see the same tokens has one KVState. Layers that see only a window could form a second group with a C,
a table and refcounts of their own; everything a group needs is in this class and nothing else names it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.buckets import most_written_tokens
from jaxkv.config import ModelConfig
from jaxkv.kv import pages
from jaxkv.kv.pages import Ownership
from pallas_kernels import HELD_AS_BITS, has_scales, pool_heads, scales_shape

KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
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
        """Bytes of the two pools and their scales."""
        return sum(a.nbytes for a in (self.k_pages, self.v_pages, self.kv_scales) if a is not None)


def empty_kv(
    config: ModelConfig, num_slots: int, pages_per_slot: int, page_size: int, num_pages: int, dtype: str, platform: str
) -> KVState:
    """A zeroed pool of `num_pages` pages a layer (the null page among them) and empty slots."""
    if dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype={dtype!r} is not one of {', '.join(KV_DTYPES)}")
    rows = config.num_layers * num_pages
    vectors = rows * config.num_kv_heads * page_size
    # A write sends what it drops to page indices past the pool's end, one a token and layer of its dispatch (kv/store.py).
    spare = config.num_layers * most_written_tokens(num_slots, pages_per_slot * page_size)
    if vectors + spare > _INT32_RANGE:
        raise ValueError(
            f"num_layers={config.num_layers} * {num_pages=} * num_kv_heads={config.num_kv_heads} * {page_size=} = {vectors:,}"
            f" vectors of the pool and {spare:,} indices to spare for the largest write do not fit int32: {vectors + spare:,} of at"
            f" most {_INT32_RANGE:,}; use fewer pages"
        )
    k_pages, v_pages, kv_scales = empty_pools(config, num_pages, page_size, dtype, platform)
    return KVState(k_pages, v_pages, kv_scales, pages.empty(num_slots, pages_per_slot, num_pages, page_size))


def empty_pools(
    config: ModelConfig, num_pages: int, page_size: int, dtype: str, platform: str
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns zeroed (k_pages, v_pages, kv_scales) of `num_pages` pages a layer, in the form a backend wants them."""
    rows = config.num_layers * num_pages
    heads, head_dim = pool_heads(config.num_kv_heads, config.head_dim, platform)
    bits = {jnp.dtype(value).name: held for held, value in HELD_AS_BITS.items()} if platform == "cpu" else {}
    make = lambda: jnp.zeros((rows, heads, page_size, head_dim), bits.get(dtype, dtype))
    scales = jnp.zeros(scales_shape(rows, heads, page_size), jnp.float32) if has_scales(dtype) else None
    return make(), make(), scales


def default_page_size(config: ModelConfig, platform: str) -> int:
    """Tokens a page. A TPU copies whole pages, so that they should be large: a page of one head has half the bytes of two."""
    if platform != "tpu":
        return 16
    heads, _ = pool_heads(config.num_kv_heads, config.head_dim, platform)
    return 256 if heads == 1 else 128
