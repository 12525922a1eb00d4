"""A generate call under way (`Stream`), and the host's view of each of its sequences (`Track`).

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

from jaxkv.dispatch import collect, copy, dispatch_prompts, pools_of, successor
from jaxkv.io.detokenize import DecodeStream
from jaxkv.kv import pages
from jaxkv.kv.pages import Ownership
from jaxkv.output import Output, TextEvent, Timings, TokenLogprobs
from jaxkv.sample_step import Sampled, SamplingArrays
from jaxkv.sampling import Sampling, StopMatcher, draw_seeds
from jaxkv.state import State, frozen
from jaxkv.steps import MAX_STEPS, Emitted, Loop, Pools, compile_seconds, step

# Steps a dispatch takes where it loops on the device; fewer when someone waits for each token.
_STEPS_STREAMED = 4
# Stored tokens a new text looks back at: a character is at most 4 bytes, so at most 3 tokens hold its beginning.
_OPEN_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything decided before the device is asked for anything."""

    state: State
    sampling: Sampling
    prompts: list[np.ndarray]  # tokens to run, a pending one first
    rows: np.ndarray  # slot of each prompt
    before: pages.Array  # i32[R] tokens stored in it when the call began
    own_prompt: Ownership  # while prompts are stored
    copies_prompt: pages.PageCopies
    own_decode: Ownership  # with forks, and room for every new token
    copies_decode: pages.PageCopies
    sequences: np.ndarray  # slot of each sequence, samples of a prompt together
    source: np.ndarray  # which prompt each sequence continues
    limits: np.ndarray  # most new tokens of each sequence
    chunk_size: int
    started: float


def start_loop(pools: Pools, own: Ownership, done: np.ndarray) -> Loop:
    """The decode loop's carry before the first token; rows in `done` bool[B] will emit nothing."""
    B = len(done)
    return Loop(pools, jax.tree.map(jnp.asarray, own), jnp.zeros(B, jnp.int32), jnp.asarray(done), jnp.zeros((), jnp.int32))


