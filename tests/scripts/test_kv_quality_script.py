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
        ([TEXT, "--depths=10,x"], "'x' is not a whole number from 0 to 100"),
        ([TEXT, "--depths=0,101"], "'101' is not a whole number from 0 to 100"),
        ([TEXT, "--kv_dtypes="], "--kv_dtypes= names none: give one or more of float32, "),
        ([TEXT, "--kv_dtypes=float32,int5"], "--kv_dtypes=int5 is not one of float32, "),
        ([TEXT, "--recall", "--max_tokens=100"], "--max_tokens does nothing with --recall"),
        ([TEXT, "--recall", "--chunk_size=8"], "--chunk_size does nothing with --recall"),
        ([TEXT, "--recall", "--bins=2"], "--bins does nothing with --recall"),
        ([TEXT, "--trials=2"], "--trials does nothing without --recall"),
        (["--texts_file=a.json", "--bins=2"], "--bins are of one text"),
        ([TEXT, "--plot=absent/a.png"], "--plot=absent/a.png: there is no folder "),
    ],
)
def test_user_errors_are_one_line(args, words, cache):
    assert words in one_line_error(quality(*args, cache=cache))


@pytest.mark.parametrize("text", ["", "In the beginning", '[{"txt": "a"}]', '{"a": 1}', "[]", "3", '[{"text": 3}]'])
def test_texts_of_another_form_are_refused(text, cache, tmp_path):
    path = tmp_path / "texts.json"
    path.write_text(text)
    assert 'must be JSON of the form [{"text": ' in one_line_error(quality(f"--texts_file={path}", cache=cache))


def test_a_text_without_a_second_token_is_named(cache, chat_model, tmp_path):
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([{"text": "And God said"}, {"text": ""}]))
    told = one_line_error(quality(f"--model={chat_model}", f"--texts_file={path}", cache=cache))
    assert told.startswith("a likelihood needs two tokens: text 1 of ")


def test_likelihoods_and_facts_of_a_small_model(cache, chat_model):
    dtypes = "--kv_dtypes=float32,int8"
    status, out, err = quality(f"--model={chat_model}", TEXT, "--max_tokens=60", dtypes, "--bins=2", "--json", cache=cache)
    assert status == 0, err
    base, small = json.loads(out)["kv_dtypes"]
    assert base["relative_to_first"] == 0 and base["mean_abs_difference_by_span"] == [0, 0]
    assert 0 < max(small["mean_abs_difference_by_span"]) < 0.1 and small["kv_bytes_per_token"] < base["kv_bytes_per_token"]
    for row in (base, small):
        first, last = row["mean_nll_by_span"]
        assert first != last and (30 * first + 29 * last) / 59 == pytest.approx(row["mean_nll"])
    recall = ("--recall", "--contexts=400", "--depths=0,50,100", "--trials=1")
    status, out, err = quality(f"--model={chat_model}", TEXT, dtypes, *recall, cache=cache)
    assert status == 0, err
    assert "3 questions a KV dtype" in out and "| context | float32 | int8 |" in out
    assert all(out.count(f"\n| {depth}% |") == 1 for depth in (0, 50, 100))
