"""Sampling against a plain float64 oracle with its own defaults, and the conditions of other engines' bugs."""

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

from jaxkv import sample_step, vocab_search
from jaxkv.sample_step import MAX_BIAS, MAX_LOGPROBS, MAX_STOP, Sampled, sample
from jaxkv.sampling import Sampling

# Compiling a step takes seconds, so nearly every test has this shape.
B, V = 6, 130
FAST_MATH = {"xla_cpu_prefer_vector_width": 512, "xla_cpu_enable_fast_math": True}
HISTORY = 24
TRACES: list[tuple] = []


def counted(*args):
    TRACES.append(args[0].shape)
    return sample(*args)


STEP = jax.jit(counted, compiler_options=FAST_MATH)
PLAIN_STEP = jax.jit(sample)


def run(logits, sampling=None, *, history=None, lengths=None, prompt_lengths=None, seeds=None, eos=(), step=STEP) -> Sampled:
    """Samples one step, every slot live."""
    logits = np.asarray(logits, np.float32)
    B, V = logits.shape  # the large vocabulary, the lone row and the statistics differ
    history = np.zeros((B, HISTORY), np.int32) if history is None else history
    lengths = np.zeros(B, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    arrays = (sampling or Sampling()).arrays(
        num_slots=B,
        rows=range(B),
        vocab_size=V,
        eos_token_ids=eos,
        seeds=range(B) if seeds is None else seeds,
        prompt_lengths=np.zeros(B, np.int32) if prompt_lengths is None else prompt_lengths,
    )
    return jax.tree.map(np.asarray, step(logits, history, lengths, arrays))


def assert_same(a: Sampled, rows_a, b: Sampled, rows_b, rtol=0.0):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[rows_a], y[rows_b], rtol=rtol), a, b)


# --- the oracle ---


def oracle_logits(logits, options, tokens, prompt_length):
    """Bias, then penalties, one token at a time."""
    x = np.asarray(logits, np.float64).copy()
    for token, bias in (options.get("logit_bias") or {}).items():
        x[token] += bias
    for token in set(tokens):
        penalty = options.get("repetition_penalty", 1.0)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in tokens[prompt_length:]:
        x[token] -= options.get("frequency_penalty", 0.0)
    for token in set(tokens[prompt_length:]):
        x[token] -= options.get("presence_penalty", 0.0)
    return x


def oracle_kept(x, options, slack=2.0**-20):
    """By sorting: (kept bool[V], probabilities f64[V], whether some limit is too close to call in float32)."""
    z = (x - x.max()) / options.get("temperature", 1.0)
    order = np.lexsort((np.arange(x.size), -x))
    order = order[np.isfinite(x[order])]
    k = options.get("top_k", 0)
    if k > 0:
        order = order[:k]
    p = np.exp(z[order])
    p /= p.sum()
    close = False
    if options.get("top_p", 1.0) < 1:
        before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
        margin = before - options["top_p"] + slack
        close |= bool(np.any(np.abs(margin[1:]) < 4e-7))
        order = order[: max(1, np.count_nonzero(margin < 0))]
    ratio = np.exp(z[order])
    limit = options.get("min_p", 0.0) * (1 - slack)
    close |= bool(np.any(np.abs(ratio - limit) < 4e-7 * limit))
    order = order[ratio >= limit]
    kept = np.zeros(x.size, bool)
    kept[order] = True
    probabilities = np.where(kept, np.exp(z), 0.0)
    return kept, probabilities / probabilities.sum(), close


def uniform_bits(seed, position) -> int:
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return int(jax.random.bits(key, (), jnp.uint32))


# --- kept sets ---

SIZES = (1, 2, 7, 130, 512, 513, 5000)
KINDS = ("normal", "peaked", "ties", "constant", "zeros", "extreme")


def make_logits(rng, kind, size):
    if kind == "normal":
        x = rng.normal(size=size) * 3
    elif kind == "peaked":
        x = rng.normal(size=size) + 12 * (rng.random(size) < 0.01)
    elif kind == "ties":
        x = rng.integers(-2, 3, size=size) * 0.75
    elif kind == "constant":
        x = np.full(size, -3.25)
    elif kind == "zeros":
        x = rng.choice([0.0, -0.0], size=size)
    else:
        x = rng.choice([1e30, -1e30, 3e38, -3e38, 0.0, 5.0], size=size)
    return np.asarray(x, np.float32)


LOGITS = st.builds(
    lambda seed, kind, size: make_logits(np.random.default_rng(seed), kind, size),
    st.integers(0, 2**32 - 1),
    st.sampled_from(KINDS),
    st.sampled_from(SIZES),
)
CUTS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.7, 2.5, 0.01]),
        "top_k": st.sampled_from([0, -1, 1, 2, 3, 20, 64, 65, 511, 4999, 100000]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.25, 0.75, 0.999, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    }
)


def cut_arrays(options):
    return Sampling(**options).arrays(num_slots=1, rows=[0], vocab_size=5000, eos_token_ids=(), seeds=[0], prompt_lengths=[0])


