"""From a state and what a verb has decided to the jitted steps, and back to the successor state: the shapes are made here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.buckets import CHUNK_TOKENS, bucket_rows, bucket_tokens, most_rows
from jaxkv.inputs import check_room, pool_full
from jaxkv.kv import pages
from jaxkv.kv.pages import Array, Ownership, PageCopies
from jaxkv.state import State, frozen
from jaxkv.steps import Pools, step


@dataclasses.dataclass(frozen=True)
class Part:
    """What one dispatch ran of one prompt: its tokens [start, stop), in row `place` of the dispatch."""

    prompt: int
    place: int
    start: int
    stop: int
    ends: bool  # the prompt is stored to its end: this row's logits are those of its last token


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """What one dispatch of `dispatch_prompts` left behind."""

    pools: Pools  # consumed by the next dispatch
    logits: jax.Array  # f32[R, V] of each chunk's last token, or f32[R, T, V] of all; R and T are buckets
    parts: list[Part]  # what it ran

    @property
    def ends(self) -> list[Part]:
        """The parts that ended their prompts."""
        return [part for part in self.parts if part.ends]


def with_pending(state: State, chunks: Sequence[np.ndarray], rows: np.ndarray) -> list[np.ndarray]:
    """The chunks with each row's pending token before them: what must be run to store them."""
    return [
        chunk if state.pending[row] < 0 else np.concatenate([state.pending[row : row + 1], chunk])
        for chunk, row in zip(chunks, rows, strict=True)
    ]


def claim(state: State, rows: np.ndarray, sizes: Sequence[int]) -> tuple[Ownership, PageCopies]:
    """Ownership with room for `sizes` more tokens in `rows`, lengths grown, and the page copies to make first.

    Raises:
      ValueError: a slot or the pool is too small; says by how much.
    """
    counts = np.zeros(state.num_slots, np.int32)
    counts[rows] = sizes
    check_room(state, state.kv.lengths + counts)
    own, copies, shortfall = pages.append(state.kv.own, counts)
    if shortfall:
        raise pool_full(state.kv.own, int(shortfall))
    return own, copies


def dispatch_prompts(
    state: State,
    pools: Pools,
    own: Ownership,
    rows: np.ndarray,
    prompts: Sequence[np.ndarray],
    lengths: Array,
    chunk_size: int = CHUNK_TOKENS,
    all_logits: bool = False,
) -> Iterator[Dispatched]:
    """Runs prompts in chunks, longest first, rows of one bucket a dispatch; yields what each dispatch left behind.

    Args:
      pools: consumed; those of the last dispatch hold everything.
      own: owns pages for all of the prompts.
      rows: i32[n], the slot of each prompt.
      prompts: n arrays of tokens, none empty.
      lengths: i32[n], tokens stored in each slot before.
      chunk_size: of a prompt, at most so many tokens a dispatch.
      all_logits: of every token, not only of each chunk's last.
    """
    done = [0] * len(prompts)
    left = lambda i: prompts[i].size - done[i]
    waiting = sorted(range(len(prompts)), key=left, reverse=True)
    while waiting:
        # Prompts of one bucket together: less padding, and a row's operands (steps.py) must not depend on a longer neighbour.
        bucket = lambda i: bucket_tokens(min(left(i), chunk_size))
        T = bucket(waiting[0])
        alike = [i for i in waiting if bucket(i) == T]
        batch = sorted(alike[: most_rows(T, state.num_slots)])  # in the callers' order where one dispatch takes all
        parts = []
        for place, i in enumerate(batch):
            stop = min(done[i] + min(T, chunk_size), prompts[i].size)
            parts.append(Part(i, place, done[i], stop, stop == prompts[i].size))
        chunks = [prompts[part.prompt][part.start : part.stop] for part in parts]
        stored = np.array([lengths[part.prompt] + part.start for part in parts], np.int32)
        pools, logits, _ = dispatch_prefill(state, pools, own, rows[batch], chunks, stored, T, all_logits)
        for part in parts:
            done[part.prompt] = part.stop
        yield Dispatched(pools, logits, parts)
        waiting = sorted((i for i in waiting if left(i)), key=left, reverse=True)


