"""Which module does a job: the one table of implementations. A backend goes by deleting its row and its folder."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.devices import DeviceSpec, default_device, present_spec


@dataclasses.dataclass(frozen=True)
class _Backend:
    """For each job the module that has a function of that name."""

    decode: str
    prefill: str
    write: str
    platform: str | None = None  # the only one it compiles for
    check: str | None = None  # what its kernels ask of a call beyond `validate`


_XLA_WRITE = "pallas_kernels.xla_write"
_BACKENDS = {
    "xla": _Backend("pallas_kernels.xla", "pallas_kernels.xla", _XLA_WRITE),
    "pallas_tpu": _Backend(
        "pallas_kernels.tpu.decode", "pallas_kernels.tpu.prefill", "pallas_kernels.tpu.write", "tpu", "pallas_kernels.tpu.check"
    ),
    # XLA's scatter is one kernel on a GPU: nothing to gain by another.
    "pallas_gpu": _Backend("pallas_kernels.gpu.decode", "pallas_kernels.gpu.triton_prefill", _XLA_WRITE, platform="gpu"),
}
REFERENCE = "reference"
IMPLEMENTATIONS = (REFERENCE, *_BACKENDS)
_BY_PLATFORM = {"cpu": "xla", "tpu": "pallas_tpu", "gpu": "pallas_gpu"}
_OLDEST_GPU = (8, 0)  # bf16 products and asynchronous copies to shared memory


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation that can run here, and the device it is built for."""

    name: str
    device: DeviceSpec
    interpret: Any = False  # False, True or a pltpu.InterpretParams

    @property
    def is_pallas(self) -> bool:
        return self.name in _BACKENDS and _BACKENDS[self.name].platform is not None

    @property
    def has_check(self) -> bool:
        return self.is_pallas and _BACKENDS[self.name].check is not None

    def function(self, job: str) -> Callable:
        """Returns the function that does `job`: "decode", "prefill", "write", or "check" where there is one.

        Raises:
          ValueError: it cannot be imported here.
        """
        module = getattr(_BACKENDS[self.name], job)
        try:
            return getattr(importlib.import_module(module), job)
        except ImportError as error:
            raise ValueError(f"implementation {self.name!r} has no {job} that can be imported here ({module}: {error})") from error


def choose(implementation: str | None, interpret, device: DeviceSpec | None) -> Choice:
    """Returns the implementation to run: the one named, or the one of the platform.

    Raises:
      ValueError: an unknown name, one that cannot run on the platform, or a present device that nobody described.
      TypeError: `device` is not a DeviceSpec.
    """
    if device is not None and not isinstance(device, DeviceSpec):
        raise TypeError(f"device must be a DeviceSpec or None, got {type(device).__name__}; device_spec(kind) returns one by name")
    platform = device.platform if device else jax.default_backend()
    if implementation is None:
        implementation = _BY_PLATFORM.get(platform, "xla")
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation {implementation!r} is not one of {known} (or None: pick by platform)")
    only = _BACKENDS[implementation].platform if implementation in _BACKENDS else None
    if only is None:
        if interpret:
            raise ValueError(f"interpret is for Pallas kernels, and implementation {implementation!r} has none; name a Pallas one")
        return Choice(implementation, device or default_device("cpu"))
    if platform != only:
        if not interpret:
            raise ValueError(
                f"implementation {implementation!r} compiles for {only} only, not for {platform}: interpret=True runs it here, and "
                f"device=DEVICES[...] names a {only} to compile for ahead of time"
            )
        device = default_device(only)
    device = device or present_spec(jax.devices()[0])
    if only == "gpu" and (device.compute_capability or _OLDEST_GPU) < _OLDEST_GPU:
        raise ValueError(
            f"implementation {implementation!r} needs compute capability 8.0, and {device.name} has {device.compute_capability}"
        )
    return Choice(implementation, device, interpret)
