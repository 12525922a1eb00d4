"""A device that only takes time: the scheduler's runner for planning and for tests of its own speed.

Every dispatch takes what a cost model says on a device that does one thing after another; the clock stands still unless somebody
waits. Tokens are all 1, and nobody stops before the limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.sample_step import Sampled
from jaxkv.serving.page_data import PageData
from jaxkv.serving.runner import Part
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

    def prefill(self, parts: Sequence[Part]) -> None:
        tokens = sum(part.tokens.size for part in parts)
        # Each token attends to those before it; as bytes read, that is what was cached, once a chunk.
        cached = sum(part.start for part in parts)
        self.prefill_tokens += tokens
        self._work(tokens * self._costs.s_per_prefill_token + cached * self._costs.s_per_cached_token)

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
