"""A device and tiers that only take time: what the scheduler drives for planning, and for tests of its own speed.

Every dispatch takes what a cost model says on a device that does one thing after another; the clock stands still unless somebody
waits. Tokens are all 1, and nobody stops before the limit. A tier is a list of names, with a capacity and a bandwidth.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.sample_step import Sampled
from jaxkv.serving.page_data import PageData
from jaxkv.serving.page_states import Evicted
from jaxkv.serving.restore import Restores
from jaxkv.serving.runner import Chunk
from jaxkv.serving.tier_choice import Run, best_run, takers
from jaxkv.steps import Emitted


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds of one device. The defaults are those of an 8B model in bfloat16 on one H100, from its data sheet (docs/serving.md)."""

    s_per_prefill_token: float = 2 * 8.03e9 / (989e12 * 0.5)  # products at half the peak
    s_per_decode_step: float = 16.06e9 / (3350e9 * 0.8)  # every weight read once, at 80 % of the bandwidth
    s_per_cached_token: float = 131_072 / (3350e9 * 0.8)  # keys and values of one token, read by a decode step
    s_per_dispatch: float = 0.0  # on top, of the host and of launching


class SimulatedClock:
    """Seconds that pass only when told to."""

    def __init__(self, now_s: float = 0.0):
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, then_s: float) -> None:
        """Moves on; a time that has passed changes nothing."""
        self.now_s = max(self.now_s, then_s)


class SimulatedRunner:
    """A runner without a model."""

    def __init__(self, num_slots: int, clock: SimulatedClock, costs: CostModel = CostModel()):
        self.num_slots, self._clock, self._costs = num_slots, clock, costs
        self._free_at_s = 0.0  # when the device has done all it was asked for
        self._lengths = np.zeros(num_slots, np.int64)
        self._left = np.zeros(num_slots, np.int64)  # tokens that a row still emits
        self._live = np.zeros(num_slots, bool)
        self.busy_s = 0.0
        self.prefill_tokens = self.decode_steps = self.decode_tokens = 0

    def seat(self, row: int, pages: Sequence[int], options, cached: np.ndarray) -> None:
        if options is not None:
            self._left[row] = options

    def set_pages(self, row: int, pages: Sequence[int], first: int) -> None:
        pass

    def clear(self, row: int) -> None:
        self._live[row] = False

    def prefill(self, chunks: Sequence[Chunk]) -> tuple[float, list[bool]]:
        tokens = sum(chunk.tokens.size for chunk in chunks)
        # Each token attends to those before it; as bytes read, that is what was cached, once a chunk.
        cached = sum(chunk.start for chunk in chunks)
        self.prefill_tokens += tokens
        self._work(tokens * self._costs.s_per_prefill_token + cached * self._costs.s_per_cached_token)
        return self._free_at_s, [True] * len(chunks)

    def read_prefill(self, ticket: tuple[float, list[bool]]) -> list[bool]:
        done_at_s, sound = ticket
        self._clock.advance_to(done_at_s)
        return sound

    def copy_pages(self, src, dst, row_src, row_dst) -> None:
        pass

    def begin(self, rows: Sequence[int], lengths: Sequence[int]) -> tuple[float, Emitted]:
        self._lengths[list(rows)] = lengths
        emits = np.zeros(self.num_slots, bool)
        emits[list(rows)] = True
        return self._emit(emits)

    def decode(self) -> tuple[float, Emitted]:
        live = self._live.copy()
        self.decode_steps += 1
        self.decode_tokens += int(live.sum())
        self._lengths[live] += 1
        self._work(self._costs.s_per_decode_step + float(self._lengths[live].sum()) * self._costs.s_per_cached_token)
        return self._emit(live)

    def read(self, ticket: tuple[float, Emitted]) -> Emitted:
        done_at_s, emitted = ticket
        self._clock.advance_to(done_at_s)
        return emitted

    def read_pages(self, pages: Sequence[int]) -> Any:
        raise NotImplementedError("simulated pages hold nothing: SimulatedRestores moves names")

    def page_data(self, ticket: Any) -> list[PageData]:
        raise NotImplementedError("simulated pages hold nothing: SimulatedRestores moves names")

    def write_pages(self, pages: Sequence[int], data: Sequence[PageData]) -> None:
        pass

    def _emit(self, emits: np.ndarray) -> tuple[float, Emitted]:
        self._left[emits] -= 1
        self._live = (self._live | emits) & (self._left > 0)
        B = self.num_slots
        nothing: Any = np.zeros((1, B), bool)
        tokens: Any = np.ones((1, B), np.int32)
        valid: Any = emits[None]
        return self._free_at_s, Emitted(Sampled(tokens, nothing, nothing, nothing, nothing, nothing), valid)

    def _work(self, seconds: float) -> None:
        seconds += self._costs.s_per_dispatch
        self.busy_s += seconds
        self._free_at_s = max(self._free_at_s, self._clock()) + seconds


