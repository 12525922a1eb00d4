"""New keys and values into their pages on TPU, in place and for all layers in one call.

The work is items, a page of a row in a layer that new tokens fall into, in the order layer, row, page. A page that they cover is
written whole, without being read. Otherwise only its tiles (8, 16 or 32 tokens of all heads: the least that a copy may address) that
they touch are written, and of these only such as keep old tokens are read first. Every page is one row's own and is one item, so no
copy waits for another item's; `ahead` items are read while one is filled and earlier ones are written.

Tokens arrive as [K, H] and lie in pages as [K, P, H]: a tile is turned in registers.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sizes import WriteBlocks, choose, tpu_write_blocks
from pallas_kernels.devices import DeviceSpec
from pallas_kernels.quantise import inverse_of, nearest, scale_of
from pallas_kernels.tpu.common import (
    LANES,
    TABLE_BYTES,
    divide,
    rows_at_once,
    tile_rows,
    vmem_limit,
)
from pallas_kernels.tpu.write_items import CURSOR, Items

RESIDENT_BYTES = 2**20  # a layer's new keys (and as many values), twice buffered: 4 MiB of VMEM


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything static about a call."""

    L: int
    B: int
    T: int
    K: int
    H: int
    P: int
    M: int
    C: int  # pages of a layer
    sub: int  # tokens of a tile
    rows: int  # tokens of a buffer: a page, or a tile where a call has one token a row
    window: int  # tokens of the chunk that are copied for an item; 0: the layer's tokens are all in VMEM
    stages: int
    ahead: int
    layers: int  # of a core
    cores: int
    num_pages: int
    num_pools: int
    vmem_limit: int | None


def _kernel(table, lengths, counts, offset, k_new, v_new, *refs, plan):
    n = plan.num_pools
    pools, refs = refs[n : 2 * n], refs[2 * n :]
    buffers, refs = refs[:n], refs[n:]
    windows, (*semaphores, cursor, written) = (refs[:2], refs[2:]) if plan.window else ((), refs)
    items = Items(plan, (table, lengths, counts, offset), (k_new, v_new), pools, buffers, windows, semaphores, cursor, written)
    begin = pl.program_id(0) * plan.layers
    end = jnp.minimum(begin + plan.layers, plan.L)
    layer = begin + pl.program_id(1)

    @pl.when(pl.program_id(1) == 0)
    def _():
        items.begin(begin, end)

    def one_row(row, _):
        first, count = items.pages(row)

        def one_page(page, _):
            slot = items.next(end)
            item = items.item(layer, row, page)
            items.wait_read(item, layer, row, slot)
            tokens = [x.at[slot] for x in windows] if plan.window else [x.at[0, row] for x in (k_new, v_new)]
            base = item.first - items.window(item) if plan.window else item.first
            lax.fori_loop(*item.tiles(plan), functools.partial(_fill, plan, items, item, tokens, base, slot), None)
            items.write(item, slot)

        lax.fori_loop(first, first + count, one_page, None)

    lax.fori_loop(0, jnp.where(layer < end, plan.B, 0), one_row, None)

    @pl.when(pl.program_id(1) == plan.layers - 1)
    def _():
        lax.fori_loop(0, plan.stages, lambda slot, _: items.wait_written(slot), None)


def _fill(plan, items, item, tokens, base, slot, tile, _):
    """Puts the new tokens of one tile into the item's buffers; its row r is token base + r."""
    row = tile * plan.sub
    position = row + lax.broadcasted_iota(jnp.int32, (plan.K, plan.sub, plan.H), 1)
    new = (position >= item.begin) & (position < item.end)
    for which, ref in enumerate(tokens):
        rows = _tile_tokens(plan, ref, base + row)
        to = items.tile(items.buffers[which].at[slot], tile)
        if plan.num_pools == 3:
            scales = [scale_of(jnp.max(jnp.abs(x), axis=-1, keepdims=True), to.dtype) for x in rows]
            rows = [nearest(x * inverse_of(scale), to.dtype).astype(jnp.float32) for x, scale in zip(rows, scales, strict=True)]
            _fill_scales(plan, items.buffers[2].at[slot, which], scales, item, row)
        to[...] = jnp.where(new, _heads_first(plan, rows), to[...].astype(jnp.float32)).astype(to.dtype)


def _tile_tokens(plan, ref, first):  # [tokens, K, H] -> f32[K, H] of each
    """Returns tokens first, first + 1 .. of a tile, any where there are none such; a lone token once for all rows."""
    last = ref.shape[0] - 1
    indices = [0] if last == 0 else [jnp.clip(first + r, 0, last) for r in range(plan.sub)]
    return [ref[index].astype(jnp.float32) for index in indices]


def _heads_first(plan, rows):  # f32[K, H] of each token -> [K, sub, H]
    if len(rows) == 1:
        return jnp.broadcast_to(rows[0][:, None], (plan.K, plan.sub, plan.H))
    return jnp.swapaxes(jnp.stack(rows), 0, 1)


