"""Measures block sizes of a kernel on the present device and keeps the best of each shape.

For each combination of the lists below it starts from the kernel's rule and tries the
values of one field after another, each beside the best so far in interleaved rounds. A
candidate must agree with the oracle, and be faster by --min_gain to be kept. The result
goes to pallas_kernels/tuned/<device>.json, where kernels look their sizes up by shape:
entries of other shapes stay, the file is replaced as a whole. An entry without sizes
says that the rule was measured to be best.

  python scripts/tune_block_sizes.py --op decode --batch 1,32 --context 4096,16384
  python scripts/tune_block_sizes.py --op prefill --chunk 512 --dtype bfloat16,int8
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path
from unittest import mock

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags  # noqa: E402

from scripts import _kernel_flags, _script  # noqa: E402

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(_kernel_flags)
flags.DEFINE_string("kernel", None, "A decode kernel by name, such as gpu.mosaic_decode; without it the one that the op runs.")
flags.DEFINE_integer("repeats", 5, "Rounds that count.", lower_bound=1)
flags.DEFINE_float("min_gain", 0.02, "By how much a candidate must be faster, as a fraction: less is noise.", lower_bound=0.0)
flags.DEFINE_string("output", None, "The file to write; without it the one that kernels of this device read.")
flags.DEFINE_bool("interpret", False, "A trial on CPU that interprets GPU kernels and measures nothing of use; needs --output.")

_LISTS: dict[str, list] = {
    "op": ["decode", "prefill"],
    "batch": [1, 8, 32],
    "context": [4096],
    "kv_heads": [8],
    "group": [4],
    "head_dim": [128],
    "dtype": ["bfloat16", "int8", "float8_e4m3fn"],
}
# Values worth trying, the field with the largest effect first. What does not fit a device refuses to compile and is passed over.
_CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    "gpu.triton_decode": {"tokens_per_block": (16, 32, 64, 128), "num_stages": (2, 3, 4, 5), "num_warps": (2, 4, 8)},
    "gpu.mosaic_decode": {"tokens_per_block": (64, 128, 192, 256), "num_stages": (2, 3, 4, 6)},
    "gpu.triton_prefill": {
        "queries_per_block": (32, 64, 128),
        "keys_per_block": (16, 32, 64, 128),
        "num_stages": (2, 3, 4),
        "num_warps": (4, 8),
    },
    "tpu.decode": {"pages_per_block": (1, 2, 4, 8), "num_stages": (2, 3, 4)},
    "tpu.prefill": {"queries_per_block": (32, 64, 128, 256), "pages_per_block": (1, 2, 4)},
    "tpu.write": {"num_stages": (2, 4, 8, 16, 32)},
}


@dataclasses.dataclass(frozen=True)
class Lookup:
    """What a kernel asked the file for: in whose table, by which key, for which class of sizes."""

    kernel: str
    device: str
    key: str  # JSON, to be hashable
    kind: type


def main(terminal) -> None:
    """Tunes every case and writes the file after each."""
    _kernel_flags.check()
    if FLAGS.interpret and not FLAGS.output:
        raise ValueError("--interpret measures nothing of use: name a file with --output, so that no device's own is replaced")
    terminal("importing jax")
    from jaxkv.io.cache import use_compilation_cache
    from scripts._kernel_machine import present_machine
    from scripts._kernel_timing import Bench

    machine = present_machine(FLAGS.cache_mb)
    if machine.platform == "cpu" and not FLAGS.interpret:
        raise ValueError("nothing to tune on a CPU: its implementation has no tuned block sizes")
    use_compilation_cache()
    bench = Bench(machine, FLAGS.repeats, copy_bytes=1 << 20, round_s=0.0) if FLAGS.interpret else Bench(machine, FLAGS.repeats)
    for case in _kernel_flags.cases(machine.platform, _LISTS):
        terminal(f"tuning {case}")
        try:
            lookup, entry = _tune(bench, case)
        except ValueError as error:  # the other cases go on
            terminal.done()
            print(f"{case}: skipped, {error}")
            continue
        path = _path(lookup)
        write_entry(path, lookup, entry | _origin(machine))
        terminal.done()
        print(f"{case}: {entry['blocks'] or 'the rule'}, {entry['us']:.1f} us against {entry['rule_us']:.1f} by the rule; {path}")


def _path(lookup: Lookup) -> Path:
    from pallas_kernels.block_sizes import TUNED_FOLDER

    return Path(FLAGS.output) if FLAGS.output else TUNED_FOLDER / f"{lookup.device}.json"


def _tune(bench, case) -> tuple[Lookup, dict]:
    """Returns what the kernel looks up for this case, and the entry to be found.

    Raises:
      ValueError: the case does not run here, or its kernel looks nothing up.
    """
    from scripts._kernel_check import How

    if FLAGS.kernel and FLAGS.interpret:
        raise ValueError("--interpret takes no --kernel")
    device = None if FLAGS.interpret else bench.machine.spec
    how = How("pallas_gpu" if FLAGS.interpret else None, interpret=FLAGS.interpret, device=device, module=FLAGS.kernel)
    with recorded_lookups() as lookups:
        figures = {"rule": _measured(bench.measure(case, {"rule": how}), "rule")["us"]}
        if len(lookups) != 1:
            raise ValueError(f"it looks up sizes of {len(lookups)} kernels, not of one: {[x.kernel for x in lookups]}")
        lookup = lookups[0]
        with_blocks = lambda blocks: dataclasses.replace(how, block_sizes=lookup.kind(**blocks))
        best: dict[str, int] = {}
        for field, values in _CANDIDATES.get(lookup.kernel, {}).items():
            best = _try_field(bench, case, with_blocks, best, field, values, figures)
        # What justifies the entry is one comparison, whose rounds took turns.
        last = bench.measure(case, {"rule": how, "best": with_blocks(best)})
    rule, row = _measured(last, "rule"), _measured(last, "best")
    if row["us"] > rule["us"] * (1 - FLAGS.min_gain):
        best, row = {}, rule
    picked = {name: row[name] for name in ("us", "spread", "gb_s", "fraction_of_copy", "error")}
    return lookup, {"key": json.loads(lookup.key), "blocks": best, **picked, "rule_us": rule["us"], "candidates_us": figures}


def _try_field(bench, case, with_blocks, best: dict[str, int], field: str, values, figures: dict) -> dict[str, int]:
    """Returns the best sizes, with the fastest value of a field if it gains enough; notes every candidate's time, or why it has none."""
    tried = {json.dumps(best | {field: value}): best | {field: value} for value in values}
    result = bench.measure(case, {"best so far": with_blocks(best)} | {name: with_blocks(blocks) for name, blocks in tried.items()})
    rows = {name: result["implementations"][name] for name in tried}
    figures |= {name: row.get("us") or row.get("failed") or row["skipped"] for name, row in rows.items()}
    fast = {name: row["us"] for name, row in rows.items() if "us" in row}
    name = min(fast, key=fast.__getitem__, default=None)
    if name is None or fast[name] > _measured(result, "best so far")["us"] * (1 - FLAGS.min_gain):
        return best
    return tried[name]


