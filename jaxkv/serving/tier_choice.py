"""Which tier gives pages back, if any: the one from which that saves the most time over computing them.

Pure arithmetic over what tiers say of themselves, so that real and simulated tiers decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class Source(Protocol):
    """A tier, as the choice sees it. Both answers come from memory: it is asked between two steps."""

    @property
    def name(self) -> str: ...

    def __contains__(self, key: bytes) -> bool: ...

    @property
    def bytes_per_s(self) -> float:
        """How fast it gives pages back."""

    @property
    def waits_s(self) -> float:
        """Seconds until a load that is asked for now would begin."""


class Run(NamedTuple):
    """Leading pages to load from one tier."""

    tier: str | None  # None: no tier has the first page and is fast enough
    num_pages: int
    saved_s: float  # by not computing them


NO_RUN = Run(None, 0, 0.0)


def run_length(source: Source, keys: Sequence[bytes]) -> int:
    """How many leading keys a tier has. O(that number)."""
    return next((i for i, key in enumerate(keys) if key not in source), len(keys))


def best_run(sources: Iterable[Source], keys: Sequence[bytes], page_bytes: int, recompute_s_per_page: float) -> Run:
    """The run of leading keys that saves the most time, of equal ones the earlier source's; `NO_RUN` where none saves any.

    A tier that is twice as fast but has half of the pages may save less than a slower one that has all, and the reverse.
    """
    best = NO_RUN
    for source in sources:
        if num_pages := run_length(source, keys):
            load_s = source.waits_s + num_pages * page_bytes / source.bytes_per_s
            saved_s = num_pages * recompute_s_per_page - load_s
            if saved_s > best.saved_s:
                best = Run(source.name, num_pages, saved_s)
    return best


def takers(sources: Iterable[Source], page_bytes: int, recompute_s_per_page: float) -> list[str]:
    """The tiers in which pages are worth storing: one would come back faster than it is computed, once nothing waits."""
    return [source.name for source in sources if page_bytes / source.bytes_per_s < recompute_s_per_page]
