"""The devices that kernels are built for: what block sizes and validators need to know of each.

A kernel is told its device and never asks `jax.devices()`, so that the real compilers can check it on a machine without one.
Figures are of one jax device, which is the whole chip except on TPU7x, where a chip is two.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

_KIB, _MIB = 2**10, 2**20


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """One jax device. Memory in bytes, `hbm_gbps` in 10^9 bytes a second, `matrix_tflops_bf16` dense; 0: not known."""

    name: str
    platform: str  # "tpu", "gpu" or "cpu"
    hbm_bytes: int
    hbm_gbps: float
    matrix_tflops_bf16: float
    vmem_bytes: int = 0  # of one TensorCore
    smem_bytes: int = 0  # TPU: scalar memory of a core; GPU: the most shared memory one block may ask for
    num_cores: int = 1  # TensorCores, or streaming multiprocessors
    compute_capability: tuple[int, int] | None = None  # NVIDIA


# Bandwidth, peak and memory: data sheets. VMEM: jax's own table of TPUs. SMEM: libtpu's refusals (1 MiB); CUDA occupancy tables.
_SPECS = (
    DeviceSpec("v5e", "tpu", 16 * 10**9, 819, 197, 128 * _MIB, _MIB, 1),
    DeviceSpec("v5p", "tpu", 95 * 10**9, 2765, 459, 64 * _MIB, _MIB, 2),
    DeviceSpec("v6e", "tpu", 32 * 10**9, 1640, 918, 128 * _MIB, _MIB, 1),
    DeviceSpec("tpu7x", "tpu", 96 * 10**9, 3685, 1153.5, 64 * _MIB, _MIB, 1),  # half a chip
    DeviceSpec("a100", "gpu", 80 * 10**9, 2039, 312, 0, 163 * _KIB, 108, (8, 0)),
    DeviceSpec("h100", "gpu", 80 * 10**9, 3350, 989, 0, 227 * _KIB, 132, (9, 0)),
    DeviceSpec("h200", "gpu", 141 * 10**9, 4800, 989, 0, 227 * _KIB, 132, (9, 0)),
    DeviceSpec("cpu", "cpu", 0, 0, 0),
)
DEVICES: Mapping[str, DeviceSpec] = types.MappingProxyType({spec.name: spec for spec in _SPECS})

# How jax spells `Device.device_kind`, in lower case; GPUs add memory and form factor, so a prefix decides.
_KINDS = (
    ("tpu v5 lite", "v5e"),
    ("tpu v5e", "v5e"),
    ("tpu v5", "v5p"),
    ("tpu v6 lite", "v6e"),
    ("tpu v6e", "v6e"),
    ("tpu7x", "tpu7x"),
    ("tpu v7x", "tpu7x"),
    ("nvidia a100", "a100"),
    ("nvidia h100", "h100"),
    ("nvidia h200", "h200"),
    ("cpu", "cpu"),
)
# What a kernel is built for where nobody said, as an interpreted one: the least of each figure among the rows of a platform, and a
# name of its own, under which nothing was tuned.
_DEFAULTS = {
    "tpu": DeviceSpec("tpu", "tpu", 16 * 10**9, 819, 197, 64 * _MIB, _MIB, 1),
    "gpu": DeviceSpec("gpu", "gpu", 80 * 10**9, 2039, 312, 0, 163 * _KIB, 108, (8, 0)),
    "cpu": DEVICES["cpu"],
}
# The most shared memory a block may ask for, by compute capability (CUDA's occupancy tables).
_SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99, (12, 1): 99}


def device_spec(device_kind: str) -> DeviceSpec:
    """Returns the row for a `jax.Device.device_kind`, such as "TPU v5 lite" or "NVIDIA H200"; its own short name works too.

    Raises:
      ValueError: an unknown device; the caller may pass a DeviceSpec of its own instead.
    """
    kind = device_kind.lower()
    if kind in DEVICES:
        return DEVICES[kind]
    for prefix, name in _KINDS:
        if kind.startswith(prefix):
            return DEVICES[name]
    known = ", ".join(DEVICES)
    raise ValueError(f"no DeviceSpec for {device_kind!r}; known are {known}. Pass device=DeviceSpec(...) with its figures")


def present_spec(device) -> DeviceSpec:
    """Returns the row of a `jax.Device`; for an NVIDIA GPU without one, what it says of itself: its figures are never another's.

    Raises:
      ValueError: a device that is neither known nor says enough.
    """
    try:
        return device_spec(device.device_kind)
    except ValueError:
        parts = str(getattr(device, "compute_capability", "")).split(".")
        if device.platform != "gpu" or len(parts) != 2 or not all(part.isdigit() for part in parts):
            raise
    capability = int(parts[0]), int(parts[1])
    return DeviceSpec(
        "-".join(device.device_kind.lower().split()), "gpu", hbm_bytes=0, hbm_gbps=0, matrix_tflops_bf16=0,
        smem_bytes=_SHARED_KIB.get(capability, 48 if capability < (8, 0) else 99) * _KIB,
        num_cores=getattr(device, "core_count", None) or 1, compute_capability=capability,
    )  # fmt: skip


def default_device(platform: str) -> DeviceSpec:
    """Returns the device that a platform's kernels are built for where there is none: interpreted, or ahead of time."""
    return _DEFAULTS[platform]
