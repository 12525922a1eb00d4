"""Tiers below the device: which pages they hold, moving them beside the steps, and whether moving pays.

Every tier has one thread that stores and one that loads, so that a slow disk holds up neither the engine nor host memory, and a
long write no read. A page goes to every tier; one run of pages comes back from one tier.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.page_data import PageData, PageLayout, PageRecord
from jaxkv.serving.tier_counts import TierCounts
from jaxkv.serving.transfer_costs import Rate, TransferCosts

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Tier(Protocol):
    """A place for pages: `HostTier`, `DiskTier`. Its methods may be called from any thread."""

    name: str
    counts: TierCounts

    @property
    def nbytes(self) -> int: ...
    def __contains__(self, key: bytes) -> bool: ...
    def store(self, record: PageRecord) -> bool: ...
    def load(self, key: bytes, fingerprint: Fingerprint, tokens: np.ndarray, layout: PageLayout) -> PageData | None: ...
    def touch(self, keys: Sequence[bytes]) -> int: ...
    def drop_where(self, predicate: Callable[[Fingerprint], bool]) -> int: ...


class Run(NamedTuple):
    """Leading pages that one tier has."""

    tier: str | None  # None: no tier has the first page
    num_pages: int


class _Lane:
    """A tier, its two threads, what waits for them and how fast they were."""

    def __init__(self, tier: Tier, costs: TransferCosts):
        believed = costs.load_bytes_per_s.get(tier.name, costs.other_bytes_per_s)
        self.tier = tier
        self.stores = ThreadPoolExecutor(1, f"jaxkv-store-{tier.name}")
        self.loads = ThreadPoolExecutor(1, f"jaxkv-load-{tier.name}")
        self.load_rate, self.store_rate = Rate(believed, costs.decay), Rate(believed, costs.decay)
        self._pending: collections.Counter[ThreadPoolExecutor] = collections.Counter()
        self._lock = threading.Lock()

    def submit(self, executor: ThreadPoolExecutor, nbytes: int, job: Callable[..., _T], *args: Any) -> Future[_T]:
        """Runs a job for `nbytes` on one of the two threads."""
        with self._lock:
            self._pending[executor] += nbytes
        future = executor.submit(job, *args)
        future.add_done_callback(lambda _: self._done(executor, nbytes))
        return future

    def pending_bytes(self, executor: ThreadPoolExecutor) -> int:
        """Bytes of jobs that have not ended."""
        return self._pending[executor]

    def measured(self, rate: Rate, nbytes: int, seconds: float) -> None:
        """Notes a transfer; one of nothing, or in no time, says nothing."""
        if nbytes > 0 and seconds > 0:
            with self._lock:
                rate.measured(nbytes, seconds)

    def fade(self, rate: Rate) -> None:
        """Forgets a little of what was measured."""
        with self._lock:
            rate.fade()

    def run_length(self, keys: Sequence[bytes]) -> int:
        """How many leading keys the tier has."""
        return next((i for i, key in enumerate(keys) if key not in self.tier), len(keys))

    def _done(self, executor: ThreadPoolExecutor, nbytes: int) -> None:
        with self._lock:
            self._pending[executor] -= nbytes


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
        self._lanes = {tier.name: _Lane(tier, self.cost) for tier in tiers}
        self._clock = clock
        self._closed = False

    def how_many(self, keys: Sequence[bytes]) -> Run:
        """The longest run of leading keys that one tier has, from the faster of two that have as many. Reads no page."""
        runs = [Run(name, lane.run_length(keys)) for name, lane in self._lanes.items()]
        best = max(runs, key=lambda run: run.num_pages)
        return best if best.num_pages else Run(None, 0)

    def worth_restoring(self, num_tokens: int, nbytes: int, recompute_s_per_token: float, tier: str) -> bool:
        """Whether loading `nbytes`, behind what already waits for the tier, takes less time than recomputing `num_tokens`.

        Each refusal lets what was measured fade a little, so that one slow transfer is not held against a tier for ever.
        """
        lane = self._lanes[tier]
        cost_s = (lane.pending_bytes(lane.loads) + nbytes) / lane.load_rate.bytes_per_s
        worth = cost_s < num_tokens * recompute_s_per_token
        if not worth:
            lane.fade(lane.load_rate)
        return worth

    def store_async(
        self, records: Sequence[PageRecord] | Callable[[], Sequence[PageRecord]], num_pages: int | None = None
    ) -> dict[str, Future[int]]:
        """Stores pages in every tier beside the steps; returns by tier how many it will hold, later.

        A function is called on a storing thread, once, so that it may wait for the device; `num_pages` says how many records it
        will return. The deepest page of a chain comes first, as eviction gives them, so that it leaves a tier first too. A tier
        with too much waiting takes nothing (counted as "backlog") and is not in what is returned.
        """
        if self._closed:
            return {}
        batch = _Batch(records)
        count = num_pages if num_pages is not None else len(batch.get())
        nbytes, futures = count * self.layout.nbytes, {}
        for name, lane in self._lanes.items():
            if lane.pending_bytes(lane.stores) + nbytes > self.cost.max_pending_bytes:
                lane.tier.counts.failure("backlog", count)
            else:
                futures[name] = lane.submit(lane.stores, nbytes, self._store, lane, batch)
        return futures

    def load_async(
        self, keys: Sequence[bytes], fingerprint: Fingerprint, tokens: np.ndarray, tier: str | None = None
    ) -> Future[list[PageData]]:
        """Loads the leading run of pages that a tier still has, beside the steps. The result never raises; it may be shorter than
        `keys`, or empty.

        Args:
          keys: of consecutive pages of one chain.
          tokens: i32, of the same pages: page_size for each key, more are ignored.
          tier: by default the one that `how_many` names.
        """
        name = tier if tier is not None else self.how_many(keys).tier
        if self._closed or name is None:
            nothing: Future[list[PageData]] = Future()
            nothing.set_result([])
            return nothing
        lane, keys = self._lanes[name], list(keys)
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

    def bytes_per_s(self) -> dict[str, dict[str, float]]:
        """{"load", "store"} bytes a second of each tier, as measured of late, or as believed."""
        return {
            name: {"load": lane.load_rate.bytes_per_s, "store": lane.store_rate.bytes_per_s} for name, lane in self._lanes.items()
        }

    def counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Hits, misses and failures of each tier (`TierCounts.as_dict`)."""
        return {name: lane.tier.counts.as_dict() for name, lane in self._lanes.items()}

    def nbytes(self) -> dict[str, int]:
        """Bytes that each tier holds."""
        return {name: lane.tier.nbytes for name, lane in self._lanes.items()}

    def close(self) -> None:
        """Takes no more work, and returns when what was asked for is done. Again: nothing."""
        self._closed = True
        for lane in self._lanes.values():
            lane.stores.shutdown()
            lane.loads.shutdown()

    # On the tiers' threads

    def _store(self, lane: _Lane, batch: _Batch) -> int:
        records: Sequence[PageRecord] = self._safely(lane, (), batch.get)
        started, kept, moved = self._clock(), 0, 0
        for record in records:
            new = record.key not in lane.tier
            if self._safely(lane, False, lane.tier.store, record):
                kept, moved = kept + 1, moved + new * record.data.nbytes
        lane.measured(lane.store_rate, moved, self._clock() - started)
        return kept

    def _load(self, lane: _Lane, keys: list[bytes], fingerprint: Fingerprint, pages: np.ndarray) -> list[PageData]:
        started, loaded = self._clock(), []
        for key, tokens in zip(keys, pages, strict=True):
            data = self._safely(lane, None, lane.tier.load, key, fingerprint, tokens, self.layout)
            if data is None:
                break
            loaded.append(data)
        lane.measured(lane.load_rate, sum(data.nbytes for data in loaded), self._clock() - started)
        self._safely(lane, 0, lane.tier.touch, keys[: len(loaded)])
        return loaded

    def _safely(self, lane: _Lane, otherwise: _T, job: Callable[..., _T], *args: Any) -> _T:
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
