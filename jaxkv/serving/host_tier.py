"""Pages in host memory, as they are or in int8."""

from __future__ import annotations

import collections
import dataclasses
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.page_data import PageData, PageLayout, PageRecord, mismatch, to_bytes
from jaxkv.serving.page_int8 import Int8Page, applies_to, from_int8, to_int8
from jaxkv.serving.tier_counts import TierCounts


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    fingerprint: Fingerprint
    tokens: np.ndarray
    layout: PageLayout
    page: PageData | Int8Page
    checksum: int
    nbytes: int


class HostTier:
    """The least recently used pages leave when capacity_bytes are full. Every method may be called from any thread.

    Args:
      capacity_bytes: of arrays held.
      store_dtype: None keeps pages bit by bit; "int8" keeps float pages in int8 (`page_int8`), 8-bit ones as they are.

    Raises:
      ValueError: a negative capacity, or another store_dtype.
    """

    name = "host"

    def __init__(self, capacity_bytes: int, store_dtype: Literal["int8"] | None = None):
        if capacity_bytes < 0:
            raise ValueError(f"{capacity_bytes=} must not be negative")
        if store_dtype not in (None, "int8"):
            raise ValueError(f"{store_dtype=} must be None (as it is) or 'int8'")
        self.capacity_bytes, self.store_dtype = capacity_bytes, store_dtype
        self.counts = TierCounts()
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[bytes, _Entry] = collections.OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of arrays held."""
        return self._nbytes

    @property
    def num_pages(self) -> int:
        """Pages held."""
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def refresh(self) -> None:
        """Nobody else stores here."""

    def store(self, record: PageRecord) -> bool:
        """Copies a page in, if it is not there already; returns whether it is now."""
        if self.touch([record.key]):
            return True
        entry = self._entry(record)
        if entry is None:
            self.counts.failure("not_finite")
            return False
        if entry.nbytes > self.capacity_bytes:
            self.counts.failure("too_large")
            return False
        with self._lock:
            self._pop(record.key)
            while self._nbytes + entry.nbytes > self.capacity_bytes:
                self._pop(next(iter(self._entries)))
                self.counts.event("evict")
            self._entries[record.key] = entry
            self._nbytes += entry.nbytes
        self.counts.event("store")
        return True

    def load(self, key: bytes, fingerprint: Fingerprint, tokens: np.ndarray, layout: PageLayout) -> PageData | None:
        """The page of these tokens under this fingerprint, its arrays read-only; None for any doubt, counted by its reason."""
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            self.counts.miss("absent")
            return None
        reason = mismatch(entry, fingerprint, tokens, layout)
        if reason is None and _checksum(entry.page) != entry.checksum:
            reason = "checksum"
            self.drop(key)
        if reason is not None:
            self.counts.miss(reason)
            return None
        data = from_int8(entry.page, layout) if isinstance(entry.page, Int8Page) else entry.page
        self.touch([key])
        self.counts.event("hit")
        return data

    def touch(self, keys: Sequence[bytes]) -> int:
        """Makes the pages of one chain, first page first, the last to leave, the deepest before the others; returns how many
        of them are here."""
        with self._lock:
            here = [key for key in reversed(keys) if key in self._entries]
            for key in here:
                self._entries.move_to_end(key)
        return len(here)

    def drop(self, key: bytes) -> bool:
        """Forgets a page; returns whether it was here."""
        with self._lock:
            return self._pop(key)

    def drop_where(self, predicate: Callable[[Fingerprint], bool]) -> int:
        """Forgets every page whose fingerprint the predicate is true for; returns how many."""
        with self._lock:
            keys = [key for key, entry in self._entries.items() if predicate(entry.fingerprint)]
            for key in keys:
                self._pop(key)
        return len(keys)

    def _pop(self, key: bytes) -> bool:
        entry = self._entries.pop(key, None)
        self._nbytes -= entry.nbytes if entry else 0
        return entry is not None

    def _entry(self, record: PageRecord) -> _Entry | None:
        """The record as it is held; None for a page that int8 cannot hold."""
        data = record.data
        if self.store_dtype == "int8" and applies_to(data.layout):
            page: PageData | Int8Page | None = to_int8(data)
            if page is None:
                return None
        else:
            page = PageData(*(np.array(array, order="C") for array in data.arrays))
        for array in page.arrays:
            array.flags.writeable = False
        nbytes = sum(array.nbytes for array in page.arrays)
        return _Entry(record.fingerprint, record.tokens.copy(), data.layout, page, _checksum(page), nbytes)


def _checksum(page: PageData | Int8Page) -> int:
    """Against stray writes into memory, not against an enemy: 1.6 GB/s where it was measured, SHA-256 0.7."""
    value = 0
    for array in page.arrays:
        value = zlib.crc32(to_bytes(array), value)
    return value