@dataclasses.dataclass(frozen=True)
class SimulatedTier:
    """How much a tier holds, and how fast it gives pages back."""

    name: str
    capacity_pages: int
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class _Layout:
    nbytes: int  # of a page


class _Load:
    """Pages that will have arrived at a time."""

    def __init__(self, clock: SimulatedClock, at_s: float, count: int):
        self._clock, self.at_s, self._count = clock, at_s, count

    def done(self) -> bool:
        return self._clock() >= self.at_s

    def result(self) -> list[None]:
        return [None] * self._count


class _Lane:
    """A tier's keys, the least recently used first, and when its link is free again."""

    def __init__(self, tier: SimulatedTier, clock: SimulatedClock):
        self.name, self.tier, self._clock = tier.name, tier, clock
        self.keys: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self.free_at_s = 0.0
        self.loaded_pages = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self.keys

    @property
    def bytes_per_s(self) -> float:
        return self.tier.bytes_per_s

    @property
    def waits_s(self) -> float:
        return max(self.free_at_s - self._clock(), 0.0)


class SimulatedTiers:
    """`jaxkv.serving.tiers.Tiers` without pages: what it decides comes from the same `tier_choice`."""

    pages_per_store = 1 << 30

    def __init__(self, tiers: Sequence[SimulatedTier], page_bytes: int, clock: SimulatedClock):
        self.layout = _Layout(page_bytes)
        self._clock = clock
        self._lanes = {tier.name: _Lane(tier, clock) for tier in tiers}

    @property
    def loaded_pages(self) -> dict[str, int]:
        """Pages that each tier gave back."""
        return {name: lane.loaded_pages for name, lane in self._lanes.items()}

    def __contains__(self, key: bytes) -> bool:
        return any(key in lane for lane in self._lanes.values())

    def all_have(self, key: bytes) -> bool:
        return False  # storing what is there makes it the last to leave, and costs nothing

    def refresh(self) -> None:
        pass

    def how_many(self, keys: Sequence[bytes], recompute_s_per_page: float) -> Run:
        return best_run(self._lanes.values(), keys, self.layout.nbytes, recompute_s_per_page)

    def takers(self, num_pages: int, recompute_s_per_page: float) -> list[str]:
        return takers(self._lanes.values(), self.layout.nbytes, recompute_s_per_page)

    def load_async(self, keys: Sequence[bytes], fingerprint, tokens, tier: str) -> _Load:
        lane = self._lanes[tier]
        for key in reversed(keys):
            lane.keys.move_to_end(key)
        lane.free_at_s = self._clock() + lane.waits_s + len(keys) * self.layout.nbytes / lane.bytes_per_s
        lane.loaded_pages += len(keys)
        return _Load(self._clock, lane.free_at_s, len(keys))

    def store(self, keys: Sequence[bytes], takers: Sequence[str]) -> None:
        """Takes pages, the least recently used ones leave."""
        for lane in (self._lanes[name] for name in takers):
            for key in keys:
                lane.keys[key] = None
                lane.keys.move_to_end(key)
            while len(lane.keys) > lane.tier.capacity_pages:
                lane.keys.popitem(last=False)


class SimulatedRestores(Restores):
    """Restores over simulated tiers."""

    def wait(self) -> None:
        loads: list[Any] = [load.future for load in self._loads.values()]
        self._tiers._clock.advance_to(min(load.at_s for load in loads))  # type: ignore[attr-defined]

    def _copy(self, pages: list[Evicted], takers: list[str]) -> None:
        self._tiers.store([one.key for one in pages], takers)  # type: ignore[attr-defined]
