"""Continuous batching: which chunks of prompts run beside the decoding rows, who gives way, what is read when.

Plain host code over a `Runner`, a `PageCache` and a clock: a simulated device drives the very same code (scripts/replay_trace.py).
One `step` of the scheduler

    1  starts waiting groups (`starting`)
    2  dispatches chunks of prompts, at most prefill_tokens of them, so that decoding rows keep their pace
    3  dispatches one token for every row that decodes
    4  reads all dispatches but the last: the device is never waited for with nothing to do, and never far behind

What it does a step depends on the rows and on what changed, never on how many wait.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.buckets import CHUNK_TOKENS
from jaxkv.output import TextEvent
from jaxkv.serving.admission import Admission
from jaxkv.serving.ladder import Ladder
from jaxkv.serving.match import Match
from jaxkv.serving.metrics import Metrics
from jaxkv.serving.page_cache import PageCache
from jaxkv.serving.runner import Chunk, Runner
from jaxkv.serving.running import Running
from jaxkv.serving.sequence import Sequence, SequenceGroup
from jaxkv.serving.starting import Starter

if TYPE_CHECKING:
    from jaxkv.serving.restore import Restores

# What a measurement of prefill still weighs after the next one, and how much slower than the last ones it may count: a compile or a
# pause of the machine fades.
_DECAY, _OUTLIER = 0.8, 4.0
# A dispatch that was under way while the caller did something else is not measured, where that took more than this share of its time.
_MOST_PAUSE = 0.1


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Chunks whose dispatch is not read yet: whose, at which row, and all its tokens up to the chunk's end."""

    result: object
    chunks: list[tuple[Sequence, int, np.ndarray]]
    num_tokens: int
    dispatched_at: float


@dataclasses.dataclass(frozen=True)
class _Sampled:
    """A token for each of these rows, not read yet. A row may have a new holder by then."""

    result: object
    holders: list[tuple[int, Sequence]]
    dispatched_at: float
    kv_bytes: int = 0  # of keys and values that a decode step reads


