"""Measures the kernels of pallas_kernels on the present device: each combination of the
lists below is a case.

Every implementation's result is compared with the oracle in float64 first; one that is
wrong is not timed, and the exit status is 1. In each round every implementation, a copy
of a large buffer and (for prefill) a matrix product run in changing order; figures are
medians over --repeats rounds, fractions are medians of the rounds' own.

A call goes to the next layer of a pool, whose layers together are several times the
cache. GB/s count the bytes in use: the keys and values that rows see, in the form of the
pool, with queries and outputs; a copy counts what it reads and what it writes. Calls of
PyTorch and FlashInfer are made from Python: below 20 us they measure that.

  python scripts/kernel_bench.py --quick
  python scripts/kernel_bench.py --op decode --batch 32 --context 4096,16384 --dtype bfloat16,int8
  python scripts/kernel_bench.py --op prefill --chunk 1024 --json
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags  # noqa: E402

from scripts import _kernel_flags, _script  # noqa: E402

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(_kernel_flags)
flags.DEFINE_list("implementation", None, "What to run; without it the platform's own and xla.")
flags.DEFINE_bool("peers", True, "Run PyTorch and FlashInfer too, where they are installed.")
flags.DEFINE_integer("repeats", 7, "Rounds that count.", lower_bound=1)
flags.DEFINE_bool("quick", False, "A case an op, and few rounds.")
flags.DEFINE_bool("json", False, "One JSON object on stdout instead of the table.")

# What lists hold where no flag says otherwise: (sweep, quick). A CPU gets a small model's shape, the others that of Llama 3.1 8B.
_LISTS: dict[str, tuple[list, list]] = {
    "op": (["decode", "prefill"], ["decode", "prefill", "write"]),
    "batch": ([1, 8, 32], [8]),
    "context": ([1024, 4096, 16384], [4096]),
    "kv_heads": ([8], [8]),
    "group": ([4], [4]),
    "head_dim": ([128], [128]),
    "dtype": (["bfloat16", "int8", "float8_e4m3fn"], ["bfloat16"]),
}
_CPU_LISTS = _LISTS | {
    "batch": ([1, 8], [2]),
    "context": ([512, 4096], [512]),
    "kv_heads": ([2], [2]),
    "head_dim": ([64, 128], [64]),
    "dtype": (["float32", "bfloat16", "int8"], ["float32"]),
}
_QUICK_REPEATS, _QUICK_CHUNK = 3, 128
_OWN = {"cpu": ["xla"], "gpu": ["pallas_gpu", "xla"], "tpu": ["pallas_tpu", "xla"]}


def main(terminal) -> None:
    """Measures every case and prints what came out."""
    _kernel_flags.check()
    result = _measure(terminal)
    terminal.done()
    if FLAGS.json:
        print(json.dumps(result))
    else:
        _print_table(result)
    if any("failed" in outcome for case in result["cases"] for outcome in case.get("implementations", {}).values()):
        sys.exit(1)


def _measure(report) -> dict:
    # PyTorch needs memory of the same GPU, of which jax would take three quarters.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report("importing jax")
    import jax

    from jaxkv.io.cache import use_compilation_cache
    from scripts._kernel_machine import present_machine
    from scripts._kernel_peers import find_peers
    from scripts._kernel_timing import Bench

    use_compilation_cache()
    machine = present_machine(FLAGS.cache_mb)
    cases = _cases(machine.platform)
    hows = _hows(machine)
    peers, missing = find_peers(machine.platform) if FLAGS.peers else ([], {})
    report("measuring a copy")
    bench = Bench(machine, min(FLAGS.repeats, _QUICK_REPEATS) if FLAGS.quick else FLAGS.repeats)
    results = []
    for i, case in enumerate(cases):
        report(str(case), i / len(cases))
        try:
            results.append(bench.measure(case, hows, peers))
        except ValueError as error:
            results.append({"case": dataclasses.asdict(case), "label": str(case), "skipped": str(error)})
    return {
        "device": machine.device.device_kind,
        "platform": machine.platform,
        "jax": jax.__version__,
        "cache_bytes": machine.cache_bytes,
        "repeats": bench.rounds,
        "peers_missing": missing,
        "cases": results,
    }


def _cases(platform: str) -> list:
    lists = {name: values[FLAGS.quick] for name, values in (_CPU_LISTS if platform == "cpu" else _LISTS).items()}
    return _kernel_flags.cases(platform, lists, min(FLAGS.chunk, _QUICK_CHUNK) if FLAGS.quick else None)


def _hows(machine) -> dict:
    from pallas_kernels import IMPLEMENTATIONS
    from scripts._kernel_check import How

    names = FLAGS.implementation or _OWN.get(machine.platform, ["xla"])
    _kernel_flags.check_names("implementation", names, IMPLEMENTATIONS)
    return {name: How(name, device=machine.spec) for name in names}


def _print_table(result: dict) -> None:
    print(
        f"{result['device']}, jax {result['jax']}, median of {result['repeats']}; pools of more than "
        f"{result['cache_bytes'] / 2**20:.0f} MiB of cache"
    )
    for name, reason in result["peers_missing"].items():
        print(f"{name}: skipped, {reason}")
    for case in result["cases"]:
        _print_case(case)


def _print_case(case: dict) -> None:
    print(f"\n{case['label']}")
    if "skipped" in case:
        print(f"  skipped: {case['skipped']}")
        return
    loop = "" if case["loop_us"] is None else f"; the loop itself takes {case['loop_us']:.1f} us a call"
    rate = "" if case["matmul_tflop_s"] is None else f", a matrix product {case['matmul_tflop_s']:.3g} TFLOP/s"
    print(
        f"  {case['bytes_in_use'] / 1e6:.2f} MB in use, {case['layers']} layers; a copy moves {case['copy_gb_s']:.4g} GB/s{rate}{loop}\n"
        f"  {'':14}{'us':>12}{'spread':>9}{'GB/s':>10}{'of copy':>9}{'TFLOP/s':>10}{'of matmul':>11}{'error':>10}{'x xla':>8}"
    )
    for name, row in case["implementations"].items():
        print(f"  {name:14}{_figures(row, case['rounds_over_xla'].get(name))}")


def _figures(row: dict, ratio: float | None) -> str:
    for status in ("skipped", "failed"):
        if status in row:
            return f"  {status}: {row[status]}"
    matmul = f"{row['tflop_s']:10.3f}{row['fraction_of_matmul']:11.0%}" if "tflop_s" in row else f"{'':21}"
    speed = "" if ratio is None else f"{ratio:8.2f}"
    return (
        f"{row['us']:12.1f}{row['spread']:9.0%}{row['gb_s']:10.1f}{row['fraction_of_copy']:9.0%}{matmul}{row['error']:10.1e}{speed}"
    )


if __name__ == "__main__":
    _script.run(main)
