"""Paged decode attention on TPU: a loop over a row's own pages, fed by copies that run ahead of it, over rows.

A page holds all heads of P tokens and is copied whole, keys and values by one transfer each. `stages` blocks of pages are in VMEM;
while one is used the others are on their way, across the ends of rows, so that short rows do not wait for their first page.

    rows     | row 0          | row 1  | row 2 (empty) | row 3
    copies   0.0  0.1  0.2    1.0      3.0  3.1 ...            stages - 1 ahead of
    products      0.0  0.1    0.2      1.0  3.0 ...            the block in use

Heads with few queries are bundled: g = 8 // G heads share the 8 sublanes of a register as one product over g*H columns, their
queries on the diagonal, so that the softmax works on full registers. N = K / g bundles of S = g * G queries.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sizes import DecodeBlocks, choose, tpu_decode_blocks
from pallas_kernels.devices import DeviceSpec
from pallas_kernels.tpu.common import (
    LANES,
    LOG2_E,
    MASKED,
    TABLE_BYTES,
    ceil_divide,
    divide,
    dot,
    operand_dtype,
    repeat,
    rows_at_once,
    tile_rows,
    token_scales,
    vmem_limit,
)
from pallas_kernels.tpu.decode_copies import CURSOR, UNROLL, Copies

SUBLANES = 8
ROWS_PER_STEP = 8  # a grid step costs about 0.35 us on a TPU whatever it does (JAX's Pallas documentation); eight rows share it
STEP_BYTES = 2**20  # of queries and outputs, twice buffered
WAVE_REGISTERS = 32  # of 64: scores of the bundles in flight


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything static about a call."""

    K: int
    G: int
    H: int
    P: int
    M: int  # columns of the page table
    g: int  # heads in a bundle
    block: int  # pages
    stages: int
    rows: int  # rows of a grid step
    steps: int  # grid steps of a core
    cores: int
    scale: float
    soft_cap: float | None
    operand: jnp.dtype  # of products
    clean: bool  # whether dead values can be NaN
    num_pages: int
    num_pools: int
    wave: int  # bundles whose scores are in registers at once
    vmem_limit: int | None

    @property
    def N(self) -> int:
        return self.K // self.g

    @property
    def S(self) -> int:
        return self.g * self.G

    @property
    def T(self) -> int:
        return self.block * self.P


def _kernel(table, lengths, starts, offset, q_ref, *refs, plan):
    n = plan.num_pools
    pools, (o_ref, lse_ref), refs = refs[:n], refs[n : n + 2], refs[n + 2 :]
    buffers, (semaphores, cursor, acc, top, total) = refs[:n], refs[n:]
    copies = Copies(plan, (table, lengths, starts, offset), pools, buffers, semaphores, cursor)
    begin = pl.program_id(0) * plan.steps * plan.rows
    end = begin + plan.steps * plan.rows
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        copies.begin(begin, end)

    def one_row(i, _):
        row = begin + step * plan.rows + i
        (lo, hi), (first, count) = copies.bounds(row), copies.pages(row)
        top[...] = jnp.full_like(top, MASKED)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

        def one_block(j, carry):
            left, lo, hi = carry
            slot = copies.next(left, end)
            _attend(plan, q_ref.at[i], [b.at[slot] for b in buffers], lo, hi, acc, top, total)
            return left - plan.block, lo - plan.T, hi - plan.T

        base = first * plan.P
        lax.fori_loop(0, ceil_divide(count, plan.block), one_block, (count, lo - base, hi - base))
        _finish(plan, o_ref.at[i], lse_ref.at[i], acc, top, total)

    lax.fori_loop(0, plan.rows, one_row, None)


def _attend(plan, q_ref, buffers, lo, hi, acc, top, total):
    """Adds one block, whose tokens lo <= t < hi are alive, to the running softmax."""
    if plan.clean:
        _zero_dead(plan, buffers[1], lo, hi)
    position = lax.broadcasted_iota(jnp.int32, (1, plan.T), 1)
    alive = (position >= lo) & (position < hi)
    factors = None
    if plan.num_pools == 3:
        keys, values = (token_scales(buffers[2], which, plan.K, plan.P) for which in (0, 1))
        factors = keys, jnp.where(alive, values, 0)  # a dead token's scale may be NaN; for keys the scores are masked
    for n in range(0, plan.N, plan.wave):
        _attend_wave(plan, range(n, min(n + plan.wave, plan.N)), q_ref, buffers, alive, factors, acc, top, total)