def dispatch_steps(state: State, loop: Loop, options: SamplingArrays, halt: np.ndarray, count: int) -> tuple[Loop, Emitted, int]:
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

    def __init__(self, plan: Plan, streamed: bool):
        self._plan, self._streamed = plan, streamed
        state = plan.state
        self._key = state.key
        self._options = self._make_options()
        self._halt = np.zeros(state.num_slots, bool)
        self._tracks = [self._track(i, text) for i, text in enumerate(self._text_streams())]
        self._read_at: list[float] = []
        self._compiled_at: list[float] = [compile_seconds()]
        self._steps_read = 0
        self._loop = self._start(*self._prefill())
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

    def _make_options(self) -> SamplingArrays:
        plan, state = self._plan, self._plan.state
        seeds = np.zeros(len(plan.sequences), np.uint32)
        if plan.sampling.needs_seeds:
            self._key, seeds = draw_seeds(state.key, len(plan.sequences))
        prompt_lengths = plan.own_prompt.lengths[plan.rows][plan.source]
        return plan.sampling.arrays(
            num_slots=state.num_slots,
            rows=plan.sequences,
            source=plan.source,
            vocab_size=state.static.model.vocab_size,
            eos_token_ids=state.eos_token_ids,
            seeds=seeds,
            prompt_lengths=prompt_lengths,
            max_tokens=prompt_lengths + plan.limits,
        )

    def _track(self, index: int, stream: DecodeStream | None) -> Track:
        plan = self._plan
        stop = plan.sampling.stop_strings(int(plan.source[index]), len(plan.rows))
        if stop and stream is None:
            raise ValueError("stop strings need a tokenizer; this model has none")
        row = int(plan.sequences[index])
        matcher = StopMatcher(stop) if stop else None
        return Track(index, row, int(plan.limits[index]), stream, matcher, bool(self._options.num_logprobs[row] >= 0))

    def _text_streams(self) -> list[DecodeStream | None]:
        """Decoders that continue the text of each prompt's row: its first space was shown, half a character may be open."""
        plan, tokenizer = self._plan, self._plan.state.tokenizer
        if tokenizer is None:
            return [None] * len(plan.sequences)
        heads = [np.zeros(0, np.int32)] * len(plan.rows)
        if plan.before.any():
            histories = [plan.state.tokens(row) for row in plan.rows]
            heads = [h[max(n - _OPEN_TOKENS, 0) : n] for h, n in zip(histories, plan.before, strict=True)]
        return [tokenizer.stream(np.concatenate([heads[i], plan.prompts[i]])) for i in plan.source]

    def _prefill(self) -> tuple[Pools, jax.Array]:
        """Runs the prompts; returns (pools, logits f32[B, V]: of each prompt's last token, at the slots of its samples)."""
        plan, state = self._plan, self._plan.state
        pools, buffer = pools_of(state, plan.copies_prompt), None
        for run in dispatch_prompts(state, pools, plan.own_prompt, plan.rows, plan.prompts, plan.before, plan.chunk_size):
            places = {part.prompt: part.place for part in run.ends}
            ready = [i for i, prompt in enumerate(plan.source.tolist()) if prompt in places]
            if ready:
                at = [places[int(plan.source[i])] for i in ready]
                buffer = collect(state, buffer, run.logits, plan.sequences[ready].tolist(), at)
        assert buffer is not None  # no prompt is empty, so each has a last token
        return run.pools, buffer

    def _start(self, pools: Pools, logits: jax.Array) -> Loop:
        """The decode loop's carry, ready for the first tokens."""
        plan, state = self._plan, self._plan.state
        self._logits = logits
        extra = np.flatnonzero(plan.sequences != plan.rows[plan.source])
        copies, C = plan.copies_decode, state.kv.refcounts.shape[0]
        if extra.size or (copies.dst < C).any():
            pools = copy(state, pools, copies.src, copies.dst, plan.rows[plan.source[extra]], plan.sequences[extra])
        done = np.ones(state.num_slots, bool)
        done[plan.sequences] = plan.limits == 0
        return start_loop(pools, plan.own_decode, done)

    def _run(self) -> Generator[TextEvent, None, None]:
        """Dispatches and reads: while the device runs one dispatch, the host looks at the tokens of the one before."""
        plan = self._plan
        longest = int(plan.limits.max(initial=0))
        if longest == 0:
            return
        platform = plan.state.static.platform
        rows = np.zeros(plan.state.num_slots, bool)
        rows[plan.sequences[plan.limits > 0]] = True
        lengths = np.array(plan.own_decode.lengths)
        self._loop, emitted = step("first_tokens", platform)(self._loop, self._logits, self._options, rows, lengths)
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

    def _dispatch(self, left: int) -> tuple[Emitted, int]:
        halt = self._halt.copy()  # the device may read its argument after this returns
        most = _STEPS_STREAMED if self._streamed else MAX_STEPS
        self._loop, emitted, count = dispatch_steps(self._plan.state, self._loop, self._options, halt, min(left, most))
        return emitted, count

    def _all_finished(self) -> bool:
        return all(track.finish_reason for track in self._tracks)

    def _read(self, emitted: Emitted) -> Generator[TextEvent, None, None]:
        emitted = jax.device_get(emitted)
        self._read_at.append(time.perf_counter())
        self._compiled_at.append(compile_seconds())
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
        compiled = self._compiled_at
        decode_s = last - first - (compiled[-1] - compiled[min(1, len(compiled) - 1)])
        timings = Timings(
            ttft_s=first - plan.started,
            decode_s=decode_s,
            tpot_s=decode_s / max(self._steps_read - 1, 1),
            total_s=now - plan.started,
            compile_s=compile_seconds() - compiled[0],
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


class Track:
    """The host's view of one sequence: tokens, text, and why it ended."""

    def __init__(
        self, index: int, row: int, limit: int, stream: DecodeStream | None, matcher: StopMatcher | None, wants_logprobs: bool
    ):
        self.index, self.row, self.limit = index, row, limit
        self.stream, self.matcher = stream, matcher
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.wants_logprobs = wants_logprobs
        self.finish_reason: str | None = None if limit else "length"  # nobody waits for it

    def close(self, reason: str = "cancelled") -> str:
        """Nobody waits for more; returns the text that was held back."""
        if self.finish_reason is not None:
            return ""
        self.finish_reason, text = reason, self._end_of_text()
        self.text += text
        return text

    def take(self, emitted: Emitted, step_index: int) -> TextEvent | None:
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


def _token_logprobs(sampled: Sampled, i: int, row: int, token: int) -> TokenLogprobs:
    ids, values = sampled.top_ids[i, row], sampled.top_logprobs[i, row]
    top = tuple((int(t), float(p)) for t, p in zip(ids, values, strict=True) if t >= 0)
    return TokenLogprobs(token, float(sampled.logprobs[i, row]), top)