class Scheduler:
    """Continuous batching over a runner's rows.

    Args:
      options: what the runner's `seat` takes of a sequence.
      prefill_tokens: prompt tokens a step stores at most.
      overcommit: pages are taken as sequences grow, and the youngest gives way when there are none; False: all on admission.
      kv_bytes: that a decode step reads for a row of so many stored tokens.
      restores: what brings pages back from other tiers, and takes evicted ones there; None: nothing does.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PageCache,
        admission: Admission,
        metrics: Metrics,
        clock: Callable[[], float],
        options: Callable[[Sequence], Any],
        *,
        prefill_tokens: int = CHUNK_TOKENS,
        overcommit: bool = False,
        ladder: Ladder | None = None,
        restores: Restores | None = None,
        kv_bytes: Callable[[int], int] = lambda stored: 0,
    ):
        self._runner, self._cache, self._metrics, self._clock = runner, cache, metrics, clock
        self._prefill_tokens, self._ladder, self._restores, self._kv_bytes = prefill_tokens, ladder, restores, kv_bytes
        self._running = Running(runner, cache, options)
        self._starter = Starter(cache, admission, self._running, overcommit)
        self._tickets: collections.deque[_Stored | _Sampled] = collections.deque()
        self._events: list[tuple[Sequence, TextEvent]] = []
        self._ttl_s = cache.reusable_ttl_s
        self._read_at = 0.0  # when the last ticket was read
        self._entered_at = self._left_at = clock()  # the present step, the one before
        self._measured_s = self._measured_tokens = 0.0  # of prefill, fading

    @property
    def num_waiting(self) -> int:
        """Groups without rows."""
        return len(self._starter.queue)

    @property
    def num_running(self) -> int:
        """Rows taken."""
        return len(self._running)

    @property
    def promised_pages(self) -> int:
        """Pages that the running sequences may still take, beside those that they have."""
        return self._running.promised_pages

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._starter.queue and not self._running and not self._tickets

    @property
    def recompute_s_per_token(self) -> float:
        """What storing a prompt's token takes, as measured; 0: not known yet."""
        return self._measured_s / self._measured_tokens if self._measured_tokens else 0.0

    def add(self, group: SequenceGroup) -> None:
        """Queues a group."""
        self._starter.push(group)

    def step(self) -> list[tuple[Sequence, TextEvent]]:
        """One turn; returns what became known of sequences, in order."""
        self._entered_at = self._clock()
        self._cache.tick()
        if self._restores is not None:
            self._restores.finish(self._running.promised_pages)
        if self._starter.queue and not self._waits_for_recovery():
            for group, match in self._starter.start():
                self._started(group, match)
        dispatched = self._prefill()
        dispatched = self._decode() or dispatched
        while len(self._tickets) > 1 or (self._tickets and not dispatched):
            self._read(self._tickets.popleft())
        if not dispatched and not self._events and self._restores is not None and self._running.prefilling:
            self._restores.wait()
        self.update_ladder()
        self.observe(in_step=True)
        events, self._events = self._events, []
        self._left_at = self._clock()
        return events

    def abort(self, id: int) -> list[Sequence]:
        """Ends what waits or runs of a request, wherever it is; returns those sequences. Unknown ids: none."""
        ended = []
        for group in self._starter.queue.of_request(id):
            self._starter.remove(group)
            ended += group.sequences
        for one in [one for one in self._running if one.id == id]:
            self._running.leave(one)
            self._release(one)
            ended.append(one)
        self._starter.changed()
        return ended

    # Starting

    def _waits_for_recovery(self) -> bool:
        return self._ladder is not None and self._ladder.rung.queues_only and len(self._running) > 0

    def _started(self, group: SequenceGroup, match: Match) -> None:
        first = group.first
        if first.started_at is None:  # not one that was preempted: what it finds then, it had stored itself
            receipt = self._cache.receipt(match)
            cached = {"device": match.num_tokens} if match.num_tokens else {}  # one for all: what else is found counts for each
            for one in group.sequences:
                one.cached, one.receipt = cached, receipt
        if self._restores is not None:
            self._restores.start(first, match)

    def _count(self, first: Sequence) -> None:
        """Counts a request when its first chunk is dispatched, which is when it is known what was found stored."""
        now = self._clock()
        for one in (first, *self._running.children(first)):
            one.started_at = now
            shares = one is not first
            queries = first.prompt.size if first.request.use_cache and not shares else 0
            self._metrics.admitted(
                now - one.arrived_at, 0 if shares else first.prompt.size, {} if shares else first.cached, queries
            )

    # Dispatching

    def _prefill(self) -> bool:
        """Dispatches chunks, and first tokens of the prompts that end with them."""
        budget, parts, chunks, ended = self._prefill_tokens, [], [], []
        for one in self._running.prefilling:
            if budget <= 0:
                break
            if self._restores is not None and self._restores.is_pending(one):
                continue
            assert one.goal is not None
            if one.started_at is None:
                self._count(one)
            start, stop = one.stored, min(one.stored + budget, one.goal.size)
            samplers: tuple[int, ...] = ()
            if stop == one.goal.size:
                ended.append(one)
                samplers = (one.row, *(child.row for child in self._running.children(one)))
            parts.append(Chunk(one.row, start, one.goal[start:stop], samplers))
            chunks.append((one, one.row, one.goal[:stop]))
            budget -= stop - start
            one.stored = stop
        if not parts:
            return False
        result = self._runner.prefill(parts)
        self._tickets.append(_Stored(result, chunks, self._prefill_tokens - budget, self._clock()))
        if ended:
            begun = [one for first in ended for one in self._running.begin(first)]
            for one in begun:
                one.dispatched = len(one.track.tokens) + 1
            result = self._runner.begin([one.row for one in begun], [one.stored for one in begun])
            self._tickets.append(_Sampled(result, [(one.row, one) for one in begun], self._clock()))
        return True

    def _decode(self) -> bool:
        """Dispatches a token for every row that may have one more."""
        self._grow()
        holders = [(row, one) for row, one in self._running.decoding.items() if one.dispatched < one.track.limit]
        if not holders:
            return False
        result = self._runner.decode()
        read = sum(self._kv_bytes(one.stored) for _, one in holders)
        for _, one in holders:
            one.dispatched += 1
            one.stored += 1
        self._tickets.append(_Sampled(result, holders, self._clock(), read))
        return True

    # Reading

    def _read(self, ticket: _Stored | _Sampled) -> None:
        if isinstance(ticket, _Stored):
            self._read_stored(ticket)
        else:
            self._read_sampled(ticket)

    def _read_stored(self, ticket: _Stored) -> None:
        """Publishes chunks: who waits for their pages may have them while the rest of the prompt is being stored."""
        sound = self._runner.read_prefill(ticket.result)
        for (one, row, tokens), is_sound in zip(ticket.chunks, sound, strict=True):
            if one.row != row:
                continue
            if is_sound:
                self._running.publish(one, tokens)
            else:
                self._running.retire(one)
        seconds = self._seconds(ticket)
        if seconds is not None:
            self._measure(seconds, ticket.num_tokens)

    def _read_sampled(self, ticket: _Sampled) -> None:
        """Takes the tokens that a dispatch gave; ends sequences."""
        emitted = self._runner.read(ticket.result)
        now = self._clock()
        gaps, count = [], 0
        for row, one in ticket.holders:
            if one.finished or one.row != row:
                continue
            event = one.track.take(emitted, 0)
            if event is None:
                continue
            count += len(event.tokens)
            if one.last_token_at is None:
                one.first_token_at = now
                if event.tokens:
                    self._metrics.first_token(now - one.arrived_at)
            elif event.tokens:
                gaps.append(now - one.last_token_at)
            one.last_token_at = now
            self._events.append((one, event))
            if event.finish_reason is not None:
                self._finish(one, now)
        self._metrics.tokens(count, gaps)
        seconds = self._seconds(ticket)
        if ticket.kv_bytes and seconds is not None:
            self._metrics.kv_read(ticket.kv_bytes, seconds)

    def _seconds(self, ticket: _Stored | _Sampled) -> float | None:
        """What the device took for a ticket just read: it does one after the other. None: nobody knows, for the caller was away."""
        before, self._read_at = max(ticket.dispatched_at, self._read_at), self._clock()
        seconds = self._read_at - before
        away = self._entered_at - self._left_at if before <= self._left_at else 0.0
        return seconds if away <= _MOST_PAUSE * seconds else None

    def _measure(self, seconds: float, num_tokens: int) -> None:
        """Notes what storing so many tokens took."""
        known = self.recompute_s_per_token
        if known:
            seconds = min(seconds, _OUTLIER * known * num_tokens)
        self._measured_s = _DECAY * self._measured_s + seconds
        self._measured_tokens = _DECAY * self._measured_tokens + num_tokens
        if self._restores is not None:
            self._restores.recompute_s_per_token = self.recompute_s_per_token

    def _finish(self, one: Sequence, now: float) -> None:
        assert one.first_token_at is not None and one.track.finish_reason is not None
        failed = one.track.finish_reason == "error"
        self._running.leave(one)
        if not failed:
            self._running.publish(one, one.history[:-1])  # the last token may not be stored
        self._release(one, hold=one.request.hold and not failed)
        decode_s = now - one.first_token_at
        self._metrics.finished(one.track.finish_reason, now - one.arrived_at, one.prompt.size, len(one.track.tokens), decode_s)

    def _release(self, one: Sequence, hold: bool = False) -> None:
        if self._restores is not None:
            self._restores.cancel(one)
        self._running.release(one, hold)
        self._starter.changed()

    # Growing

    def _grow(self) -> None:
        """Gives each decoding row that needs one a page for its next token."""
        P = self._cache.page_size
        for one in list(self._running.decoding.values()):
            if one.row >= 0 and one.stored >= len(one.pages) * P and one.dispatched < one.track.limit:
                self._give_page(one)

    def _give_page(self, one: Sequence) -> None:
        """Where nothing was reserved and there is no page, the youngest gives way: the oldest always goes on."""
        while one.row >= 0 and not self._running.extend(one):
            if self._tickets:  # what is in flight may end someone
                self._read(self._tickets.popleft())
            else:
                self._preempt(self._running.group_of(self._victim()))

    def _victim(self) -> Sequence:
        """The youngest; of those who have taken all that was promised to them, if there is one beside the oldest."""
        by_age = sorted(self._running, key=lambda one: (one.order, one.owner))
        return next((one for one in reversed(by_age[1:]) if not one.promised), by_age[-1])

    def _preempt(self, group: list[Sequence]) -> None:
        """Puts sequences back into the queue; full pages stay matchable, in a slower tier where bringing them back pays."""
        kind, first = "recompute", group[0]
        if first.row in self._running.decoding and first.request.use_cache:
            self._running.publish(first, first.history[:-1])
            if self._restores is not None and self._restores.keep(first):
                kind = "swap"
        for one in reversed(group):
            self._running.leave(one)
            self._release(one)
            one.goal, one.stored, one.pages = None, 0, []
        self._metrics.preempted(kind)
        self._starter.push(SequenceGroup(group, first.order))

    # Watching

    def update_ladder(self) -> None:
        """Takes in how short pages are now."""
        if self._ladder is not None:
            cache = self._cache
            self._ladder.update((cache.active_pages + cache.held_pages + self._running.promised_pages) / (cache.num_pages - 1))
            cache.reusable_ttl_s = None if self._ttl_s is None else self._ttl_s * self._ladder.rung.ttl_factor

    def observe(self, in_step: bool = False) -> None:
        """Tells the metrics how things stand."""
        cache, P = self._cache, self._cache.page_size
        # Shared pages are full, so what is unused lies in pages of one holder: each physical page counts once.
        allocated = cache.active_pages * P
        with_pages = (*self._running.decoding.values(), *self._running.prefilling)
        unused = sum(len(one.pages) * P - one.stored for one in with_pages)
        for first in self._running.prefilling:
            assert first.goal is not None
            shared = first.goal.size // P
            unused += sum((len(child.pages) - shared) * P for child in self._running.children(first))
        self._metrics.gauges(
            running=len(self._running),
            waiting=self._starter.queue.num_sequences,
            free_pages=cache.free_pages,
            active_pages=cache.active_pages,
            reusable_pages=cache.reusable_pages,
            held_pages=cache.held_pages,
            allocated_slots=allocated,
            used_slots=allocated - unused,
            ladder_level=self._ladder.level if self._ladder else 0,
            over_quota_tenants=cache.over_quota_tenants,
            in_step=in_step,
        )