def _measured(result: dict, name: str) -> dict:
    row = result["implementations"][name]
    if "us" not in row:
        raise ValueError(row.get("failed") or row["skipped"])
    return row


@contextlib.contextmanager
def recorded_lookups():
    """A list of what kernels traced meanwhile look up, each once. They find nothing: the rule is what candidates are compared with."""
    from pallas_kernels import block_sizes

    lookups: list[Lookup] = []

    def record(kernel: str, device_name: str, key: dict, kind: type):
        lookup = Lookup(kernel, device_name, json.dumps(key), kind)
        if lookup not in lookups:
            lookups.append(lookup)

    with mock.patch.object(block_sizes, "tuned", record):
        yield lookups


def write_entry(path: Path, lookup: Lookup, entry: dict) -> None:
    """Puts an entry into a file in place of one of the same key; the file is there as a whole at every moment."""
    from jaxkv.io.cache import atomic_write

    content = json.loads(path.read_text()) if path.is_file() else {"kernels": {}}
    entries = content["kernels"].setdefault(lookup.kernel, [])
    content["kernels"][lookup.kernel] = [old for old in entries if old["key"] != entry["key"]] + [entry]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as out:
        out.write((json.dumps(content, indent=1) + "\n").encode())


def _origin(machine) -> dict:
    import jax

    return {"device_kind": machine.device.device_kind, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    _script.run(main)
