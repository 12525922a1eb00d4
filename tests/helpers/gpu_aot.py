"""The real CUDA compiler without a GPU: targets, and what ptxas makes of every Triton kernel of a function.

`compile_for(name, f, *specs)` needs the jax CUDA plugin and ptxas, no GPU. JAX_PLATFORMS=cpu must be set before jax is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class Target:
    """What the compiler asks about a device, from NVIDIA's data sheets and occupancy tables."""

    description: str
    capability: tuple[int, int]
    cores: int
    bandwidth: int
    memory: int
    l2: int
    shared_per_core: int
    shared_per_block: int

    @property
    def arch(self) -> str:
        return {(8, 0): "sm_80", (9, 0): "sm_90a"}[self.capability]

    @property
    def config(self) -> str:
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


_HOPPER = {"capability": (9, 0), "cores": 132, "shared_per_core": 233472, "shared_per_block": 232448}
TARGETS = {
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 2_039_000_000_000, 85_899_345_920, 41_943_040, 167_936, 166_912
    ),
    "h100": Target("NVIDIA H100 80GB HBM3", bandwidth=3_350_000_000_000, memory=85_899_345_920, l2=52_428_800, **_HOPPER),
    "h200": Target("NVIDIA H200", bandwidth=4_800_000_000_000, memory=150_109_880_320, l2=62_914_560, **_HOPPER),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Triton kernel as ptxas made it."""

    name: str
    registers: int
    spill_bytes: int  # loads and stores together
    shared_bytes: int
    waits: tuple[int, ...]  # the N of each cp.async.wait_group N: groups that may still be in flight
    ptx: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Report:
    memory: object  # compiled.memory_analysis()
    kernels: tuple[Kernel, ...]

    def kernel(self, name: str) -> Kernel:
        """The kernel of that name."""
        (found,) = [k for k in self.kernels if k.name == name]
        return found


@functools.cache
def missing() -> str | None:
    """Why this machine cannot compile for NVIDIA targets, or None."""
    if jax.default_backend() != "cpu":
        return "needs JAX_PLATFORMS=cpu"
    if _ptxas() is None:
        return "no ptxas: pip install nvidia-cuda-nvcc-cu12"
    try:
        _device("h200")
    except Exception as error:  # the plugin's own error types differ between versions
        return f"no CUDA topology, pip install the jax CUDA plugin: {str(error)[:120]}"
    return None


def spec(name: str, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
    """An abstract array on target `name`."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(_device(name)))


def compile_for(name: str, f, *specs, donate_argnums=()) -> Report:
    """Compiles `f` for target `name`; specs come from `spec(name, ...)`."""
    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        with _as_device(target):
            lowered = jax.jit(f, donate_argnums=donate_argnums).lower(*specs)
        options = {"xla_dump_to": folder}
        if jax.__version_info__ >= (0, 11):  # there a dump has PTX only when its emitter is asked for; all of them take minutes
            options["xla_dump_emitter_re"] = "ptx"
        compiled = lowered.compile(options)
        dump = Path(folder)
        thunks = "\n".join(p.read_text() for p in sorted(dump.glob("*thunk_sequence.txt")))
        kernels = tuple(k for p in sorted(dump.glob("*.ptx")) for k in _kernels(p, target, thunks))
        return Report(compiled.memory_analysis(), kernels)


@functools.cache
def _device(name: str):
    return topologies.get_topology_desc(platform="cuda", target_config=TARGETS[name].config, topology="1x1x1").devices[0]


@functools.cache
def _ptxas() -> str | None:
    with contextlib.suppress(ImportError):
        import nvidia

        for folder in nvidia.__path__:
            for found in sorted(Path(folder).glob("*/bin/ptxas")):
                return str(found)
    return shutil.which("ptxas")


def _as_device(target: Target):
    """Newer jax asks the abstract mesh which GPU a Triton kernel is lowered for; 0.10 takes sm_90 without asking."""
    try:
        from jax.sharding import AbstractDevice
    except ImportError:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=target.description, num_cores=target.cores, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _kernels(path: Path, target: Target, thunks: str):
    ptx = path.read_text()
    if ".entry" not in ptx:
        return
    command = [_ptxas(), "-v", f"-arch={target.arch}", str(path), "-o", str(path.with_suffix(".cubin"))]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for body in re.split(r"(?=\.visible \.entry )", ptx)[1:]:
        name = re.match(r"\.visible \.entry (\w+)", body).group(1)
        part = log.split(f"Compiling entry function '{name}'")[1].split("Compiling entry")[0]
        number = lambda pattern, part=part: int((re.search(pattern, part) or (0, 0))[1])
        # Triton's shared memory is dynamic: the launch says how much, ptxas does not see it.
        shared = re.search(rf"\b{name} grid: .*shared_memory: (\d+) bytes", thunks)
        yield Kernel(
            name=name,
            registers=number(r"Used (\d+) registers"),
            spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            shared_bytes=int(shared.group(1)) if shared else 0,
            waits=tuple(int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", body)),
            ptx=body,
        )
