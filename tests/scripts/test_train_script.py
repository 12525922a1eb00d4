"""scripts/train.py as its users run it: train, stop, go on, convert, and let generate.py write."""

import json

import pytest
import run_script
from run_script import HF_TINY, ROOT, one_line_error, run

RECIPE = (
    "--text_file", str(ROOT / "tests" / "data" / "kjv_genesis.txt"), "--batch_tokens", "256", "--context", "64", "--eval_context", "128",
    "--steps", "20", "--save_every", "3",
)  # fmt: skip
TINY = (
    *RECIPE, "--model_dim", "32", "--num_layers", "1", "--num_q_heads", "4", "--num_kv_heads", "4", "--mlp_dim", "32",
    "--max_positions", "256",
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
        "train.py", *RECIPE, "--num_kv_heads", "2", "--from_checkpoint", str(output / "model"), "--convert", "mean",
        "--uptrain_fraction", "0.2", "--output", str(target), "--json", cache=cache,
    )  # fmt: skip
    assert status == 0, err
    figures = json.loads(out)
    assert (figures["num_kv_heads"], figures["steps"], figures["parameters"]) == (2, 4, before["parameters"] - 2 * 2 * 8 * 32)
    assert (target / "loss.png").read_bytes()[:4] == b"\x89PNG"
    options = ("--prompt", "And God", "--max_new_tokens", "8", "--temperature", "0", "--json")
    status, out, err = run("generate.py", "--model", str(target / "model"), *options, cache=cache)
    assert status == 0 and len(json.loads(out)["tokens"]) == 8, err


@pytest.mark.parametrize(
    "kv_heads, steps, done", [(("--convert", "mean", "--num_kv_heads", "4"), 20, 1), ((), 3, 3)], ids=["all heads", "as it is"]
)
def test_a_model_is_trained_on(trained, cache, tmp_path, kv_heads, steps, done):
    """Converted to as many heads as it has, for 5 % of the steps; or without --convert, for all of them."""
    start = ("--from_checkpoint", str(trained[0] / "model"), *kv_heads, "--steps", str(steps))
    status, out, err = run("train.py", *RECIPE, *start, "--output", str(tmp_path), "--noplot", "--json", cache=cache)
    assert status == 0, err
    figures = json.loads(out)
    assert (figures["num_kv_heads"], figures["steps_done"]) == (4, done)
    assert figures["bits_per_byte_before"] == pytest.approx(trained[1]["bits_per_byte"], abs=0.01)  # stored in float16


@pytest.mark.parametrize(
    "args, words",
    [
        (["--convert=mean", "--num_kv_heads=2"], "--convert=mean needs --from_checkpoint"),
        (["--from_checkpoint=a", "--convert=mean"], "--convert=mean needs --num_kv_heads"),
        (["--from_checkpoint=a", "--num_kv_heads=2"], "--num_kv_heads=2 of a --from_checkpoint needs --convert"),
        (["--from_checkpoint=a", "--uptrain_fraction=0.1"], "--uptrain_fraction is of a --convert"),
        (["--uptrain_fraction=0.1"], "--uptrain_fraction is of a --convert"),
        (["--from_checkpoint=a", "--model_dim=64", "--num_layers=2"], "--model_dim, --num_layers: only a new model has sizes"),
        ([f"--from_checkpoint={HF_TINY / 'llama_mha'}"], "256 bytes, and the model has vocab_size=130"),
    ],
)
def test_flags_that_would_change_nothing_are_refused(args, words, cache, tmp_path):
    assert words in one_line_error(run("train.py", *RECIPE, "--output", str(tmp_path), *args, cache=cache))


def test_what_goes_wrong_is_said_in_a_line(trained, cache, tmp_path):
    output, _ = trained
    assert "is not empty: give --resume" in one_line_error(run("train.py", *TINY, "--output", str(output), cache=cache))
    assert "--text_file FILE" in one_line_error(run("train.py", "--output", str(tmp_path / "x"), cache=cache))
    missing = ("--text_file=no.txt", "--output", str(tmp_path / "x"))
    assert one_line_error(run("train.py", *missing, cache=cache)) == "--text_file=no.txt: there is no such file"


def test_help_lists_the_flags(cache):
    status, out, _ = run_script.run("train.py", "--help", cache=cache)
    assert status == 0 and "--uptrain_fraction=X" in out and "--from_checkpoint=TEXT" in out
