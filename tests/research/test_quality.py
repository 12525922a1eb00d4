"""Likelihoods through the cache are those of the decoder; planted facts stand where they should and are asked for as they stand."""

import math
from pathlib import Path

import numpy as np
import pytest
from engine import make_model, tiny_config

import jaxkv
from jaxkv.research import recall
from jaxkv.research.byte_tokenizer import byte_tokenizer
from jaxkv.research.quality import bits_per_byte, scores, token_losses

FILLER = (Path(__file__).parents[1] / "data" / "kjv_genesis.txt").read_text()


@pytest.fixture(scope="module")
def reader():
    """A model over bytes, of whom nothing is known."""
    return make_model(tiny_config(vocab_size=256, max_positions=4096), tokenizer=byte_tokenizer())


def test_losses_are_those_of_a_pass_without_cache(reader):
    rows = [np.arange(40), np.arange(100, 125)]
    found = token_losses(reader, rows, "float32", chunk_size=16)
    for row, loss, logits in zip(rows, found, jaxkv.score(reader, rows), strict=True):
        logits = np.asarray(logits, np.float64)[: len(row) - 1]
        chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        assert loss == pytest.approx(-np.log(chances[np.arange(len(row) - 1), row[1:]]), abs=2e-4)
    assert not np.array_equal(token_losses(reader, rows, "int8", chunk_size=16)[0], found[0])
    with pytest.raises(ValueError, match="needs two tokens, a row has 1"):
        token_losses(reader, [np.array([3])])


def test_bits_per_byte_count_bytes_not_rows(reader):
    text = FILLER[:100]
    tokens = np.asarray(reader.tokenizer.encode(text))
    parts = token_losses(reader, [tokens[:64], tokens[64:]])
    assert bits_per_byte(reader, text, context=64) == pytest.approx(sum(p.sum() for p in parts) / math.log(2) / 98, rel=1e-6)
    with pytest.raises(ValueError, match="the text has 1, a row 1024"):
        bits_per_byte(reader, "a")
    with pytest.raises(ValueError, match="no tokenizer"):
        bits_per_byte(make_model(), text)


def test_scores_know_the_best():
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], np.float32))
    loss, best = scores(logits, np.array([0, 1]))
    assert loss == pytest.approx(-np.log([0.5, 0.2]), rel=1e-6) and best.tolist() == [True, False]


def test_facts_are_planted_in_order_at_their_depths(reader):
    depths = [0.9, 0.1, 0.5]
    found = recall.make_haystack(reader, FILLER, 1500, depths, trial=3)
    text = reader.tokenizer.decode(found.tokens)
    assert 1300 < len(found.tokens) <= 1500 and text.count("The secret number of") == 3
    for fact, depth in zip(found.facts, sorted(depths), strict=True):
        place = found.tokens.tobytes().index(np.concatenate([fact.question, fact.answer]).tobytes()) // 4
        assert place / len(found.tokens) == pytest.approx(depth, abs=0.1)
        assert reader.tokenizer.decode(fact.answer).strip().isdecimal()
    other = recall.make_haystack(reader, FILLER, 1500, depths, trial=4)
    assert not np.array_equal(other.tokens, found.tokens)
    for bad, words in (([], "1 to 16 depths"), ([1.5], "from 0 to 1"), ([0.5, 0.5], "do not fit between")):
        with pytest.raises(ValueError, match=words):
            recall.make_haystack(reader, FILLER, 1500, bad, trial=0)
    with pytest.raises(ValueError, match="needs a filler of more lines"):
        recall.make_haystack(reader, "In the beginning\n", 1500, [0.5], trial=0)


def test_facts_stand_before_and_behind_a_text(reader):
    text = reader.tokenizer.decode(recall.make_haystack(reader, FILLER, 1500, [0, 1], trial=0).tokens)
    assert text.startswith("The secret number of") and text[:-1].splitlines()[-1].startswith("The secret number of")
    assert text.count("The secret number of") == 2


def test_contexts_that_cannot_be_are_told_before_any_is_read(reader, monkeypatch):
    monkeypatch.setattr(recall, "ask", lambda *args: pytest.fail("asked"))
    with pytest.raises(ValueError, match="a context of 4050 tokens and a question of up to 48 are more than .* max_positions=4096"):
        recall.measure(reader, FILLER, ["int8"], [450, 4050], [0.5], trials=1)
    with pytest.raises(ValueError, match="a text of 60 tokens with 1 facts needs"):
        recall.measure(reader, FILLER, ["int8"], [450, 60], [0.5], trials=1)


def test_a_question_in_a_fork_is_a_question_behind_the_text(reader):
    haystack = recall.make_haystack(reader, FILLER, 450, [0.2, 0.8], trial=0)
    logprob, exact = recall.ask(reader, haystack, "int8")
    for fact, found in zip(haystack.facts, logprob, strict=True):
        whole = np.concatenate([haystack.tokens, fact.question, fact.answer])
        [loss] = token_losses(reader, [whole], "int8")
        assert found == pytest.approx(-loss[-len(fact.answer) :].sum(), abs=2e-3)
    assert exact.tolist() == [False, False]  # nothing is known


def test_measure_has_a_row_for_each_and_tells_means(reader, tmp_path):
    rows = recall.measure(reader, FILLER, ["int8"], [450], [0.8, 0.2], trials=2)
    assert [(r["kv_dtype"], r["depth"], r["trials"]) for r in rows] == [("int8", 0.2, 2), ("int8", 0.8, 2)]
    one, two = (recall.ask(reader, recall.make_haystack(reader, FILLER, 450, [0.2, 0.8], trial), "int8")[0] for trial in (0, 1))
    assert [r["answer_logprob_nats"] for r in rows] == pytest.approx((one + two) / 2)
    told = recall.describe(rows)
    assert f"| 450 | {(one + two).mean() / 2:.3f}, 0% |" in told and "4 questions a KV dtype" in told and "| 80% |" in told
    pytest.importorskip("matplotlib")
    recall.draw(tmp_path / "a.png", rows)
    assert (tmp_path / "a.png").stat().st_size > 1000
