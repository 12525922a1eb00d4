"""How fast a tier gives pages back: believed at first, then measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class TransferCosts:
    """What loads are believed to cost before any was measured, and how measurements replace that.

    Raises:
      ValueError: a number that makes no sense.
    """

    load_bytes_per_s: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"host": 2e9, "disk": 2e8})
    other_bytes_per_s: float = 1e8  # of a tier that is not named above
    decay: float = 0.8  # what a measurement still weighs after the next one
    half_life_s: float = 10.0  # and after so much time half of that: a tier that was slow is tried again a minute or two later
    max_pending_bytes: int = 256 << 20  # of stores that wait for a tier; what comes beyond is not kept

    def __post_init__(self):
        rates = {**self.load_bytes_per_s, "other": self.other_bytes_per_s}
        if not all(rate > 0 for rate in rates.values()):
            raise ValueError(f"bytes per second must be positive, got {rates}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay} must be at least 0 and below 1")
        if not self.half_life_s > 0:
            raise ValueError(f"half_life_s={self.half_life_s} must be positive")
        if self.max_pending_bytes < 0:
            raise ValueError(f"max_pending_bytes={self.max_pending_bytes} must not be negative")


class Rate:
    """Bytes a second over past transfers, each weighing `decay` of the next, half as much each `half_life_s`, and large ones more
    than small ones. Times are seconds of one clock; where it goes back nothing fades.

    Args:
      believed_bytes_per_s: before anything was measured, and long after.
      believed_bytes: what that weighs, as a transfer of so many: few beside the first one that is measured.
    """

    def __init__(self, believed_bytes_per_s: float, believed_bytes: float, decay: float, half_life_s: float):
        self._believed_bytes, self._believed_s = believed_bytes, believed_bytes / believed_bytes_per_s
        self._decay, self._half_life_s = decay, half_life_s
        self._bytes = self._seconds = self._then_s = 0.0

    def measured(self, nbytes: int, seconds: float, now_s: float) -> None:
        """A transfer that ended now took so long."""
        weight = self._decay * self._faded(now_s)
        self._bytes, self._seconds = self._bytes * weight + nbytes, self._seconds * weight + seconds
        self._then_s = now_s

    def bytes_per_s(self, now_s: float) -> float:
        """The estimate: what was measured, and the more of what was believed the longer ago that is."""
        weight = self._faded(now_s)
        return (self._bytes * weight + self._believed_bytes) / (self._seconds * weight + self._believed_s)

    def _faded(self, now_s: float) -> float:
        return 0.5 ** (max(now_s - self._then_s, 0.0) / self._half_life_s)
