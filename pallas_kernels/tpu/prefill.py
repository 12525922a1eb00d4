"""Chunked prefill on TPU: a tile of a chunk's queries attends its row's cached pages, then the chunk's own keys.

A program is one tile: `queries` tokens of a row, with all their heads. It walks blocks of `pages` pages, first the cached pages
that its window reaches, then the chunk's keys, which are copied page by page into buffers alike, so that one loop serves both.
The next block, of this tile or the next one, is on its way while the matrix units work on this one (`prefill_block`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sizes import PrefillBlocks
from pallas_kernels.devices import DeviceSpec
from pallas_kernels.tpu.common import (
    LOG2_E,
    MASKED,
    TABLE_BYTES,
    ceil_divide,
    divide,
    rows_at_once,
    start_copy,
    token_scales,
    vmem_limit,
)
from pallas_kernels.tpu.prefill_block import Refs, Sizes, Turn, attend, mark_visible
from pallas_kernels.tpu.prefill_sizes import loaded_dtype, scratch, sizes, vmem

_NO_WINDOW = 1 << 30


class _Tile(NamedTuple):
    """One tile of queries, and what it sees."""

    row: jax.Array
    length: jax.Array
    first: jax.Array  # its first token, in the chunk
    size: jax.Array  # its tokens in use
    lo: jax.Array  # first position that any of them sees
    page: jax.Array  # first cached page, and first page-sized piece of the chunk
    own_page: jax.Array
    cached: jax.Array  # blocks of cached pages
    blocks: jax.Array  # blocks in all


def _tile(r: Refs, z: Sizes, i) -> _Tile:
    row = divide(i, z.tiles)
    first = (i - row * z.tiles) * z.queries
    length = r.lengths[row]
    size = jnp.clip(r.chunk_lengths[row] - first, 0, z.queries)
    lo = jnp.maximum(length + first + 1 - r.options[0], 0)
    page = divide(jnp.minimum(lo, length), z.P)
    own_page = divide(jnp.maximum(lo - length, 0), z.P)
    cached = jnp.where(lo < length, ceil_divide(ceil_divide(length, z.P) - page, z.pages), 0)
    own = ceil_divide(ceil_divide(first + size, z.P) - own_page, z.pages)
    return _Tile(row, length, first, size, lo, page, own_page, cached, jnp.where(size > 0, cached + own, 0))


def _copy(r: Refs, z: Sizes, tile: _Tile, b, slot, act) -> None:
    """Starts or awaits the copies of the tile's block b: of the pages in use, whole, and of no other."""

    def each(first, end, copies):
        def one(j, _):
            for source, target in copies(first + j):
                act(source, target.at[slot, j], r.semaphores.at[slot])

        lax.fori_loop(0, jnp.minimum(z.pages, end - first), one, None)

    def cached(index):
        page = r.table[tile.row * z.M + jnp.minimum(index, z.M - 1)] + r.options[1]
        page = jnp.clip(page, 0, r.k_pages.shape[0] - 1)  # cheaper than the compiler's bounds checks, and memory is as safe
        scales = [(r.kv_scales.at[page], r.scale_pages)] if z.scaled else []
        return [(r.k_pages.at[page], r.k), (r.v_pages.at[page], r.v), *scales]

    def own(index):
        piece = pl.ds(pl.multiple_of(index * z.P, z.P), z.P)
        k, v = (r.k_own, r.v_own) if z.staged else (r.k, r.v)
        return [(r.k_new.at[tile.row, :, piece], k), (r.v_new.at[tile.row, :, piece], v)]

    @pl.when(b < tile.cached)
    def _():
        each(tile.page + b * z.pages, ceil_divide(tile.length, z.P), cached)

    @pl.when(b >= tile.cached)
    def _():
        each(tile.own_page + (b - tile.cached) * z.pages, ceil_divide(tile.first + tile.size, z.P), own)


def _wait(source, target, semaphore) -> None:
    pltpu.make_async_copy(source, target, semaphore).wait()


def _kernel(*refs, names: tuple[str, ...], z: Sizes):
    r = Refs(**dict(zip(names, refs, strict=True)))
    step = pl.program_id(1)
    i = pl.program_id(0) * z.items + step
    tile, before = _tile(r, z, i), _tile(r, z, jnp.maximum(i - 1, 0))

    @pl.when(step == 0)
    def _():
        r.slot[0] = 0

    @pl.when((tile.blocks > 0) & ((step == 0) | (before.blocks == 0)))
    def _():  # no tile before this one has started its first block
        _copy(r, z, tile, 0, r.slot[0], start_copy)

    @pl.when(tile.blocks > 0)
    def _():
        r.top[...] = jnp.full_like(r.top, MASKED)
        r.total[...] = jnp.zeros_like(r.total)
        r.acc[...] = jnp.zeros_like(r.acc)

    def body(b, slot):
        last = b + 1 == tile.blocks
        after = _tile(r, z, jnp.where(last, jnp.minimum(i + 1, z.cores * z.items - 1), i))

        @pl.when(~last | ((step + 1 < z.items) & (after.blocks > 0)))
        def _():
            _copy(r, z, after, jnp.where(last, 0, b + 1), 1 - slot, start_copy)

        _copy(r, z, tile, b, slot, _wait)
        _block(r, z, tile, b, slot)
        return 1 - slot

    r.slot[0] = lax.fori_loop(0, tile.blocks, body, r.slot[0])
    pl.when(tile.size == 0)(lambda: _blank(r))
    pl.when(tile.size > 0)(lambda: _finish(r, z, tile))


