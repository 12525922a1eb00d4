"""The loop over prefill and decode: `generate(state, tokens) -> (state, Output)`, whole or streamed.

plan      claim every page the call can need, on the host, or raise with nothing changed
prefill   chunks of the prompts, several rows a dispatch
fork      parallel samples share the prompt's pages
decode    one dispatch after another; the host reads tokens one dispatch behind the device
settle    give back what was reserved and not used, roll back behind stop strings
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv import pages
from jaxkv.kv.pages import Ownership
from jaxkv.sampling import Sampling, StopMatcher
from jaxkv.state import State, frozen, require_live
from jaxkv.steps import MAX_STEPS, Loop, Pools, step
from jaxkv.verbs import (
    bucket_tokens,
    check_room,
    check_tokens,
    copy,
    dispatch_decode,
    dispatch_prefill,
    most_rows,
    pool_full,
    pools_of,
    row_buckets,
    successor,
    with_pending,
)

_DEFAULT_NEW_TOKENS = 128
# Steps a dispatch takes where it loops on the device; fewer when someone waits for each token.
_STEPS_STREAMED = 4
# Stored tokens a new text looks back at: a character is at most 4 bytes, so at most 3 tokens hold its beginning.
_OPEN_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Timings:
    """Wall time of one generate call, in seconds, and what it processed."""

    ttft_s: float  # from the call to the first token on the host
    total_s: float
    tpot_s: float  # mean time between tokens after the first; 0 if there was one
    prompt_tokens: int  # run through prefill
    new_tokens: int  # emitted, over all rows


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one emitted token under the model's own distribution."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the best alternatives, best first


@dataclasses.dataclass(frozen=True)
class Output:
    """What was emitted; one entry a sequence (with n > 1 the samples of one prompt stand together)."""

    tokens: list[np.ndarray]  # i32, a stop token included, a stop string's tokens not
    text: list[str] | None  # None without a tokenizer; special tokens and stop strings left out
    logprobs: list[list[TokenLogprobs] | None] | None  # None where not asked for
    finish_reasons: list[str]  # "stop", "length", "cancelled" (finish() before the end), or "error": logits were NaN or infinite
    rows: list[int]  # the slot of each sequence
    timings: Timings


@dataclasses.dataclass(frozen=True)
class TextEvent:
    """One piece of a stream: tokens as they come, and the text they complete."""

    index: int  # of the sequence in Output
    row: int  # its slot
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None


def generate(
    state: State,
    tokens,
    lengths=None,
    *,
    max_new_tokens=None,
    sampling: Sampling | None = None,
    rows=None,
    stream: bool = False,
    chunk_size: int = 512,
):
    """Continues each row with its tokens and up to max_new_tokens of the model's, and returns (state, Output).

    Args:
      state: consumed; keep the one returned.
      tokens: token lists, one a row, or an array i32[R, T] with `lengths`. An empty row continues what its slot holds.
      lengths: i32[R], with an array.
      max_new_tokens: an int or one a row; 0 only prefills. None: 128, or what fits the slot if that is less.
      sampling: options, scalars or one a row; None: greedy.
      rows: the slot of each row; None: slots 0 to R-1. Samples beyond the first of a row (n > 1) take empty slots.
      stream: return a `Stream` instead: iterate it, then take `stream.finish()`.
      chunk_size: prompts go through the model in chunks of at most so many tokens.

    Raises:
      ValueError: token ids outside the vocabulary, rows that do not fit their slot, too few free pages or slots, bad options;
        with the numbers, before anything ran: the state is still usable.
      StaleStateError: the state was already consumed.
    """
    run = Stream(_plan(state, tokens, lengths, max_new_tokens, sampling or Sampling(), rows, chunk_size), stream)
    if stream:
        return run
    collections.deque(run, maxlen=0)
    return run.finish()


def warmup(state: State, max_prompt_tokens: int | None = None, chunk_size: int = 512) -> State:
    """Compiles every step that `generate` and `decode` can need on this state, and returns it with nothing changed.

    After it no step is traced again, whatever the prompt lengths (up to max_prompt_tokens; None: what a slot holds), rows and
    sampling options. The state is consumed, as by any verb.

    Raises:
      ValueError: a size below 1.
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
                pools, logits = dispatch_prefill(state, pools, own, nobody, nothing, np.zeros(R, np.int32), T)
                buffer = step("collect_logits", platform)(_empty_logits(state, logits), logits, np.full(B, -1, np.int32))
    pools = copy(state, pools, none, none, none, none)
    pools, _ = dispatch_decode(state, pools, own, none, none)
    options = Sampling().arrays(
        num_slots=B, rows=(), vocab_size=state.static.model.vocab_size, eos_token_ids=(), seeds=(), prompt_lengths=()
    )
    loop = _start_loop(pools, own, np.ones(B, bool))
    loop, _ = step("first_tokens", platform)(loop, buffer, options)
    loop, _, _ = _dispatch_steps(state, loop, options, np.zeros(B, bool), 1)
    return successor(state, loop.pools, own, none, -1)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything decided before the device is asked for anything."""

    state: State
    sampling: Sampling
    prompts: list[np.ndarray]  # tokens to run, a pending one first
    rows: np.ndarray  # slot of each prompt
    before: np.ndarray  # i32[R] tokens stored in it when the call began
    own_prompt: Ownership  # while prompts are stored
    copies_prompt: pages.PageCopies
    own_decode: Ownership  # with forks, and room for every new token
    copies_decode: pages.PageCopies
    sequences: np.ndarray  # slot of each sequence, samples of a prompt together
    source: np.ndarray  # which prompt each sequence continues
    limits: np.ndarray  # most new tokens of each sequence
    chunk_size: int
    started: float


def _plan(state, tokens, lengths, max_new_tokens, sampling, rows, chunk_size) -> _Plan:
    started = time.perf_counter()
    require_live(state)
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a jaxkv.Sampling, got {type(sampling).__name__}")
    if not isinstance(chunk_size, int | np.integer) or chunk_size < 1:
        raise ValueError(f"{chunk_size=} must be a whole number of at least 1")
    chunks, rows = check_tokens(state, tokens, lengths, rows)
    own, prompts = _recomputing(state, with_pending(state, chunks, rows), rows)
    before = own.lengths[rows]
    stored = _per_slot(state, rows, [p.size for p in prompts])
    limits = _limits(state, max_new_tokens, sampling, rows, own.lengths + stored)
    totals = (own.lengths + stored).astype(np.int64)
    totals[rows] += limits
    check_room(state, totals)
    source = np.repeat(np.arange(len(rows)), sampling.n)
    sequences, limits = _slots(state, rows, sampling.n), limits.astype(np.int32)[source]

    own_prompt, copies_prompt, shortfall = pages.append(own, stored)
    if shortfall:
        raise pool_full(state.kv.own, _missing(own, stored, rows, source, limits, shortfall))
    extra = np.setdiff1d(np.arange(len(sequences)), np.arange(0, len(sequences), sampling.n))
    own_decode = pages.fork(own_prompt, rows[source[extra]], sequences[extra]) if extra.size else own_prompt
    room = _per_slot(state, sequences, np.maximum(limits - 1, 0))  # the last token stays pending
    own_decode, copies_decode, shortfall = pages.reserve(own_decode, room)
    if shortfall:
        raise pool_full(state.kv.own, _missing(own, stored, rows, source, limits, shortfall))
    return _Plan(
        state, sampling, prompts, rows, before, own_prompt, copies_prompt, own_decode, copies_decode, sequences, source, limits,
        int(chunk_size), started,
    )  # fmt: skip


def _missing(own: Ownership, stored, rows, source, limits, least) -> int:
    """Pages the whole call is short of, for the error: prompts, samples and every token that may come."""
    prompt = (own.lengths + stored)[rows]
    wanted = np.asarray(pages.num_pages_needed(prompt[source] + np.maximum(limits - 1, 0), own.page_size))
    others = np.diff(source, prepend=-1) == 0  # samples beyond the first share the prompt's full pages
    wanted = wanted - np.where(others, prompt[source] // own.page_size, 0)
    held = int(np.count_nonzero(own.page_table[rows]))
    return max(int(wanted.sum()) - held - int(pages.free_pages(own)), int(least))


def _recomputing(state: State, prompts, rows):
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


def _limits(state: State, max_new_tokens, sampling, rows, totals):
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


def _slots(state: State, rows, n: int):
    """Slot of each sequence: a prompt's own, then empty slots for its other samples."""
    if n == 1:
        return rows
    idle = np.setdiff1d(np.flatnonzero(state.num_tokens == 0), rows)
    wanted = len(rows) * (n - 1)
    if wanted > idle.size:
        raise ValueError(f"n={n} samples of {len(rows)} rows need {wanted} more empty slots, {idle.size} are empty: release slots")
    return np.concatenate([rows[:, None], idle[:wanted].reshape(len(rows), n - 1)], 1).reshape(-1)


