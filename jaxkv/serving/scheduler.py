"""Continuous batching: who gets a slot, which chunks of prompts run beside the decoding rows, who gives way.

Plain host code over a `Runner`, a `PageCache` and a clock: a simulated device drives the very same code (scripts/replay_trace.py).
One `step` of the scheduler

    1  starts waiting jobs: looks their prefix up, takes pages for all they can need, gives them rows
    2  dispatches chunks of prompts, at most prefill_tokens of them, so that decoding rows keep their pace
    3  dispatches one token for every row that decodes
    4  reads what the dispatches before the last brought: the device is never waited for with nothing to do

What it does a step depends on the rows and on what changed, never on how many wait.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.buckets import CHUNK_TOKENS
from jaxkv.kv.pages import num_pages_needed
from jaxkv.output import TextEvent
from jaxkv.serving.admission import Admission
from jaxkv.serving.ladder import Ladder
from jaxkv.serving.match import Match
from jaxkv.serving.metrics import Metrics
from jaxkv.serving.page_cache import PageCache
from jaxkv.serving.runner import Part, Runner
from jaxkv.serving.sequence import Job, Sequence
from jaxkv.serving.waiting import WaitingQueue

if TYPE_CHECKING:
    from jaxkv.serving.restore import Restores

# Jobs looked at past one that waits for another's pages, each step.
_LOOK_AHEAD = 16


@dataclasses.dataclass(frozen=True)
class _Ticket:
    """A dispatch not yet read, and whom it gives a token: by row, since a row may have a new holder by then."""

    result: object
    holders: list[tuple[int, Sequence]]
    dispatched_at: float
    prompt_tokens: int = 0  # stored by the dispatches since the ticket before
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
        self._runner, self._cache, self._admission, self._metrics, self._clock = runner, cache, admission, metrics, clock
        self._options = options
        self._prefill_tokens, self._overcommit = prefill_tokens, overcommit
        self._ladder, self._restores, self._kv_bytes = ladder, restores, kv_bytes
        self._queue = WaitingQueue()
        self._free_rows = list(range(runner.num_slots - 1, -1, -1))
        self._prefilling: list[Sequence] = []  # in the order of admission
        self._children: dict[int, list[Sequence]] = {}  # by owner: samples that begin when its prompt is stored
        self._decoding: dict[int, Sequence] = {}  # by row
        self._tickets: collections.deque[_Ticket] = collections.deque()
        self._events: list[tuple[Sequence, TextEvent]] = []
        self._blocked: int | None = None  # available pages when the first waiting job last did not fit
        self._ttl_s = cache.reusable_ttl_s
        self._promised = 0  # pages reserved for those that run, beside those that they hold already
        self._prompt_tokens = 0  # stored since the last ticket
        self._read_at = 0.0  # when the last ticket was read
        self.recompute_s_per_token = 0.0  # measured, of prefill

    @property
    def num_waiting(self) -> int:
        """Jobs without rows."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Rows taken."""
        return self._runner.num_slots - len(self._free_rows)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._queue and not self.num_running and not self._tickets

    def add(self, job: Job) -> None:
        """Queues a job."""
        self._queue.push(job)
        self._blocked = None

    def running(self) -> list[Sequence]:
        """The sequences that have rows."""
        waiting = itertools.chain.from_iterable(self._children.values())
        return [*self._prefilling, *waiting, *self._decoding.values()]

    def step(self) -> list[tuple[Sequence, TextEvent]]:
        """One turn; returns what became known of sequences, in order."""
        self._cache.tick()
        if self._restores is not None:
            self._restores.finish(self._promised)
        self._start_waiting()
        dispatched = self._prefill()
        dispatched = self._decode() or dispatched
        while len(self._tickets) > 1 or (self._tickets and not dispatched):
            self._read(self._tickets.popleft())
        if not dispatched and not self._events and self._restores is not None and self._prefilling:
            self._restores.wait()
        self.update_ladder()
        self.observe(in_step=True)
        events, self._events = self._events, []
        return events

    def abort(self, id: int) -> list[Sequence]:
        """Ends what waits or runs of a request, wherever it is; returns those sequences. Unknown ids: none."""
        ended = []
        for job in self._queue.of_request(id):
            self._queue.remove(job)
            ended += job.sequences
        self._blocked = None
        for sequence in [s for s in self.running() if s.id == id]:
            self._leave(sequence)
            self._release(sequence, publish=False)
            ended.append(sequence)
        return ended

    # Starting

    def _start_waiting(self) -> None:
        """Starts jobs in order until one does not fit. It is not tried again before something has changed."""
        if not self._queue or not self._free_rows or self._waits_for_recovery():
            return
        if self._blocked == self._cache.available_pages:
            return
        self._blocked = None
        for job in self._queue.in_order(_LOOK_AHEAD):
            if not self._free_rows:
                return
            if not self._try(job):
                self._blocked = self._cache.available_pages
                return

    def _waits_for_recovery(self) -> bool:
        return self._ladder is not None and self._ladder.rung.queues_only and self.num_running > 0

    def _try(self, job: Job) -> bool:
        """Starts a job if it can; False: it must wait, and those behind it too.

        One whose next page another sequence is computing right now is left for later; those behind it may go first.
        """
        first, n, P, cache = job.first, len(job.sequences), self._cache.page_size, self._cache
        if n > len(self._free_rows):
            return False
        goal = first.history
        match = self._match(job, goal)
        ahead = len(match.pages)
        if (ahead + 1) * P < goal.size and cache.is_announced(match.keys[ahead]) is not None:
            return True
        most = first.prompt.size + first.track.limit
        total = num_pages_needed(goal.size + 1 if self._overcommit else most, P)
        shared, now = goal.size // P, num_pages_needed(goal.size, P)
        wanted = cache.idle_pages(match) + total - ahead + (n - 1) * (total - shared)
        if not self._admission.may_start(self.num_running, wanted, cache.available_pages - self._promised, n):
            return False
        first.pages = cache.allocate(first.owner, first.fingerprint.tenant, now - ahead, match) or []
        for child in job.sequences[1:]:
            child.pages = cache.fork(first.owner, child.owner, shared, now - shared) or []
        for sequence in job.sequences:
            sequence.promised = total - now
            self._promised += sequence.promised
        self._queue.remove(job)
        self._admit(job, goal, match)
        return True

    def _match(self, job: Job, goal: np.ndarray) -> Match:
        fingerprint = job.first.fingerprint
        public = dataclasses.replace(fingerprint, tenant=None, acl_epoch=None) if job.first.request.use_cache else None
        known = job.match.keys if job.match is not None and job.match.fingerprint == fingerprint else None
        job.match = self._cache.match(fingerprint, goal, public=public, keys=known)
        return job.match

    def _admit(self, job: Job, goal: np.ndarray, match: Match) -> None:
        first = job.first
        for sequence in job.sequences:
            sequence.row, sequence.published = self._free_rows.pop(), False
            found = goal[: match.num_tokens] if sequence is first else goal[:0]
            self._runner.seat(sequence.row, sequence.pages, self._options(sequence), found)
        first.goal, first.stored = goal, match.num_tokens
        if first.started_at is None:  # not one that was preempted: what it finds then, it had stored itself
            receipt = self._cache.receipt(first.fingerprint, goal, match)
            for sequence in job.sequences:
                sequence.cached = {"device": match.num_tokens} if match.num_tokens else {}
                sequence.receipt = receipt
        self._prefilling.append(first)
        self._children[first.owner] = job.sequences[1:]
        self._cache.announce(first.owner, match.keys[len(match.pages) :])
        if self._restores is not None:
            self._restores.start(first, match)

    def _count(self, first: Sequence) -> None:
        """Counts a request when its first chunk is dispatched, which is when it is known what was found stored."""
        now = self._clock()
        for sequence in (first, *self._children[first.owner]):
            sequence.started_at = now
            shares = sequence is not first
            queries = first.prompt.size if first.request.use_cache and not shares else 0
            self._metrics.admitted(
                now - sequence.arrived_at, 0 if shares else first.prompt.size, {} if shares else first.cached, queries
            )

    # Dispatching

    def _prefill(self) -> bool:
        """Dispatches chunks, and first tokens of the prompts that end with them."""
        budget, parts, ended = self._prefill_tokens, [], []
        for sequence in self._prefilling:
            if budget <= 0:
                break
            if self._restores is not None and self._restores.is_pending(sequence):
                continue
            assert sequence.goal is not None
            if sequence.started_at is None:
                self._count(sequence)
            stop = sequence.stored + min(sequence.goal.size - sequence.stored, budget)
            samplers: tuple[int, ...] = ()
            if stop == sequence.goal.size:
                ended.append(sequence)
                samplers = (sequence.row, *(child.row for child in self._children[sequence.owner]))
            parts.append(Part(sequence.row, sequence.stored, sequence.goal[sequence.stored : stop], samplers))
            budget -= stop - sequence.stored
            self._prompt_tokens += stop - sequence.stored
            sequence.stored = stop
        if not parts:
            return False
        self._runner.prefill(parts)
        if ended:
            self._begin(ended)
        return True

    def _begin(self, ended: Many[Sequence]) -> None:
        """Samples share their prompts' full pages, each has its partial page; then all sample their first tokens."""
        holders = []
        for sequence in ended:
            self._prefilling.remove(sequence)
            children = self._children.pop(sequence.owner)
            if children:
                full, partial = divmod(sequence.stored, self._cache.page_size)
                src = [sequence.pages[full]] * len(children) if partial else []
                dst = [child.pages[full] for child in children] if partial else []
                self._runner.copy_pages(src, dst, [sequence.row] * len(children), [child.row for child in children])
            for one in (sequence, *children):
                one.stored, one.goal = sequence.stored, None
                one.dispatched = len(one.track.tokens) + 1
                self._decoding[one.row] = one
                holders.append((one.row, one))
        result = self._runner.begin([row for row, _ in holders], [one.stored for _, one in holders])
        self._tickets.append(_Ticket(result, holders, self._clock(), self._prompt_tokens))
        self._prompt_tokens = 0

    def _decode(self) -> bool:
        """Dispatches a token for every row that may have one more."""
        self._grow()
        holders = [(row, one) for row, one in self._decoding.items() if one.dispatched < one.track.limit]
        if not holders:
            return False
        result = self._runner.decode()
        read = sum(self._kv_bytes(one.stored) for _, one in holders)
        for _, one in holders:
            one.dispatched += 1
            one.stored += 1
        self._tickets.append(_Ticket(result, holders, self._clock(), self._prompt_tokens, read))
        self._prompt_tokens = 0
        return True

    # Reading

    def _read(self, ticket: _Ticket) -> None:
        """Takes the tokens that a dispatch gave; ends sequences, publishes prompts."""
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
            if not one.published and event.tokens:
                one.published = True
                self._publish(one, one.history[:-1])
                self._blocked = None
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
        seconds = now - max(ticket.dispatched_at, self._read_at)
        self._read_at = now
        if ticket.prompt_tokens:
            self._measure(seconds / ticket.prompt_tokens)
        elif ticket.kv_bytes:
            self._metrics.kv_read(ticket.kv_bytes, seconds)

    def _measure(self, s_per_token: float) -> None:
        """A moving average, in which a compile or a pause of the machine fades."""
        known = self.recompute_s_per_token
        self.recompute_s_per_token = s_per_token if not known else 0.8 * known + 0.2 * min(s_per_token, 4 * known)
        if self._restores is not None:
            self._restores.recompute_s_per_token = self.recompute_s_per_token

    def _finish(self, one: Sequence, now: float) -> None:
        self._leave(one)
        self._release(one, publish=one.track.finish_reason != "error", hold=one.request.hold)
        assert one.first_token_at is not None and one.track.finish_reason is not None
        decode_s = now - one.first_token_at
        self._metrics.finished(one.track.finish_reason, now - one.arrived_at, one.prompt.size, len(one.track.tokens), decode_s)

    def _publish(self, one: Sequence, tokens: np.ndarray) -> None:
        if one.request.use_cache:
            # Publishing may point at pages that were reusable; those promised to others must stay available.
            self._cache.publish(one.owner, one.fingerprint, tokens, spare_pages=self._cache.available_pages - self._promised)

    def _leave(self, one: Sequence) -> None:
        """Takes a sequence off its row. Steps in flight may still write to its pages: whoever gets those writes after them."""
        if one in self._prefilling:
            self._prefilling.remove(one)
            self._children.pop(one.owner)
        for siblings in self._children.values():
            if one in siblings:
                siblings.remove(one)
        self._decoding.pop(one.row, None)
        self._runner.clear(one.row)
        self._free_rows.append(one.row)
        one.row = -1

    def _release(self, one: Sequence, publish: bool, hold: bool = False) -> None:
        if publish:
            self._publish(one, one.history[:-1])  # the last token may not be stored
        if self._restores is not None:
            self._restores.cancel(one)
        self._cache.release(one.owner, hold=hold)
        self._promised -= one.promised
        one.promised = 0
        self._blocked = None

    # Growing

    def _grow(self) -> None:
        """Gives each decoding row that needs one a page for its next token."""
        P = self._cache.page_size
        for one in list(self._decoding.values()):
            if one.row >= 0 and one.stored >= len(one.pages) * P and one.dispatched < one.track.limit:
                self._give_page(one)

    def _give_page(self, one: Sequence) -> None:
        """Where nothing was reserved and there is no page, the youngest gives way: the oldest always goes on."""
        while (more := self._cache.extend(one.owner, 1)) is None:
            while self._tickets:  # what is in flight may end someone
                self._read(self._tickets.popleft())
            if self._cache.available_pages == 0:
                self._preempt(max(self.running(), key=lambda other: (other.order, other.owner)))
            if one.row < 0:
                return
        self._runner.set_pages(one.row, more, len(one.pages))
        one.pages += more
        taken = min(one.promised, 1)
        one.promised -= taken
        self._promised -= taken

    def _preempt(self, one: Sequence) -> None:
        """Puts a sequence back into the queue; its full pages stay matchable, in a slower tier where bringing them back pays."""
        kind, decoding = "recompute", one.row in self._decoding
        children = list(self._children.get(one.owner, ()))
        if decoding and one.request.use_cache:
            self._publish(one, one.history[:-1])
            if self._restores is not None and self._restores.keep(one):
                kind = "swap"
        for sequence in (*children, one):
            self._leave(sequence)
            self._release(sequence, publish=False)
            sequence.goal, sequence.stored, sequence.pages = None, 0, []
        self._metrics.preempted(kind)
        self._queue.push(Job([one, *children], one.order))

    # Watching

    def update_ladder(self) -> None:
        """Takes in how short pages are now."""
        if self._ladder is not None:
            cache = self._cache
            self._ladder.update((cache.active_pages + cache.held_pages + self._promised) / (cache.num_pages - 1))
            cache.reusable_ttl_s = None if self._ttl_s is None else self._ttl_s * self._ladder.rung.ttl_factor

    def observe(self, in_step: bool = False) -> None:
        """Tells the metrics how things stand."""
        cache, P = self._cache, self._cache.page_size
        running = self.running()
        # Shared pages are full, so what is unused lies in pages of one holder: each physical page counts once.
        allocated = cache.active_pages * P
        unused = sum(len(one.pages) * P - one.stored for one in (*self._decoding.values(), *self._prefilling))
        self._metrics.gauges(
            running=len(running),
            waiting=self._queue.num_sequences,
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
