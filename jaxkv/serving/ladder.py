"""The ladder: what new work has to put up with while pages are short. Work that runs is left alone on every rung."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Rung:
    """What one level of pressure changes. The default is level 0: nothing."""

    name: str = "normal"
    longest_context_tokens: int | None = None  # a new request whose prompt + max_new_tokens is longer is refused; None: no limit
    ttl_factor: float = 1.0  # times of reusable pages in the prefix cache are multiplied by this
    queues_only: bool = False  # new requests wait, none starts


def default_rungs(max_context_tokens: int) -> tuple[Rung, ...]:
    """Returns levels 0 to 3; long is more than a quarter of the longest. Each level keeps what those below it do."""
    longest = max(1, max_context_tokens // 4)
    return (
        Rung(),
        Rung("reject new long contexts", longest),
        Rung("shorten prefix TTLs", longest, ttl_factor=0.25),
        Rung("queue until recovery", longest, ttl_factor=0.25, queues_only=True),
    )


@dataclasses.dataclass(frozen=True)
class LadderConfig:
    """Thresholds, shares of the usable pages, one a rung above level 0. An upper one over 1 is never reached.

    A full batch is no emergency: where it alone takes most of the pool, set `up` higher, or have no ladder.
    """

    up: tuple[float, ...] = (0.85, 0.92, 0.98)
    down: tuple[float, ...] = (0.75, 0.85, 0.92)
    dwell_s: float = 1.0  # how long pressure must stay below a rung's lower threshold

    def __post_init__(self):
        up, down = self.up, self.down
        if len(up) != len(down):
            raise ValueError(f"as many lower thresholds as upper ones are wanted, got {up=}, {down=}")
        if any(not 0 < low < high for low, high in zip(down, up, strict=True)):
            raise ValueError(f"each rung's lower threshold must be over 0 and below its upper one, got {up=}, {down=}")
        if list(up) != sorted(up) or list(down) != sorted(down):
            raise ValueError(f"thresholds must not fall from rung to rung, got {up=}, {down=}")
        if not self.dwell_s >= 0:
            raise ValueError(f"dwell_s must not be negative, got {self.dwell_s}")


class Ladder:
    """Finds the level from the pressure, with hysteresis.

        pressure   >= up[i]                     at least level i + 1, at once
                   >= down[i]                   as it was
                   <  down[i] for dwell_s       at most level i

    Deterministic in the calls of `update` and the clock, and monotone: higher pressure never gives a lower level.
    """

    def __init__(self, config: LadderConfig, rungs: Sequence[Rung], clock: Callable[[], float]):
        """`rungs`: of an `Admission`; `clock`: monotonic seconds. ValueError unless each rung but level 0 has a threshold."""
        if len(rungs) != len(config.up) + 1:
            raise ValueError(f"{len(rungs)} rungs, level 0 included, want {len(rungs) - 1} thresholds, got up={config.up}")
        self.config, self.rungs = config, tuple(rungs)
        self._clock = clock
        self._level = 0
        self._low_since_s: list[float | None] = [None] * len(config.up)  # since when pressure is below each lower threshold

    @property
    def level(self) -> int:
        """0 without pressure, up to 3 with the default rungs."""
        return self._level

    @property
    def rung(self) -> Rung:
        """What the level means."""
        return self.rungs[self._level]

    def update(self, pressure: float) -> int:
        """Takes in the share of usable pages that are active or held, and returns the level from now on."""
        if not pressure >= 0:
            raise ValueError(f"{pressure=} must be a share of the usable pages, 0 or more")
        now_s, level = self._clock(), 0
        for i, (up, down) in enumerate(zip(self.config.up, self.config.down, strict=True)):
            since_s = self._low_since_s[i]
            since_s = None if pressure >= down else now_s if since_s is None else since_s
            self._low_since_s[i] = since_s
            stays = self._level > i and (since_s is None or now_s - since_s < self.config.dwell_s)
            if pressure >= up or stays:
                level = i + 1
        self._level = level
        return level
