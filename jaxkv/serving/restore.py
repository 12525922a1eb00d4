"""Pages on their way between the device and the tiers below it.

Out: what the page cache evicts, and what a preempted sequence will want again. Back: the pages that continue a prompt's match, when
loading them is measured to be faster than computing them. Both beside the steps; a sequence waits for its own pages only.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from jaxkv.serving.match import Match
from jaxkv.serving.page_cache import PageCache
from jaxkv.serving.page_data import KEY_BYTES, PageData, PageRecord
from jaxkv.serving.page_states import Evicted
from jaxkv.serving.runner import Runner
from jaxkv.serving.sequence import Sequence
from jaxkv.serving.tiers import Tiers

# Pages of one store: a long sequence's go in several, so that a tier with little room takes a part.
_STORED_TOGETHER = 64


@dataclasses.dataclass(frozen=True)
class _Load:
    """Pages that a sequence waits for."""

    sequence: Sequence
    future: concurrent.futures.Future[list[PageData]]
    tier: str
    first_page: int  # logical


class Restores:
    """Moves pages for a scheduler.

    Attributes:
      recompute_s_per_token: what computing a prompt's token takes, as measured; 0: not known yet, so nothing is moved.
    """

    def __init__(self, tiers: Tiers, cache: PageCache, runner: Runner):
        self._tiers, self._cache, self._runner = tiers, cache, runner
        self._loads: dict[int, _Load] = {}  # by owner
        self.recompute_s_per_token = 0.0

    def on_evict(self, evicted: Many[Evicted]) -> None:
        """Stores pages that leave the device, unless bringing them back would take longer than computing them."""
        if self._pays(1):
            self._store(list(evicted))

    def keep(self, one: Sequence) -> bool:
        """Stores what a sequence that gives way has published; False: computing it again is faster."""
        match = self._cache.match(one.fingerprint, one.history)
        if not match.pages or not self._pays(len(match.pages)):
            return False
        rows = one.history[: match.num_tokens].reshape(len(match.pages), -1)
        parents = (None, *match.keys)
        return self._store(
            [
                Evicted(page, match.keys[i], parents[i], i, one.fingerprint, rows[i].astype(np.int32))
                for i, page in reversed(list(enumerate(match.pages)))
            ]
        )

    def start(self, one: Sequence, match: Match) -> None:
        """Begins to load what continues the match of a sequence that has its row, where that pays."""
        P, first = self._cache.page_size, len(match.pages)
        assert one.goal is not None
        keys = match.keys[first : (one.goal.size - 1) // P]
        if match.is_public or not keys:  # the keys are the tenant's own: they do not continue a public chain
            return
        run = self._tiers.how_many(keys)
        if run.tier is None or not self._pays(run.num_pages, run.tier):
            return
        tokens = one.goal[first * P : (first + run.num_pages) * P]
        future = self._tiers.load_async(keys[: run.num_pages], one.fingerprint, tokens, run.tier)
        self._loads[one.owner] = _Load(one, future, run.tier, first)

    def is_pending(self, one: Sequence) -> bool:
        """Whether a sequence's pages are on their way."""
        return one.owner in self._loads

    def finish(self, promised_pages: int) -> None:
        """Writes what has arrived to its pages; a load that brought nothing leaves its sequence to compute.

        Args:
          promised_pages: must stay available.
        """
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

    def wait(self) -> None:
        """Waits until something arrives."""
        concurrent.futures.wait([load.future for load in self._loads.values()], return_when=concurrent.futures.FIRST_COMPLETED)

    def cancel(self, one: Sequence) -> None:
        """Nobody waits for this sequence's pages any more."""
        self._loads.pop(one.owner, None)

    def _pays(self, num_pages: int, tier: str | None = None) -> bool:
        """Whether loading so many pages, from the fastest tier unless named, is faster than computing their tokens."""
        name = tier or next(iter(self._tiers.bytes_per_s()))
        nbytes, num_tokens = num_pages * self._tiers.layout.nbytes, num_pages * self._cache.page_size
        return self._tiers.worth_restoring(num_tokens, nbytes, self.recompute_s_per_token, name)

    def _store(self, pages: list[Evicted]) -> bool:
        """Stores pages; False: no tier took all of them. They are copied in the order of the device's work: they may be given away."""
        took = True
        for i in range(0, len(pages), _STORED_TOGETHER):
            took &= self._store_some(pages[i : i + _STORED_TOGETHER])
        return took

    def _store_some(self, pages: list[Evicted]) -> bool:
        ticket: Any = self._runner.read_pages([one.page for one in pages])

        def records() -> list[PageRecord]:
            return [
                PageRecord(one.key, one.parent_key or bytes(KEY_BYTES), one.depth, one.fingerprint, one.tokens, data)
                for one, data in zip(pages, self._runner.page_data(ticket), strict=True)
            ]

        return bool(self._tiers.store_async(records, len(pages)))
