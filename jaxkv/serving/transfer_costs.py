"""How fast a tier gives pages back: believed at first, then measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

_PRIOR_BYTES = 1 << 16  # what a belief weighs against measured transfers: little beside the first page


@dataclasses.dataclass(frozen=True)
class TransferCosts:
    """What loads are believed to cost before any was measured, and how measurements replace that.

    Raises:
      ValueError: a number that makes no sense.
    """

    load_bytes_per_s: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"host": 2e9, "disk": 2e8})
    other_bytes_per_s: float = 1e8  # of a tier that is not named above
    decay: float = 0.8  # what a measurement still weighs after the next one
    max_pending_bytes: int = 256 << 20  # of stores that wait for a tier; what comes beyond is not kept

    def __post_init__(self):
        rates = {**self.load_bytes_per_s, "other": self.other_bytes_per_s}
        if not all(rate > 0 for rate in rates.values()):
            raise ValueError(f"bytes per second must be positive, got {rates}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay} must be at least 0 and below 1")
        if self.max_pending_bytes < 0:
            raise ValueError(f"max_pending_bytes={self.max_pending_bytes} must not be negative")


class Rate:
    """Bytes a second over past transfers, each weighing `decay` of the next, and large ones more than small ones."""

    def __init__(self, believed_bytes_per_s: float, decay: float):
        self._believed, self._decay = believed_bytes_per_s, decay
        self._bytes = self._seconds = 0.0

    def measured(self, nbytes: int, seconds: float) -> None:
        """A transfer took so long."""
        self.fade()
        self._bytes, self._seconds = self._bytes + nbytes, self._seconds + seconds

    def fade(self) -> None:
        """Forgets a little of what was measured, in favour of what was believed."""
        self._bytes, self._seconds = self._bytes * self._decay, self._seconds * self._decay

    @property
    def bytes_per_s(self) -> float:
        """The estimate."""
        return (self._bytes + _PRIOR_BYTES) / (self._seconds + _PRIOR_BYTES / self._believed)
