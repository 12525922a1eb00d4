"""scripts/train.py as its users run it: train, stop, go on, convert, and let generate.py write."""

import json

import pytest
import run_script
from run_script import ROOT, one_line_error, run

TINY = (
    "--text_file", str(ROOT / "tests" / "data" / "kjv_genesis.txt"), "--model_dim", "32", "--num_layers", "1", "--num_q_heads", "4",
    "--num_kv_heads", "4", "--mlp_dim", "32", "--max_positions", "256", "--batch_tokens", "256", "--context", "64", "--eval_context",
    "128", "--steps", "20", "--save_every", "3",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """A run that was stopped and resumed: (its folder, what the two said)."""
    output = tmp_path_factory.mktemp("runs") / "mha"
    first = run("train.py", *TINY, "--output", str(output), "--stop_after", "8", "--noplot", cache=cache)
    assert first[0] == 0 and "8 of 20 steps" in first[1] and not (output / "model").exists(), first
    status, out, err = run("train.py", *TINY, "--output", str(output), "--resume", "--noplot", "--json", cache=cache)
    assert status == 0, err
    return output, json.loads(out)


def test_a_run_leaves_a_model_and_its_history(trained):
    output, figures = trained
    assert sorted(p.name for p in output.iterdir()) == ["history.json", "model", "state"]
    history = json.loads((output / "history.json").read_text())
    assert len(history["losses_nats"]) == figures["steps_done"] == figures["steps"] == 20
    assert figures["bits_per_byte"] < figures["bits_per_byte_before"] < 8.5
    assert figures["tokens"] == 20 * 256 and history["recipe"]["batch_tokens"] == 256


@pytest.mark.slow
def test_conversion_uptrains_and_the_model_generates(trained, cache):
    output, before = trained
    target = output.parent / "gqa"
    status, out, err = run(
        "train.py", *TINY, "--num_kv_heads", "2", "--from_checkpoint", str(output / "model"), "--convert", "mean",
        "--uptrain_fraction", "0.2", "--output", str(target), "--json", cache=cache,
    )  # fmt: skip
    assert status == 0, err
    figures = json.loads(out)
    assert (figures["num_kv_heads"], figures["steps"], figures["parameters"]) == (2, 4, before["parameters"] - 2 * 2 * 8 * 32)
    assert (target / "loss.png").read_bytes()[:4] == b"\x89PNG"
    options = ("--prompt", "And God", "--max_new_tokens", "8", "--temperature", "0", "--json")
    status, out, err = run("generate.py", "--model", str(target / "model"), *options, cache=cache)
    assert status == 0 and len(json.loads(out)["tokens"]) == 8, err


def test_what_goes_wrong_is_said_in_a_line(trained, cache, tmp_path):
    output, _ = trained
    assert "is not empty: give --resume" in one_line_error(run("train.py", *TINY, "--output", str(output), cache=cache))
    assert "--text_file FILE" in one_line_error(run("train.py", "--output", str(tmp_path / "x"), cache=cache))
    convert = ("--output", str(tmp_path / "x"), "--convert", "mean")
    assert "needs --from_checkpoint" in one_line_error(run("train.py", *TINY, *convert, cache=cache))


def test_help_lists_the_flags(cache):
    status, out, _ = run_script.run("train.py", "--help", cache=cache)
    assert status == 0 and "--uptrain_fraction=X" in out and "--from_checkpoint=TEXT" in out