def dispatch_prefill(
    state: State,
    pools: Pools,
    own: Ownership,
    rows: np.ndarray,
    chunks: Sequence[np.ndarray],
    lengths: np.ndarray,
    T: int,
    all_logits: bool = False,
) -> tuple[Pools, jax.Array, jax.Array]:
    """Runs one prefill step of up to T tokens for each of `rows`; returns (pools, logits, sound) of the padded rows."""
    R = bucket_rows(len(rows), state.num_slots)
    tokens, counts = pad(chunks, T, R)
    slots = np.full(R, state.num_slots, np.int32)
    slots[: len(rows)] = rows
    before, table = np.zeros(R, np.int32), np.zeros((R, own.page_table.shape[1]), np.int32)
    before[: len(rows)], table[: len(rows)] = lengths, own.page_table[rows]
    return step("prefill", state.static.platform)(
        state.params, pools, table, before, slots, tokens, counts, static=state.static, all_logits=all_logits
    )


def dispatch_decode(state: State, pools: Pools, own: Ownership, rows: np.ndarray, tokens: np.ndarray) -> tuple[Pools, jax.Array]:
    """Runs one token for each of `rows` in a step over all slots; returns (pools, logits f32[B, V])."""
    B = state.num_slots
    counts, column, lengths = np.zeros(B, np.int32), np.zeros((B, 1), np.int32), np.zeros(B, np.int32)
    counts[rows], column[rows, 0], lengths[rows] = 1, tokens, state.kv.lengths[rows]
    pools, logits, _ = step("decode", state.static.platform)(
        state.params, pools, own.page_table, lengths, np.arange(B, dtype=np.int32), column, counts,
        static=state.static, all_logits=False,
    )  # fmt: skip
    return pools, logits


def collect(state: State, buffer: jax.Array | None, logits: jax.Array, slots: list[int], places: list[int]) -> jax.Array:
    """The buffer f32[B, V] (None: of zeros) with row places[i] of logits f32[R, V] at slots[i]."""
    source = np.full(state.num_slots, -1, np.int32)
    source[slots] = places
    buffer = jnp.zeros((state.num_slots, logits.shape[1]), jnp.float32) if buffer is None else buffer
    return step("collect_logits", state.static.platform)(buffer, logits, source)


def pick(state: State, logits: jax.Array, rows: np.ndarray) -> jax.Array:
    """Rows of logits f32[B, V] in the order of `rows`, f32[R, V]; one small trace for each R, none for all in order."""
    if np.array_equal(rows, np.arange(state.num_slots)):
        return logits
    return step("pick_rows", state.static.platform)(logits, rows.astype(np.int32))


def pools_of(state: State, copies: PageCopies | None) -> Pools:
    """The state's pools, with the copies that copy-on-write asks for made (which consumes the state)."""
    pools = Pools(state.kv.k_pages, state.kv.v_pages, state.kv.kv_scales, state.history)
    if copies is None or (copies.dst >= state.kv.refcounts.shape[0]).all():
        return pools
    nowhere = np.full(1, state.num_slots, np.int32)
    return copy(state, pools, copies.src, copies.dst, np.zeros(1, np.int32), nowhere)


def copy(state: State, pools: Pools, page_src, page_dst, row_src, row_dst) -> Pools:
    """Copies pages and history rows (i32[..], at most B each), padded to B entries so that one trace serves every call."""
    B, C = state.num_slots, state.kv.refcounts.shape[0]
    padded = lambda a, fill: np.concatenate([np.asarray(a, np.int32), np.full(B - len(a), fill, np.int32)])
    return step("copy_rows", state.static.platform)(
        pools, padded(page_src, 0), padded(page_dst, C), padded(row_src, 0), padded(row_dst, B),
        num_layers=state.static.model.num_layers,
    )  # fmt: skip


def successor(state: State, pools: Pools, own: Ownership, rows: np.ndarray, pending: np.ndarray | int) -> State:
    """The state after a step: new pools and ownership, `pending` set for `rows`."""
    kv = dataclasses.replace(state.kv, k_pages=pools.k_pages, v_pages=pools.v_pages, kv_scales=pools.kv_scales, own=own)
    everything = state.pending.copy()
    everything[rows] = pending
    return dataclasses.replace(state, kv=kv, history=pools.history, pending=frozen(everything))


def pad(chunks: Sequence[np.ndarray], T: int, R: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens i32[R, T] and counts i32[R] of ragged chunks."""
    tokens, counts = np.zeros((R, T), np.int32), np.zeros(R, np.int32)
    for i, chunk in enumerate(chunks):
        tokens[i, : chunk.size] = chunk
        counts[i] = chunk.size
    return tokens, counts
