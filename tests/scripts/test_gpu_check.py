"""scripts/gpu_check.sh on a CPU, and what its parts do with checks that fail, end the process or never begin."""

import json
import math
import os
import subprocess
import sys
import types

import jax
import pytest
import run_script

from scripts import _gpu_checks, gpu_check
from scripts._gpu_checks import Check, Outcome, Skip, goals
from scripts.gpu_check import Notes

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a dry check is of a CPU")
MACHINE = types.SimpleNamespace(device=types.SimpleNamespace(device_kind="cpu"))


def command(*args, env=None, timeout=1000):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHON": sys.executable, **(env or {})}
    return subprocess.run(args, capture_output=True, text=True, env=env, timeout=timeout)


def run_part(folder, part, checks, monkeypatch):
    monkeypatch.setattr(_gpu_checks, "setting", lambda dry: types.SimpleNamespace(machine=MACHINE))
    monkeypatch.setattr(_gpu_checks, "checks", lambda part, at: [Check(part, name, check) for name, check in checks.items()])
    return gpu_check._run(types.SimpleNamespace(cpu=True, parts=part, folder=folder))


def raises(error):
    def check():
        raise error

    return check


def test_checks_go_on_past_failures(tmp_path, monkeypatch):
    checks = {
        "good": lambda: Outcome(1e-3, 1e-2),
        "bad": lambda: Outcome(2e-2, 1e-2, "note"),
        "nan": lambda: Outcome(math.nan, 1e-2),
        "raises": raises(RuntimeError("no\nroom")),
        "skips": raises(Skip("not here")),
    }
    assert run_part(tmp_path, "decode", checks, monkeypatch) == 0
    results, device = Notes(tmp_path, "decode").results()
    assert [r["status"] for r in results] == ["pass", "fail", "fail", "fail", "skip"]
    assert results[3]["note"] == "RuntimeError: no room"
    assert device.startswith("cpu, jax ")


def test_a_broken_device_is_left_and_the_rest_is_done_by_the_next_run(tmp_path, monkeypatch):
    checks = {
        "first": lambda: Outcome(0, 0),
        "breaks": raises(RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")),
        "last": lambda: Outcome(0, 0),
    }
    assert run_part(tmp_path, "decode", checks, monkeypatch) == 3
    assert [r["status"] for r in Notes(tmp_path, "decode").results()[0]] == ["pass", "fail", "fail"]
    ran = []
    checks["first"] = lambda: ran.append("again")
    assert run_part(tmp_path, "decode", checks, monkeypatch) == 0
    assert [r["status"] for r in Notes(tmp_path, "decode").results()[0]] == ["pass", "fail", "pass"] and not ran


def test_a_check_that_ended_its_process_has_failed(tmp_path):
    notes = Notes(tmp_path, "decode")
    notes.plan(["one", "two"], MACHINE)
    notes.add("one", status="running")
    first, second = notes.results()[0]
    assert (first["status"], second["status"]) == ("fail", "fail")
    assert "ended its process" in first["note"] and "not run" in second["note"]
    assert notes.begun() == {"one"}


def test_a_part_that_never_started_has_failed(tmp_path):
    (result,) = Notes(tmp_path, "bench").results()[0]
    assert result["status"] == "fail" and "did not start" in result["note"]


def test_goals_are_judged_by_the_fastest_kernel():
    def bench(dtype, context, us, fraction):
        rows = {
            "triton": {"us": us, "fraction_of_copy": fraction},
            "xla": {"us": 9 * us, "fraction_of_copy": 0.1},
            "mosaic": {"skipped": "-"},
        }
        return {"figures": {"case": {"op": "decode", "batch": 32, "context": context, "dtype": dtype}, "implementations": rows}}

    results = [bench("bfloat16", 4096, 100, 0.85), bench("bfloat16", 16384, 400, 0.9), bench("int8", 16384, 300, 0.7)]
    found = {goal["name"]: goal for goal in goals(results)}
    assert found["decode B32 S4096 bf16, of a copy"]["status"] == "pass"
    assert found["int8 S16384, times as fast as bf16"]["status"] == "fail"
    assert len(found) == 2  # nothing is said of what was not measured


def test_parts_and_table_on_a_cpu(tmp_path):
    script = str(run_script.ROOT / "scripts" / "gpu_check.py")
    done = command(sys.executable, script, "run", "--cpu", "--parts=write", f"--folder={tmp_path}")
    assert done.returncode == 0, done.stderr
    report = command(sys.executable, script, "report", "--cpu", f"--folder={tmp_path}", f"--json={tmp_path}/out/x.json")
    assert report.returncode == 1  # the other parts did not run
    assert "write: int8, a chunk" in report.stdout and "did not start" in report.stdout
    result = json.loads((tmp_path / "out" / "x.json").read_text())
    assert not result["passed"]
    assert [r["status"] for r in result["results"] if r["part"] == "write"] == ["pass"] * 5


def test_it_wants_a_gpu_and_knows_its_one_flag(tmp_path):
    script = str(run_script.ROOT / "scripts" / "gpu_check.py")
    done = command(sys.executable, script, "run", "--parts=write", f"--folder={tmp_path}")
    assert done.returncode != 0 and "jax sees no GPU" in done.stderr
    done = command(str(run_script.ROOT / "scripts" / "gpu_check.sh"), "--gpu")
    assert (done.returncode, done.stderr) == (2, "usage: scripts/gpu_check.sh [--cpu]\n")


@pytest.mark.slow  # interprets every kernel: most of a minute of two cores
def test_the_whole_dry_check_passes(tmp_path):
    out = tmp_path / "out"
    done = command(
        str(run_script.ROOT / "scripts" / "gpu_check.sh"), "--cpu", env={"OUT": str(out), "JAXKV_CACHE_DIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
    for words in ("decode: NaN in unused slots, int8", "prefill: windows", "memory: decode step, bfloat16", "mosaic: ", "bench: "):
        assert words in done.stdout
    assert json.loads((out / "gpu_check.json").read_text())["passed"]
