"""What happened in a tier, counted: hits, misses and failures by reason."""

from __future__ import annotations

import collections
import threading


class TierCounts:
    """Counts in pages. Any thread may count and read.

    Attributes:
      events: "hit", "store", "evict", and what else a tier does.
      misses: loads that gave nothing, by reason: "absent", "fingerprint", "tokens", "layout", "checksum" ...
      failures: stores that kept nothing, by reason: "too_large", "disk_full", "read_only" ...
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.events: collections.Counter[str] = collections.Counter()
        self.misses: collections.Counter[str] = collections.Counter()
        self.failures: collections.Counter[str] = collections.Counter()

    def event(self, name: str, pages: int = 1) -> None:
        """Something that a tier is for."""
        with self._lock:
            self.events[name] += pages

    def miss(self, reason: str) -> None:
        """A load that gave nothing."""
        with self._lock:
            self.misses[reason] += 1

    def failure(self, reason: str, pages: int = 1) -> None:
        """Pages that were not kept."""
        with self._lock:
            self.failures[reason] += pages

    def as_dict(self) -> dict[str, dict[str, int]]:
        """A JSON-able copy of all counts at one moment."""
        with self._lock:
            return {name: dict(getattr(self, name)) for name in ("events", "misses", "failures")}