def _block(r: Refs, z: Sizes, tile: _Tile, b, slot) -> None:
    """Attends the tile's block b, without a mask where every query sees every key."""
    is_own = b >= tile.cached
    page = jnp.where(is_own, tile.own_page + (b - tile.cached) * z.pages, tile.page + b * z.pages)
    base = page * z.P + jnp.where(is_own, tile.length, 0)  # position of the first key
    position = tile.length + tile.first  # of the first query
    end = jnp.where(is_own, position + tile.size, tile.length)
    last_start = position + tile.size - r.options[0]  # first position that the last query sees
    whole = (base + z.keys <= jnp.minimum(end, position + 1)) & (base >= last_start)
    if z.scaled:
        _spread_scales(r, z, slot, is_own)

    @pl.when(whole)
    def _():
        attend(r, z, Turn(slot, is_own, None))

    @pl.when(~whole)
    def _():
        live = (jnp.maximum(tile.lo - base, 0), jnp.minimum(end - base, z.keys))
        if not z.staged:
            _zero_dead(r, z, slot, *live)
        mark_visible(r, position - base, r.options[0], live[1])
        attend(r, z, Turn(slot, is_own, live))


def _zero_dead(r: Refs, z: Sizes, slot, lo, hi) -> None:
    """Zeroes the values of the block's tokens outside [lo, hi) in VMEM: 0 * NaN is NaN."""

    def page(j, _):
        token = j * z.P + lax.broadcasted_iota(jnp.int32, (z.P, z.H), 0)

        def head(k, _):
            v = r.v[slot, j, k]
            r.v[slot, j, k] = jnp.where((token >= lo) & (token < hi), v.astype(jnp.float32), 0).astype(v.dtype)

        @pl.when((j * z.P < lo) | ((j + 1) * z.P > hi))
        def _():
            lax.fori_loop(0, z.K, head, None)

    lax.fori_loop(0, z.pages, page, None)


def _spread_scales(r: Refs, z: Sizes, slot, is_own) -> None:
    """Lays the block's scales out as one row of tokens a head; the chunk's own keys have scale 1."""

    @pl.when(is_own)
    def _():
        r.scale_rows[...] = jnp.ones_like(r.scale_rows)

    @pl.when(~is_own)
    def _():
        for which in range(2):
            rows = token_scales(r.scale_pages.at[slot], which, z.K, z.P)
            for k in range(z.K):
                r.scale_rows[which, k] = rows[k : k + 1]


def _blank(r: Refs) -> None:
    r.o[...] = jnp.zeros_like(r.o)
    r.lse[...] = jnp.zeros_like(r.lse)


