"""Sampling steps against a plain float64 oracle, and the conditions of other engines' bugs."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import (
    FAST_MATH,
    HISTORY,
    KINDS,
    PLAIN_STEP,
    SIZES,
    STEP,
    TRACES,
    B,
    V,
    as_sampling,
    assert_same,
    make_logits,
    oracle_kept,
    oracle_logits,
    random_options,
    run,
    uniform_bits,
)

from jaxkv import sample_step, vocab_search
from jaxkv.sample_step import MAX_LOGPROBS, sample
from jaxkv.sampling import Sampling


@pytest.mark.parametrize("step, V", [(STEP, V), (PLAIN_STEP, V), (STEP, 40000)], ids=["fast_math", "plain", "large"])
def test_tokens_follow_the_oracles_inverse_cdf(step, V):
    rng = np.random.default_rng(V)
    checked, drawn = 0, 0
    for _ in range(60 if V < 1000 else 25):
        rows = [random_options(rng, V) for _ in range(B)]
        kinds = rng.choice(["normal", "peaked", "ties"], size=B)
        logits = np.stack([make_logits(rng, kind, V) for kind in kinds])
        history = rng.integers(0, V, size=(B, HISTORY), dtype=np.int32)
        history[:, 1::2] = history[:, ::2] % 7
        lengths, prompts = rng.integers(0, HISTORY + 1, size=B), rng.integers(0, HISTORY, size=B)
        seeds = rng.integers(0, 2**32, size=B)
        result = run(logits, as_sampling(rows), history=history, lengths=lengths, prompt_lengths=prompts, seeds=seeds, step=step)
        assert not result.failed.any()
        for b, options in enumerate(rows):
            x = oracle_logits(logits[b], options, history[b, : lengths[b]].tolist(), int(prompts[b]))
            if options["temperature"] == 0:
                best = np.flatnonzero(x >= x.max() - 1e-5)
                assert result.tokens[b] == best[0] if best.size == 1 else result.tokens[b] in best
                checked += 1
                continue
            _, probabilities, close = oracle_kept(x, options)
            u = (uniform_bits(seeds[b], lengths[b]) + 0.5) / 2**32
            cdf = np.cumsum(probabilities)
            if close or np.abs(cdf - u).min() < 3e-6:
                continue
            assert result.tokens[b] == np.searchsorted(cdf, u), (options, lengths[b])
            drawn += 1
    assert checked > 20 and drawn > 60


@pytest.mark.parametrize("options", [FAST_MATH, None], ids=["fast_math", "plain"])
def test_greedy_takes_the_lowest_index_of_ties(options):
    @functools.partial(jax.jit, compiler_options=options)
    def argmax(logits):
        blocks = vocab_search.to_blocks(logits)
        tops, _, broken = vocab_search.checked_tops(blocks, logits.shape[1])
        return vocab_search.argmax(blocks, tops), broken

    for size in SIZES:
        rng = np.random.default_rng(size)
        logits = np.stack([make_logits(rng, kind, size) for kind in KINDS])
        tokens, broken = argmax(logits)
        assert tokens.tolist() == np.argmax(logits + 0.0, axis=1).tolist()
        assert not broken.any()


@pytest.mark.parametrize("step", [STEP, PLAIN_STEP], ids=["fast_math", "plain"])
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(step, poison):
    logits = np.random.default_rng(0).normal(size=(B, V)).astype(np.float32)
    options = Sampling(
        temperature=[0, 0.8, 0, 1.0, 0.9, 1.0], top_k=[0, 5, 0, 0, 0, 0], top_p=[1, 1, 1, 0.9, 1, 0.9], logprobs=3,
        repetition_penalty=[1, 1, 1.2, 1, 1, 1], min_p=[0, 0, 0, 0, 0.1, 0],
    )  # fmt: skip
    history = np.tile(np.arange(HISTORY, dtype=np.int32), (B, 1))
    clean = run(logits, options, history=history, lengths=[5] * B, step=step)
    assert not clean.failed.any()
    for row, token in ((0, 0), (1, V - 1), (2, 64), (3, 3), (4, 4), (5, 129)):
        poisoned = logits.copy()
        poisoned[row, token] = poison
        result = run(poisoned, options, history=history, lengths=[5] * B, step=step)
        assert np.flatnonzero(result.failed).tolist() == [row]
        assert result.tokens[row] == 0 and result.logprobs[row] == 0 and not result.is_stop[row]
        others = np.arange(B) != row
        assert_same(result, others, clean, others)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans(temperature):
    logits = np.zeros((B, V), np.float32)
    bans = [{i: -math.inf for i in range(V) if i != row} for row in range(B - 1)] + [dict.fromkeys(range(V), -math.inf)]
    result = run(logits, Sampling(temperature=temperature, logit_bias=bans))
    assert result.failed.tolist() == [False] * (B - 1) + [True]
    assert result.tokens.tolist() == [*range(B - 1), 0]


@pytest.mark.parametrize("size", [1, 7, 512, 20000])
def test_logprobs_are_those_of_the_raw_logits(size):
    rng = np.random.default_rng(size)
    kinds, asked = ("normal", "ties", "peaked", "zeros", "constant"), (20, 5, 2, 0, -1)
    logits = np.stack([make_logits(rng, kind, size) for kind in kinds])
    tokens = rng.integers(0, size, 5, dtype=np.int32)

    @functools.partial(jax.jit, compiler_options=FAST_MATH)
    def logprobs(logits, tokens, asked):
        tops, highest = vocab_search.block_tops(vocab_search.to_blocks(logits))
        return sample_step._logprobs(logits, tops, highest, tokens, asked)

    own, top_ids, top_logprobs = map(np.asarray, logprobs(logits, tokens, np.array(asked, np.int32)))
    x = logits.astype(np.float64)
    expected = x - x.max(1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(1, keepdims=True))
    for b, count in enumerate(asked):
        shown = min(max(count, 0), size)
        order = np.lexsort((np.arange(size), -x[b]))[:shown]
        assert top_ids[b].tolist() == order.tolist() + [-1] * (MAX_LOGPROBS - shown)
        np.testing.assert_allclose(top_logprobs[b, :shown], expected[b, order], rtol=1e-5, atol=1e-5)
        assert not top_logprobs[b, shown:].any()
        np.testing.assert_allclose(own[b], expected[b, tokens[b]] if count >= 0 else 0, rtol=1e-5, atol=1e-5)


def test_logprobs_ignore_the_options():
    logits = np.random.default_rng(2).normal(size=(B, V))
    plain = run(logits, Sampling(logprobs=20))
    biased = run(logits, Sampling(logprobs=20, temperature=2.0, logit_bias={3: 50.0}, min_p=0.9))
    assert biased.tokens.tolist() == [3] * B
    np.testing.assert_array_equal(biased.top_ids, plain.top_ids)
    np.testing.assert_array_equal(biased.top_logprobs, plain.top_logprobs)
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(biased.logprobs, expected[:, 3], rtol=1e-5)


def test_stop_tokens():
    logits = np.eye(V, dtype=np.float32)[[2, 3, 4, 5, 0, 6]]
    sampling = Sampling(stop_token_ids=[[2], [], [1], [], [0], []], ignore_eos=[False, False, False, True, True, True])
    assert run(logits, sampling, eos=(3, 5)).is_stop.tolist() == [True, True, False, False, True, False]


# --- randomness ---


def test_same_seed_same_tokens_alone_and_in_any_company():
    rng = np.random.default_rng(3)
    mine = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1}
    for _ in range(12):
        logits = rng.normal(size=(1, V)).astype(np.float32) * 2
        history = rng.integers(0, V, size=(1, HISTORY), dtype=np.int32)
        at = {"lengths": [9], "prompt_lengths": [4], "seeds": [77]}
        alone = run(logits, as_sampling([mine], logprobs=2), history=history, **at)
        row = int(rng.integers(B))
        rows = [random_options(rng, V) for _ in range(B)]
        rows[row] = mine
        company = rng.normal(size=(B, V)).astype(np.float32)
        company[row] = logits
        histories = rng.integers(0, V, size=(B, HISTORY), dtype=np.int32)
        histories[row] = history
        sampling = as_sampling(rows, logprobs=[2 if b == row else None for b in range(B)])
        both = run(company, sampling, history=histories, lengths=[9] * B, prompt_lengths=[4] * B, seeds=[77] * B)
        assert_same(alone, 0, both, row, rtol=1e-6)


def draw_many(probabilities, sampling, lengths=None):
    """4000 tokens of 8, from consecutive seeds or positions."""
    logits = np.tile(np.log(np.asarray(probabilities)), (500, 1))
    tokens = []
    for r in range(8):
        at = np.arange(500) + 500 * r
        tokens.append(run(logits, sampling, seeds=at, lengths=None if lengths is None else at).tokens)
    return np.concatenate(tokens)


def chi_square(tokens, probabilities):
    expected = tokens.size * np.asarray(probabilities)
    return ((np.bincount(tokens, minlength=8) - expected) ** 2 / expected).sum()


CHI_SQUARE_0_999 = 24.32  # quantile for 7 degrees of freedom


def test_a_uniform_distribution_passes_chi_square_and_lag_one():
    tokens = draw_many([1 / 8] * 8, Sampling(temperature=1.0, seed=11), lengths="consecutive")
    assert chi_square(tokens, [1 / 8] * 8) < CHI_SQUARE_0_999
    repeats, pairs = (tokens[1:] == tokens[:-1]).sum(), tokens.size - 1
    assert abs(repeats - pairs / 8) < 3.3 * math.sqrt(pairs * 1 / 8 * 7 / 8)


@pytest.mark.parametrize("top_k", [0, 64])
def test_draws_have_the_given_probabilities(top_k):
    probabilities = [0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02]
    assert chi_square(draw_many(probabilities, Sampling(temperature=1.0, top_k=top_k)), probabilities) < CHI_SQUARE_0_999


def test_bits_differ_by_position_and_seed():
    bits = np.asarray(jax.jit(sample_step._random_bits)(jnp.arange(64, dtype=jnp.uint32) // 8, jnp.arange(64) % 8))
    assert len(set(bits.tolist())) == 64


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
@settings(max_examples=200, deadline=None)
def test_multiply_high_is_exact(a, b):
    high = sample_step._multiply_high(jnp.asarray([a], jnp.uint32), jnp.asarray([b], jnp.int32))
    assert int(high[0]) == a * b >> 32


# --- shapes, padding, backends ---


def test_no_mix_of_options_traces_again():
    rng = np.random.default_rng(5)
    run(np.zeros((B, V)))
    before = len(TRACES)
    for i in range(10):
        rows = [random_options(rng, V) for _ in range(B)]
        more = {"logprobs": [None, 0, 3, 20, None, 1], "seed": i, "stop_token_ids": [1, 2], "ignore_eos": True} if i % 2 else {}
        run(rng.normal(size=(B, V)), as_sampling(rows, **more), eos=(0,))
    run(np.zeros((B, V)), Sampling(temperature=1, top_k=4))
    run(np.zeros((B, V)), Sampling())
    assert len(TRACES) == before


def test_padding_never_writes_the_last_token_or_row():
    logits = np.full((B, V), 0.5, np.float32)
    logits[:, V - 1] = 1.0  # wins unless something leaks into it
    history = np.full((B, HISTORY), -1, np.int32)
    history[:, 0] = 2
    history[:, 5:] = V - 1  # past the length
    sampling = Sampling(
        logit_bias=[{0: -5.0}, None, {1: -5.0}] * 2,
        repetition_penalty=[5.0, 1.0] * 3,
        presence_penalty=2.0,
        frequency_penalty=2.0,
    )
    assert run(logits, sampling, history=history, lengths=[5] * B).tokens.tolist() == [V - 1] * B
    arrays = sampling.arrays(num_slots=B, rows=range(B), vocab_size=V, eos_token_ids=(), seeds=[0] * B, prompt_lengths=[0] * B)
    negative = dataclasses.replace(
        arrays,
        bias_ids=np.where(arrays.bias_ids < V, arrays.bias_ids, -1),
        bias_values=np.where(arrays.bias_ids < V, arrays.bias_values, -9.0).astype(np.float32),
    )
    assert STEP(logits, history, np.full(B, 5, np.int32), negative, np.ones(B, bool)).tokens.tolist() == [V - 1] * B
    arrays = Sampling(logit_bias={0: 1.0}).arrays(
        num_slots=2, rows=[0], vocab_size=V, eos_token_ids=(), seeds=[0], prompt_lengths=[0]
    )
    assert (arrays.bias_ids[0, 1:] >= V).all() and (arrays.bias_ids[1] >= V).all()


def test_all_rows_at_once_gives_what_one_after_the_other_gives(monkeypatch):
    rng = np.random.default_rng(9)
    cases = []
    for i in range(8):
        rows = [random_options(rng, V) | ({"top_k": 7 + i} if i % 2 else {}) for _ in range(B)]
        history = rng.integers(0, V, size=(B, HISTORY), dtype=np.int32)
        cases.append((rng.normal(size=(B, V)) * 2, as_sampling(rows, logprobs=[None, 2, 0, None, 20, 1]), history))
    in_turn = [run(x, s, history=h, lengths=[HISTORY] * B) for x, s, h in cases]
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    at_once = jax.jit(lambda *args: sample(*args))
    for (x, s, h), expected in zip(cases, in_turn, strict=True):
        result = run(x, s, history=h, lengths=[HISTORY] * B, step=at_once)
        assert_same(result, slice(None), expected, slice(None), rtol=1e-6)


@pytest.mark.parametrize("dead", [[0], [1, 3, 4], [0, 1, 2, 3, 4, 5]])
def test_rows_that_are_not_live_ask_for_nothing(dead):
    """They cost what greedy rows cost, since they sample as such, and the others sample as if they were there or not."""
    rng = np.random.default_rng(len(dead))
    rows = [random_options(rng, V) for _ in range(B)]
    history = rng.integers(0, V, size=(B, HISTORY), dtype=np.int32)
    logits, given = rng.normal(size=(B, V)) * 2, dict(history=history, lengths=[HISTORY] * B)
    live = ~np.isin(np.arange(B), dead)
    everybody = run(logits, as_sampling(rows, logprobs=2), **given)
    result = run(logits, as_sampling(rows, logprobs=2), live=live, **given)
    assert_same(result, live, everybody, live)
    assert_same(result, ~live, run(logits, **given), ~live)
    assert (result.top_ids[~live] == -1).all() and (result.tokens[~live] == logits[~live].argmax(1)).all()