@jax.jit
def masses(blocks, arrays):
    tops, highest = vocab_search.block_tops(blocks)
    full = sample_step._mass(blocks, highest, arrays)(blocks, sample_step._ids(blocks))
    values, ids = vocab_search.best(blocks, tops, 64)
    return full, sample_step._mass_short(values, highest, arrays), ids


@settings(max_examples=250, deadline=None)
@given(logits=LOGITS, options=CUTS)
def test_kept_set_is_the_oracles(logits, options):
    kept, probabilities, close = oracle_kept(logits.astype(np.float64), options)
    if close:
        return
    full, short, ids = masses(vocab_search.to_blocks(jnp.asarray(logits[None])), cut_arrays(options))
    full = np.asarray(full).reshape(-1)[: logits.size].astype(np.float64)
    # Below 2**-30 a probability is 0 in fixed point; down to 2**-28 rounding may go either way.
    assert not full[~kept].any()
    assert full[kept & (probabilities > 2.0**-28)].all()
    np.testing.assert_allclose(full / full.sum(), probabilities, rtol=2e-6, atol=2.0**-29)
    if 1 <= options["top_k"] <= 64:
        from_short = np.zeros(64 * 512 + 5000)
        np.add.at(from_short, np.asarray(ids)[0], np.asarray(short)[0])
        np.testing.assert_array_equal(from_short[: logits.size], full)


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2]),  # 2 and 3 tie: the lower id
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.75}, [0, 1]),  # reached exactly
        ({"top_p": 0.76}, [0, 1, 2]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.5}, [0, 1]),
        ({"min_p": 0.2501}, [0, 1]),
        ({"min_p": 0.25}, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.66}, [0]),  # top_p over what top_k left: 2/3 and 1/3
        ({"top_k": 2, "top_p": 0.67}, [0, 1]),
        ({"temperature": 0.5, "min_p": 0.26}, [0]),  # after temperature 1 : 1/4
        ({"temperature": 2.0, "min_p": 0.6}, [0, 1]),  # after temperature 1 : 0.71 : 0.5
        ({"top_k": 0}, [0, 1, 2, 3]),
        ({"top_k": -1}, [0, 1, 2, 3]),
    ],
)
def test_kept_set_by_hand(options, kept):
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.125, 0.125]]))
    full, _, _ = masses(vocab_search.to_blocks(logits), cut_arrays({"temperature": 1.0} | options))
    assert np.flatnonzero(np.asarray(full).reshape(-1)).tolist() == kept


def test_the_shortlist_weighs_each_row_as_the_whole_vocabulary_does():
    logits = np.random.default_rng(1).normal(size=(3, V)).astype(np.float32)
    arrays = Sampling(temperature=[0.5, 1.0, 2.0], top_k=[3, 64, 30], top_p=[1.0, 0.9, 0.8]).arrays(
        num_slots=3, rows=range(3), vocab_size=V, eos_token_ids=(), seeds=[0] * 3, prompt_lengths=[0] * 3
    )
    full, short, ids = masses(vocab_search.to_blocks(jnp.asarray(logits)), arrays)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(full).reshape(3, -1), np.asarray(ids), 1), short)


def test_the_best_tokens_tie_by_lowest_id_across_blocks():
    x = np.full((1, 3 * 512), -1.0, np.float32)
    x[0, [700, 800, 5, 1100]] = [2.0, 1.0, 1.0, 1.0]
    blocks = vocab_search.to_blocks(jnp.asarray(x))
    values, ids = vocab_search.best(blocks, vocab_search.block_tops(blocks)[0], 5)
    assert ids.tolist() == [[700, 5, 800, 1100, 0]] and values.tolist() == [[2.0, 1.0, 1.0, 1.0, -1.0]]


# --- whole steps ---


def random_options(rng, V):
    """One row's options, each off half of the time."""
    choices = {
        "temperature": [1.0, 0.6, 1.7],
        "top_k": [1, 5, 40, 64, 100],
        "top_p": [0.9, 0.5, 0.99],
        "min_p": [0.05, 0.3],
        "repetition_penalty": [1.3, 0.7],
        "presence_penalty": [0.5, -0.8],
        "frequency_penalty": [0.3, -0.4],
    }
    options = {name: values[rng.integers(len(values))] for name, values in choices.items() if rng.random() < 0.5}
    options.setdefault("temperature", 0.0)
    if rng.random() < 0.5:
        ids = rng.choice(V, size=min(V - 1, 9), replace=False)
        options["logit_bias"] = {int(i): float(rng.choice([3.0, -3.0, -math.inf])) for i in ids}
    return options


DEFAULTS = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
}


def as_sampling(rows, **more):
    """Sampling with a sequence for each field."""
    return Sampling(**{name: [row.get(name, default) for row in rows] for name, default in DEFAULTS.items()}, **more)


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
    assert STEP(logits, history, np.full(B, 5, np.int32), negative).tokens.tolist() == [V - 1] * B
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