def _finish(r: Refs, z: Sizes, tile: _Tile) -> None:
    """Writes the tile's output, acc / total, and log-sum-exp; zeros for tokens past the chunk."""
    together = next(n for n in (4, 3, 2, 1) if z.K * z.G % n == 0)  # query heads that overlap

    def heads(i, _):
        for n in [i * together + j for j in range(together)]:
            total = jnp.sum(r.total[n], axis=1, keepdims=True)
            token = lax.broadcasted_iota(jnp.int32, (z.queries, z.H), 0)
            r.o[0, n] = jnp.where(token < tile.size, r.acc[n] * _inverse(total), 0).astype(r.o.dtype)
            for t in range(0, z.queries, z.lanes):
                part = slice(t, min(t + z.lanes, z.queries))
                top = r.top[n, part]
                lse = _as_row(top) * (z.exponent / LOG2_E) + jnp.log(_as_row(jnp.broadcast_to(total[part], top.shape)))
                token = t + lax.broadcasted_iota(jnp.int32, lse.shape, 1)
                r.lse[0, 0, n, :, part] = jnp.where(token < tile.size, lse, 0)

    lax.fori_loop(0, z.K * z.G // together, heads, None)


def _inverse(x):
    """Returns 1 / x for x > 0, in half the vector operations of a division: a guess from the unit of functions, a Newton step."""
    y = jnp.exp2(-jnp.log2(x))
    return y * (2 - x * y)


def _as_row(x):  # [n, lanes], all lanes equal -> [1, n]
    """Returns a column as a row, by way of its diagonal."""
    row, lane = (lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
    return jnp.sum(jnp.where(row == lane, x, 0), axis=0, keepdims=True)[:, : len(x)]


def prefill(
    q,  # [B, T, K, G, H]
    k_pages,  # [L*C, K, P, H]
    v_pages,
    kv_scales,  # f32[L*C, 2, R, 128], or None
    page_table,  # i32[B, M]
    lengths,  # i32[B]
    chunk_lengths,  # i32[B]
    k_new,  # [B, T, K, H]
    v_new,
    window,  # i32[], 0: none
    page_offset,  # i32[]
    *,
    scale: float,
    soft_cap: float | None,
    interpret,
    block_sizes: PrefillBlocks | None,
    device: DeviceSpec,
):
    """Returns causal attention of a chunk over its row's pages and itself: o `[B, T, K, G, H]` in q's dtype, lse f32 `[B, T, K, G]`.

    Both are 0 for tokens past the chunk. Rows whose page tables do not fit scalar memory together go in several calls.

    Raises:
      ValueError: a table row too long for scalar memory, or pages too large for VMEM.
    """
    M = page_table.shape[1]
    most = rows_at_once(M, TABLE_BYTES)
    if scale < 0:  # the largest score is looked for before it is scaled
        q, scale = -q, -scale
    options = jnp.stack([jnp.where(window > 0, window, _NO_WINDOW), page_offset, 0]).astype(jnp.int32)
    outputs = []
    for b in range(0, len(q), most):
        rows = slice(b, b + most)
        z = sizes(q[rows], k_pages, M, scale=scale, soft_cap=soft_cap, block_sizes=block_sizes, device=device)
        scalars = (lengths[rows], chunk_lengths[rows], page_table[rows].reshape(-1), options)
        outputs.append(_call(z, scalars, q[rows], k_pages, v_pages, kv_scales, k_new[rows], v_new[rows], interpret, device))
    return outputs[0] if len(outputs) == 1 else tuple(jnp.concatenate(x) for x in zip(*outputs, strict=True))


def _call(z: Sizes, scalars, q, k_pages, v_pages, kv_scales, k_new, v_new, interpret, device):
    """Returns (o, lse) of rows whose page table fits scalar memory."""
    B, T, N, Q, H = len(q), z.T, z.K * z.G, z.queries, z.H
    dtype = loaded_dtype(q.dtype, z.operand)
    pad = lambda x, n: jnp.pad(x, ((0, 0), (0, 0), (0, n - T), (0, 0)))
    inputs = {
        "q": pad(q.astype(dtype).transpose(0, 2, 3, 1, 4).reshape(B, N, T, H), z.tiles * Q),
        "k_pages": k_pages, "v_pages": v_pages,
        "k_new": pad(k_new.astype(z.operand).transpose(0, 2, 1, 3), pl.cdiv(T, z.P) * z.P),
        "v_new": pad(v_new.astype(z.operand).transpose(0, 2, 1, 3), pl.cdiv(T, z.P) * z.P),
    }  # fmt: skip
    if z.scaled:
        inputs["kv_scales"] = kv_scales
    outputs = {
        "o": jax.ShapeDtypeStruct((B, N, z.tiles * Q, H), dtype),
        "lse": jax.ShapeDtypeStruct((B, z.tiles, N, 1, Q), jnp.float32),
    }
    o, lse = _pallas_call(z, inputs, outputs, interpret, device)(*scalars, *inputs.values())
    o = o[:, :, :T].reshape(B, z.K, z.G, T, H).transpose(0, 3, 1, 2, 4).astype(q.dtype)
    return o, lse[:, :, :, 0].swapaxes(2, 3).reshape(B, z.tiles * Q, z.K, z.G)[:, :T]


def _pallas_call(z: Sizes, inputs: dict, outputs: dict, interpret, device: DeviceSpec):
    N, Q, H = z.K * z.G, z.queries, z.H
    buffers = scratch(z, inputs["k_pages"].dtype)
    names = ("lengths", "chunk_lengths", "table", "options", *inputs, *outputs, *buffers, "semaphores", "slot")
    needed = vmem(z, outputs["o"].dtype, inputs["k_pages"].dtype)
    tile = lambda c, i: ((c * z.items + i) // z.tiles, (c * z.items + i) % z.tiles)
    q_block = pl.BlockSpec((1, N, Q, H), lambda c, i, *_: (tile(c, i)[0], 0, tile(c, i)[1], 0))
    lse_block = pl.BlockSpec((1, 1, N, 1, Q), lambda c, i, *_: (*tile(c, i), 0, 0, 0))
    scratch_shapes = [pltpu.VMEM(*buffer) for buffer in buffers.values()] + [
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
    ]
    return pl.pallas_call(
        functools.partial(_kernel, names=names, z=z),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(z.cores, z.items),
            in_specs=[q_block] + [pl.BlockSpec(memory_space=pltpu.HBM)] * (len(inputs) - 1),
            out_specs=[q_block, lse_block],
            scratch_shapes=scratch_shapes,
        ),
        out_shape=list(outputs.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True, vmem_limit_bytes=vmem_limit(needed, device)
        ),
        interpret=interpret,
        name="paged_prefill",
    )
