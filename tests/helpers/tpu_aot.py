"""The real TPU compiler on a machine without a TPU: whether a kernel compiles, what it allocates, and its static schedule.

The compiler is libtpu's, run against a topology description. With JAXKV_TPU_SCHEDULES=1 it writes its schedules (a bundle issues in
one cycle at best) into a folder of this process, from which `static_cost` reads the innermost loops of one kernel. It does so for all
that it compiles, which takes minutes for a whole step: those are compiled in a process without it.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path

_DUMP = Path(tempfile.mkdtemp(prefix="tpu_schedule_"))
atexit.register(shutil.rmtree, _DUMP, True)
# libtpu reads these when it loads, which is at the first topology. Only compiling, so its one-process lock has nothing to guard.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
_WRITES_SCHEDULES = os.environ.get("JAXKV_TPU_SCHEDULES") == "1"
if _WRITES_SCHEDULES:
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={_DUMP} --xla_jf_dump_llo_text=true".strip()
    )

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install jax[tpu]"
)
needs_schedules = pytest.mark.skipif(not _WRITES_SCHEDULES, reason="reads the compiler's schedules: set JAXKV_TPU_SCHEDULES=1")


@functools.cache
def mesh(device: str, num_devices: int = 1) -> Mesh:
    """Returns a mesh over the axis "x" of devices that are not here."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[device])
    return Mesh(np.array(topology.devices[:num_devices]), ("x",))


def compile_for(device: str, function, *args, donate=(), options=None):
    """Returns `function` compiled for one `device`.

    Args:
      args: pytrees of arrays or of (shape, dtype) pairs; None stays None.
      donate: positions of the arguments whose buffers the outputs take.
    """
    is_pair = lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple)
    sharding = NamedSharding(mesh(device), PartitionSpec())

    def spec(x):
        shape, dtype = x if is_pair(x) else (x.shape, x.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    specs = jax.tree.map(spec, args, is_leaf=is_pair)
    clear_dump()
    with jax.set_mesh(mesh(device)):  # some lowerings ask the mesh which TPU they are for
        return jax.jit(function, donate_argnums=donate).trace(*specs).lower(lowering_platforms=("tpu",)).compile(options)


def clear_dump() -> None:
    """Removes every schedule written so far."""
    shutil.rmtree(_DUMP, ignore_errors=True)
    _DUMP.mkdir(exist_ok=True)


@dataclasses.dataclass(frozen=True)
class StaticCost:
    """What the compiler scheduled for one kernel. A bundle issues in one cycle at best; waits for memory come on top."""

    total: int  # bundles of the kernel
    spills: int  # vector registers stored and loaded back, anywhere
    loops: tuple[Loop, ...]  # those that feed the matrix units, the one that does so most first; of a kernel without, its longest

    @property
    def loop(self) -> int:
        """Bundles of the main loop."""
        return self.loops[0].bundles


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop's own code, without the loops inside it."""

    bundles: int
    waits: int  # cycles in which nothing issues: empty bundles of the schedule, which the code has folded into its neighbours
    spills: int
    units: dict[str, int]  # uses of each unit: MXU, XLU, VALU, EUP, VLOAD, VSTORE, SALU ..


def static_cost(kernel: str) -> StaticCost:
    """Returns the cost of the kernel (by its `pallas_call` name) that `compile_for` compiled last."""
    names, usage = _read_usage(_dumped(kernel, "final_hlo-static-per-bundle-utilization"))
    code, schedule = (_read_loops(_dumped(kernel, what)) for what in ("final_bundles", "packed-bundles-post-ra"))
    if code.keys() != schedule.keys():
        raise ValueError(f"{kernel} has {len(code)} loops, and its schedule {len(schedule)}: this libtpu dumps something else")
    loops = []
    for number, bundles in code.items():
        units = {name: sum(usage[at][i] for at in bundles) for i, name in enumerate(names)}
        loops.append(Loop(len(bundles), len(schedule[number]) - len(bundles), _spills(units), units))
    loops.sort(key=lambda loop: (-loop.units["MXU"], -loop.bundles))
    attending = tuple(loop for loop in loops if loop.units["MXU"])
    spills = sum(_spills(dict(zip(names, row, strict=True))) for row in usage)
    return StaticCost(len(usage), spills, attending or tuple(loops[:1]))


def _spills(units: dict[str, int]) -> int:
    return units["VSTORE:SPILL"] + units["VLOAD:FILL"]


def _dumped(kernel: str, what: str) -> str:
    paths = sorted(path for path in _DUMP.glob(f"*-{kernel}*-{what}.txt") if re.search(rf"-\d+-{what}\.txt$", path.name))
    if not paths:
        raise FileNotFoundError(
            f"no schedule of {kernel} in {_DUMP}: libtpu was loaded before tests/helpers/tpu_aot.py was imported"
        )
    return paths[-1].read_text()


def _read_usage(text: str) -> tuple[list[str], list[list[int]]]:
    """Returns the units' names, and how many of each every bundle uses."""
    lines = text.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    return names, [[int(x) for x in line.split()] for line in lines[4:] if re.fullmatch(r"[\d ]+", line)]


def _read_loops(text: str) -> dict[int, list[int]]:
    """Returns the addresses of each loop's own bundles, by the loop's number; 0 is the code outside all loops."""
    loops, current, at_depth, number = collections.defaultdict(list), 0, {0: 0}, 0
    for line in text.splitlines():
        bundle = re.match(r"\s*(0x[0-9a-f]+|0)\s+(\w\w)?\s*: (>*) ?\{", line)
        if bundle is None:
            continue
        depth = len(bundle[3])
        if bundle[2] == "LB":
            number += 1
            at_depth[depth] = number
        if depth or not re.search(r": +\{\}", line):  # an empty bundle (a branch's delay) carries no depth: it stays where it is
            current = at_depth[depth]
        loops[current].append(int(bundle[1], 16))
    return loops
