"""One tier and its two threads: one that stores and one that loads."""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.page_data import PageData, PageLayout, PageRecord
from jaxkv.serving.tier_counts import TierCounts
from jaxkv.serving.transfer_costs import Rate, TransferCosts

# A tier looks for what other processes stored so often at most, and for no larger share of the time: 10,000 names take about 15 ms.
_REFRESH_S = 1.0
_REFRESH_SHARE = 0.05
_T = TypeVar("_T")


class Tier(Protocol):
    """A place for pages: `HostTier`, `DiskTier`. Its methods may be called from any thread."""

    name: str
    counts: TierCounts

    @property
    def num_pages(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __contains__(self, key: bytes) -> bool:
        """Whether a page is here, as far as memory knows: this is asked between two steps."""

    def refresh(self) -> None:
        """Finds out what other processes have stored or removed."""

    def store(self, record: PageRecord) -> bool: ...
    def load(self, key: bytes, fingerprint: Fingerprint, tokens: np.ndarray, layout: PageLayout) -> PageData | None: ...
    def touch(self, keys: Sequence[bytes]) -> int: ...
    def drop_where(self, predicate: Callable[[Fingerprint], bool]) -> int: ...


class Lane:
    """A tier, its two threads, what waits for them and how fast it gave pages back."""

    def __init__(self, tier: Tier, costs: TransferCosts, page_bytes: int, clock: Callable[[], float]):
        believed = costs.load_bytes_per_s.get(tier.name, costs.other_bytes_per_s)
        self.tier, self.name = tier, tier.name
        self.stores = ThreadPoolExecutor(1, f"jaxkv-store-{tier.name}")
        self.loads = ThreadPoolExecutor(1, f"jaxkv-load-{tier.name}")
        self._clock, self._rate = clock, Rate(believed, page_bytes / 8, costs.decay, costs.half_life_s)
        self._pending: collections.Counter[ThreadPoolExecutor] = collections.Counter()
        self._lock = threading.Lock()
        self._refresh_at_s, self._refreshing = -math.inf, False

    def __contains__(self, key: bytes) -> bool:
        return key in self.tier

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

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Notes what a load brought, and how long it took: one that brings nothing after a long time makes the tier slow, too."""
        if seconds > 0:
            with self._lock:
                self._rate.measured(nbytes, seconds, self._clock())

    @property
    def bytes_per_s(self) -> float:
        """How fast loads were of late."""
        with self._lock:
            return self._rate.bytes_per_s(self._clock())

    @property
    def waits_s(self) -> float:
        """Seconds until a load that is asked for now would begin."""
        return self.pending_bytes(self.loads) / self.bytes_per_s

    def refresh(self, safely: Callable[..., Any]) -> None:
        """Has the tier look for what others stored, on the loading thread, if the last time is long enough ago."""
        with self._lock:
            if self._refreshing or self._clock() < self._refresh_at_s:
                return
            self._refreshing = True
        self.submit(self.loads, 0, self._refresh, safely)

    def _refresh(self, safely: Callable[..., Any]) -> None:
        started_s = self._clock()
        safely(self, None, self.tier.refresh)
        now_s = self._clock()
        with self._lock:
            self._refreshing = False
            self._refresh_at_s = now_s + max(_REFRESH_S, (now_s - started_s) / _REFRESH_SHARE)

    def _done(self, executor: ThreadPoolExecutor, nbytes: int) -> None:
        with self._lock:
            self._pending[executor] -= nbytes
