"""Paged decode for Hopper (Pallas Mosaic GPU): split-K attention of one query token a row, for 16-bit pools.

As many programs as the device has cores take turns at the *jobs*: an item of work (splits.py) for one kv head. In each program one
warpgroup copies pages to shared memory by TMA, tile after tile and job after job, as far ahead as the ring of `stages` tiles
reaches; the other multiplies and keeps the online softmax. Items leave float32 partials, which XLA combines by their base-2
log-sum-exp; where no row is split they are the result.

    copying      K0 V0 K1 V1 K2 ...         waits for a free half of a slot
    computing       QK0 softmax PV0 QK1 ..  frees K's half after QK and V's after PV
"""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.block_sizes import DecodeBlocks, choose, decode_key, gpu_decode_items
from pallas_kernels.devices import DeviceSpec
from pallas_kernels.gpu.splits import LN2, LOG2E, combine, work_list

plgpu: Any
try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError as error:
    plgpu, _missing = None, str(error)

# A wgmma multiplies 64 rows: the queries of one kv head, the rest of the rows is never looked at.
_ROWS = 64
# Registers a thread of the copying and the computing warpgroup: the first holds page ids only, the second a [64, H] sum and scores.
_COPY_REGISTERS, _COMPUTE_REGISTERS = 80, 240
_INSTEAD = "'pallas_gpu' runs its Triton kernel (pallas_kernels.gpu.triton_decode) there"


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static of one call. Tiles have `block` tokens, copied in chunks that lie in one page each."""

    B: int
    K: int
    G: int
    H: int
    P: int
    block: int
    stages: int
    target: int
    num_splits: int | None
    programs: int
    scale: float
    soft_cap: float | None
    dtype: Any
    interpret: bool

    @property
    def chunk(self) -> int:
        """Tokens of one copy."""
        return math.gcd(self.P, self.block)

    @property
    def rows(self) -> int:
        """Query rows that are copied: a tile in shared memory has 8."""
        return -(-self.G // 8) * 8

    @property
    def items(self) -> int:
        """The length of the work list."""
        return self.B + self.target if self.num_splits is None else self.B * self.num_splits

    @property
    def jobs(self) -> int:
        return self.items * self.K


def available() -> str | None:
    """Returns why this kernel cannot be used with the installed jax, or None."""
    if plgpu is None:
        return f"this jax has no Pallas Mosaic GPU ({_missing})"
    used = ("kernel", "wgmma", "ACC", "LoweringSemantics", "TilingTransform", "SwizzleTransform", "set_max_registers")
    lacks = [name for name in used if not hasattr(plgpu, name)]
    return f"Pallas Mosaic GPU of this jax lacks {', '.join(lacks)}" if lacks else None


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
    interpret,
    block_sizes: DecodeBlocks | None,
    device: DeviceSpec,
):
    """Returns o f32 `[B, K, G, H]` and lse f32 `[B, K, G]` (natural; -inf where nothing is seen) of keys `[starts, lengths)`.

    Raises:
      ValueError: an operand, shape or device that this kernel is not for.
    """
    reason = refusal(q, k_pages, kv_scales, interpret, device)
    if reason is not None:
        raise ValueError(f"the Mosaic GPU decode kernel cannot do this: {reason}; {_INSTEAD}")
    plan = _plan(q, k_pages, page_table, scale, soft_cap, interpret, block_sizes, device)
    work = work_list(lengths, starts, items=plan.items, block=plan.block, target=plan.target, num_splits=plan.num_splits)
    work = jnp.stack(work, 1)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, plan.rows - plan.G), (0, 0)))
    o, lse = _call(plan, interpret)(work, jnp.reshape(page_offset, (1,)).astype(jnp.int32), page_table, q, k_pages, v_pages)
    lse = lse[..., : plan.G]
    if plan.items == plan.B:
        return o, lse * LN2
    return combine(work[:, 0], o, lse, plan.B)


def _call(plan: _Plan, interpret):
    """The kernel as a function of (work, page_offset, page_table, q, k_pages, v_pages)."""
    # What wgmma reads: tiles of 8 rows and 128 bytes, swizzled.
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    ring = plgpu.SMEM((plan.stages, plan.block, plan.H), plan.dtype, transforms=tiled)
    full = plgpu.Barrier(num_arrivals=plan.block // plan.chunk, num_barriers=plan.stages)
    free = plgpu.Barrier(num_barriers=plan.stages)

    def paged_decode(*refs, **scratch):  # the name that a profile shows
        _decode_kernel(plan, *refs, **scratch)

    return plgpu.kernel(
        paged_decode,
        out_type=[
            jax.ShapeDtypeStruct((plan.items, plan.K, plan.G, plan.H), jnp.float32),
            jax.ShapeDtypeStruct((plan.items, plan.K, _ROWS), jnp.float32),
        ],
        scratch_types=dict(
            q=plgpu.SMEM((_ROWS, plan.H), plan.dtype, transforms=tiled),
            k=ring,
            v=ring,
            o=plgpu.SMEM((_ROWS, plan.H), jnp.float32),
            lse=plgpu.SMEM((_ROWS,), jnp.float32),
            q_full=plgpu.Barrier(),
            k_full=full,
            v_full=full,
            k_free=free,
            v_free=free,
        ),
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=512,  # a row of scores lies in one warp: nothing is reduced through shared memory
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=_interpreter(interpret),
    )


def _decode_kernel(plan: _Plan, work_ref, offset_ref, table_ref, q_ref, k_ref, v_ref, o_ref, lse_ref, **scratch):
    """One program: every `programs`-th job, so that neighbours read the heads of a page, which lie side by side."""
    smem = types.SimpleNamespace(**scratch)
    program = lax.axis_index("program")
    jobs = _div(plan.jobs - program + (plan.programs - 1), plan.programs)
    warpgroup = lax.axis_index("warpgroup")

    def job(i):
        index = program + i * plan.programs
        item, head = _div(index, plan.K), _rem(index, plan.K)
        row, *span = (work_ref[item, field] for field in range(5))
        return item, head, jnp.minimum(row, plan.B - 1), *span  # the list's unused end has no tiles

    @pl.when(warpgroup == 0)
    def _compute():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        step = lambda i, count: _attend_job(plan, smem, q_ref, o_ref, lse_ref, *job(i), count)
        lax.fori_loop(jnp.int32(0), jobs, step, jnp.int32(0))

    @pl.when(warpgroup == 1)
    def _copy():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        page_offset = offset_ref[0]
        step = lambda i, count: _copy_job(plan, smem, table_ref, page_offset, k_ref, v_ref, *job(i), count)
        count = lax.fori_loop(jnp.int32(0), jobs, step, jnp.int32(0))
        # The interpreter holds a barrier that nobody waited for to be a mistake.
        lax.fori_loop(jnp.maximum(count - plan.stages, 0), count, lambda i, _: _await_free(plan, smem, i), None)


def _await_free(plan: _Plan, smem, count):
    for free in (smem.k_free, smem.v_free):
        plgpu.barrier_wait(free.at[_rem(count, plan.stages)])


def _copy_job(plan: _Plan, smem, table_ref, page_offset, k_ref, v_ref, _item, head, row, start, end, tile, end_tile, count):
    """Copies the tiles of one job into the ring; `count` tiles went before it. Returns the new count.

    Chunks outside [start, end) are read from the nearest page inside, which is in the cache: the barriers count copies.
    """
    first_page, last_page = _div(start, plan.P), _div(jnp.maximum(end - 1, 0), plan.P)
    chunks, in_page = plan.block // plan.chunk, plan.P // plan.chunk

    def pages(t):
        page = lambda i: jnp.minimum(jnp.maximum(_div(t * chunks + i, in_page), first_page), last_page)
        return [table_ref[row, page(i)] + page_offset for i in range(chunks)]

    def source(ref, page, t, i):
        # Written as a multiple of the chunk, so that the compiler sees whole tiles of 8 rows.
        offset = _rem(t * chunks + i, in_page) * plan.chunk if in_page > 1 else 0
        return ref.at[page, head, pl.ds(offset, plan.chunk)]

    def step(t, carry):
        count, ids = carry
        slot = _rem(count, plan.stages)
        following = pages(t + 1)  # asked for a tile ahead: the table is as far away as the pages
        for ref, ring, full, free in ((k_ref, smem.k, smem.k_full, smem.k_free), (v_ref, smem.v, smem.v_full, smem.v_free)):

            @pl.when(count >= plan.stages)
            def _(free=free):
                plgpu.barrier_wait(free.at[slot])

            for i, page in enumerate(ids):
                plgpu.copy_gmem_to_smem(source(ref, page, t, i), ring.at[slot, pl.ds(i * plan.chunk, plan.chunk)], full.at[slot])
        return count + 1, following

    count, _ = lax.fori_loop(tile, end_tile, step, (count, pages(tile)))
    return count


def _attend_job(plan: _Plan, smem, q_ref, o_ref, lse_ref, item, head, row, start, end, tile, end_tile, count):
    """Attends the tiles of one job as they arrive, and writes its partial result. Returns the new count of tiles."""
    plgpu.copy_gmem_to_smem(q_ref.at[row, head], smem.q.at[pl.ds(0, plan.rows)], smem.q_full)
    plgpu.barrier_wait(smem.q_full)

    def step(t, carry):
        acc, m, total, count = carry
        slot = _rem(count, plan.stages)
        edge = (t * plan.block < start) | ((t + 1) * plan.block > end)

        @pl.when(edge)
        def _():  # before there are scores: registers are short
            plgpu.barrier_wait(smem.v_full.at[slot])
            _drop_unseen(plan, smem.v.at[slot], t, start, end)

        plgpu.barrier_wait(smem.k_full.at[slot])
        s = _scores(plan, smem.q, smem.k.at[slot])
        plgpu.barrier_arrive(smem.k_free.at[slot])
        s = jnp.where(_seen(plan, t, start, end, s.shape, 1), s, -jnp.inf)
        m_new = jnp.maximum(m, jnp.max(s, 1))
        decay = jnp.exp2(m - m_new)
        p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, (0,)))
        total = total * decay + jnp.sum(p, 1)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, (0,))

        @pl.when(jnp.logical_not(edge))
        def _():
            plgpu.barrier_wait(smem.v_full.at[slot])

        acc = _add_product(plan, acc, p.astype(plan.dtype), smem.v.at[slot])
        plgpu.barrier_arrive(smem.v_free.at[slot])
        return acc, m_new, total, count + 1

    rows = lambda value: jnp.full((_ROWS,), value, jnp.float32)
    carry = (jnp.zeros((_ROWS, plan.H), jnp.float32), rows(-jnp.inf), rows(0.0), count)
    acc, m, total, count = lax.fori_loop(tile, end_tile, step, carry)
    safe = jnp.where(total != 0, total, 1.0)
    smem.o[...] = acc / lax.broadcast_in_dim(safe, acc.shape, (0,))
    smem.lse[...] = m + jnp.log(safe) * LOG2E  # nothing seen: -inf
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.o.at[pl.ds(0, plan.G)], o_ref.at[item, head])
    plgpu.copy_smem_to_gmem(smem.lse, lse_ref.at[item, head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    return count


def _div(x, n: int):
    return lax.div(x, np.int32(n))  # a Python number would be an int64 under jax.enable_x64


def _rem(x, n: int):
    return lax.rem(x, np.int32(n))


def _seen(plan: _Plan, t, start, end, shape, axis: int):
    """Whether the tokens of tile `t`, along `axis` of `shape`, lie in [start, end)."""
    position = t * plan.block + lax.broadcasted_iota(jnp.int32, shape, axis)
    return (position >= start) & (position < end)


def _scores(plan: _Plan, q, keys):
    """Base-2 scores f32 [64, block]: log2(e) times what the public op calls a score."""

    def multiply(s):
        plgpu.wgmma(s, q, keys.transpose((1, 0)))
        return s[...]

    if plan.interpret:
        s = _interpreted_product(q[...], keys[...].T)
    else:
        s = pl.run_scoped(multiply, plgpu.ACC((_ROWS, plan.block), jnp.float32))
    if plan.soft_cap is None:
        return s * (plan.scale * LOG2E)
    # tanh(x) = 1 - 2 / (1 + e^2x): the device's approximate tanh is off by 2^-11, its exp2 by 2^-22.
    return plan.soft_cap * LOG2E - (2 * plan.soft_cap * LOG2E) / (1.0 + jnp.exp2(s * (2 * LOG2E * plan.scale / plan.soft_cap)))


def _drop_unseen(plan: _Plan, values, t, start, end):
    """Zeroes the tokens outside [start, end) of a tile at the edge: wgmma reads values where they lie, and 0 * NaN is NaN."""
    across = plan.H // 64

    def piece(i, _):  # 16 registers; the whole tile has 64
        row, col = _div(i, across) * 64, _rem(i, across) * 64
        part = values.at[pl.ds(row, 64), pl.ds(col, 64)]
        seen = _seen(plan, t, start - row, end - row, (64, 64), 0)
        part[...] = jnp.where(seen, part[...], jnp.zeros((), plan.dtype))

    lax.fori_loop(jnp.int32(0), jnp.int32(plan.block // 64 * across), piece, None)
    plgpu.commit_smem()


def _add_product(plan: _Plan, acc, p, values):
    """acc + p @ values, p from registers."""
    if plan.interpret:
        return acc + _interpreted_product(p, values[...])
    return pl.run_state(lambda ref: plgpu.wgmma(ref, p, values))(plgpu.ACC.init(acc))


def _interpreted_product(a, b):
    """a @ b in place of wgmma, whose register operands the interpreter of jax 0.10 does not know."""
    # wgmma and TMA see shared memory through one proxy, these loads through another: jax 0.12 asks for the fence between them.
    plgpu.commit_smem()
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def refusal(q, k_pages, kv_scales, interpret, device: DeviceSpec) -> str | None:
    """Returns why this kernel cannot do a call, or None; pools are not bits here."""
    (_, _, G, H), P = q.shape, k_pages.shape[2]
    reason = available()
    if reason is not None:
        return reason
    if not interpret and device.compute_capability != (9, 0):
        return f"it needs wgmma, which compute capability 9.0 has, and {device.name} has {device.compute_capability}"
    if kv_scales is not None or k_pages.dtype not in (jnp.bfloat16, jnp.float16):
        return f"wgmma reads keys and values of 16 bits where they lie, not {k_pages.dtype}"
    if q.dtype != k_pages.dtype:
        return f"q and the pool must have one type, got {q.dtype} and {k_pages.dtype}"
    if H not in (64, 128, 256):
        return f"the head dimension must be 64, 128 or 256, got {H}"
    if G > _ROWS:
        return f"it holds at most {_ROWS} query heads a kv head, got {G}"
    return f"the page size must be a multiple of 8, got {P}" if P % 8 else None


def _plan(q, k_pages, page_table, scale, soft_cap, interpret, given: DecodeBlocks | None, device: DeviceSpec) -> _Plan:
    """The static side of a call: what was given, tuned or ruled, and the length of the work list."""
    (B, K, G, H), P = q.shape, k_pages.shape[2]
    key = decode_key(q, k_pages, page_table)
    blocks = choose("gpu.mosaic_decode", device, key, DecodeBlocks, rule(H, device), given, also=("num_splits",))
    block, stages, target = blocks.tokens_per_block, blocks.num_stages, 0
    assert block is not None and stages is not None  # the rule names both
    if block % 64 or not 64 <= block <= 256 or stages < 1 or shared_bytes(H, block, stages) > device.smem_bytes > 0:
        raise ValueError(
            f"tokens_per_block={block} must be 64, 128, 192 or 256, and with num_stages={stages} it takes {shared_bytes(H, block, stages)} "
            f"bytes of shared memory, where {device.name} has {device.smem_bytes}"
        )
    if blocks.num_splits is None:
        target = gpu_decode_items(device, B, K, tiles=-(-page_table.shape[1] * P // block))
    items = B + target if blocks.num_splits is None else B * blocks.num_splits
    programs = min(items * K, device.num_cores, 2 if interpret else items * K)  # two show what many would
    cap = None if soft_cap is None else float(soft_cap)
    return _Plan(B, K, G, H, P, block, stages, target, blocks.num_splits, programs, float(scale), cap, q.dtype, bool(interpret))


def rule(H: int, device: DeviceSpec) -> DecodeBlocks:
    """Returns tiles of 32 KiB of keys and 32 KiB of values, half of it at H 64, and as many as shared memory holds, at most 4.

    Two tiles keep 64 KiB in flight while one is computed: a Hopper core's share of 4.8 TB/s needs 40 at 1 us of latency.
    """
    block = 64 if H == 256 else 128
    rest = (device.smem_bytes or 227 * 2**10) - shared_bytes(H, block, 0)
    return DecodeBlocks(tokens_per_block=block, num_stages=max(1, min(4, rest // (4 * block * H))))


def shared_bytes(H: int, block: int, stages: int) -> int:
    """Returns the shared memory of a program: q, o, the ring, and 2.5 KiB for lse, barriers, reductions and alignment."""
    return _ROWS * H * (2 + 4) + stages * 2 * block * H * 2 + 2560


def _interpreter(interpret):
    """What plgpu.kernel takes for `interpret`: jax 0.10 has the parameters of its GPU interpreter, but not in public."""
    if interpret is not True:
        return interpret or None
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()
