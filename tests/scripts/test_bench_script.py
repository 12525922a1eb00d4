"""scripts/bench.py from outside, and what it counts."""

import importlib.util
import json

import jax
import numpy as np
import pytest
import run_script

import jaxkv
from jaxkv.research.traffic import kv_bytes, weight_bytes
from scripts import _peers

# The shapes of test_generate_script's three prompts, so that nothing is compiled for these: 3 slots of 256 tokens.
SMALL = ("--context=12", "--new_tokens=244", "--repeats=2", "--batch=3")
TWO_CASES = ("--context=12", "--kv_dtype=float32,int8", *SMALL[1:])


def bench(*args, cache):
    return run_script.run("bench.py", *args, cache=cache)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--peer=vllm"], "none|transformers|llama.cpp"),
        (["--new_tokens=1"], "new_tokens"),
        (["--batch=x"], "batch"),
        (["--context=100,,4000"], "whole number from 1 on"),
        (["--pool_factor=0"], "'0' is not a whole number from 1 on"),
    ],
)
def test_user_errors_are_one_line(args, words, cache):
    assert words in run_script.one_line_error(bench(*args, cache=cache))


def test_json_holds_the_figures_of_every_case(cache, chat_model):
    status, out, err = bench(f"--model={chat_model}", "--json", *TWO_CASES, cache=cache)
    assert status == 0, err
    result = json.loads(out)
    assert result["read_gb_s"] > 0
    assert [(case["context"], case["kv_dtype"]) for case in result["cases"]] == [(12, "float32"), (12, "int8")]
    for case in result["cases"]:
        ours = case["jaxkv"]
        assert len(ours["rounds_decode_ms"]) == 2
        assert ours["prefill_tok_s"] > 0 and ours["decode_ms"] > 0
        read = ours["weight_bytes"] + ours["kv_bytes"]
        assert read / ours["decode_ms"] / 1e6 == pytest.approx(ours["weight_gb_s"] + ours["kv_gb_s"])
    first, second = (case["jaxkv"]["rounds_decode_ms"] for case in result["cases"])
    ratios = sorted(y / x for x, y in zip(first, second, strict=True))
    assert result["cases"][1]["decode_ms_over_first_case"] == pytest.approx(sum(ratios) / 2)


def test_the_table_says_what_was_measured(cache, chat_model):
    status, out, err = bench(f"--model={chat_model}", *SMALL, cache=cache)
    assert status == 0, err
    assert "batch 3, 244 new tokens, median of 2" in out and "context 12\n" in out
    assert "decode ms/step" in out and "GB/s" in out


@pytest.mark.parametrize("peer, package", [("transformers", "transformers"), ("llama.cpp", "llama-cpp-python")])
def test_a_missing_peer_says_how_to_get_it(peer, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"--peer={peer} .*pip install .*{package}"):
        _peers.open_peer(peer, "gemma-3-270m", 1, 64, print)


def test_llama_cpp_runs_one_row(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="--batch=1, not 2"):
        _peers.open_peer("llama.cpp", "gemma-3-270m", 2, 64, print)


def test_a_step_reads_each_weight_once_in_the_form_it_multiplies(chat_model):
    plain = jaxkv.load_model(chat_model, weights="float32")
    V, D = plain.config.vocab_size, plain.config.model_dim
    everything = sum(a.nbytes for a in jax.tree.leaves(plain.params))
    assert weight_bytes(plain, 3) == everything - (V - 3) * D * 4  # untied: of the embedding only rows are read
    small = jaxkv.load_model(chat_model, weights="int8")
    scales = sum(a.nbytes for p, a in jax.tree.flatten_with_path(small.params)[0] if ".scale" in jax.tree_util.keystr(p))
    assert weight_bytes(small, 1) < everything / 4 + scales + V * D
    if jax.default_backend() == "cpu":
        assert weight_bytes(small, 64) > 1.5 * weight_bytes(small, 1)  # many rows multiply the bf16 form


def test_kv_bytes_grow_with_tokens_and_stop_at_a_window(chat_model):
    model = jaxkv.load_model(chat_model, weights="float32")
    c = model.config
    itemsize = np.dtype(np.float32).itemsize if jax.default_backend() == "cpu" else 2
    assert kv_bytes(model, 2, 100) == 2 * 2 * 100 * c.num_layers * c.num_kv_heads * c.head_dim * itemsize
    windowed = jaxkv.load_model(run_script.HF_TINY / "mistral_swa", weights="float32")
    longest = max(windowed.config.layer_windows)
    assert longest and kv_bytes(windowed, 1, longest) == kv_bytes(windowed, 1, longest + 50)
