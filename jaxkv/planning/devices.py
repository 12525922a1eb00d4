"""Chips as they are bought: memory, bandwidth and peak from data sheets, and rows of the user's own.

The kernels' table (`pallas_kernels.devices`) has the devices that something was compiled for, one row a jax device. A plan counts
chips, so a TPU7x is two of those devices here, and it needs rows for chips that no kernel was built for yet.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.planning import yaml_file
from jaxkv.planning.units import GB, GIB
from pallas_kernels.devices import DEVICES


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip. `hbm_gbps` is 10^9 bytes a second, `matrix_tflops_bf16` dense; a chip may be several jax devices."""

    name: str
    platform: str  # "tpu", "gpu" or "cpu": decides the page size and how a pool is laid out
    memory_bytes: int
    hbm_gbps: float
    matrix_tflops_bf16: float
    devices_per_chip: int = 1

    def __post_init__(self):
        if self.platform not in ("tpu", "gpu", "cpu"):
            raise ValueError(f"{self.name}: platform must be tpu, gpu or cpu, got {self.platform!r}")
        for field in ("memory_bytes", "hbm_gbps", "matrix_tflops_bf16", "devices_per_chip"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
                raise ValueError(f"{self.name}: {field} must be a positive number, got {value!r}")
        if not isinstance(self.devices_per_chip, int):
            raise ValueError(f"{self.name}: devices_per_chip must be a whole number, got {self.devices_per_chip!r}")

    @property
    def ridge_flop_per_byte(self) -> float:
        """FLOP per byte above which a kernel is compute-bound, and bandwidth-bound below."""
        return self.matrix_tflops_bf16 * 1e12 / (self.hbm_gbps * 1e9)


_JAX_DEVICES_PER_CHIP = {"tpu7x": 2}


def _rows() -> dict[str, Chip]:
    rows = {}
    for spec in DEVICES.values():
        if spec.hbm_gbps:
            n = _JAX_DEVICES_PER_CHIP.get(spec.name, 1)
            figures = (spec.hbm_bytes * n, spec.hbm_gbps * n, spec.matrix_tflops_bf16 * n)
            rows[spec.name] = Chip(spec.name, spec.platform, *figures, n)
    return rows | {"b200": Chip("b200", "gpu", 180 * GB, 8000, 2250)}


CHIPS: Mapping[str, Chip] = _rows()
_KEYS = ("platform", "memory_gb", "memory_gib", "hbm_gbps", "matrix_tflops_bf16", "devices_per_chip")


def read_chips(path: str | Path) -> dict[str, Chip]:
    """Returns the rows of a YAML file by name, with those of the table that it does not replace by one of that name in any case.

    A row is `my-card: {memory_gb: 48, hbm_gbps: 864, matrix_tflops_bf16: 181}`, with `memory_gib` instead of `memory_gb` where
    that is what one knows, and optionally `platform` (gpu) and `devices_per_chip` (1).
    """
    own = {name: _chip(name, row, f"{path}: {name}") for name, row in yaml_file.read_mapping(path).items()}
    return {name: row for name, row in CHIPS.items() if _find(name, own) is None} | own


def _chip(name: str, row: Any, where: str) -> Chip:
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be a mapping of {', '.join(_KEYS)}, got {row!r}")
    for key in row:
        if key not in _KEYS:
            raise ValueError(f"{where}: unknown key {key!r}; known are {', '.join(_KEYS)}")
    if ("memory_gb" in row) == ("memory_gib" in row):
        raise ValueError(f"{where}: give memory_gb (10^9 bytes) or memory_gib (2^30 bytes), one of the two")
    for key in ("hbm_gbps", "matrix_tflops_bf16"):
        if key not in row:
            raise ValueError(f"{where}: {key} is missing")
    rest = {key: value for key, value in row.items() if not key.startswith("memory_")}
    return Chip(**({"name": name, "platform": "gpu", "memory_bytes": memory_bytes(where, **_memory(row))} | rest))


def _memory(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key[7:]: row[key] for key in ("memory_gb", "memory_gib") if key in row}


def memory_bytes(where: str, gb: float | None = None, gib: float | None = None) -> int:
    """Returns bytes of a size given in one of two units."""
    value, unit = (gb, GB) if gb is not None else (gib, GIB)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ValueError(f"{where}: the memory must be a positive number, got {value!r}")
    return round(value * unit)


def chip(name: str, rows: Mapping[str, Chip] = CHIPS) -> Chip:
    """Returns the row of that name; if there is none, of that name in another case.

    Raises:
      ValueError: no such row; says how to give one.
    """
    if found := _find(name, rows):
        return found
    near = difflib.get_close_matches(name.lower(), rows, n=2)
    hint = f": did you mean {' or '.join(near)}? If not, there are" if near else "; there are"
    raise ValueError(
        f"no row for device {name!r}{hint} {', '.join(rows)}. Give your own with --memory_gb, --hbm_gbps and --tflops_bf16,"
        " or a file of rows with --device_file"
    )


def _find(name: str, rows: Mapping[str, Chip]) -> Chip | None:
    return rows.get(name) or next((row for other, row in rows.items() if other.lower() == name.lower()), None)


def described(
    name: str,
    rows: Mapping[str, Chip] = CHIPS,
    *,
    memory_gb: float | None = None,
    memory_gib: float | None = None,
    hbm_gbps: float | None = None,
    tflops: float | None = None,
) -> Chip:
    """Returns a row with some figures replaced; all of them make a chip that no table needs to know.

    Raises:
      ValueError: no such row and figures missing, or the memory in two units.
    """
    if memory_gb is not None and memory_gib is not None:
        raise ValueError(f"{memory_gb=} and {memory_gib=}: give the memory once, in GB (10^9 bytes) or GiB (2^30 bytes)")
    given: dict[str, Any] = {"hbm_gbps": hbm_gbps, "matrix_tflops_bf16": tflops}
    if memory_gb is not None or memory_gib is not None:
        given["memory_bytes"] = memory_bytes(name, memory_gb, memory_gib)
    given = {key: value for key, value in given.items() if value is not None}
    if len(given) == 3 and _find(name, rows) is None:
        return Chip(name=name, platform="cpu" if name == "cpu" else "gpu", **given)
    if given and _find(name, rows) is None:
        flags = {"memory_bytes": "--memory_gb", "hbm_gbps": "--hbm_gbps", "matrix_tflops_bf16": "--tflops_bf16"}
        missing = " and ".join(flag for key, flag in flags.items() if key not in given)
        raise ValueError(f"no row for device {name!r}: to describe it give {missing}, too")
    return dataclasses.replace(chip(name, rows), **given)
