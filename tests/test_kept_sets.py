"""Which tokens top_k, top_p and min_p keep: against sorting, in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import KINDS, SIZES, V, make_logits, oracle_kept

from jaxkv import sample_step, vocab_search
from jaxkv.sampling import Sampling

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
