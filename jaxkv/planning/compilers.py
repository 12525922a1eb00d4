"""The compilers of devices that are not here: libtpu's for TPUs, the CUDA plugin's for NVIDIA GPUs. Neither needs its device.

    compiled = compile_for("v5e", jax.jit(f, donate_argnums=0), x)  # x: arrays or ShapeDtypeStructs
    compiled.temporary_bytes, compiled.executable.memory_analysis()

They come with the extra `jaxkv[aot]`, and are loaded when the first device of their kind is named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# A TPU's `temp_size_in_bytes` is more than what the compiler sets aside: 357 MB for 237 with a prefill step of Gemma 3 1B on a v6e (jax
# 0.10.2, 0.11.2; no longer 0.12.0). A program whose arguments and that figure are more than the device's memory compiles. All that is set
# aside, arguments too, is `total_allocation_bytes` since jax 0.11, and was in the compiler's report before.
_HAS_TOTAL = jax.__version_info__ >= (0, 11)
_EXTRA = "pip install 'jaxkv[aot]' brings the compilers of TPUs and GPUs"


@dataclasses.dataclass(frozen=True)
class Target:
    """What the CUDA compiler asks about a GPU, from NVIDIA's data sheets and occupancy tables."""

    description: str
    capability: tuple[int, int]
    cores: int
    bandwidth: int  # bytes a second
    memory: int
    l2: int
    shared_per_core: int
    shared_per_block: int

    @property
    def config(self) -> str:
        """As the text of XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_per_core} threads_per_core_limit: 2048 core_count: {self.cores}
              fpus_per_core: {128 if major == 9 else 64} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
              block_dim_limit_z: 65535 memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2} clock_rate_ghz: 1.98
              device_memory_size: {self.memory} shared_memory_per_block_optin: {self.shared_per_block}
              cuda_compute_capability {{ major: {major} minor: {minor} }} registers_per_core_limit: 65536
              registers_per_block_limit: 65536 }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 patch: 0 }}
            device_description_str: "{self.description}" """


_HOPPER: dict[str, Any] = {"capability": (9, 0), "cores": 132, "shared_per_core": 233472, "shared_per_block": 232448}
TARGETS = {
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 2_039_000_000_000, 85_899_345_920, 41_943_040, 167_936, 166_912
    ),
    "h100": Target("NVIDIA H100 80GB HBM3", bandwidth=3_350_000_000_000, memory=85_899_345_920, l2=52_428_800, **_HOPPER),
    "h200": Target("NVIDIA H200", bandwidth=4_800_000_000_000, memory=150_109_880_320, l2=62_914_560, **_HOPPER),
}  # fmt: skip
DEVICES = (*TOPOLOGIES, *TARGETS)


class CompilerMissing(ValueError):
    """This machine has no compiler for a device; the message says how to get it."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled function, and what a call of it takes besides its arguments, in bytes."""

    executable: jax.stages.Compiled
    temporary_bytes: int  # set aside in the device's memory
    output_bytes: int  # arguments that are updated in place do not count
    live_bytes: int  # temporaries and outputs alive at once, at most, on a TPU's chip, too; on CPU the sum of both


def compile_for(device: str, jitted, *args, **static) -> Compiled:
    """Returns a jitted function compiled for one device of that name.

    Args:
      device: one of DEVICES.
      jitted: anything with the `.lower` of `jax.jit`; it says what is donated.
      args: pytrees of arrays or of ShapeDtypeStructs.
      static: passed on as they are.

    Raises:
      CompilerMissing: the compiler is not installed, or there is none for that device.
    """
    sharding = _sharding(device)
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    # Some lowerings ask the mesh which TPU they are for. set_mesh sets it when it is called, not when it is entered.
    with jax.set_mesh(_tpu_mesh(device)) if device in TOPOLOGIES else _as_gpu(TARGETS[device]):
        lowered = jitted.lower(*specs, **static)
    executable, total = _compile_for_tpu(lowered) if device in TOPOLOGIES else (lowered.compile(), None)
    stats, outputs = _stats(executable)
    temporaries = stats.temp_size_in_bytes if total is None else total - stats.argument_size_in_bytes - outputs
    return Compiled(executable, temporaries, outputs, stats.peak_memory_in_bytes - stats.argument_size_in_bytes)


def compile_for_cpu(jitted, *args, **static) -> Compiled:
    """Returns the same for the CPU that is here."""
    executable = jitted.lower(*args, **static).compile()
    stats, outputs = _stats(executable)
    return Compiled(executable, stats.temp_size_in_bytes, outputs, stats.temp_size_in_bytes + outputs)


