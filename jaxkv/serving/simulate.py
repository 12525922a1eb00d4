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
from jaxkv.serving.tiers import Run
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

    def read_pages(self, pages: Sequence[int]) -> int:
        return len(pages)

    def page_data(self, ticket: int) -> list[PageData]:
        return []

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


class SimulatedTiers:
    """`jaxkv.serving.tiers.Tiers` without pages."""

    def __init__(self, tiers: Sequence[SimulatedTier], page_bytes: int, clock: SimulatedClock):
        self.layout = _Layout(page_bytes)
        self._clock = clock
        self._tiers = {tier.name: tier for tier in tiers}
        self._keys: dict[str, collections.OrderedDict[bytes, None]] = {tier.name: collections.OrderedDict() for tier in tiers}
        self._free_at_s = dict.fromkeys(self._tiers, 0.0)
        self.loaded_pages = dict.fromkeys(self._tiers, 0)

    def how_many(self, keys: Sequence[bytes]) -> Run:
        runs = [
            Run(name, next((i for i, key in enumerate(keys) if key not in held), len(keys))) for name, held in self._keys.items()
        ]
        best = max(runs, key=lambda run: run.num_pages)
        return best if best.num_pages else Run(None, 0)

    def worth_restoring(self, num_tokens: int, nbytes: int, recompute_s_per_token: float, tier: str) -> bool:
        return self._seconds(nbytes, tier) < num_tokens * recompute_s_per_token

    def load_async(self, keys: Sequence[bytes], fingerprint, tokens, tier: str) -> _Load:
        for key in reversed(keys):
            self._keys[tier].move_to_end(key)
        self._free_at_s[tier] = self._clock() + self._seconds(len(keys) * self.layout.nbytes, tier)
        self.loaded_pages[tier] += len(keys)
        return _Load(self._clock, self._free_at_s[tier], len(keys))

    def store(self, keys: Sequence[bytes]) -> None:
        """Takes pages, the least recently used ones leave."""
        for name, held in self._keys.items():
            for key in keys:
                held[key] = None
                held.move_to_end(key)
            while len(held) > self._tiers[name].capacity_pages:
                held.popitem(last=False)

    def bytes_per_s(self) -> dict[str, dict[str, float]]:
        return {name: {"load": tier.bytes_per_s, "store": tier.bytes_per_s} for name, tier in self._tiers.items()}

    def _seconds(self, nbytes: int, tier: str) -> float:
        """Until so many bytes have come, behind those that are on their way."""
        return max(self._free_at_s[tier] - self._clock(), 0.0) + nbytes / self._tiers[tier].bytes_per_s


class SimulatedRestores(Restores):
    """Restores over simulated tiers."""

    def wait(self) -> None:
        loads: list[Any] = [load.future for load in self._loads.values()]
        self._tiers._clock.advance_to(min(load.at_s for load in loads))  # type: ignore[attr-defined]

    def _store(self, pages: list[Evicted]) -> bool:
        self._tiers.store([one.key for one in pages])  # type: ignore[attr-defined]
        return True
