"""The loop over prefill and decode: `generate(state, tokens) -> (state, Output)`, whole or streamed.

Here is what happens before anything runs: `_plan` claims every page the call can need, on the host, or raises with nothing
changed. `stream.Stream` then carries the plan out.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from typing import Literal, overload

import numpy as np

from jaxkv.buckets import CHUNK_TOKENS, bucket_tokens, most_rows, row_buckets
from jaxkv.dispatch import collect, copy, dispatch_decode, dispatch_prefill, pick, pools_of, successor, with_pending
from jaxkv.inputs import Integers, Tokens, check_room, check_tokens, pool_full
from jaxkv.kv import pages
from jaxkv.kv.pages import Array, Ownership
from jaxkv.output import Output
from jaxkv.sampling import Sampling
from jaxkv.state import State, require_live
from jaxkv.steps import step
from jaxkv.stream import Plan, Stream, dispatch_steps, start_loop

_DEFAULT_NEW_TOKENS = 128
# Most new tokens: one number, or one a row where None means the default.
Limits = int | Sequence[int | None] | np.ndarray


@overload
def generate(
    state: State,
    tokens: Tokens,
    lengths: Integers | None = None,
    *,
    max_new_tokens: Limits | None = None,
    sampling: Sampling | None = None,
    rows: Integers | None = None,
    stream: Literal[False] = False,
    chunk_size: int = CHUNK_TOKENS,
) -> tuple[State, Output]: ...
@overload
def generate(
    state: State,
    tokens: Tokens,
    lengths: Integers | None = None,
    *,
    max_new_tokens: Limits | None = None,
    sampling: Sampling | None = None,
    rows: Integers | None = None,
    stream: Literal[True],
    chunk_size: int = CHUNK_TOKENS,
) -> Stream: ...
def generate(
    state: State,
    tokens: Tokens,
    lengths: Integers | None = None,
    *,
    max_new_tokens: Limits | None = None,
    sampling: Sampling | None = None,
    rows: Integers | None = None,
    stream: bool = False,
    chunk_size: int = CHUNK_TOKENS,
) -> tuple[State, Output] | Stream:
    """Continues each row with its tokens and up to max_new_tokens of the model's, and returns (state, Output).

    Args:
      state: consumed; keep the one returned.
      tokens: token lists, one a row, or an array i32[R, T] with `lengths`. An empty row continues what its slot holds.
      lengths: i32[R], how many tokens of each row of an array count; None: all.
      max_new_tokens: tokens to emit at most, an int or one a row; 0 only prefills. None: what `sampling` says, else 128, or what
        fits the slot if that is less.
      sampling: options, scalars or one a row; None: greedy.
      rows: i32[R], the slot of each row; None: slots 0 to R-1. Samples beyond the first of a row (n > 1) take empty slots.
      stream: return a `Stream` instead: iterate it, then take `stream.finish()`.
      chunk_size: prompts go through the model in chunks of at most so many tokens.

    Returns:
      (state, Output): the successor, and tokens, text, logprobs, reasons and timings of R * n sequences; with `stream` a `Stream`.

    Raises:
      TypeError: tokens, lengths or rows that are not whole numbers, a `sampling` that is no `Sampling`.
      ValueError: token ids outside the vocabulary, rows that do not fit their slot, too few free pages or slots, bad options;
        with the numbers, before anything ran: the state is still usable.
      StaleStateError: the state was already consumed.
    """
    run = Stream(_plan(state, tokens, lengths, max_new_tokens, sampling or Sampling(), rows, chunk_size), stream)
    if stream:
        return run
    collections.deque(run, maxlen=0)
    return run.finish()


def warmup(state: State, max_prompt_tokens: int | None = None, chunk_size: int = CHUNK_TOKENS) -> State:
    """Compiles all that `generate`, `prefill`, `decode` and `fork` can need on this state, and returns it with nothing changed.

    After it nothing is traced or compiled again, whatever the prompt lengths (up to max_prompt_tokens), rows and sampling options.
    Not covered: `prefill` with all_logits, whose shapes are the caller's, and `score`, which takes no state.

    Args:
      state: consumed, as by any verb.
      max_prompt_tokens: the longest prompt to come; None: what a slot holds.
      chunk_size: what `generate` will be called with.

    Raises:
      ValueError: a size below 1.
      StaleStateError: the state was already consumed.
    """
    require_live(state)
    if (max_prompt_tokens is not None and max_prompt_tokens < 1) or chunk_size < 1:
        raise ValueError(f"{max_prompt_tokens=} and {chunk_size=} must be at least 1")
    # A pending token makes a prompt one longer.
    longest = min((max_prompt_tokens or state.max_tokens_per_slot) + 1, state.max_tokens_per_slot, chunk_size)
    B, own, platform = state.num_slots, state.kv.own, state.static.platform
    pools, none = pools_of(state, None), np.zeros(0, np.int32)
    for T in sorted({bucket_tokens(size) for size in range(1, longest + 1)}):
        for R in row_buckets(B):
            if R <= most_rows(T, B):
                nobody, nothing = np.full(R, 0), [none] * R
                pools, logits, _ = dispatch_prefill(state, pools, own, nobody, nothing, np.zeros(R, np.int32), T)
                buffer = collect(state, None, logits, [], [])
    pools = copy(state, pools, none, none, none, none)
    pools, logits = dispatch_decode(state, pools, own, none, none)
    for R in range(1, B + 1):  # the rows of a verb's logits, in an order that is not that of the slots
        pick(state, logits, np.zeros(R, np.int32) + B - 1)
    options = Sampling().arrays(
        num_slots=B, rows=(), vocab_size=state.static.model.vocab_size, eos_token_ids=(), seeds=(), prompt_lengths=()
    )
    loop = start_loop(pools, own, np.ones(B, bool))
    loop, _ = step("first_tokens", platform)(loop, buffer, options, np.zeros(B, bool), np.array(own.lengths))
    loop, _, _ = dispatch_steps(state, loop, options, np.zeros(B, bool), 1)
    return successor(state, loop.pools, own, none, -1)


def _plan(
    state: State,
    tokens: Tokens,
    lengths: Integers | None,
    max_new_tokens: Limits | None,
    sampling: Sampling,
    rows: Integers | None,
    chunk_size: int,
) -> Plan:
    started = time.perf_counter()
    require_live(state)
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a jaxkv.Sampling, got {type(sampling).__name__}")
    if not isinstance(chunk_size, int | np.integer) or chunk_size < 1:
        raise ValueError(f"{chunk_size=} must be a whole number of at least 1")
    chunks, slots = check_tokens(state, tokens, lengths, rows)
    own, prompts = _recomputing(state, with_pending(state, chunks, slots), slots)
    before = own.lengths[slots]
    stored = _per_slot(state, slots, [p.size for p in prompts])
    limits = _limits(state, max_new_tokens, sampling, slots, own.lengths + stored)
    totals = (own.lengths + stored).astype(np.int64)
    totals[slots] += limits
    check_room(state, totals)
    source = np.repeat(np.arange(len(slots)), sampling.n)
    sequences, limits = _slots(state, slots, sampling.n), limits.astype(np.int32)[source]

    own_prompt, copies_prompt, shortfall = pages.append(own, stored)
    if shortfall:
        raise pool_full(state.kv.own, _missing(own, stored, slots, source, limits, shortfall))
    extra = np.setdiff1d(np.arange(len(sequences)), np.arange(0, len(sequences), sampling.n))
    own_decode = pages.fork(own_prompt, slots[source[extra]], sequences[extra]) if extra.size else own_prompt
    room = _per_slot(state, sequences, np.maximum(limits - 1, 0))  # the last token stays pending
    own_decode, copies_decode, shortfall = pages.reserve(own_decode, room)
    if shortfall:
        raise pool_full(state.kv.own, _missing(own, stored, slots, source, limits, shortfall))
    return Plan(
        state, sampling, prompts, slots, before, own_prompt, copies_prompt, own_decode, copies_decode, sequences, source, limits,
        int(chunk_size), started,
    )  # fmt: skip


def _missing(
    own: Ownership, stored: np.ndarray, rows: np.ndarray, source: np.ndarray, limits: np.ndarray, least: Array | int
) -> int:
    """Pages the whole call is short of, for the error: prompts, samples and every token that may come."""
    prompt = (own.lengths + stored)[rows]
    wanted = np.asarray(pages.num_pages_needed(prompt[source] + np.maximum(limits - 1, 0), own.page_size))
    others = np.diff(source, prepend=-1) == 0  # samples beyond the first share the prompt's full pages
    wanted = wanted - np.where(others, prompt[source] // own.page_size, 0)
    held = int(np.count_nonzero(own.page_table[rows]))
    return max(int(wanted.sum()) - held - int(pages.free_pages(own)), int(least))


def _recomputing(state: State, prompts: list[np.ndarray], rows: np.ndarray) -> tuple[Ownership, list[np.ndarray]]:
    """A row with nothing new to run gives back its last token, so that there are logits to continue from."""
    empty = [i for i, p in enumerate(prompts) if p.size == 0]
    if not empty:
        return state.kv.own, prompts
    keep, prompts = state.kv.lengths.copy(), list(prompts)
    for i in empty:
        if keep[rows[i]] == 0:
            raise ValueError(f"slot {rows[i]} is empty and got no tokens: there is nothing to continue; give at least one token")
        keep[rows[i]] -= 1
        prompts[i] = state.tokens(rows[i])[-1:]
    return pages.truncate(state.kv.own, keep), prompts


def _limits(state: State, max_new_tokens: Limits | None, sampling: Sampling, rows: np.ndarray, totals: Array) -> np.ndarray:
    """Most new tokens of each row, i64[R]: not yet checked against the room there is."""
    if max_new_tokens is None:
        max_new_tokens = sampling.max_new_tokens
    default = np.clip(state.max_tokens_per_slot - totals[rows], 0, _DEFAULT_NEW_TOKENS)
    if max_new_tokens is None:
        return default
    if isinstance(max_new_tokens, tuple | list) and len(max_new_tokens) == len(rows):
        max_new_tokens = [most if given is None else given for given, most in zip(max_new_tokens, default, strict=True)]
    limits = np.asarray(max_new_tokens)
    if limits.ndim == 0:
        limits = np.full(len(rows), limits)
    if limits.shape != (len(rows),) or not np.issubdtype(limits.dtype, np.integer) or (limits < 0).any():
        raise ValueError(
            f"max_new_tokens must be a whole number of at least 0, or one for each of {len(rows)} rows; got {max_new_tokens!r}"
        )
    return np.minimum(limits, np.iinfo(np.int32).max).astype(np.int64)


def _slots(state: State, rows: np.ndarray, n: int) -> np.ndarray:
    """Slot of each sequence: a prompt's own, then empty slots for its other samples."""
    if n == 1:
        return rows
    idle = np.setdiff1d(np.flatnonzero(state.num_tokens == 0), rows)
    wanted = len(rows) * (n - 1)
    if wanted > idle.size:
        raise ValueError(f"n={n} samples of {len(rows)} rows need {wanted} more empty slots, {idle.size} are empty: release slots")
    return np.concatenate([rows[:, None], idle[:wanted].reshape(len(rows), n - 1)], 1).reshape(-1)


def _per_slot(state: State, rows: np.ndarray, values: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.zeros(state.num_slots, np.int32)
    array[rows] = values
    return array