# --- options ---


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", [0.5, -1]),
        ("temperature", None),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.01),
        ("presence_penalty", -2.01),
        ("frequency_penalty", math.nan),
        ("frequency_penalty", 3),
        ("seed", -1),
        ("seed", 2**32),
        ("ignore_eos", 1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("n", 0),
        ("n", [1, 2]),
        ("n", None),
        ("max_new_tokens", -1),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", [{1: "x"}]),
        ("logit_bias", 5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [["a"], [""]]),
        ("stop", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", [1.5]),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperature": [0.5]}, "temperature has 1 entries for 2 rows"),
        ({"stop_token_ids": [[1], [2], [3]]}, "stop_token_ids has 3 entries for 2 rows"),
        ({"logit_bias": [{}]}, "logit_bias has 1 entries for 2 rows"),
        ({"seed": [1, 2, 3]}, "seed has 3 entries for 2 rows"),
        ({"logit_bias": {10: 1.0}}, "token id 10, outside the vocabulary of 0 to 9"),
        ({"logit_bias": {-1: 1.0}}, "token id -1"),
        ({"stop_token_ids": [10]}, "stop_token_ids holds token id 10"),
    ],
)
def test_arrays_refuse_what_does_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**options).arrays(num_slots=3, rows=[0, 2], vocab_size=10, eos_token_ids=(1,), seeds=[0, 0], prompt_lengths=[0, 0])


def test_arrays_refuse_too_many_tokens():
    def build(**options):
        return Sampling(**options).arrays(num_slots=1, rows=[0], vocab_size=9999, eos_token_ids=(0,), seeds=[0], prompt_lengths=[0])

    build(logit_bias=dict.fromkeys(range(MAX_BIAS), 1.0), stop_token_ids=list(range(MAX_STOP)))
    with pytest.raises(ValueError, match=f"logit_bias has {MAX_BIAS + 1} tokens"):
        build(logit_bias=dict.fromkeys(range(MAX_BIAS + 1), 1.0))
    with pytest.raises(ValueError, match=f"stop_token_ids has {MAX_STOP + 1} tokens"):
        build(stop_token_ids=list(range(1, MAX_STOP + 1)))


def test_arrays_put_each_row_at_its_slot():
    arrays = Sampling(
        temperature=np.array([0.5, 0.0]),
        top_k=[3, -1],
        seed=[5, None],
        stop_token_ids=[[4], []],
        logprobs=[None, 2],
        n=2,
    ).arrays(
        num_slots=6,
        rows=[4, 1, 0, 3],
        vocab_size=10,
        eos_token_ids=(9,),
        seeds=[50, 51, 52, 53],
        prompt_lengths=[7, 7, 8, 8],
        max_tokens=[20, 20, 30, 30],
    )
    assert arrays.temperature.tolist() == [0, 0.5, 0, 0, 0.5, 0]
    assert arrays.top_k.tolist() == [-1, 3, 0, -1, 3, 0]
    assert arrays.seeds[[4, 0, 3]].tolist() == [5, 52, 53] and arrays.seeds[1] not in (5, 6, 51)
    assert arrays.stop_ids[:, :2].tolist() == [[9, -1], [4, 9], [-1, -1], [9, -1], [4, 9], [-1, -1]]
    assert arrays.num_logprobs.tolist() == [2, -1, -1, 2, -1, -1]
    assert arrays.prompt_lengths.tolist() == [8, 7, 0, 8, 7, 0]
    assert arrays.max_tokens[[4, 0]].tolist() == [20, 30]
    dtypes = {name: str(getattr(arrays, name).dtype) for name in ("temperature", "top_k", "seeds", "stop_ids", "bias_values")}
    assert dtypes == {"temperature": "float32", "top_k": "int32", "seeds": "uint32", "stop_ids": "int32", "bias_values": "float32"}


def test_samples_of_seeds_in_a_row_all_differ():
    arrays = Sampling(seed=[0, 1, 2, 3], n=4).arrays(
        num_slots=16, rows=range(16), vocab_size=10, eos_token_ids=(), seeds=[9] * 16, prompt_lengths=[0] * 16
    )
    assert arrays.seeds[::4].tolist() == [0, 1, 2, 3] and len(set(arrays.seeds.tolist())) == 16


def test_what_a_sampling_says_of_itself():
    assert not Sampling().is_random and Sampling(temperature=[0, 1]).is_random
    assert Sampling(temperature=1, seed=[None, 3]).needs_seeds and not Sampling(temperature=1, seed=3).needs_seeds
    assert not Sampling().wants_logprobs and Sampling(logprobs=0).wants_logprobs
    assert Sampling(stop="a").stop_strings(1, 2) == ("a",) == Sampling(stop=[["b"], "a"]).stop_strings(1, 2)
    assert Sampling(stop=["a", "b"]).stop_strings(0, 1) == ("a", "b") and Sampling().stop_strings(0, 3) == ()
    assert Sampling(top_k=[1, 2]) == Sampling(top_k=(1, 2)) == Sampling(top_k=np.array([1, 2]))