def _stats(executable: jax.stages.Compiled) -> tuple[Any, int]:
    """(memory analysis, bytes of outputs that are not updated arguments)."""
    stats: Any = executable.memory_analysis()
    return stats, stats.output_size_in_bytes - stats.alias_size_in_bytes


def _compile_for_tpu(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, int]:
    """(executable, bytes of the device's memory that it takes in all)."""
    if _HAS_TOTAL:
        executable = lowered.compile()
        return executable, _stats(executable)[0].total_allocation_bytes
    with tempfile.TemporaryDirectory() as folder:
        executable = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        (report,) = Path(folder).glob("*memory-usage-report.txt")
        total = re.search(r"^Memory Space: default .*\nTotal bytes: (\d+)", report.read_text(), re.MULTILINE)
    assert total, "libtpu's report has another form"
    return executable, int(total[1])


def compiler_version(device: str) -> str:
    """Returns the name and version of the compiler for that device, such as "libtpu 0.0.42.1"."""
    names = ("libtpu",) if device in TOPOLOGIES else ("jax-cuda12-plugin", "jax-cuda13-plugin")
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return "an unknown version"


def require(device: str) -> None:
    """Raises CompilerMissing, with the reason in one line, where nothing can be compiled for that device here."""
    _sharding(device)


def missing(device: str) -> str | None:
    """Returns why nothing can be compiled for that device here; None where it can."""
    try:
        require(device)
    except CompilerMissing as error:
        return str(error)
    return None


def stay_on_cpu() -> None:
    """Keeps jax from looking for accelerators where the machine shows none: with their plugins installed it would, for a minute.

    To be called before jax has a backend; a JAX_PLATFORMS of the user's own is left alone.
    """
    found = any(any(Path("/dev").glob(pattern)) for pattern in ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*"))
    if "JAX_PLATFORMS" not in os.environ and not found:
        jax.config.update("jax_platforms", "cpu")


def _sharding(device: str) -> NamedSharding | SingleDeviceSharding:
    """What arrays on the device have."""
    if device in TOPOLOGIES:
        return NamedSharding(_tpu_mesh(device), PartitionSpec())
    if device in TARGETS:
        return SingleDeviceSharding(_gpu(device))
    raise CompilerMissing(f"no compiler is known for device {device!r}; there are some for {', '.join(DEVICES)}")


@functools.cache
def _tpu_mesh(device: str) -> Mesh:
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerMissing(f"compiling for {device} needs libtpu: {_EXTRA}")
    # libtpu reads these when it loads. Only compiling, so its lock against a second process has nothing to guard.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return Mesh(np.array(_topology(device, platform="tpu", topology_name=TOPOLOGIES[device])[:1]), ("x",))


@functools.cache
def _gpu(device: str):
    if not any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")):
        raise CompilerMissing(f"compiling for {device} needs the CUDA plugin of jax: {_EXTRA}")
    if not has_ptxas():
        raise CompilerMissing(f"compiling for {device} needs ptxas of the CUDA toolkit: {_EXTRA}")
    return _topology(device, platform="cuda", target_config=TARGETS[device].config, topology="1x1x1")[0]


def _topology(device: str, **options) -> list:
    from jax.experimental import topologies

    try:
        with _silent_stderr():
            return list(topologies.get_topology_desc(**options).devices)
    except Exception as error:  # the plugins' own error types differ between versions
        raise CompilerMissing(f"the compiler for {device} does not load: {str(error).splitlines()[0][:200]}; {_EXTRA}") from None


def has_ptxas() -> bool:
    """Whether ptxas is here: in the nvcc wheel, or of an installed CUDA toolkit."""
    if importlib.util.find_spec("nvidia") is not None:
        import nvidia

        if any(True for folder in nvidia.__path__ for _ in Path(folder).glob("*/bin/ptxas")):
            return True
    return shutil.which("ptxas") is not None


def _as_gpu(target: Target):
    """Newer jax asks the abstract mesh which GPU a Triton kernel is lowered for; 0.10 takes sm_90 without asking."""
    try:
        from jax.sharding import AbstractDevice  # type: ignore[attr-defined]
    except ImportError:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=target.description, num_cores=target.cores, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)  # type: ignore[call-arg]
    return jax.sharding.use_abstract_mesh(mesh)


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drops what C++ writes to stderr: libtpu complains at length that it finds no TPU, which is as it should be."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
