"""Pages on their way between the device and the tiers below it.

Out: what the page cache evicts, and what a preempted sequence will want again. Back: the pages that continue a prompt's match, when
loading them is measured to be faster than computing them. Both beside the steps; a sequence waits for its own pages only.

A prompt is looked for under two fingerprints: the request's own, and that of the operator's public pages, whose right to be read is
everybody's and which is else the same. What comes back is published under the request's own.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from jaxkv.serving.fingerprint import Fingerprint, iter_page_keys
from jaxkv.serving.match import Match
from jaxkv.serving.page_cache import PageCache
from jaxkv.serving.page_data import KEY_BYTES, PageData, PageRecord
from jaxkv.serving.page_states import Evicted
from jaxkv.serving.runner import Runner
from jaxkv.serving.sequence import Sequence
from jaxkv.serving.tier_choice import NO_RUN, Run
from jaxkv.serving.tiers import Tiers

# Pages of one store at most: a long sequence's go in several, so that a tier with little room takes a part.
_STORED_TOGETHER = 64
# A load that takes so many times as long as computing its pages, and a moment for a machine that pauses, is given up.
_PATIENCE, _LEAST_PATIENCE_S = 10.0, 5.0
# A step that has nothing else to do waits so long for a load: long beside a page's, short for whoever wants to abort.
_WAIT_S = 0.5


@dataclasses.dataclass(frozen=True)
class _Load:
    """Pages that a sequence waits for."""

    sequence: Sequence
    future: concurrent.futures.Future[list[PageData]]
    tier: str
    first_page: int  # logical
    is_public: bool  # they are the operator's
    until_s: float  # when waiting for them is given up


class Restores:
    """Moves pages for a scheduler.

    Args:
      secret: the cache's, under which the keys of public pages are made; None: those are not brought back.
      clock: seconds; a load that takes far too long by it is given up.

    Attributes:
      recompute_s_per_token: what computing a prompt's token takes, as measured; 0: not known yet, so nothing is moved.
    """

    def __init__(
        self,
        tiers: Tiers,
        cache: PageCache,
        runner: Runner,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tiers, self._cache, self._runner, self._secret, self._clock = tiers, cache, runner, secret, clock
        self._loads: dict[int, _Load] = {}  # by owner
        self.recompute_s_per_token = 0.0

    def on_evict(self, evicted: Many[Evicted]) -> None:
        """Stores pages that leave the device, unless bringing them back would take longer than computing them."""
        self._store(list(evicted))

    def keep(self, one: Sequence) -> bool:
        """Stores what a sequence that gives way has published; False: computing it again is faster, or no tier takes all of it."""
        match = self._cache.match(one.fingerprint, one.history)
        if not match.pages:
            return False
        rows = one.history[: match.num_tokens].reshape(len(match.pages), -1)
        parents = (None, *match.keys)
        return self._store(
            [
                Evicted(page, match.keys[i], parents[i], i, one.fingerprint, rows[i].astype(np.int32))
                for i, page in reversed(list(enumerate(match.pages)))
            ]
        )

    def look(self) -> None:
        """Has the tiers look beside the steps for what other processes stored. For the arrival of a request, so that it is known when
        that request starts; starting asks for it too. Returns at once."""
        self._tiers.refresh()

    def start(self, one: Sequence, match: Match) -> None:
        """Begins to load what continues the match of a sequence that has its row, where that pays."""
        P, first = self._cache.page_size, len(match.pages)
        assert one.goal is not None
        last = (one.goal.size - 1) // P
        if first >= last:
            return
        s_per_page = self.recompute_s_per_token * P
        fingerprint, keys, is_public = one.fingerprint, list(match.keys[first:last]), False
        run = self._tiers.how_many(keys, s_per_page)
        public = dataclasses.replace(one.fingerprint, tenant=None, acl_epoch=None)
        if run.num_pages < len(keys) and self._secret is not None and one.request.use_cache and public != one.fingerprint:
            public_keys, public_run = self._public_run(public, match, one.goal[: last * P], s_per_page)
            if public_run.saved_s > run.saved_s:
                fingerprint, keys, run, is_public = public, public_keys, public_run, True
        if run.tier is None:
            return
        tokens = one.goal[first * P : (first + run.num_pages) * P]
        future = self._tiers.load_async(keys[: run.num_pages], fingerprint, tokens, run.tier)
        until_s = self._clock() + max(_LEAST_PATIENCE_S, _PATIENCE * run.num_pages * s_per_page)
        self._loads[one.owner] = _Load(one, future, run.tier, first, is_public, until_s)

    def _public_run(self, public: Fingerprint, match: Match, tokens: np.ndarray, s_per_page: float) -> tuple[list[bytes], Run]:
        """The public keys that continue a match, as far as a tier has them, and the best run of them. O(pages matched and found)."""
        assert self._secret is not None
        P, first = self._cache.page_size, len(match.pages)
        if match.is_public and match.entry is not None:  # goes on where the match ended
            rest = iter_page_keys(match.entry.key, tokens[first * P :], P)
        else:
            rest = itertools.islice(iter_page_keys(public.root(self._secret), tokens, P), first, None)
        keys = list(itertools.takewhile(self._tiers.__contains__, rest))
        return keys, self._tiers.how_many(keys, s_per_page) if keys else NO_RUN

    def is_pending(self, one: Sequence) -> bool:
        """Whether a sequence's pages are on their way."""
        return one.owner in self._loads

    def finish(self, promised_pages: int) -> None:
        """Writes what has arrived to its pages; a load that brought nothing, or does not end, leaves its sequence to compute.

        Args:
          promised_pages: must stay available.
        """
        now = self._clock() if self._loads else 0.0
        for one in [load.sequence for load in self._loads.values() if load.until_s < now and not load.future.done()]:
            self.cancel(one)  # what comes yet is not written: it may hang for good
        for load in [load for load in self._loads.values() if load.future.done()]:
            one, data, P = load.sequence, load.future.result(), self._cache.page_size
            del self._loads[one.owner]
            if not data:
                continue
            self._runner.write_pages(one.pages[load.first_page : load.first_page + len(data)], data)
            one.stored += len(data) * P
            assert one.goal is not None
            self._runner.seat(one.row, one.pages, None, one.goal[: one.stored])
            spare = self._cache.available_pages - promised_pages
            self._cache.publish(one.owner, one.fingerprint, one.goal[: one.stored], spare_pages=spare)
            if one.started_at is None:
                one.cached[load.tier] = len(data) * P
                if one.receipt is not None:
                    one.receipt = one.receipt.restored(load.is_public)

    def wait(self) -> None:
        """Waits until something arrives, but not long: a tier may hang, and whoever steps can still abort."""
        futures = [load.future for load in self._loads.values()]
        concurrent.futures.wait(futures, _WAIT_S, concurrent.futures.FIRST_COMPLETED)

    def cancel(self, one: Sequence) -> None:
        """Nobody waits for this sequence's pages any more."""
        self._loads.pop(one.owner, None)

    def _store(self, pages: list[Evicted]) -> bool:
        """Stores pages; False: no tier took all of them."""
        took, together = True, min(_STORED_TOGETHER, self._tiers.pages_per_store)
        for i in range(0, len(pages), together):
            took &= self._store_some(pages[i : i + together])
        return took

    def _store_some(self, pages: list[Evicted]) -> bool:
        """Stores pages if a tier takes them; else nothing is copied, nor what every tier has since it came from there."""
        new = [one for one in pages if not self._tiers.all_have(one.key)]
        takers = self._tiers.takers(len(new), self.recompute_s_per_token * self._cache.page_size) if new else []
        if takers:
            self._copy(new, takers)
        if len(new) < len(pages):
            self._tiers.touch_async([one.key for one in reversed(pages) if self._tiers.all_have(one.key)])
        return bool(takers) or not new

    def _copy(self, pages: list[Evicted], takers: list[str]) -> None:
        """Copies pages on the device, in the order of its work: they may be given away after."""
        unique = {page: i for i, page in enumerate(dict.fromkeys(one.page for one in pages))}  # one may go under several keys
        ticket: Any = self._runner.read_pages(list(unique))

        def records() -> list[PageRecord]:
            data = self._runner.page_data(ticket)
            return [
                PageRecord(
                    one.key, one.parent_key or bytes(KEY_BYTES), one.depth, one.fingerprint, one.tokens, data[unique[one.page]]
                )
                for one in pages
            ]

        self._tiers.store_async(records, len(pages), takers)
