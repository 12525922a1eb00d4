"""Chunked prefill for NVIDIA GPUs (Pallas Triton): a chunk of queries against the cached pages and then against itself.

A program attends `rows` query rows of one kv head of one batch row. A row of the tile is a (token, query head) pair, head fastest,
so that any G fills the tile. It walks the row's pages from the first that its window reaches, then the chunk's own keys up to its
last token: the online softmax of one runs on into the other.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.block_sizes import PrefillBlocks, choose, gpu_prefill_blocks
from pallas_kernels.devices import DeviceSpec
from pallas_kernels.gpu import triton_common as common
from pallas_kernels.gpu.triton_common import Numerics

_NO_WINDOW = 2**30  # more tokens than a row can hold


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static of one call: a tile has `rows` (token, query head) rows and `block` keys."""

    B: int
    T: int
    K: int
    G: int
    H: int
    P: int
    rows: int
    block: int
    cached: Numerics  # of products with the pool
    own: Numerics  # of products with the chunk's own keys


@dataclasses.dataclass(frozen=True)
class _Tile:
    """The query rows of a program. token, g i32 `[rows]`; position: of each in its batch row; window: tokens each sees."""

    b: jax.Array
    head: jax.Array
    token: jax.Array
    g: jax.Array
    position: jax.Array
    window: jax.Array
    first: jax.Array  # token of the first row
    end: jax.Array  # one past the token of the last row that is real

    def sees(self, keys, exist):
        """bool `[rows, block]`: which keys, at positions i32 `[block]`, each row sees."""
        distance = self.position[:, None] - keys[None, :]
        return (distance >= 0) & (distance < self.window) & exist[None, :]


def _kernel(plan: _Plan, offset_ref, window_ref, lengths_ref, chunk_ref, table_ref, q_ref, k_ref, v_ref, *refs):
    """Grid (row tiles, K, B): programs that start together read the same keys."""
    scales_ref, (k_new_ref, v_new_ref, o_ref, lse_ref) = (refs[0], refs[1:]) if plan.cached.scaled else (None, refs)
    tile, head, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length, chunk, window = lengths_ref[b], chunk_ref[b], window_ref[0]
    row = tile * plan.rows + jnp.arange(plan.rows, dtype=jnp.int32)
    token = lax.div(row, jnp.int32(plan.G))
    here = _Tile(
        b, head, token, lax.rem(row, jnp.int32(plan.G)), length + token, jnp.where(window > 0, window, _NO_WINDOW),
        first=lax.div(tile * plan.rows, jnp.int32(plan.G)),
        end=jnp.minimum(lax.div(tile * plan.rows + (plan.rows - 1), jnp.int32(plan.G)) + 1, chunk),
    )  # fmt: skip
    columns, exist = common.part_columns(plan.cached, plan.H)
    state = (
        [jnp.zeros((plan.rows, exist.shape[0]), jnp.float32) for _ in columns],
        jnp.full((plan.rows,), common.LOWEST, jnp.float32),
        jnp.zeros((plan.rows, plan.block), jnp.float32),
    )
    state = _attend_pages(plan, here, state, length, offset_ref[0], table_ref, q_ref, k_ref, v_ref, scales_ref, columns, exist)
    acc, m, total = state
    state = [a * plan.cached.key_unit for a in acc] if plan.cached.key_unit != 1 else acc, m, total
    state = _attend_chunk(plan, here, state, length, q_ref, k_new_ref, v_new_ref, columns, exist)
    o, lse = common.finish(*state)
    real = token < plan.T
    at = lambda ref, *h: ref.at[(b, token[:, None], head, here.g[:, None], *h) if h else (b, token, head, here.g)]
    for part, h in zip(o, columns, strict=True):
        plgpu.store(at(o_ref, h[None, :]), part.astype(o_ref.dtype), mask=real[:, None] & exist[None, :])
    plgpu.store(at(lse_ref), lse, mask=real)


def _load_q(plan: _Plan, here: _Tile, q_ref, columns, exist):
    mask = (here.token < plan.T)[:, None] & exist[None, :]
    at = lambda h: q_ref.at[here.b, here.token[:, None], here.head, here.g[:, None], h[None, :]]
    return [plgpu.load(at(h), mask=mask, other=jnp.zeros((), q_ref.dtype)) for h in columns]


