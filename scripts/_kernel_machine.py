"""The present device, and what it can do: bytes copied and operations of a matrix product a second.

Needs jax and numpy alone, so that a bare machine with a GPU can run it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.devices import DeviceSpec, default_device, present_spec

_PASSES = 4
# Last-level caches, in bytes: NVIDIA's data sheets; torch reports 60 MB on an H200.
_GPU_CACHES = {"a100": 40 << 20, "h100": 50 << 20, "h200": 60 << 20}
_UNKNOWN_CACHE = 64 << 20


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is measured on: a device of jax, its figures, and the bytes that may stay in its cache."""

    device: jax.Device
    spec: DeviceSpec
    cache_bytes: int

    @property
    def platform(self) -> str:
        return self.device.platform

    @property
    def memory_bytes(self) -> int:
        """What one case may take, of all there is."""
        stats = self.device.memory_stats() or {}
        total = stats.get("bytes_limit") or self.spec.hbm_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(0.4 * total)


def present_machine(cache_mb: int | None = None) -> Machine:
    """Returns the default device. A device nobody listed has the figures of its platform's default one.

    Args:
      cache_mb: size of its last-level cache in MiB, where it is not known.
    """
    device = jax.devices()[0]
    try:
        spec = present_spec(device)
    except ValueError:
        spec = default_device(device.platform)
    cache = _GPU_CACHES.get(spec.name) or spec.vmem_bytes or _cpu_cache() if cache_mb is None else cache_mb << 20
    return Machine(device, spec, cache)


def _cpu_cache() -> int:
    """Bytes of the largest cache that Linux tells of."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1] in units), default=_UNKNOWN_CACHE)


class Copier:
    """Copies a large buffer, again and again, in more than one way, since which is fastest depends on the device."""

    def __init__(self, machine: Machine, num_bytes: int | None = None):
        on_cpu = machine.platform == "cpu"
        num_bytes = num_bytes or max((32 if on_cpu else 1024) << 20, 2 * machine.cache_bytes)
        self._buffer = jax.block_until_ready(jnp.arange(num_bytes >> 2, dtype=jnp.int32).reshape(-1, 1 << 10))
        self._num_bytes = self._buffer.nbytes
        # Copies waited for together: one lasts a few dispatches only. On CPU every new array would be new pages of memory: there
        # one way changes the buffer in place, and the other copies between two old ones, with a thread a core.
        self._copies = 1 if on_cpu else 16
        self._change = jax.jit(lambda x: x ^ 1, donate_argnums=0)
        self._ways = [self._in_place, self._between if on_cpu else self._transfer]
        if on_cpu:
            cores = len(os.sched_getaffinity(0))
            self._pairs = [np.array_split(np.ones(num_bytes >> 2, np.int32), cores) for _ in range(2)]
            self._threads = ThreadPoolExecutor(cores)
        else:
            self._copy = jax.jit(jnp.copy)
        self.gb_s()

    def gb_s(self) -> float:
        """The best of a few passes, read and written bytes together, in 1e9 a second."""
        best = math.inf
        for way in self._ways * _PASSES:
            started = time.perf_counter()
            way()
            best = min(best, time.perf_counter() - started)
        return 2 * self._num_bytes * self._copies / best / 1e9

    def _in_place(self):
        for _ in range(self._copies):
            self._buffer = self._change(self._buffer)
        self._buffer.block_until_ready()

    def _transfer(self):
        for _ in range(self._copies):
            copied = self._copy(self._buffer)
        copied.block_until_ready()

    def _between(self):
        list(self._threads.map(np.copyto, *self._pairs))


class Multiplier:
    """Multiplies square matrices of random numbers."""

    _CALLS = 4

    def __init__(self, machine: Machine, dtype: str, size: int | None = None):
        self._size = size or (1024 if machine.platform == "cpu" else 8192)
        rng = np.random.default_rng(0)
        shape = (self._size, self._size)
        self._x, self._w = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in range(2))

        def products(x, w):
            once = lambda _, x: (jnp.dot(x, w, preferred_element_type=jnp.float32) * self._size**-0.5).astype(dtype)
            return lax.fori_loop(0, self._CALLS, once, x)

        self._products = jax.jit(products)
        self.tflop_s()

    def tflop_s(self) -> float:
        """The best of a few passes, in 1e12 floating-point operations a second."""
        best = math.inf
        for _ in range(_PASSES):
            started = time.perf_counter()
            jax.block_until_ready(self._products(self._x, self._w))
            best = min(best, time.perf_counter() - started)
        return 2 * self._size**3 * self._CALLS / best / 1e12
