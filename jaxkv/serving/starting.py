"""From the queue to rows: in order, each with all the pages it was promised, or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence as Many

from jaxkv.kv.pages import num_pages_needed
from jaxkv.serving.admission import Admission
from jaxkv.serving.match import Match
from jaxkv.serving.page_cache import PageCache
from jaxkv.serving.running import Running
from jaxkv.serving.sequence import SequenceGroup
from jaxkv.serving.waiting import WaitingQueue

# Groups looked at in one step, and tokens of their prompts: what a step costs must not depend on how many came at once.
_GROUPS, _TOKENS = 16, 1 << 15


class Starter:
    """Starts waiting groups when there are rows and pages for them.

    Args:
      overcommit: a group needs the pages of its prompt and the plan's reserve; False: all that it can ever take.
    """

    def __init__(self, cache: PageCache, admission: Admission, running: Running, overcommit: bool):
        self._cache, self._admission, self._running, self._overcommit = cache, admission, running, overcommit
        self.queue = WaitingQueue()
        self._full_at: int | None = None  # spare pages when the first waiting group last did not fit
        cache.on_settled = self._settled

    def push(self, group: SequenceGroup) -> None:
        """Queues a group."""
        self.queue.push(group)
        self._full_at = None

    def remove(self, group: SequenceGroup) -> None:
        """Takes a group out of the queue."""
        self.queue.remove(group)
        self._full_at = None

    def changed(self) -> None:
        """Rows or pages came back, or more can be found: who did not fit may fit now."""
        self._full_at = None

    def start(self) -> list[tuple[SequenceGroup, Match]]:
        """Gives rows to groups in order until one does not fit; that one is not tried again before something has changed.

        A group whose next page somebody is computing right now waits for that instead of computing it too; those behind it go first.
        """
        started: list[tuple[SequenceGroup, Match]] = []
        if not self._running.num_free_rows or self._full_at == self._running.spare_pages:
            return started
        self._full_at = None
        tokens, parked = 0, 0
        # Closed at once where it is left early: it puts back those that it took out of the heap.
        with contextlib.closing(self.queue.in_order(_GROUPS)) as groups:
            for group in groups:
                if tokens >= _TOKENS or len(group.sequences) > self._running.num_free_rows:
                    break
                tokens += group.goal.size
                match = self._match(group)
                if self._parked(group, match):
                    parked += 1
                    continue
                if not self._fits(group, match):
                    self._full_at = self._running.spare_pages
                    break
                self.queue.remove(group)
                self._running.seat(group, match)
                started.append((group, match))
        if parked:
            self._hurry()
        return started

    def _match(self, group: SequenceGroup) -> Match:
        first = group.first
        public = dataclasses.replace(first.fingerprint, tenant=None, acl_epoch=None) if first.request.use_cache else None
        known = group.match.keys if group.match is not None and group.match.fingerprint == first.fingerprint else None
        group.match = self._cache.match(first.fingerprint, group.goal, public=public, keys=known)
        return group.match

    def _parked(self, group: SequenceGroup, match: Match) -> bool:
        """Parks a group under the last page behind its match that another sequence is computing; False: nobody computes the next."""
        # The last token is always computed, so a page that ends with it would not be taken.
        usable = match.keys[len(match.pages) : (group.goal.size - 1) // self._cache.page_size]
        computed = list(itertools.takewhile(lambda key: self._cache.announcer(key) is not None, usable))
        if not computed:
            return False
        self.queue.park(group, computed[-1])
        return True

    def _hurry(self) -> None:
        """Whoever is waited for is as urgent as who waits: else those between the two would go before both."""
        orders: dict[int, float] = {}
        for key, order in self.queue.awaited.items():
            owner = self._cache.announcer(key)
            if owner is not None:
                orders[owner] = min(order, orders.get(owner, order))
        self._running.hurry(orders)

    def _fits(self, group: SequenceGroup, match: Match) -> bool:
        """Takes the pages of a group if it may start."""
        first, n, P = group.first, len(group.sequences), self._cache.page_size
        most = num_pages_needed(first.prompt.size + first.track.limit, P)
        each, shared = most, group.goal.size // P
        if self._overcommit:
            each = min(most, max(num_pages_needed(group.goal.size + 1, P), self._admission.reserve_pages))
        wanted = self._cache.idle_pages(match) + each - len(match.pages) + (n - 1) * (each - shared)
        if not self._admission.may_start(len(self._running), wanted, self._running.spare_pages, n):
            return False
        self._running.allocate(group, match, each)
        return True

    def _settled(self, keys: Many[bytes]) -> None:
        if self.queue.wake(keys):
            self._full_at = None
            self._hurry()