def _attend_wave(plan, wave, q_ref, buffers, alive, factors, acc, top, total):
    """Adds the block to some bundles' softmax, phase by phase: each has work for every unit while another's result is awaited."""
    T, H, g = plan.T, plan.H, plan.g

    def side_by_side(ref, n):
        return jnp.concatenate([ref[:, n * g + i].reshape(T, H) for i in range(g)], axis=1).astype(plan.operand)

    scores, tops, weights, sums = {}, {}, {}, {}
    for n in wave:
        products = dot(q_ref[n], side_by_side(buffers[0], n), (1, 1))
        if factors is not None:
            products = products * _spread(plan, factors[0], n)
        scores[n] = jnp.where(alive, _scores(plan, products), MASKED)
    for n in wave:
        tops[n] = jnp.maximum(top[n], scores[n].max(axis=-1, keepdims=True))
        weights[n] = jnp.exp2(scores[n] - repeat(tops[n], T))
    for n in wave:
        w = weights[n] if factors is None else weights[n] * _spread(plan, factors[1], n)
        sums[n] = dot(w.astype(plan.operand), side_by_side(buffers[1], n), (1, 0))
    for n in wave:
        decay = jnp.exp2(top[n] - tops[n])
        top[n] = tops[n]
        lanes = total.shape[-1]
        total[n] = total[n] * repeat(decay, lanes) + sum(weights[n][:, t : t + lanes] for t in range(0, T, lanes))
        acc[n] = acc[n] * repeat(decay, g * H) + sums[n]


def _scores(plan, products):
    """Returns the scores in base 2: scaled, then capped."""
    if plan.soft_cap is None:
        return products * (plan.scale * LOG2_E)
    return jnp.tanh(products * (plan.scale / plan.soft_cap)) * (plan.soft_cap * LOG2_E)


def _spread(plan, factor, n):  # [>= K, T] -> [S, T]
    """Returns the rows of bundle n's heads, each repeated for the head's queries."""
    head = lax.broadcasted_iota(jnp.int32, (plan.S, plan.T), 0) // plan.G
    rows = jnp.broadcast_to(factor[n * plan.g][None], (plan.S, plan.T))
    for i in range(1, plan.g):
        rows = jnp.where(head == i, factor[n * plan.g + i][None], rows)
    return rows


