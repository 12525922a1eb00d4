"""scripts/serving_bench.py on a tiny model: both kinds of load, every flag, and what it says."""

import importlib.util
import json

import pytest
import run_script

# Both tests run slots of 48 tokens, so that only the first compiles.
TINY = ("--num_slots=2", "--prefill_tokens=32", "--new_tokens=3")
FIGURES = {"total_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "itl_p99_s", "new_tokens_per_s"}


def bench(*args, cache):
    return run_script.run("serving_bench.py", *args, cache=cache, timeout=300)


@pytest.mark.slow
def test_a_shared_prefix_is_measured_with_and_without_the_cache(cache, chat_model):
    args = (f"--model={chat_model}", "--requests=4", "--shared_tokens=24", "--repeats=2", "--weights=float32", "--seed=7", *TINY)
    status, out, err = bench(*args, "--json", "--peer=none", cache=cache)
    assert status == 0, err
    result = json.loads(out)
    assert (result["requests"], result["prompt_tokens"], result["new_tokens"]) == (4, 4 * (24 + 20), 4 * 3)
    runs = result["runs"]
    assert list(runs) == ["prefix cache", "no prefix cache"]
    for figures in runs.values():
        assert set(figures) >= FIGURES and all(figures[name] > 0 for name in FIGURES)
    # Of 44 tokens those of one full page are shared, by at least the two that start when the first two are done.
    assert runs["prefix cache"]["kv_hit_rate"] >= 2 * 16 / (4 * 44) and not runs["no prefix cache"]["kv_hit_rate"]
    assert runs["no prefix cache"]["total_s_over_first"] > 0 and runs["no prefix cache"]["ttft_p50_s_over_first"] > 0
    assert "total_s_over_first" not in runs["prefix cache"]


def test_mixed_requests_and_the_table(cache, chat_model):
    status, out, err = bench(f"--model={chat_model}", "--requests=2", "--seed=142", *TINY, cache=cache)
    assert status == 0, err
    head, line = out.splitlines()
    assert head == "2 requests, 61 prompt and 6 new tokens, 2 slots"
    assert line.startswith("prefix cache: total_s ") and "new_tokens_per_s" in line and "_over_first" not in line


@pytest.mark.parametrize(
    "args, words",
    [
        (["--requests=0"], "requests"),
        (["--weights=int3"], "float32|bfloat16|int8"),
        (["--peer=vllm"], "none|transformers"),
        (["--repeats=x"], "repeats"),
    ],
)
def test_user_errors_are_one_line(args, words, cache):
    assert words in run_script.one_line_error(bench(*args, cache=cache))


def test_a_peer_runs_beside_or_says_how_to_get_it(cache, chat_model):
    args = (f"--model={chat_model}", "--requests=2", "--seed=142", "--peer=transformers", "--json", *TINY)
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        assert "pip install" in run_script.one_line_error(bench(*args, cache=cache))
        return
    status, out, err = bench(*args, cache=cache)
    assert status == 0, err
    ours, theirs = json.loads(out)["runs"].values()
    assert theirs["total_s"] > 0 and theirs["new_tokens_per_s"] > 0 and theirs["total_s_over_first"] > 0
