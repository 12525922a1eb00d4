"""Sampling options of `generate` against naive loops over `score`, parallel samples, and models whose logits are not numbers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from engine import (
    ATOL,
    B,
    FakeTokenizer,
    V,
    assert_all_pages_return,
    greedy,
    log_softmax,
    new_state,
    oracle,
    prompt,
    tokens_of,
)

import jaxkv
from jaxkv import Sampling

# Sampling options


def test_unseeded_rows_and_calls_differ_and_come_back_with_the_states_seed(model):
    sampling = Sampling(temperature=2.0)

    def two_calls(seed):
        state, first = jaxkv.generate(new_state(model, seed=seed), [prompt(8)] * 3, max_new_tokens=8, sampling=sampling)
        state, second = jaxkv.generate(jaxkv.release(state, range(B)), [prompt(8)] * 3, max_new_tokens=8, sampling=sampling)
        return tokens_of(first) + tokens_of(second)

    texts = two_calls(seed=1)
    assert len(set(map(tuple, texts))) == 6
    assert two_calls(seed=1) == texts
    assert two_calls(seed=2) != texts


def test_a_greedy_call_leaves_the_key_alone(model):
    state = new_state(model)
    after, _ = jaxkv.generate(state, [prompt(8)], max_new_tokens=2)
    assert (after.key == state.key).all()


def test_parallel_samples_share_the_prompt_and_part_ways(model):
    sampling = Sampling(temperature=2.0, seed=4, n=3)
    text = prompt(20)
    _, alone = jaxkv.generate(new_state(model), [text], rows=[1], max_new_tokens=8, sampling=Sampling(temperature=2.0, seed=4))
    state, output = jaxkv.generate(new_state(model), [text], rows=[1], max_new_tokens=8, sampling=sampling)
    assert output.rows == [1, 0, 2]
    assert tokens_of(output)[0] == tokens_of(alone)[0]
    assert len(set(map(tuple, tokens_of(output)))) == 3
    jaxkv.check_integrity(state)
    assert (state.kv.refcounts == 3).sum() == 2  # the prompt's two full pages; its third was copied before writing
    for row, tokens in zip(output.rows, tokens_of(output), strict=True):
        assert state.tokens(row).tolist() == text + tokens
    state, more = jaxkv.generate(state, [[]] * 3, rows=output.rows, max_new_tokens=4)
    assert tokens_of(more) == [greedy(model, text + tokens, 4) for tokens in tokens_of(output)]
    assert_all_pages_return(state)


def test_parallel_samples_of_two_prompts_with_limits_and_reasons(model):
    state, output = jaxkv.generate(
        new_state(model),
        [prompt(9), prompt(16)],
        rows=[3, 0],
        max_new_tokens=[1, 3],
        sampling=Sampling(temperature=1.0, n=2, logprobs=1),
    )
    assert output.rows == [3, 1, 0, 2]
    assert [len(t) for t in output.tokens] == [1, 1, 3, 3]
    assert [len(p) for p in output.logprobs] == [1, 1, 3, 3]
    jaxkv.check_integrity(state)
    histories = [state.tokens(row).tolist() for row in range(B)]
    state, more = jaxkv.generate(state, [[]] * B, max_new_tokens=3)
    assert tokens_of(more) == [greedy(model, history, 3) for history in histories]
    assert_all_pages_return(state)


def test_logprobs_are_the_models_own(model):
    """Log-softmax of the raw logits, whatever bias, penalty and temperature chose the token."""
    text = prompt(20)
    sampling = Sampling(
        temperature=[0, 1.5, 0],
        seed=9,
        logprobs=[5, 0, None],
        logit_bias=[{7: 30.0}, None, None],
        repetition_penalty=[1.3, 1.0, 1.0],
    )
    _, output = jaxkv.generate(new_state(model), [text] * 3, max_new_tokens=4, sampling=sampling)
    for row, alternatives in ((0, 5), (1, 0)):
        tokens = tokens_of(output)[row]
        logprobs = log_softmax(oracle(model, text + tokens)[len(text) - 1 : -1])
        for given, token, expected in zip(output.logprobs[row], tokens, logprobs, strict=True):
            assert given.token == token
            assert given.logprob == pytest.approx(expected[token], abs=ATOL)
            best = np.argsort(-expected, kind="stable")[:alternatives]
            assert [t for t, _ in given.top] == best.tolist()
            assert [p for _, p in given.top] == pytest.approx(expected[best].tolist(), abs=ATOL)
    assert tokens_of(output)[0][0] == 7  # the bias won, and then the penalty did not
    _, output = jaxkv.generate(new_state(model), [text], max_new_tokens=1)
    assert output.logprobs is None


def test_penalties_and_bias_choose_what_a_naive_loop_chooses(model):
    text = prompt(12) * 2
    repetition, presence, frequency, bias = 1.5, 0.7, 0.4, {3: 1.5, 50: -np.inf, 99: -2.0}
    expected = []
    for _ in range(16):
        x = oracle(model, text + expected)[-1].astype(np.float64)
        for token, value in bias.items():
            x[token] += value
        seen = list(set(text + expected))
        x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
        for token in expected:
            x[token] -= frequency
        x[list(set(expected))] -= presence
        expected.append(int(x.argmax()))
    sampling = Sampling(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)
    _, output = jaxkv.generate(new_state(model), [text], max_new_tokens=16, sampling=sampling)
    assert tokens_of(output) == [expected]


# A model whose logits are not numbers


def poisoned(model, token):
    """The model with NaN for the embedding of one token: a row fails once it has run that token."""
    embed = model.params["embed"]
    embed = dataclasses.replace(embed, weight=embed.weight.at[token].set(jnp.nan))
    return dataclasses.replace(model, params={**model.params, "embed": embed})


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=2, logprobs=2, repetition_penalty=1.1)])
def test_nan_logits_fail_their_row_only(model, sampling):
    texts = [prompt(20, 1), prompt(20, 2), prompt(9, 3)]
    _, clean = jaxkv.generate(new_state(model), texts, max_new_tokens=8, sampling=sampling)
    used = set(sum(texts, []) + sum(tokens_of(clean), []))
    bad = next(t for t in range(V) if t not in used)
    sick = poisoned(model, bad)
    state, output = jaxkv.generate(
        new_state(sick), [texts[0], texts[1][:10] + [bad], texts[2]], max_new_tokens=8, sampling=sampling
    )
    assert output.finish_reasons == ["length", "error", "length"]
    assert tokens_of(output) == [tokens_of(clean)[0], [], tokens_of(clean)[2]]
    jaxkv.check_integrity(state)
    # Pages that hold NaN are reused by a healthy row.
    state = jaxkv.release(state, [1])
    state, output = jaxkv.generate(state, [texts[1]], rows=[1], max_new_tokens=8, sampling=sampling)
    assert tokens_of(output) == [tokens_of(clean)[1]]
    assert output.finish_reasons == ["length"]


def test_a_row_that_fails_on_its_way_keeps_what_it_emitted(model, long_text):
    text, expected = long_text
    at = next(i for i in range(2, 20) if expected[i] not in expected[:i] + text)
    tokenizer = FakeTokenizer({expected[at]: b"\xc3"})  # half a character, held back when the row fails
    sick = dataclasses.replace(poisoned(model, expected[at]), tokenizer=tokenizer)
    run = jaxkv.generate(new_state(sick), [text], max_new_tokens=24, stream=True)
    events = list(run)
    state, output = run.finish()
    assert tokens_of(output) == [expected[: at + 1]]
    assert output.finish_reasons == ["error"] and events[-1].finish_reason == "error"
    assert "".join(e.text for e in events) == output.text[0] == tokenizer.decode(expected[: at + 1])
    assert state.tokens(0).tolist() == text + expected[: at + 1]
    jaxkv.check_integrity(state)
    state = jaxkv.truncate(state, [0], [len(text) + at])  # back to before the token that broke it
    state, output = jaxkv.generate(state, [[]], max_new_tokens=1)
    assert tokens_of(output) == [[expected[at]]]


def test_infinite_logits_fail_their_row_only(model):
    text = prompt(20)
    bad = next(t for t in range(V) if t not in text)
    head = model.params["head"]
    sick = dataclasses.replace(
        model, params={**model.params, "head": dataclasses.replace(head, weight=head.weight.at[bad].set(jnp.inf))}
    )
    _, output = jaxkv.generate(new_state(sick), [text], max_new_tokens=3)
    assert output.finish_reasons == ["error"] and tokens_of(output) == [[]]
