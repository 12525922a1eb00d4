"""Paged decode for NVIDIA GPUs (Pallas Triton): split-K attention of one query token a row, work split by work.

A program attends one kv head of one *item*: a run of tiles of one row. Items follow from `lengths` and `starts` alone, so every
program derives the same list (`split_rows`) and finds its own entry (`find_item`): no list is built by another kernel, and a batch
of unequal rows still fills the device evenly. A row that is one item writes its result; the others leave float32 partials, which
a second kernel combines by their base-2 log-sum-exp.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.block_sizes import DecodeBlocks, choose, decode_key, gpu_decode_blocks, gpu_decode_items
from pallas_kernels.devices import DeviceSpec
from pallas_kernels.gpu import triton_common as common
from pallas_kernels.gpu.splits import LN2, LOG2E, find_item, split_rows
from pallas_kernels.gpu.triton_common import Numerics, pow2

# Partials that a step of the combining kernel reads together: 8 KiB at H 128.
_COMBINE_BLOCK = 16


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static of one call. Tiles have `block` tokens, counted from position 0 of a row."""

    B: int
    K: int
    G: int
    H: int
    P: int
    block: int
    target: int
    num_splits: int | None
    num: Numerics

    @property
    def items(self) -> int:
        """The length of the work list."""
        return self.B + self.target if self.num_splits is None else self.B * self.num_splits


def _sum(x):
    return jnp.sum(x, dtype=jnp.int32)


def _rows(plan: _Plan, lengths_ref, starts_ref):
    """Loads the rows and splits them: (rows, lengths, starts, first, tiles, items), padded to a power of two with 0 items."""
    rows = jnp.arange(pow2(plan.B), dtype=jnp.int32)
    real = rows < plan.B
    load = lambda ref: plgpu.load(ref.at[jnp.minimum(rows, plan.B - 1)], mask=real, other=0)
    lengths, starts = load(lengths_ref), load(starts_ref)
    first, tiles, items = split_rows(lengths, starts, block=plan.block, target=plan.target, num_splits=plan.num_splits)
    return rows, lengths, starts, first, tiles, jnp.where(real, items, 0)


def _decode_kernel(plan: _Plan, offset_ref, lengths_ref, starts_ref, table_ref, q_ref, k_ref, v_ref, *refs):
    """Attends one item for one kv head: grid (K, items)."""
    num = plan.num
    scales_ref, (o_ref, lse_ref, *partials) = (refs[0], refs[1:]) if num.scaled else (None, refs)
    head, item = pl.program_id(0), pl.program_id(1)
    rows, lengths, starts, first, tiles, items = _rows(plan, lengths_ref, starts_ref)
    row, tile, end_tile, count = find_item(first, tiles, items, item)
    pick = lambda x: _sum(jnp.where(rows == row, x, 0))
    row, start, end = jnp.minimum(row, plan.B - 1), pick(starts), jnp.minimum(pick(lengths), end_tile * plan.block)

    g = jnp.arange(pow2(plan.G, 16), dtype=jnp.int32)
    columns, exist = common.part_columns(num, plan.H)
    mask = (g < plan.G)[:, None] & exist[None, :]
    q = [plgpu.load(q_ref.at[row, head, g[:, None], h[None, :]], mask=mask, other=jnp.zeros((), q_ref.dtype)) for h in columns]
    q, row_scale = common.normalised(num, q)
    page_offset = offset_ref[0]
    pages_of = lambda i: common.load_pages(table_ref, row, page_offset, plan.P, i, plan.block, start, end)

    def body(i, carry):
        acc, m, total, pages = carry
        positions, seen = common.token_span(i, plan.block, start, end)
        at = (pages, head, lax.rem(positions, jnp.int32(plan.P)), seen)
        keys, values = common.load_tile(k_ref, *at, exist), common.load_tile(v_ref, *at, exist)
        ks, vs = common.load_scales(scales_ref, 0, *at, plan.P), common.load_scales(scales_ref, 1, *at, plan.P)
        # The pipeliner copies ahead only what one load leads to: these ids are of the next step, those of this one were carried.
        following = pages_of(i + 1)
        s = jnp.where(seen[None, :], common.scores(num, q, row_scale, keys, ks), -jnp.inf)
        return *common.softmax_step(num, acc, m, total, s, values, vs), following

    acc = [jnp.zeros((g.shape[0], exist.shape[0]), jnp.float32) for _ in columns]
    m, total = jnp.full(g.shape, common.LOWEST, jnp.float32), jnp.zeros((g.shape[0], plan.block), jnp.float32)
    acc, m, total, _ = lax.fori_loop(tile, end_tile, body, (acc, m, total, pages_of(tile)))
    o, lse = common.finish(acc, m, total, num.key_unit)
    _store(plan, o_ref, lse_ref, row, head, g, columns, exist, count == 1, o, lse)
    if partials:
        _store(plan, partials[0], partials[1], item, head, g, columns, exist, count > 1, o, lse * LOG2E)