def _attend_pages(plan: _Plan, here: _Tile, state, length, page_offset, table_ref, q_ref, k_ref, v_ref, scales_ref, columns, exist):
    """Keys [start, length) in pages, where start is the first that the tile's first row sees."""
    num, block = plan.cached, plan.block
    start = jnp.maximum(length + here.first - here.window + 1, 0)
    end = jnp.where(here.first < here.end, length, 0)  # a tile of padding has nothing to do
    q, row_scale = common.normalised(num, _load_q(plan, here, q_ref, columns, exist))
    pages_of = lambda i: common.load_pages(table_ref, here.b, page_offset, plan.P, i, block, start, end)

    def body(i, carry):
        *state, pages = carry
        positions, seen = common.token_span(i, block, start, end)
        at = (pages, here.head, lax.rem(positions, jnp.int32(plan.P)), seen)
        keys, values = common.load_tile(k_ref, *at, exist), common.load_tile(v_ref, *at, exist)
        ks, vs = common.load_scales(scales_ref, 0, *at, plan.P), common.load_scales(scales_ref, 1, *at, plan.P)
        following = pages_of(i + 1)  # carried, as in decode
        s = jnp.where(here.sees(positions, seen), common.scores(num, q, row_scale, keys, ks), -jnp.inf)
        return *common.softmax_step(num, *state, s, values, vs), following

    first = lax.div(start, jnp.int32(block))
    *state, _ = lax.fori_loop(first, pl.cdiv(end, block), body, (*state, pages_of(first)))
    return state


def _attend_chunk(plan: _Plan, here: _Tile, state, length, q_ref, k_new_ref, v_new_ref, columns, exist):
    """The chunk's own keys, from the first that the tile's first row sees to its last row's token. Pool parts, own operands."""
    num, block = plan.own, plan.block
    start = jnp.maximum(here.first - here.window + 1, 0)
    q, row_scale = common.normalised(num, _load_q(plan, here, q_ref, columns, exist))
    at = jnp.arange(exist.shape[0], dtype=jnp.int32)

    def load(ref, tokens, seen):
        mask, other = seen[:, None] & exist[None, :], jnp.zeros((), ref.dtype)
        return [
            plgpu.load(ref.at[part, here.b, tokens[:, None], here.head, at[None, :]], mask=mask, other=other)
            for part in range(len(q))
        ]

    def body(i, state):
        tokens, seen = common.token_span(i, block, start, here.end)
        keys, values = load(k_new_ref, tokens, seen), load(v_new_ref, tokens, seen)
        s = jnp.where(here.sees(length + tokens, seen), common.scores(num, q, row_scale, keys, None), -jnp.inf)
        return common.softmax_step(num, *state, s, values, None)

    return lax.fori_loop(lax.div(start, jnp.int32(block)), pl.cdiv(here.end, block), body, state)


def prefill(
    q,
    k_pages,
    v_pages,
    kv_scales,
    page_table,
    lengths,
    chunk_lengths,
    k_new,
    v_new,
    window,
    page_offset,
    *,
    scale: float,
    soft_cap: float | None,
    interpret: bool,
    block_sizes: PrefillBlocks | None,
    device: DeviceSpec,
):
    """Returns o `[B, T, K, G, H]` in q's dtype and lse f32 `[B, T, K, G]` (natural; -inf where nothing is seen)."""
    plan, blocks = _plan(q, k_pages, page_table, scale, soft_cap, interpret, block_sizes, device)
    scalar = lambda x: jnp.reshape(x, (1,))
    arrays = [scalar(page_offset), scalar(window), lengths, chunk_lengths, page_table]
    arrays += [common.query_view(plan.cached, q), *(common.pool_view(plan.cached, x) for x in (k_pages, v_pages))]
    if plan.cached.scaled:
        arrays.append(kv_scales.reshape(kv_scales.shape[0], 2, -1))
    arrays += [_own_parts(plan, x) for x in (k_new, v_new)]
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)],
        grid=(pl.cdiv(plan.T * plan.G, plan.rows), plan.K, plan.B),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="paged_prefill",
    )(*arrays)


def _own_parts(plan: _Plan, x):  # [B, T, K, H] -> [parts, B, T, K, H / parts]
    """The chunk's keys or values in the operand type, their columns dealt out like the pool's. No copy for 16-bit pools."""
    x = x.astype(plan.own.dtype).reshape(*x.shape[:-1], -1, plan.cached.parts)
    return jnp.moveaxis(x, -1, 0)


def _plan(q, k_pages, page_table, scale, soft_cap, interpret, given: PrefillBlocks | None, device: DeviceSpec):
    (B, T, K, G, H), P = q.shape, k_pages.shape[2]
    cached = common.numerics(q, k_pages, scale, soft_cap, interpret)
    # What an 8-bit pool will hold of the chunk comes here dequantised: q's own type holds it well enough, and takes any magnitude.
    own = cached if cached.parts == 1 else dataclasses.replace(cached, dtype=str(q.dtype), pool=str(q.dtype))
    key = {"B": B, "T": T, "K": K, "G": G, "H": H, "P": P, "M": page_table.shape[1], "dtype": str(k_pages.dtype)}
    rule = gpu_prefill_blocks(T * G, H, k_pages.dtype.itemsize, cached.dtype)
    blocks = choose("gpu.triton_prefill", device, key, PrefillBlocks, rule, given)
    rows, block = blocks.queries_per_block, blocks.keys_per_block
    common.check_tile("gpu.triton_prefill", blocks.num_warps, queries_per_block=rows, keys_per_block=block)
    assert rows is not None and block is not None  # the rule names them
    return _Plan(B, T, K, G, H, P, rows, block, cached, own), blocks