def _zero_dead(plan, v_ref, lo, hi):
    """Zeroes the values of dead tokens in VMEM, which only a row's first and last block have: 0 * NaN is NaN."""
    T, P, K, H = plan.T, plan.P, plan.K, plan.H
    rows = min(tile_rows(v_ref.dtype), P)
    per_page = P // rows

    def tile(i, _):
        page, row = divide(i, per_page), pl.multiple_of(lax.rem(i, jnp.int32(per_page)) * rows, rows)
        ref = v_ref.at[page, :, pl.ds(row, rows)]
        position = i * rows + lax.broadcasted_iota(jnp.int32, (K, rows, H), 1)
        x = ref[...]
        ref[...] = jnp.where((position >= lo) & (position < hi), x.astype(jnp.float32), 0).astype(x.dtype)

    @pl.when((lo > 0) | (hi < T))
    def _():
        lax.fori_loop(0, jnp.where(lo > 0, ceil_divide(lo, rows), 0), tile, None)
        lax.fori_loop(jnp.where(hi < T, divide(hi, rows), T // rows), T // rows, tile, None)


def _finish(plan, o_ref, lse_ref, acc, top, total):
    """Writes a row's output and log-sum-exp from its running softmax; 0 and -inf where no key was seen."""
    S, H, G = plan.S, plan.H, plan.G
    lane = lax.broadcasted_iota(jnp.int32, lse_ref.shape, 1)
    head = lax.broadcasted_iota(jnp.int32, (S, H), 0) // G
    lse = jnp.full(lse_ref.shape, -jnp.inf, jnp.float32)
    for n in range(plan.N):
        total_n = total[n].sum(axis=-1, keepdims=True)
        o = acc[n][:, :H]
        for i in range(1, plan.g):
            o = jnp.where(head == i, acc[n][:, i * H : (i + 1) * H], o)
        o_ref[n] = o / jnp.where(total_n == 0, 1, total_n)
        here = (jnp.log2(total_n) + top[n][:, :1]) * (1 / LOG2_E)
        lse = jnp.where((lane == n) & (total_n != 0), here, lse)
    lse_ref[...] = lse


def decode(
    q,  # [B, K, G, H]
    k_pages,  # [L*C, K, P, H]
    v_pages,
    kv_scales,  # f32[L*C, 2, R, 128], or None
    page_table,  # i32[B, M]
    lengths,  # i32[B]
    starts,  # i32[B]
    page_offset,  # i32[]
    *,
    scale: float,
    soft_cap: float | None,
    interpret,
    block_sizes: DecodeBlocks | None,
    device: DeviceSpec,
):
    """Returns attention of one query a row over keys [starts, lengths) of its pages: o f32[B, K, G, H], lse f32[B, K, G].

    The page table lies in scalar memory; rows that do not fit there together go in several calls.

    Raises:
      ValueError: a table row too long for scalar memory, or pages too large for VMEM.
    """
    B, M = page_table.shape
    most = rows_at_once(M, TABLE_BYTES)
    pools = [k_pages, v_pages] + ([] if kv_scales is None else [kv_scales])
    outputs = []
    for b in range(0, B, most):
        rows = slice(b, b + most)
        static = make_plan(q[rows], pools, M, scale=scale, soft_cap=soft_cap, block_sizes=block_sizes, device=device)
        outputs.append(_call(static, q[rows], pools, page_table[rows], lengths[rows], starts[rows], page_offset, interpret))
    return outputs[0] if len(outputs) == 1 else tuple(jnp.concatenate(x) for x in zip(*outputs, strict=True))


def make_plan(q, pools, M: int, *, scale: float, soft_cap: float | None, block_sizes, device: DeviceSpec) -> _Plan:
    """Returns the static side of a call with tables of M columns.

    Raises:
      ValueError: pages too large for VMEM, or block sizes that the kernel does not read.
    """
    B, K, G, H = q.shape
    num_pages, _, P, _ = pools[0].shape
    dtype = pools[0].dtype
    rule = tpu_decode_blocks(K, G, H, P, M, dtype.itemsize, device)
    key = {"K": K, "G": G, "H": H, "P": P, "dtype": dtype.name}
    blocks = choose("tpu.decode", device, key, DecodeBlocks, rule, block_sizes)
    g = max(i for i in range(1, max(1, SUBLANES // G) + 1) if K % i == 0)
    cores = min(device.num_cores, B)
    row_bytes = K * max(G, SUBLANES) * H * 6  # q and o
    rows = max(1, min(ROWS_PER_STEP, -(-B // cores), STEP_BYTES // row_bytes))
    page_bytes = sum(math.prod(pool.shape[1:]) * pool.dtype.itemsize for pool in pools)
    needed = max(2, blocks.num_stages) * blocks.pages_per_block * page_bytes + 4 * row_bytes * rows
    score_registers = -(-g * G // SUBLANES) * -(-blocks.pages_per_block * P // LANES)
    return _Plan(
        K=K, G=G, H=H, P=P, M=M, g=g, block=blocks.pages_per_block, stages=max(2, blocks.num_stages), rows=rows,
        steps=-(-B // (cores * rows)), cores=cores, wave=max(1, WAVE_REGISTERS // score_registers), scale=scale,
        soft_cap=soft_cap, operand=operand_dtype(q.dtype, dtype), clean=dtype != jnp.int8, num_pages=num_pages,
        num_pools=len(pools), vmem_limit=vmem_limit(needed, device),
    )  # fmt: skip


def _bundle(plan, q):  # [B, K, G, H] -> [B, N, S, g*H]
    """Returns the queries with those of a bundle's i-th head in its i-th H columns, and zeros beside them."""
    B, g = len(q), plan.g
    q = q.astype(plan.operand)
    if g > 1:
        q = q.reshape(B, plan.N, g, plan.G, 1, plan.H) * jnp.eye(g, dtype=plan.operand)[:, None, :, None]
    return q.reshape(B, plan.N, plan.S, g * plan.H)


def _call(plan, q, pools, page_table, lengths, starts, page_offset, interpret):
    B, N, S, H = len(q), plan.N, plan.S, plan.H
    padded = plan.cores * plan.steps * plan.rows
    pad = lambda x: jnp.pad(x, [(0, padded - B)] + [(0, 0)] * (x.ndim - 1))
    # A block's ids are read whole, and the last steps read on where nothing is left to fetch. Rows that fill up a grid step have no
    # columns: they are empty, so no page is looked up for them, and scalar memory has no room for more.
    table = jnp.pad(page_table.reshape(-1), (0, plan.stages * plan.block + UNROLL))
    lse_lanes = -(-N // LANES) * LANES
    at_row = lambda *rest: pl.BlockSpec((plan.rows, *rest), lambda c, s, *_: (c * plan.steps + s,) + (0,) * len(rest))
    state = [(N, S, plan.g * H), (N, S, LANES), (N, S, LANES if plan.T % LANES == 0 else plan.T)]  # acc, top, total
    o, lse = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(plan.cores, plan.steps),
            in_specs=[at_row(N, S, plan.g * H)] + [pl.BlockSpec(memory_space=pltpu.HBM)] * len(pools),
            out_specs=[at_row(N, S, H), at_row(S, lse_lanes)],
            scratch_shapes=[pltpu.VMEM((plan.stages, plan.block, *pool.shape[1:]), pool.dtype) for pool in pools]
            + [pltpu.SemaphoreType.DMA((plan.stages,)), pltpu.SMEM((len(CURSOR),), jnp.int32)]
            + [pltpu.VMEM(shape, jnp.float32) for shape in state],
        ),
        out_shape=[jax.ShapeDtypeStruct((padded, *shape), jnp.float32) for shape in ((N, S, H), (S, lse_lanes))],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True, vmem_limit_bytes=plan.vmem_limit
        ),
        interpret=interpret,
        name="paged_decode",
    )(table, pad(lengths), pad(starts), jnp.reshape(page_offset, (1,)), pad(_bundle(plan, q)), *pools)
    lse = jnp.swapaxes(lse[:B, :, :N], 1, 2)
    return o[:B].reshape(B, plan.K, plan.G, H), lse.reshape(B, plan.K, plan.G)
