"""scripts/kernel_bench.py from outside, and what its figures mean."""

import functools
import importlib.util
import json
import math

import gpu_aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_script

from pallas_kernels import DEVICES, WriteBlocks
from scripts import _kernel_check, _kernel_peers
from scripts._kernel_cases import Case, make_data
from scripts._kernel_check import How, compare, dense, oracle, run, worst_error
from scripts._kernel_machine import present_machine
from scripts._kernel_timing import Bench, _attends, interleave, num_layers

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="measures nothing of use, on CPU only")
CASE = Case("decode", 4, 20, 2, 3, 8, 4, "float32", ragged=True)
TINY = ("--batch=2", "--context=200", "--kv_heads=2", "--group=2", "--head_dim=32", "--page_size=8", "--cache_mb=1", "--quick")
XLA = How("xla")


def bench(*args, cache):
    return run_script.run("kernel_bench.py", *args, cache=cache)


def error_line(result):
    """The last line of stderr: jax may write of its plugins before."""
    status, out, err = result
    assert (status, out) == (1, ""), result
    line = err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    "args, words",
    [
        (["--op=encode"], "--op: 'encode' is not one of decode, prefill, write"),
        (["--dtype=int4"], "--dtype: 'int4' is not one of float32"),
        (["--implementation=cuda"], "--implementation: 'cuda' is not one of reference, xla"),
        (["--batch=0"], "'0' is not a whole number from 1 on"),
    ],
)
def test_user_errors_are_one_line(args, words, cache):
    assert words in error_line(bench(*args, cache=cache))


@pytest.mark.slow
def test_json_holds_every_op_with_units(cache):
    status, out, err = bench("--json", "--chunk=4", "--nopeers", *TINY, cache=cache)
    assert status == 0, err
    result = json.loads(out)
    assert [case["case"]["op"] for case in result["cases"]] == ["decode", "prefill", "write"]
    for case in result["cases"]:
        row = case["implementations"]["xla"]
        assert len(row["rounds_us"]) == result["repeats"] == 3
        assert row["error"] <= row["tolerance"]
        assert row["gb_s"] == pytest.approx(case["bytes_in_use"] / row["us"] / 1e3)
        assert row["fraction_of_copy"] > 0 and case["copy_gb_s"] > 0
        assert case["pool_bytes"] >= 3 << 20  # several times the cache of 1 MiB
    prefill = result["cases"][1]
    assert prefill["implementations"]["xla"]["tflop_s"] > 0 and prefill["matmul_tflop_s"] > 0


def test_the_table_says_what_was_measured_and_what_was_refused(cache):
    # A CPU has no GPU kernel to run: it is refused by name, and xla is measured.
    status, out, err = bench("--op=decode", "--implementation=pallas_gpu,xla", *TINY, cache=cache)
    assert status == 0, err
    assert "decode B2 S200 K2 G2 H32 P8 f32" in out and "of copy" in out
    assert "skipped: ValueError: implementation 'pallas_gpu' compiles for gpu only" in out
    assert "flashinfer: skipped, flashinfer runs on NVIDIA GPUs, not on cpu" in out


def test_bytes_and_operations_count_what_rows_see():
    case = Case("decode", 3, 100, 2, 4, 16, 8, "bfloat16")
    q_bytes = 3 * 2 * 4 * 16 * 2
    assert case.bytes_in_use("gpu") == 3 * 100 * 2 * 2 * 16 * 2 + 2 * q_bytes
    assert case.bytes_in_use("tpu") == 8 * 3 * 100 * 2 * 2 * 16 * 2 + 2 * q_bytes  # padded to 128 lanes
    assert case.flops == 4 * 3 * 8 * 16 * 100
    int8 = Case("decode", 3, 100, 2, 4, 16, 8, "int8")
    assert int8.bytes_in_use("gpu") == 3 * 100 * 2 * 2 * (16 + 4) + 2 * q_bytes
    assert Case("decode", 3, 100, 2, 4, 16, 8, "bfloat16", window=10).bytes_in_use("gpu") == 3 * 10 * 2 * 2 * 16 * 2 + 2 * q_bytes
    prefill = Case("prefill", 1, 100, 2, 4, 16, 8, "bfloat16", tokens=3)
    assert prefill.flops == 4 * 8 * 16 * (3 * 100 + 1 + 2 + 3)


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_unused_slots_hold_nan_and_rows_differ(dtype):
    case = Case("decode", 8, 20, 2, 3, 8, 4, dtype, ragged=True)
    data = make_data(case, 2, "cpu")
    assert np.asarray(data.lengths).tolist() == [20, 0, 1, 3, 4, 5, 10, 11]
    stored = np.asarray(data.k_pages if dtype == "float32" else data.kv_scales)
    assert np.isnan(stored[0]).all() and np.isnan(stored).any(axis=tuple(range(1, stored.ndim))).sum() > case.pages
    assert np.isfinite(stored[np.asarray(data.page_table)[0, 0] + case.pages]).any()
    assert len(np.unique(np.asarray(data.page_table))) == case.batch * case.columns


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        Case("decode", 4, 20, 2, 3, 8, 4, "int8", own=True, sinks=True, soft_cap=2.0, window=5),
        Case("prefill", 5, 20, 2, 3, 8, 4, "float32", tokens=5, ragged=True, window=5),
        Case("write", 5, 20, 2, 3, 8, 4, "int8", tokens=5, ragged=True),
    ],
    ids=str,
)
def test_a_right_result_has_a_small_error_whichever_rows_are_compared(case):
    data = make_data(case, 2, "cpu")
    for rows in (None, [0, 3]):
        assert worst_error(case, data, 2, XLA, rows) <= (0 if case.op == "write" else case.tolerance)


