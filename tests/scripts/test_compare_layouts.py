"""scripts/compare_layouts.py from outside: Markdown, JSON, a picture, and a run against another."""

import json

import pytest
import run_script
from run_script import HF_TINY, one_line_error

SMALL = ("--context=64", "--batch=2", "--new_tokens=4", "--repeats=2", "--weights=float32")
MODELS = f"--models={HF_TINY / 'llama_mha'},{HF_TINY / 'llama_mqa'}"


def compare(*args, cache):
    return run_script.run("compare_layouts.py", *args, cache=cache, timeout=600)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--shape=llama-3.1-8b"], "--shape=NAME and --num_kv_heads=32,8,1 go together"),
        (["--num_layers=2"], "--num_layers is of a --shape"),
        (["--batch=0"], "'0' is not a whole number"),
        (["--against=absent.json"], "No such file"),
        ([f"--against={HF_TINY / 'llama_mha' / 'config.json'}"], "config.json is no layouts.json of a run"),
        (["--text_file=absent.txt"], "No such file"),
        (["--models="], "--models=: name one or more"),
        (["--models=tiny-mha,,tiny-mqa"], "--models=tiny-mha,,tiny-mqa: name one or more"),
        (["--models=tiny-mha,tiny-mha"], "--models=tiny-mha,tiny-mha names one twice"),
        (["--kv_dtype=int5"], "--kv_dtype=int5 is not one of float32, "),
        (["--shape=llama-3.1-8b", "--num_kv_heads=8", "--models=tiny-mha"], "--models and --shape do not go together"),
        (["--shape=llama-3.1-8b", "--num_kv_heads=8", "--text_file=a.txt"], "--text_file and --shape do not go together"),
        (["--shape=llama-3.1-405b", "--num_kv_heads=128,8"], " GB are free: "),
    ],
)
def test_user_errors_are_one_line(args, words, cache):
    assert words in one_line_error(compare(*args, cache=cache))


def test_a_study_writes_three_files_and_compares_with_another(cache, tmp_path):
    pytest.importorskip("matplotlib")
    status, out, err = compare(MODELS, "--text_file=", f"--output={tmp_path}", *SMALL, cache=cache)
    assert status == 0, err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["layouts.json", "layouts.md", "layouts.png"]
    assert (tmp_path / "layouts.md").read_text() == out and "**Not**: " in out
    result = json.loads((tmp_path / "layouts.json").read_text())
    assert result["read_gb_s"]["median"] > 0 and len(result["rows"]) == 2 and "quality" not in result
    assert [row["kv_bytes_over_base"] for row in result["rows"]] == [1, 0.25]
    assert "other work" in out and "which are not told apart" in out
    other = tmp_path / "layouts.json"
    status, out, err = compare(MODELS, "--text_file=", f"--against={other}", *SMALL, "--json", cache=cache)
    assert status == 0, err
    against = json.loads(out)["against"]
    assert against["file"] == str(other) and against["rows"] == 2 and len(against["step_ms_apart"]) <= 2
    apart = compare(MODELS, "--page_size=32", f"--against={other}", *SMALL, cache=cache)
    assert "the two runs have no row in common" in one_line_error(apart)


@pytest.mark.slow
def test_a_public_shape_needs_no_weights(cache):
    small = ("--shape", str(HF_TINY / "llama_gqa_llama3rope"), "--num_kv_heads=4,1", "--num_layers=1")
    status, out, err = compare(*small, "--json", *SMALL, cache=cache)
    assert status == 0, err
    result = json.loads(out)
    assert result["num_layers"] == 1 < result["whole_layers"] and "quality" not in result
    assert [row["kv_bytes_over_base"] for row in result["rows"]] == [1, 0.25]


def test_help_lists_the_flags(cache):
    status, out, _ = compare("--help", cache=cache)
    assert status == 0 and "--num_kv_heads=N,..." in out and "--against" in out
