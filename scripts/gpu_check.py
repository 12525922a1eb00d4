"""The parts of gpu_check.sh: `run` does the checks of a part and notes each result at once; `report` prints the table.

A check may end its process (a bad address, a time limit): what was noted before is kept, and `run` again does the rest. absl may be
absent on a bare machine, so this one script parses its arguments with argparse.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_RUNNING, _BROKEN_DEVICE = "running", 3
# After one of these every later call of the process fails, too.
_STICKY = ("CUDA_ERROR", "illegal memory access", "device-side assert", "unspecified launch failure")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--folder", type=Path, required=True, help="where results are noted")
    parser.add_argument("--parts", default="", help="run: parts, separated by commas")
    parser.add_argument("--cpu", action="store_true", help="interpret the kernels, at tiny sizes")
    parser.add_argument("--json", type=Path, help="report: a file to write everything to, too")
    options = parser.parse_args()
    if options.command == "run":
        return _run(options)
    return _report(options)


def _run(options) -> int:
    """0 once every check of the parts is noted, whatever it found; 3 where the device must be opened anew for the rest."""
    from scripts import _gpu_checks

    at = _gpu_checks.setting(options.cpu)
    for part in options.parts.split(","):
        notes = Notes(options.folder, part)
        checks = _gpu_checks.checks(part, at)
        notes.plan([check.name for check in checks], at.machine)
        for check in checks:
            if check.name in notes.begun():
                continue
            notes.add(check.name, status=_RUNNING)
            result = _result(check)
            notes.add(check.name, **result)
            if any(word in result["note"] for word in _STICKY):
                return _BROKEN_DEVICE
    return 0


def _result(check) -> dict:
    from scripts._gpu_checks import Skip

    started = time.perf_counter()
    try:
        outcome = check.run()
        passed = outcome.value <= outcome.limit
        result = {"status": "pass" if passed else "fail", "value": outcome.value, "limit": outcome.limit, "note": outcome.note}
        if outcome.figures is not None:
            result["figures"] = outcome.figures
    except Skip as reason:
        result = {"status": "skip", "note": _one_line(str(reason))}
    except Exception as error:  # whatever a compiler or a driver raises: the other checks go on
        result = {"status": "fail", "note": _one_line(f"{type(error).__name__}: {error}")}
    return result | {"seconds": time.perf_counter() - started}


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]


class Notes:
    """Results of one part, a JSON object a line, each written before the next check begins."""

    def __init__(self, folder: Path, part: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._part = folder / f"{part}.jsonl", part

    def plan(self, names: list[str], machine) -> None:
        """Notes what there is to do, once."""
        if not self._path.exists():
            import jax

            device = f"{machine.device.device_kind}, jax {jax.__version__}, Python {sys.version.split()[0]}"
            self._append({"plan": names, "device": device})

    def add(self, name: str, **result) -> None:
        """Notes a result, or that a check begins."""
        self._append({"part": self._part, "name": name, **result})

    def begun(self) -> set[str]:
        """Names of the checks that ended, or ended the process."""
        return {line["name"] for line in self._lines() if "name" in line}

    def results(self) -> tuple[list[dict], str]:
        """Returns one result a planned check, and the device. One that began and did not end has failed, as one never begun."""
        lines = self._lines()
        if not lines:
            return [
                {"part": self._part, "name": "(all)", "status": "fail", "note": "the part did not start: its errors are above"}
            ], ""
        last = {line["name"]: line for line in lines if "name" in line}
        out = []
        for name in lines[0]["plan"]:
            result = last.get(name, {"part": self._part, "name": name, "status": "fail", "note": "not run: the part's time was up"})
            if result["status"] == _RUNNING:
                result = result | {"status": "fail", "note": "ended its process, or ran out of time"}
            out.append(result)
        return out, lines[0]["device"]

    def _lines(self) -> list[dict]:
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []

    def _append(self, line: dict) -> None:
        with self._path.open("a") as out:
            out.write(json.dumps(line) + "\n")


def _report(options) -> int:
    """Prints one table; 1 if anything failed."""
    from scripts._gpu_checks import PARTS, goals

    results, device = [], ""
    for part in PARTS:
        some, named = Notes(options.folder, part).results()
        results += some
        device = device or named
    if not options.cpu:
        results += goals(results)
    failed = sum(r["status"] == "fail" for r in results)
    print(f"\n{device}\n{'check':58}{'':6}{'worst':>10}{'limit':>10}{'s':>7}")
    for result in results:
        print(_line(result))
    print(f"\n{'bench':58}{'us':>10}{'spread':>8}{'GB/s':>8}{'of copy':>9}{'TFLOP/s':>9}{'of matmul':>11}{'x xla':>8}")
    for result in results:
        for line in _bench_lines(result.get("figures")):
            print(line)
    counts = {status: sum(r["status"] == status for r in results) for status in ("pass", "fail", "skip")}
    print(f"\n{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"device": device, "passed": not failed, "results": results}, indent=1, default=str))
    return 1 if failed else 0


def _line(result: dict) -> str:
    name = f"{result['part']}: {result['name']}"
    number = lambda key: f"{_short(result[key]):>10}" if key in result else f"{'':10}"
    seconds = f"{result['seconds']:7.1f}" if "seconds" in result else f"{'':7}"
    note = f"  {result['note']}" if result["status"] != "pass" or result["part"] in ("memory", "goal") else ""
    return f"{name:58}{result['status']:6}{number('value')}{number('limit')}{seconds}{note}".rstrip()


def _short(x: float) -> str:
    return f"{x:.3g}" if x == 0 or not math.isfinite(x) or 1e-2 <= x < 1e5 else f"{x:.1e}"


def _bench_lines(figures: dict | None):
    if figures is None:
        return
    for name, row in figures["implementations"].items():
        label = f"{figures['label']}  {name}"
        if "us" not in row:
            yield f"{label:58}  {row.get('failed') or row.get('skipped')}"
            continue
        matmul = f"{row['tflop_s']:9.2f}{row['fraction_of_matmul']:11.0%}" if "tflop_s" in row else f"{'':20}"
        ratio = figures["rounds_over_xla"].get(name)
        speed = "" if ratio is None else f"{ratio:8.2f}"
        yield f"{label:58}{row['us']:10.1f}{row['spread']:8.0%}{row['gb_s']:8.0f}{row['fraction_of_copy']:9.0%}{matmul}{speed}".rstrip()
    loop = "" if figures["loop_us"] is None else f", of which the loop itself {figures['loop_us']:.1f} us a call"
    yield f"{'':4}a copy moves {figures['copy_gb_s']:.0f} GB/s{loop}"


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a broken device can hang the ordinary end of a process
