"""What happened in a tier, counted: hits, misses and failures by reason."""

from __future__ import annotations

import collections
import threading

# Closed sets, since metrics have them as labels.
MISSES = (
    *("absent", "vanished", "fingerprint", "tokens", "layout", "checksum", "io"),
    # of files that are none of ours, or no longer (`page_file`)
    *("magic", "version", "truncated", "appended", "header_checksum", "header", "payload_checksum", "payload", "key"),
)
FAILURES = ("backlog", "too_large", "not_finite", "disk_full", "read_only", "no_folder", "io", "error")


class TierCounts:
    """Counts in pages. Any thread may count and read.

    Attributes:
      events: "hit", "store", "evict", and what else a tier does.
      misses: loads that gave nothing, by reason: one of MISSES.
      failures: stores that kept nothing, by reason: one of FAILURES.
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
        assert reason in MISSES, reason
        with self._lock:
            self.misses[reason] += 1

    def failure(self, reason: str, pages: int = 1) -> None:
        """Pages that were not kept."""
        assert reason in FAILURES, reason
        with self._lock:
            self.failures[reason] += pages

    def as_dict(self) -> dict[str, dict[str, int]]:
        """A JSON-able copy of all counts at one moment."""
        with self._lock:
            return {name: dict(getattr(self, name)) for name in ("events", "misses", "failures")}