def _per_slot(state: State, rows, values):
    array = np.zeros(state.num_slots, np.int32)
    array[rows] = values
    return array


def _empty_logits(state: State, like):
    return jnp.zeros((state.num_slots, like.shape[1]), jnp.float32)


def _start_loop(pools: Pools, own: Ownership, done) -> Loop:
    """The decode loop's carry before the first token."""
    B = len(done)
    return Loop(pools, jax.tree.map(jnp.asarray, own), jnp.zeros(B, jnp.int32), jnp.asarray(done), jnp.zeros((), jnp.int32))


def _dispatch_steps(state: State, loop: Loop, options, halt, count: int):
    """Up to `count` decode steps in one dispatch; returns (loop, emitted, how many steps that may have been)."""
    static = state.static
    looped = static.platform != "cpu"
    count = count if looped else 1
    run = step("decode_many", static.platform)
    loop, emitted = run(state.params, loop, options, halt, np.int32(count), static=static, looped=looped)
    return loop, emitted, count


class Stream:
    """A generate call under way: iterate over its `TextEvent`s; `finish()` returns (state, Output) of what was emitted.

    Leaving the iteration early loses nothing: `finish()` stops the rows where they are.
    """

    def __init__(self, plan: _Plan, streamed: bool):
        self._plan, self._streamed = plan, streamed
        state = plan.state
        self._key = state.key
        self._options = self._make_options()
        self._halt = np.zeros(state.num_slots, bool)
        self._tracks = [self._track(i, text) for i, text in enumerate(self._text_streams())]
        self._read_at: list[float] = []
        self._steps_read = 0
        self._loop = self._start(self._prefill())
        self._events = self._run()
        self._result: tuple[State, Output] | None = None

    def __iter__(self) -> Generator[TextEvent, None, None]:
        return self._events

    def finish(self) -> tuple[State, Output]:
        """The successor state and the Output; idempotent."""
        if self._result is None:
            self._events.close()
            for track in self._tracks:
                track.close()
            self._result = self._settle()
        return self._result

    def _make_options(self):
        plan, state = self._plan, self._plan.state
        B = state.num_slots
        seeds = np.zeros(len(plan.sequences), np.uint32)
        if plan.sampling.needs_seeds:
            self._key, key = jax.random.split(state.key)
            seeds = np.asarray(jax.random.bits(key, (B,), jnp.uint32))[: len(plan.sequences)]
        prompt_lengths = plan.own_prompt.lengths[plan.rows][plan.source]
        return plan.sampling.arrays(
            num_slots=B,
            rows=plan.sequences,
            source=plan.source,
            vocab_size=state.static.model.vocab_size,
            eos_token_ids=state.eos_token_ids,
            seeds=seeds,
            prompt_lengths=prompt_lengths,
            max_tokens=prompt_lengths + plan.limits,
        )

    def _track(self, index: int, stream) -> _Track:
        plan = self._plan
        stop = plan.sampling.stop_strings(int(plan.source[index]), len(plan.rows))
        if stop and stream is None:
            raise ValueError("stop strings need a tokenizer; this model has none")
        row = int(plan.sequences[index])
        matcher = StopMatcher(stop) if stop else None
        return _Track(index, row, int(plan.limits[index]), stream, matcher, self._options.num_logprobs[row] >= 0)

    def _text_streams(self):
        """Decoders that continue the text of each prompt's row: its first space was shown, half a character may be open."""
        plan, tokenizer = self._plan, self._plan.state.tokenizer
        if tokenizer is None:
            return [None] * len(plan.sequences)
        heads = [np.zeros(0, np.int32)] * len(plan.rows)
        if plan.before.any():
            stored = np.zeros(plan.state.num_slots, np.int32)
            stored[plan.rows] = plan.before
            columns = stored[:, None] - np.arange(_OPEN_TOKENS, 0, -1)
            last = np.asarray(plan.state.history[np.arange(len(stored))[:, None], np.maximum(columns, 0)])
            heads = [last[row, columns[row] >= 0] for row in plan.rows]
        return [tokenizer.stream(np.concatenate([heads[i], plan.prompts[i]])) for i in plan.source]

    def _prefill(self):
        """Runs the prompts in chunks; returns (pools, logits f32[B, V] with each prompt's at its slot)."""
        plan, state = self._plan, self._plan.state
        pools, buffer, lengths = pools_of(state, plan.copies_prompt), None, plan.before.copy()
        remaining = list(plan.prompts)
        waiting = sorted(range(len(plan.rows)), key=lambda i: -remaining[i].size)
        while waiting:
            T = bucket_tokens(min(remaining[waiting[0]].size, plan.chunk_size))
            batch = waiting[: most_rows(T, state.num_slots)]
            chunks = [remaining[i][: min(T, plan.chunk_size)] for i in batch]
            pools, logits = dispatch_prefill(state, pools, plan.own_prompt, plan.rows[batch], chunks, lengths[batch], T)
            ready = []
            for at, (i, chunk) in enumerate(zip(batch, chunks, strict=True)):
                lengths[i] += chunk.size
                remaining[i] = remaining[i][chunk.size :]
                if remaining[i].size == 0:
                    ready.append((i, at))
            if ready:
                buffer = self._collect(buffer, logits, ready)
            waiting = sorted((i for i in waiting if remaining[i].size), key=lambda i: -remaining[i].size)
        return pools, buffer

    def _collect(self, buffer, logits, ready):
        """Puts the logits of finished prompts, and of their samples, at their slots."""
        plan, B = self._plan, self._plan.state.num_slots
        place = dict(ready)
        source = np.full(B, -1, np.int32)
        for slot, prompt in zip(plan.sequences, plan.source, strict=True):
            source[slot] = place.get(int(prompt), -1)
        buffer = _empty_logits(plan.state, logits) if buffer is None else buffer
        return step("collect_logits", plan.state.static.platform)(buffer, logits, source)

    def _start(self, prefilled) -> Loop:
        """The decode loop's carry, ready for the first tokens."""
        plan, state = self._plan, self._plan.state
        pools, self._logits = prefilled
        extra = np.flatnonzero(plan.sequences != plan.rows[plan.source])
        copies, C = plan.copies_decode, state.kv.refcounts.shape[0]
        if extra.size or (copies.dst < C).any():
            pools = copy(state, pools, copies.src, copies.dst, plan.rows[plan.source[extra]], plan.sequences[extra])
        done = np.ones(state.num_slots, bool)
        done[plan.sequences] = plan.limits == 0
        return _start_loop(pools, plan.own_decode, done)

    def _run(self) -> Generator[TextEvent, None, None]:
        """Dispatches and reads: while the device runs one dispatch, the host looks at the tokens of the one before."""
        plan = self._plan
        longest = int(plan.limits.max(initial=0))
        if longest == 0:
            return
        platform = plan.state.static.platform
        self._loop, emitted = step("first_tokens", platform)(self._loop, self._logits, self._options)
        queue, dispatched = collections.deque([emitted]), 1
        if self._streamed:  # who waits for the first token need not wait for the decode step to compile
            yield from self._read(queue.popleft())
        while True:
            while len(queue) < 2 and dispatched < longest and not self._all_finished():
                emitted, count = self._dispatch(longest - dispatched)
                queue.append(emitted)
                dispatched += count
            if not queue:
                return
            yield from self._read(queue.popleft())

    def _dispatch(self, left: int):
        halt = self._halt.copy()  # the device may read its argument after this returns
        most = _STEPS_STREAMED if self._streamed else MAX_STEPS
        self._loop, emitted, count = _dispatch_steps(self._plan.state, self._loop, self._options, halt, min(left, most))
        return emitted, count

    def _all_finished(self) -> bool:
        return all(track.finish_reason for track in self._tracks)

    def _read(self, emitted) -> Generator[TextEvent, None, None]:
        emitted = jax.device_get(emitted)
        self._read_at.append(time.perf_counter())
        for i in range(emitted.valid.shape[0]):
            self._steps_read += bool(emitted.valid[i].any())
            for track in self._tracks:
                if track.finish_reason is None and (event := track.take(emitted, i)):
                    self._halt[track.row] = track.finish_reason is not None
                    if self._streamed:
                        yield event

    def _settle(self) -> tuple[State, Output]:
        """Gives back pages reserved and not used, rolls rows back to what counts, and reports."""
        plan, state, loop = self._plan, self._plan.state, self._loop
        own = jax.tree.map(lambda a: frozen(np.array(a)), loop.own)
        if int(loop.shortfall):
            raise AssertionError(f"decode ran out of {int(loop.shortfall)} pages that were reserved")
        kept, pending = own.lengths.copy(), np.full(len(plan.sequences), -1, np.int32)
        for track in self._tracks:
            total = plan.own_prompt.lengths[plan.rows[plan.source[track.index]]] + len(track.tokens)
            kept[track.row] = min(kept[track.row], total)
            if total > own.lengths[track.row] and track.tokens:
                pending[track.index] = track.tokens[-1]
        own = pages.truncate(own, kept)
        successor_state = successor(state, loop.pools, own, plan.sequences, pending)
        return dataclasses.replace(successor_state, key=self._key), self._output()

    def _output(self) -> Output:
        plan = self._plan
        tokens = [np.asarray(t.tokens, np.int32) for t in self._tracks]
        text = None if plan.state.tokenizer is None else [t.text for t in self._tracks]
        now = time.perf_counter()
        first, last = (self._read_at[0], self._read_at[-1]) if self._read_at else (now, now)
        timings = Timings(
            ttft_s=first - plan.started,
            total_s=now - plan.started,
            tpot_s=(last - first) / max(self._steps_read - 1, 1),
            prompt_tokens=sum(p.size for p in plan.prompts),
            new_tokens=sum(len(t) for t in tokens),
        )
        wants = any(t.wants_logprobs for t in self._tracks)
        return Output(
            tokens=tokens,
            text=text,
            logprobs=[t.logprobs if t.wants_logprobs else None for t in self._tracks] if wants else None,
            finish_reasons=[t.finish_reason or "length" for t in self._tracks],
            rows=[t.row for t in self._tracks],
            timings=timings,
        )


