"""scripts/kv_quality.py from outside, on a model that knows nothing; what 8-bit KV costs a real one is in tests/test_kv_quality.py."""

import json

import pytest
import run_script
from run_script import ROOT, one_line_error

TEXT = f"--text_file={ROOT / 'tests' / 'data' / 'kjv_genesis.txt'}"


def quality(*args, cache):
    return run_script.run("kv_quality.py", *args, cache=cache)


@pytest.mark.parametrize(
    "args, words",
    [
        ([], "--text_file or --texts_file names what to score"),
        (["--texts_file=a.json", "--recall"], "--plot and --recall are of one text"),
        ([TEXT, "--depths=10,x"], "'x' is not a whole number"),
    ],
)
def test_user_errors_are_one_line(args, words, cache):
    assert words in one_line_error(quality(*args, cache=cache))


def test_likelihoods_and_facts_of_a_small_model(cache, chat_model):
    dtypes = "--kv_dtypes=float32,int8"
    status, out, err = quality(f"--model={chat_model}", TEXT, "--max_tokens=60", dtypes, "--bins=2", "--json", cache=cache)
    assert status == 0, err
    base, small = json.loads(out)["kv_dtypes"]
    assert base["relative_to_first"] == 0 and base["mean_abs_difference_by_span"] == [0, 0]
    assert 0 < max(small["mean_abs_difference_by_span"]) < 0.1 and small["kv_bytes_per_token"] < base["kv_bytes_per_token"]
    recall = ("--recall", "--contexts=400", "--depths=20,80", "--trials=1")
    status, out, err = quality(f"--model={chat_model}", TEXT, dtypes, *recall, cache=cache)
    assert status == 0, err
    assert "2 questions a KV dtype" in out and "| context | float32 | int8 |" in out and out.count("\n| 80% |") == 1