def test_a_wrong_result_has_a_large_error():
    data = make_data(CASE, 2, "cpu")
    o, lse = (np.array(x) for x in run(CASE, data, 0, XLA))
    want = oracle(CASE, data, 0)
    assert compare(CASE, data, want, None, o, lse) < 1e-5
    assert compare(CASE, data, oracle(CASE, data, CASE.pages), None, o, lse) > 1e-2  # another layer
    wrong = o.copy()
    wrong[0, 0, 0, 0] = math.nan
    assert compare(CASE, data, want, None, wrong, lse) == math.inf
    idle = o.copy()
    idle[1] = 1  # row 1 sees nothing: it must be 0
    assert compare(CASE, data, want, None, idle, lse) == math.inf
    assert compare(CASE, data, want, None, o, lse + 0.1) > 1e-2


def test_a_write_that_touches_another_slot_is_wrong(monkeypatch):
    case = Case("write", 5, 20, 2, 3, 8, 4, "float32", tokens=5, ragged=True)
    data = make_data(case, 2, "cpu", poison=0.0)
    assert worst_error(case, data, 2, XLA) == 0
    original = _kernel_check.write_kv

    def write_kv(*args, implementation, **options):
        k, v, scales = original(*args, implementation=implementation, **options)
        return (k.at[-case.pages + 1, 0, 0, 0].add(1) if implementation == "xla" else k), v, scales

    monkeypatch.setattr(_kernel_check, "write_kv", write_kv)
    assert worst_error(case, data, 2, How("xla", block_sizes=WriteBlocks())) == math.inf  # another How is traced anew


def test_dense_keys_are_those_of_the_pages():
    case = Case("decode", 3, 10, 2, 3, 8, 4, "bfloat16")
    data = make_data(case, 2, "cpu")
    k, v = dense(case, data, case.pages)
    scores = jnp.einsum("bkgh,bksh->bkgs", data.q.astype(jnp.float32), k.astype(jnp.float32)) * 8**-0.5
    o = jnp.einsum("bkgs,bksh->bkgh", jax.nn.softmax(scores, -1), v.astype(jnp.float32))
    assert compare(case, data, oracle(case, data, case.pages), None, np.asarray(o)) < 1e-2


def test_runs_take_turns_after_a_round_that_does_not_count():
    order = []
    runs = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    figures = interleave(runs, 2)
    assert "".join(order) == "abc" + "cba" + "abc"
    assert figures == {"a": [6, 7], "b": [5, 8], "c": [4, 9]}


def test_a_wrong_implementation_is_not_timed_and_fails():
    bench = Bench(present_machine(cache_mb=1), 1, copy_bytes=1 << 20, round_s=0.0)
    case = Case("decode", 2, 20, 1, 2, 8, 4, "float32")

    class Wrong:
        name = "wrong"

        def prepare(self, case, data, layers):
            return lambda: np.ones((2, 1, 2, 8), np.float32), lambda n: pytest.fail("timed")

    outcomes = bench.measure(case, {"xla": XLA, "absent": How("pallas_tpu")}, [Wrong()])["implementations"]
    assert outcomes["xla"]["us"] > 0
    assert "compiles for tpu only" in outcomes["absent"]["skipped"]
    assert "error" in outcomes["wrong"]["failed"]


def test_a_pool_is_well_over_the_cache_or_refused():
    machine = present_machine(cache_mb=8)
    case = Case("decode", 4, 1000, 2, 4, 64, 16, "float32")
    layers = num_layers(case, machine)
    assert layers * case.layer_bytes("cpu") >= 3 * machine.cache_bytes > (layers - 1) * case.layer_bytes("cpu")
    with pytest.raises(ValueError, match="two layers of .* GB are more than"):
        num_layers(Case("decode", 4096, 100_000, 8, 4, 128, 16, "float32"), machine)


@pytest.mark.aot
def test_a_gpu_runs_every_call_of_the_loop_and_little_else():
    if reason := gpu_aot.missing():
        pytest.skip(reason)
    case = Case("decode", 4, 1000, 8, 4, 128, 16, "bfloat16")
    data = jax.eval_shape(lambda: make_data(case, 2, "gpu"))
    data = jax.tree.map(lambda x: gpu_aot.spec("h200", x.shape, x.dtype), data)
    loop = functools.partial(_attends, case, 2, 160, 8, How("pallas_gpu", device=DEVICES["h200"]))
    with gpu_aot._as_device(gpu_aot.TARGETS["h200"]):
        compiled = jax.jit(loop).lower(data).compile()
    text = compiled.as_text()
    turn = next(c for c in text.split("\n\n") if 'custom_call_target="__gpu$xla.gpu.triton"' in c)
    assert (
        turn.count('custom_call_target="__gpu$xla.gpu.triton"') == 2 * 8
    )  # attention and its combination: none dropped or hoisted
    assert turn.count(" fusion(") <= 8 + 3  # the queries of each call, the loop's counter, what does not change
    assert '"known_trip_count":{"n":"20"}' in text  # else the host waits for the condition of every turn


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize(
    "case", [Case("decode", 3, 20, 2, 3, 8, 4, "float32"), Case("prefill", 3, 20, 2, 3, 8, 4, "bfloat16", tokens=5)], ids=str
)
def test_torch_computes_the_same(case):
    data = make_data(case, 2, "cpu")
    once, many = _kernel_peers.TorchSdpa("cpu").prepare(case, data, 2)
    assert compare(case, data, oracle(case, data, case.pages), None, once()) < case.tolerance
    assert many(3) > 0


def test_peers_that_are_absent_say_why(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found, missing = _kernel_peers.find_peers("gpu")
    assert not found
    assert missing == {"torch sdpa": "torch is not installed", "flashinfer": "flashinfer is not installed"}
