"""Tiers below the device: which pages they hold, moving them beside the steps, and whether moving pays.

Every tier has one thread that stores and one that loads, so that a slow disk holds up neither the engine nor host memory, and a
long write no read. A page goes to every tier from which it would come back in time; one run of pages comes back from one tier.
What is decided between two steps is decided from memory; only the threads touch a disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.lane import Lane, Tier
from jaxkv.serving.page_data import PageData, PageLayout, PageRecord
from jaxkv.serving.tier_choice import Run, best_run, takers
from jaxkv.serving.transfer_costs import TransferCosts

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Tiers:
    """Pages that left the device, in tiers from the fastest to the slowest.

    Args:
      tiers: with different names.
      layout: of the engine's pages; a restore gives pages of exactly this layout or none.
      cost: what to believe of transfers, and how long.
      clock: seconds, monotonic; times the transfers.

    Raises:
      ValueError: two tiers of one name, or no tier.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        layout: PageLayout,
        *,
        cost: TransferCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        names = [tier.name for tier in tiers]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"tiers need different names, at least one: {names}")
        self.layout, self.cost = layout, cost or TransferCosts()
        if self.cost.max_pending_bytes < layout.nbytes:
            raise ValueError(
                f"max_pending_bytes={self.cost.max_pending_bytes} must hold a page, {layout.nbytes} bytes: nothing is kept"
            )
        self._lanes = {tier.name: Lane(tier, self.cost, layout.nbytes, clock) for tier in tiers}
        self._clock = clock
        self._closed = False

    def __contains__(self, key: bytes) -> bool:
        """Whether some tier has a page, as far as memory knows."""
        return any(key in lane for lane in self._lanes.values())

    def all_have(self, key: bytes) -> bool:
        """Whether every tier has a page, as far as memory knows."""
        return all(key in lane for lane in self._lanes.values())

    def how_many(self, keys: Sequence[bytes], recompute_s_per_page: float) -> Run:
        """The run of leading keys whose load saves the most time (`tier_choice`), by what was measured and what waits.

        O(keys), from memory. Also has the tiers look for what other processes stored, every now and then, on their own threads.
        """
        self.refresh()
        return best_run(self._lanes.values(), keys, self.layout.nbytes, recompute_s_per_page)

    def refresh(self) -> None:
        """Has the tiers find out beside the steps what other processes stored, unless they did a moment ago. Returns at once."""
        if not self._closed:
            for lane in self._lanes.values():
                lane.refresh(self._safely)

    @property
    def pages_per_store(self) -> int:
        """The most pages to store together: no more than may wait."""
        return max(1, self.cost.max_pending_bytes // self.layout.nbytes)

    def takers(self, num_pages: int, recompute_s_per_page: float) -> list[str]:
        """The tiers that would store so many pages now: loading one back would be faster than computing it, and there is room among
        what waits (if not, that is counted as "backlog"). To be asked before pages are copied for `store_async`."""
        if self._closed:
            return []
        worth = takers(self._lanes.values(), self.layout.nbytes, recompute_s_per_page)
        return [name for name in worth if self._has_room(self._lanes[name], num_pages)]

    def store_async(
        self, records: Sequence[PageRecord] | Callable[[], Sequence[PageRecord]], num_pages: int, takers: Iterable[str]
    ) -> dict[str, Future[int]]:
        """Stores pages beside the steps in the tiers that `takers` named; returns by tier how many it will hold, later.

        A function is called on a storing thread, once, so that it may wait for the device; `num_pages` says how many records it
        will return. The deepest page of a chain comes first, as eviction gives them, so that it leaves a tier first too.
        """
        if self._closed:
            return {}
        batch, nbytes, lanes = _Batch(records), num_pages * self.layout.nbytes, [self._lanes[name] for name in takers]
        return {lane.name: lane.submit(lane.stores, nbytes, self._store, lane, batch) for lane in lanes}

    def touch_async(self, keys: Sequence[bytes]) -> None:
        """Makes pages of one chain, first page first, the last to leave every tier, after the stores that were asked for."""
        if not self._closed:
            for lane in self._lanes.values():
                lane.submit(lane.stores, 0, self._safely, lane, 0, lane.tier.touch, keys)

    def load_async(self, keys: Sequence[bytes], fingerprint: Fingerprint, tokens: np.ndarray, tier: str) -> Future[list[PageData]]:
        """Loads the leading run of pages that a tier still has, beside the steps. The result never raises; it may be shorter than
        `keys`, or empty.

        Args:
          keys: of consecutive pages of one chain.
          tokens: i32, of the same pages: page_size for each key, more are ignored.
          tier: the one that `how_many` names.
        """
        if self._closed:
            nothing: Future[list[PageData]] = Future()
            nothing.set_result([])
            return nothing
        lane, keys = self._lanes[tier], list(keys)
        pages = np.array(tokens[: len(keys) * self.layout.page_size], np.int32).reshape(len(keys), -1)
        return lane.submit(lane.loads, len(keys) * self.layout.nbytes, self._load, lane, keys, fingerprint, pages)

    def drop_where(self, predicate: Callable[[Fingerprint], bool]) -> dict[str, Future[int]]:
        """Frees every page whose fingerprint the predicate is true for, those too whose store was asked for before this call.

        Nothing waits for it: pages of an older epoch or revision have other keys and fingerprints, and match nothing already.
        """
        if self._closed:
            return {}
        return {
            name: lane.submit(lane.stores, 0, self._safely, lane, 0, lane.tier.drop_where, predicate)
            for name, lane in self._lanes.items()
        }

    def bytes_per_s(self) -> dict[str, float]:
        """Bytes a second that each tier gives back, as measured of late, or as believed."""
        return {name: lane.bytes_per_s for name, lane in self._lanes.items()}

    def counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Hits, misses and failures of each tier (`TierCounts.as_dict`)."""
        return {name: lane.tier.counts.as_dict() for name, lane in self._lanes.items()}

    def num_pages(self) -> dict[str, int]:
        """Pages that each tier holds."""
        return {name: lane.tier.num_pages for name, lane in self._lanes.items()}

    def nbytes(self) -> dict[str, int]:
        """Bytes that each tier holds."""
        return {name: lane.tier.nbytes for name, lane in self._lanes.items()}

    def close(self) -> None:
        """Takes no more work, and returns when what was asked for is done. Again: nothing."""
        self._closed = True
        for lane in self._lanes.values():
            lane.stores.shutdown()
            lane.loads.shutdown()

    def _has_room(self, lane: Lane, num_pages: int) -> bool:
        if lane.pending_bytes(lane.stores) + num_pages * self.layout.nbytes <= self.cost.max_pending_bytes:
            return True
        lane.tier.counts.failure("backlog", num_pages)
        return False

    # On the tiers' threads

    def _store(self, lane: Lane, batch: _Batch) -> int:
        records: Sequence[PageRecord] = self._safely(lane, (), batch.get)
        return sum(self._safely(lane, False, lane.tier.store, record) for record in records)

    def _load(self, lane: Lane, keys: list[bytes], fingerprint: Fingerprint, pages: np.ndarray) -> list[PageData]:
        started, loaded = self._clock(), []
        for key, tokens in zip(keys, pages, strict=True):
            data = self._safely(lane, None, lane.tier.load, key, fingerprint, tokens, self.layout)
            if data is None:
                break
            loaded.append(data)
        lane.loaded(sum(data.nbytes for data in loaded), self._clock() - started)
        self._safely(lane, 0, lane.tier.touch, keys[: len(loaded)])
        return loaded

    def _safely(self, lane: Lane, otherwise: _T, job: Callable[..., _T], *args: Any) -> _T:
        """The job's result. Whatever goes wrong beside the steps must not end them: it is counted and logged."""
        try:
            return job(*args)
        except Exception:
            lane.tier.counts.failure("error")
            _log.exception("the %s tier failed; requests go on without it", lane.tier.name)
            return otherwise


class _Batch:
    """Records that are made once, on the thread that asks first."""

    def __init__(self, records: Sequence[PageRecord] | Callable[[], Sequence[PageRecord]]):
        self._make, self._lock = records, threading.Lock()

    def get(self) -> Sequence[PageRecord]:
        """All records."""
        with self._lock:
            if callable(self._make):
                self._make = self._make()
            return self._make