class _Track:
    """The host's view of one sequence: tokens, text, and why it ended."""

    def __init__(self, index: int, row: int, limit: int, stream, matcher: StopMatcher | None, wants_logprobs: bool):
        self.index, self.row, self.limit = index, row, limit
        self.stream, self.matcher = stream, matcher
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.wants_logprobs = wants_logprobs
        self.finish_reason: str | None = None if limit else "length"  # nobody waits for it

    def close(self) -> None:
        """Nobody waits for more: shows what was held back."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            self.text += self._end_of_text()

    def take(self, emitted, step_index: int) -> TextEvent | None:
        """Takes this sequence's token of one step, if it emitted one; returns what a stream should show."""
        sampled = emitted.sampled
        if not emitted.valid[step_index, self.row]:
            if sampled.failed[step_index, self.row]:
                self.finish_reason, text = "error", self._end_of_text()
                self.text += text
                return TextEvent(self.index, self.row, (), text, "error")
            return None
        token = int(sampled.tokens[step_index, self.row])
        self.tokens.append(token)
        if self.wants_logprobs:
            self.logprobs.append(_token_logprobs(sampled, step_index, self.row, token))
        if sampled.is_stop[step_index, self.row]:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        text = self._show(token)
        return TextEvent(self.index, self.row, (token,), text, self.finish_reason)

    def _show(self, token: int) -> str:
        if self.stream is None:
            return ""
        text = self.stream.feed([token])
        if self.matcher is not None:
            text = self._match(self.matcher, text)
        if self.finish_reason is not None:
            text += self._end_of_text()
        self.text += text
        return text

    def _match(self, matcher: StopMatcher, text: str) -> str:
        """What may be shown now; on a stop string, drops the tokens it takes part in."""
        text = matcher.feed(text)
        if matcher.stopped:
            self.finish_reason = "stop"
            self.tokens = self.tokens[: matcher.num_tokens]
            self.logprobs = self.logprobs[: matcher.num_tokens]
        return text

    def _end_of_text(self) -> str:
        """What was held back: half a character, or the start of a stop string that did not come."""
        if self.stream is None or (self.matcher is not None and self.matcher.stopped):
            return ""
        tail = self.stream.finish()  # U+FFFD for half a character; no stop string can begin or end in it
        return tail if self.matcher is None else self.matcher.flush() + tail


def _token_logprobs(sampled, i: int, row: int, token: int) -> TokenLogprobs:
    ids, values = sampled.top_ids[i, row], sampled.top_logprobs[i, row]
    top = tuple((int(t), float(p)) for t, p in zip(ids, values, strict=True) if t >= 0)
    return TokenLogprobs(token, float(sampled.logprobs[i, row]), top)
