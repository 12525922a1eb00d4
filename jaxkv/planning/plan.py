"""CapacityPlan: how one device's memory is divided, as the planner proposes it and the serving engine enforces it.

    memory = weights + activations + runtime_and_fragmentation + kv_budget + unassigned
    max_active_sequences * reserve_per_sequence + low_watermark <= kv_budget

All sizes are GiB (2^30 bytes) of one device. With data parallel replicas every replica has this plan; with tensor parallelism
every device of it has, and `reserve_per_sequence_gib` is what a sequence takes on that device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.planning import yaml_file
from jaxkv.planning.units import GIB, count

_ROUNDING = 1e-9  # of the memory: sums of decimal fractions are not exact


class PlanError(ValueError):
    """A plan that does not add up. `largest` is the largest value that `field` may have, the rest as it is."""

    def __init__(self, message: str, field: str, largest: float):
        super().__init__(message)
        self.field, self.largest = field, largest


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    """One device's memory and what is admitted to it. `check()` tells whether it adds up."""

    memory_gib: float
    weights_gib: float
    activations_gib: float
    runtime_and_fragmentation_gib: float
    kv_budget_gib: float
    max_context_tokens: int  # a longer request is refused
    max_active_sequences: int
    reserve_per_sequence_gib: float  # set aside when a sequence is admitted
    low_watermark_gib: float = 0.0  # kept free for sequences that grow beyond their reserve

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, is_count = getattr(self, field.name), field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if is_count else int | float):
                kind = "a whole number" if is_count else "a number of GiB"
                raise ValueError(f"{field.name} must be {kind}, got {value!r}")
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name} must be finite and not negative, got {value}")
        for name in ("memory_gib", "max_context_tokens", "max_active_sequences", "reserve_per_sequence_gib"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def available_gib(self) -> float:
        """What weights, activations and runtime leave of the memory."""
        return self.memory_gib - self.weights_gib - self.activations_gib - self.runtime_and_fragmentation_gib

    @property
    def unassigned_gib(self) -> float:
        """What nothing was given to."""
        return self.available_gib - self.kv_budget_gib

    @property
    def committed_gib(self) -> float:
        """The reserves of all sequences and the low watermark."""
        return self.max_active_sequences * self.reserve_per_sequence_gib + self.low_watermark_gib

    @property
    def largest_active_sequences(self) -> int:
        """The most sequences whose reserves, with the low watermark, the KV budget holds."""
        room = self.kv_budget_gib - self.low_watermark_gib + _ROUNDING * self.memory_gib
        return max(0, math.floor(room / self.reserve_per_sequence_gib))

    @property
    def kv_budget_bytes(self) -> int:
        """The KV budget in bytes."""
        return int(self.kv_budget_gib * GIB)

    def check(self) -> CapacityPlan:
        """Returns the plan itself.

        Raises:
          PlanError: the parts exceed the memory, or the sequences the KV budget; with the numbers and the largest admissible value.
        """
        slack = _ROUNDING * self.memory_gib
        if self.unassigned_gib < -slack:
            parts = self.weights_gib + self.activations_gib + self.runtime_and_fragmentation_gib + self.kv_budget_gib
            largest = max(0.0, self.available_gib)
            way_out = f"kv_budget_gib may be at most {_n(largest)}" if largest else "nothing is left for KV: more or larger devices"
            raise PlanError(
                f"the plan does not add up: weights {_n(self.weights_gib)} + activations {_n(self.activations_gib)} + runtime and"
                f" fragmentation {_n(self.runtime_and_fragmentation_gib)} + KV budget {_n(self.kv_budget_gib)} = {_n(parts)} GiB"
                f" of a memory of {_n(self.memory_gib)} GiB; {way_out}",
                "kv_budget_gib",
                largest,
            )
        if self.committed_gib > self.kv_budget_gib + slack:
            raise PlanError(self._too_many(), "max_active_sequences", self.largest_active_sequences)
        return self

    def _too_many(self) -> str:
        reserved = self.max_active_sequences * self.reserve_per_sequence_gib
        most = self.largest_active_sequences
        way_out = f"at most {count(most)} {'is' if most == 1 else 'are'} admissible"
        if self.committed_gib <= self.available_gib:
            way_out += f" (or kv_budget_gib {_n(self.committed_gib)}: {_n(self.unassigned_gib)} GiB are unassigned)"
        return (
            f"the plan does not add up: max_active_sequences {self.max_active_sequences} * {_n(self.reserve_per_sequence_gib)} GiB"
            f" = {_n(reserved)} GiB, with the low watermark of {_n(self.low_watermark_gib)} GiB {_n(self.committed_gib)} GiB, more"
            f" than the KV budget of {_n(self.kv_budget_gib)} GiB; {way_out}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str = "the plan") -> CapacityPlan:
        """Returns the plan of such a mapping; ValueError for keys that are missing or unknown."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in given:
            if name not in fields:
                unit = " (sizes are in GiB, 2^30 bytes)" if name.endswith("_gb") else ""
                raise ValueError(f"{where}: unknown key {name!r}{unit}; known are {', '.join(fields)}")
        missing = [name for name, field in fields.items() if name not in given and field.default is dataclasses.MISSING]
        if missing:
            raise ValueError(f"{where}: {', '.join(missing)} missing")
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    @classmethod
    def read(cls, path: str | Path) -> CapacityPlan:
        """Returns the plan of a YAML file, not yet checked."""
        return cls.from_dict(yaml_file.read_mapping(path), str(path))

    def write(self, path: str | Path, about: str = "") -> None:
        """Writes the plan as YAML, with lines about where it comes from as a comment."""
        comment = "A jaxkv capacity plan: one device's memory in GiB (2^30 bytes)\nCheck it: scripts/plan_capacity.py --plan FILE"
        yaml_file.write_mapping(path, self.to_dict(), f"{comment}\n{about}")


def _n(value: float) -> str:
    """A number of GiB with up to two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