def _fill_scales(plan, ref, scales, item, row):  # ref [R, 128], scales f32[K, 1] of each token
    """Puts the scales of a tile, which starts at `row` of the page, in their lanes: k*P + row + r for token r of head k."""
    head, lane = (lax.broadcasted_iota(jnp.int32, (plan.K, LANES), axis) for axis in (0, 1))
    token = lane - lax.rem(head * plan.P + row, LANES)
    moved = jnp.broadcast_to(scales[0], token.shape)
    for r in range(1, len(scales)):
        moved = jnp.where(token == r, scales[r], moved)
    new = (token >= jnp.maximum(item.begin - row, 0)) & (token < jnp.minimum(item.end - row, plan.sub))
    for k in range(plan.K):
        line = ref.at[pl.ds(divide(k * plan.P + row, LANES), 1)]
        line[...] = jnp.where(new[k : k + 1], moved[k : k + 1], line[...])


def write(
    k_pages,  # [L*C, K, P, H]
    v_pages,
    kv_scales,  # f32[L*C, 2, R, 128], or None
    k_new,  # [L, B, T, K, H]
    v_new,
    page_table,  # i32[B, M]
    lengths,  # i32[B]
    chunk_lengths,  # i32[B]
    page_offset,  # i32[]
    *,
    interpret,
    block_sizes: WriteBlocks | None,
    device: DeviceSpec,
):
    """Returns (k_pages, v_pages, kv_scales) with token t < chunk_lengths[b] of row b at position lengths[b] + t, in every layer.

    The pools are donated to the kernel: under a jit that donates them nothing is copied. No two rows may write to one page.

    Raises:
      ValueError: a page table too long for scalar memory.
    """
    B, M = page_table.shape
    most = rows_at_once(M, TABLE_BYTES)
    pools = [k_pages, v_pages] + ([] if kv_scales is None else [kv_scales])
    if k_new.dtype == jnp.float16:
        k_new, v_new = k_new.astype(jnp.float32), v_new.astype(jnp.float32)
    for b in range(0, B, most):
        rows = slice(b, b + most)
        static = make_plan(k_new[:, rows], pools, M, block_sizes, device)
        pools = _call(
            static,
            k_new[:, rows],
            v_new[:, rows],
            pools,
            page_table[rows],
            lengths[rows],
            chunk_lengths[rows],
            page_offset,
            interpret,
        )
    return *pools, *([None] * (3 - len(pools)))


def make_plan(k_new, pools, M: int, block_sizes, device: DeviceSpec) -> _Plan:
    """Returns the static side of a call with tables of M columns; refuses as decode's."""
    L, B, T, K, H = k_new.shape
    num_pages, _, P, _ = pools[0].shape
    dtype = pools[0].dtype
    key = {"K": K, "H": H, "P": P, "T": T, "dtype": dtype.name}
    sub = min(P, tile_rows(dtype))
    rows = sub if T == 1 else P
    token_bytes = max(K, tile_rows(k_new.dtype)) * H * k_new.dtype.itemsize  # padded to whole tiles in VMEM
    window = 0 if B * T * token_bytes <= RESIDENT_BYTES else min(T, P)
    buffer_bytes = 2 * (rows * K * H * dtype.itemsize + window * token_bytes)
    blocks = choose("tpu.write", device, key, WriteBlocks, tpu_write_blocks(buffer_bytes), block_sizes)
    stages = max(2, blocks.num_stages)
    cores = min(device.num_cores, L)
    needed = stages * buffer_bytes + 4 * (0 if window else B * T * token_bytes)
    return _Plan(
        L=L, B=B, T=T, K=K, H=H, P=P, M=M, C=num_pages // L, sub=sub, rows=rows, window=window, stages=stages, ahead=stages // 2,
        layers=-(-L // cores), cores=cores, num_pages=num_pages, num_pools=len(pools), vmem_limit=vmem_limit(needed, device),
    )  # fmt: skip


def _call(plan, k_new, v_new, pools, page_table, lengths, chunk_lengths, page_offset, interpret):
    n = len(pools)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    shape = (1, *k_new.shape[1:])
    of_layer = pl.BlockSpec(shape, lambda c, i, *_: (jnp.minimum(c * plan.layers + i, plan.L - 1), 0, 0, 0, 0))
    buffers = [(plan.stages, plan.K, plan.rows, plan.H)] * 2 + [(plan.stages, *pool.shape[1:]) for pool in pools[2:]]
    windows = [pltpu.VMEM((plan.stages, plan.window, plan.K, plan.H), k_new.dtype)] * 2 if plan.window else []
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(plan.cores, plan.layers),
            in_specs=[hbm if plan.window else of_layer] * 2 + [hbm] * n,
            out_specs=[hbm] * n,
            scratch_shapes=[pltpu.VMEM(shape, pool.dtype) for shape, pool in zip(buffers, pools, strict=True)]
            + windows
            + [pltpu.SemaphoreType.DMA((plan.stages,))] * 2
            + [pltpu.SMEM((len(CURSOR),), jnp.int32), pltpu.SMEM((plan.stages,), jnp.int32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={6 + i: i for i in range(n)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True, vmem_limit_bytes=plan.vmem_limit
        ),
        interpret=interpret,
        name="write_kv",
    )(page_table.reshape(-1), lengths, chunk_lengths, jnp.reshape(page_offset, (1,)), k_new, v_new, *pools)