def _store(plan: _Plan, o_ref, lse_ref, at, head, g, columns, exist, when, o, lse):
    """Writes o and lse of one (row or item, kv head), if `when`."""
    real = (g < plan.G) & when
    for part, h in zip(o, columns, strict=True):
        plgpu.store(o_ref.at[at, head, g[:, None], h[None, :]], part, mask=real[:, None] & exist[None, :])
    plgpu.store(lse_ref.at[at, head, g], lse, mask=real)


def _combine_kernel(plan: _Plan, lengths_ref, starts_ref, parts_ref, part_lse_ref, _o_ref, _lse_ref, o_ref, lse_ref):
    """Weighs the partials of one query head: grid (G, K, B). Rows of one item were written by the first kernel."""
    g, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    rows, *_, items = _rows(plan, lengths_ref, starts_ref)
    count = _sum(jnp.where(rows == row, items, 0))
    slot = _sum(jnp.where(rows < row, items, 0))
    h = jnp.arange(pow2(plan.H, 16), dtype=jnp.int32)

    def body(i, carry):
        acc, m, total = carry
        at = i * _COMBINE_BLOCK + jnp.arange(_COMBINE_BLOCK, dtype=jnp.int32)
        there = at < count
        lse = plgpu.load(part_lse_ref.at[slot + at, head, g], mask=there, other=-jnp.inf)
        mask = there[:, None] & (h < plan.H)[None, :]
        o = plgpu.load(parts_ref.at[(slot + at)[:, None], head, g, h[None, :]], mask=mask, other=0.0)
        m_new = jnp.maximum(m, jnp.max(lse))
        pivot = jnp.where(m_new > -jnp.inf, m_new, 0.0)  # every part so far may be empty
        weights, decay = jnp.exp2(lse - pivot), jnp.exp2(m - pivot)
        return acc * decay + jnp.sum(weights[:, None] * o, 0), m_new, total * decay + jnp.sum(weights)

    @pl.when(count > 1)
    def combine():
        carry = (jnp.zeros(h.shape, jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0))
        acc, m, total = lax.fori_loop(0, pl.cdiv(count, _COMBINE_BLOCK), body, carry)
        safe = jnp.where(total != 0, total, 1.0)
        plgpu.store(o_ref.at[row, head, g, h], acc / safe, mask=h < plan.H)
        lse_ref[row, head, g] = jnp.where(total != 0, m * LN2 + jnp.log(safe), -jnp.inf)


def decode(
    q,
    k_pages,
    v_pages,
    kv_scales,
    page_table,
    lengths,
    starts,
    page_offset,
    *,
    scale: float,
    soft_cap: float | None,
    interpret: bool,
    block_sizes: DecodeBlocks | None,
    device: DeviceSpec,
):
    """Returns o f32 `[B, K, G, H]` and lse f32 `[B, K, G]` (natural; -inf where nothing is seen) of keys `[starts, lengths)`."""
    num = common.numerics(q, k_pages, scale, soft_cap, interpret)
    plan, blocks = _plan(q, k_pages, page_table, num, block_sizes, device)
    arrays = [jnp.reshape(page_offset, (1,)), lengths, starts, page_table]
    arrays += [common.query_view(num, q), common.pool_view(num, k_pages), common.pool_view(num, v_pages)]
    if num.scaled:
        arrays.append(kv_scales.reshape(kv_scales.shape[0], 2, -1))
    out = lambda n: [jax.ShapeDtypeStruct((n, *q.shape[1:]), jnp.float32), jax.ShapeDtypeStruct((n, *q.shape[1:3]), jnp.float32)]
    splits = plan.items > plan.B
    o, lse, *parts = pl.pallas_call(
        functools.partial(_decode_kernel, plan),
        out_shape=out(plan.B) + (out(plan.items) if splits else []),
        # Heads first: programs that start together read the heads of a page, which lie side by side.
        grid=(plan.K, plan.items),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="paged_decode",
    )(*arrays)
    if not splits:
        return o, lse
    return pl.pallas_call(
        functools.partial(_combine_kernel, plan),
        out_shape=out(plan.B),
        grid=(plan.G, plan.K, plan.B),
        input_output_aliases={4: 0, 5: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_decode_combine",
    )(lengths, starts, *parts, o, lse)


def _plan(q, k_pages, page_table, num: Numerics, given: DecodeBlocks | None, device: DeviceSpec):
    """The static side of a call: what was given, tuned or ruled, and the length of the work list."""
    (B, K, G, H), P = q.shape, k_pages.shape[2]
    rule = gpu_decode_blocks(G, H, k_pages.dtype.itemsize, num.dtype)
    key = decode_key(q, k_pages, page_table)
    blocks = choose("gpu.triton_decode", device, key, DecodeBlocks, rule, given, also=("num_splits",))
    block = blocks.tokens_per_block
    common.check_tile("gpu.triton_decode", blocks.num_warps, tokens_per_block=block)
    assert block is not None  # the rule names one
    target = 0
    if blocks.num_splits is None:
        target = gpu_decode_items(device, B, K, tiles=-(-page_table.shape[1] * P // block))
    return _Plan(B, K, G, H, P, block, target, blocks.num_splits, num), blocks
