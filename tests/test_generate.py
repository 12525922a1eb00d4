"""`generate` against `score`: what a cached, chunked, batched, continued, streamed text must equal is the text computed without a cache."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import (
    ATOL,
    MOE,
    B,
    FakeTokenizer,
    S,
    V,
    assert_all_pages_return,
    greedy,
    log_softmax,
    make_model,
    new_state,
    oracle,
    prompt,
    tiny_config,
)

import jaxkv
from jaxkv import Sampling
from jaxkv.config import RopeConfig
from jaxkv.kv import pages

ALL_AT_ONCE = dict(
    num_kv_heads=1, norm_placement="both", qk_norm="head", attn_soft_cap=5.0, final_soft_cap=8.0, tie_embeddings=True,
    embed_scale=3.0, activation="gelu_tanh", layer_ropes=(0, 1), ropes=(RopeConfig(theta=1e3), RopeConfig(kind="linear", factor=4.0)), **MOE,
)  # fmt: skip


@pytest.fixture(scope="module")
def long_text(model):
    """A prompt longer than the window and its next 24 greedy tokens."""
    return prompt(40), greedy(model, prompt(40), 24)


def tokens_of(output):
    return [t.tolist() for t in output.tokens]


# One text, many ways


@pytest.mark.parametrize("chunk_size", [512, 16, 7, 1])
def test_one_shot_and_chunked_prompts_give_the_tokens_of_a_pass_without_cache(model, long_text, chunk_size):
    text, expected = long_text
    state, output = jaxkv.generate(new_state(model), [text], max_new_tokens=24, chunk_size=chunk_size)
    assert tokens_of(output) == [expected]
    assert output.finish_reasons == ["length"] and output.rows == [0]
    assert state.tokens(0).tolist() == text + expected
    assert state.num_tokens.tolist() == [64, 0, 0, 0]
    jaxkv.check_integrity(state)
    assert_all_pages_return(state)


@pytest.mark.parametrize("split", [(1, 23), (8, 16), (7, 1, 16), (0, 24)])
def test_generating_then_continuing_equals_one_shot(model, long_text, split):
    text, expected = long_text
    state, got, tokens = new_state(model), [], [text]
    for count in split:
        state, output = jaxkv.generate(state, tokens, max_new_tokens=count)
        got += tokens_of(output)[0]
        tokens = [[]]
        jaxkv.check_integrity(state)
    assert got == expected
    assert state.tokens(0).tolist() == text + expected


def test_a_conversation_equals_one_shot_over_the_whole_history(model):
    state, history = new_state(model), []
    for turn, (length, count) in enumerate([(17, 3), (1, 8), (9, 0), (8, 1), (16, 5)]):
        said = prompt(length, turn)
        state, output = jaxkv.generate(state, [said], rows=[2], max_new_tokens=count)
        assert tokens_of(output)[0] == greedy(model, history + said, count)
        history += said + tokens_of(output)[0]
        assert state.tokens(2).tolist() == history
        jaxkv.check_integrity(state)


def test_prefill_and_decode_verbs_give_what_generate_gives(model, long_text):
    text, expected = long_text
    state, logits = jaxkv.prefill(new_state(model), [text], rows=[1])
    got = []
    for _ in expected:
        got.append(int(logits[0].argmax()))
        state, logits = jaxkv.decode(state, [got[-1]], rows=[1])
    assert got == expected


def test_a_model_with_every_feature_generates_what_score_says():
    """MQA, soft caps, experts after a dense layer, two ropes, tied and scaled embeddings, norms on both sides."""
    model = make_model(tiny_config(**ALL_AT_ONCE))
    texts = [prompt(30), prompt(11)]
    expected = [greedy(model, text, 10) for text in texts]
    state, output = jaxkv.generate(new_state(model), texts, max_new_tokens=10, chunk_size=16)
    assert tokens_of(output) == expected
    state, logits = jaxkv.prefill(state, [[5]], rows=[1])
    np.testing.assert_allclose(logits[0], oracle(model, texts[1] + expected[1] + [5])[-1], atol=ATOL, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama_mha", "llama_mqa", "mistral_swa", "gemma2", "gemma3", "qwen3_moe", "mixtral", "olmo2", "phi3"]
)
def test_families_generate_what_score_says(hf_tiny, name):
    model = hf_tiny(name)
    text = [t % model.config.vocab_size for t in prompt(40)]
    expected = greedy(model, text, 12)
    for chunk_size in (512, 16):
        state, output = jaxkv.generate(new_state(model), [text], max_new_tokens=12, chunk_size=chunk_size)
        assert tokens_of(output) == [expected]
    state, first = jaxkv.generate(new_state(model), [text], max_new_tokens=5)
    state, second = jaxkv.generate(state, [[]], max_new_tokens=7)
    assert tokens_of(first)[0] + tokens_of(second)[0] == expected


def test_ragged_lists_and_an_array_with_lengths_are_the_same(model):
    texts = [prompt(5), prompt(17), prompt(1)]
    array = np.full((3, 20), V + 5)  # padding is never looked at
    for row, text in zip(array, texts, strict=True):
        row[: len(text)] = text
    _, listed = jaxkv.generate(new_state(model), texts, max_new_tokens=4)
    for given in (array, jnp.asarray(array), array.astype(np.int64)):
        _, output = jaxkv.generate(new_state(model), given, np.array([5, 17, 1]), max_new_tokens=4)
        assert tokens_of(output) == tokens_of(listed) == [greedy(model, text, 4) for text in texts]
    _, flat = jaxkv.generate(new_state(model), texts[1], max_new_tokens=4)  # a flat list is one row
    assert tokens_of(flat) == [greedy(model, texts[1], 4)]


# Positions past 32,767


def far_model(window, num_layers):
    """Rope frequencies are powers of two, so that an angle at position 40,000 is exact in float32."""
    layers = dict(num_layers=num_layers, layer_windows=(window,) * num_layers, layer_ropes=(0,) * num_layers)
    heads = dict(head_dim=8, num_q_heads=num_layers, num_kv_heads=1, ropes=(RopeConfig(theta=2.0**16),))
    return make_model(tiny_config(model_dim=32, max_positions=65536, **layers, **heads))


def state_at(model, position, num_tokens):
    """A slot that holds `position` tokens of zeros, whose keys and values are zeros too."""
    state = jaxkv.init_state(model, 1, num_tokens, page_size=64)
    own, _, shortfall = pages.append(state.kv.own, np.array([position]))
    assert not shortfall
    return dataclasses.replace(state, kv=dataclasses.replace(state.kv, own=own))


def test_positions_past_int16_are_right():
    """Windows of 16 in two layers: what comes 31 tokens after position 39,950 has forgotten all before, and rope is relative."""
    model = far_model(window=16, num_layers=2)
    text = prompt(48)
    state, logits = jaxkv.prefill(state_at(model, 39_950, 40_100), [text], all_logits=True)
    expected = oracle(model, text)
    np.testing.assert_allclose(np.asarray(logits)[0, 31:], expected[31:], atol=ATOL, rtol=0)
    for token in prompt(20, 1):
        text.append(token)
        state, logits = jaxkv.decode(state, [token])
    assert state.num_tokens.tolist() == [39_950 + 68]
    np.testing.assert_allclose(logits[0], oracle(model, text)[-1], atol=ATOL, rtol=0)
    assert state.tokens(0)[-68:].tolist() == text
    jaxkv.check_integrity(state)


@pytest.mark.slow
def test_a_history_past_int16_equals_a_pass_without_cache():
    model = far_model(window=0, num_layers=1)
    text = np.random.default_rng(0).integers(0, V, (1, 33_000))
    expected = np.asarray(jaxkv.score(model, text)[0, -1])
    state, _ = jaxkv.generate(jaxkv.init_state(model, 1, 33_100, page_size=64), text[:, :-3], max_new_tokens=0)
    for token in text[0, -3:]:
        state, logits = jaxkv.decode(state, [token])
    np.testing.assert_allclose(logits[0], expected, atol=ATOL, rtol=0)


# Rows, limits, reasons


def test_max_new_tokens_per_row_and_zero_only_prefills(model):
    texts = [prompt(9), prompt(12), prompt(3)]
    expected = [greedy(model, text, 7) for text in texts]
    for limits in ([7, 0, 2], np.array([7, 0, 2]), (7, 0, 2)):
        state, output = jaxkv.generate(new_state(model), texts, max_new_tokens=limits)
        assert tokens_of(output) == [expected[0], [], expected[2][:2]]
        assert output.finish_reasons == ["length"] * 3
        assert state.num_tokens.tolist() == [16, 12, 5, 0]
        jaxkv.check_integrity(state)
    state, output = jaxkv.generate(state, [[], [], []], max_new_tokens=[0, 7, 5])
    assert tokens_of(output) == [[], expected[1], expected[2][2:]]
    assert output.timings.new_tokens == 12


def test_max_new_tokens_from_sampling_and_by_default(model):
    state, output = jaxkv.generate(new_state(model), [prompt(9), prompt(4)], sampling=Sampling(max_new_tokens=[None, 3]))
    assert [len(t) for t in output.tokens] == [S - 9, 3]  # the default is 128, or what fits
    state, output = jaxkv.generate(new_state(model), [prompt(9)], max_new_tokens=2, sampling=Sampling(max_new_tokens=5))
    assert len(output.tokens[0]) == 2


def test_a_slot_can_be_filled_to_its_last_token(model):
    text = prompt(S - 2)
    state, output = jaxkv.generate(new_state(model), [text], max_new_tokens=2)
    assert tokens_of(output) == [greedy(model, text, 2)]
    assert state.num_tokens[0] == S
    jaxkv.check_integrity(state)
    state, _ = jaxkv.generate(state, [[]], max_new_tokens=0)
    assert state.kv.lengths[0] == S
    with pytest.raises(ValueError, match=f"{S + 1} tokens .{S} now"):
        jaxkv.generate(state, [[]], max_new_tokens=1)
    state = jaxkv.truncate(state, [0], [S - 2])
    state, again = jaxkv.generate(state, [[]], max_new_tokens=2)
    assert tokens_of(again) == tokens_of(output)


def test_finished_rows_end_the_call(model, monkeypatch):
    """Once every row has stopped nothing more is dispatched, also when some row asked for no token at all."""
    text = prompt(9)
    first = greedy(model, text, 1)[0]
    dispatched = []
    real = jaxkv.generate.__globals__["step"]
    monkeypatch.setitem(jaxkv.generate.__globals__, "step", lambda name, platform: dispatched.append(name) or real(name, platform))
    _, output = jaxkv.generate(new_state(model), [text, text], max_new_tokens=[60, 0], sampling=Sampling(stop_token_ids=[first]))
    assert tokens_of(output) == [[first], []]
    assert output.finish_reasons == ["stop", "length"]
    assert dispatched.count("decode_many") <= 2


def test_stop_token_ids_end_a_row_and_stay_in_it(model, long_text):
    text, expected = long_text
    at = next(i for i in range(3, 24) if expected[i] not in expected[:i])
    state, output = jaxkv.generate(
        new_state(model), [text], max_new_tokens=24, sampling=Sampling(stop_token_ids=[expected[at], V - 1])
    )
    assert tokens_of(output) == [expected[: at + 1]]
    assert output.finish_reasons == ["stop"]
    assert state.tokens(0).tolist() == text + expected[: at + 1]
    _, rest = jaxkv.generate(state, [[]], max_new_tokens=24 - at - 1)
    assert tokens_of(rest) == [expected[at + 1 :]]


def test_the_models_own_stop_tokens_and_ignore_eos(model, long_text):
    text, expected = long_text
    stopping = make_model(eos=(expected[0], V + 31870))  # configs name stop tokens that the vocabulary lacks
    _, output = jaxkv.generate(new_state(stopping), [text, text], max_new_tokens=3, sampling=Sampling(ignore_eos=[False, True]))
    assert tokens_of(output) == [expected[:1], expected[:3]]
    assert output.finish_reasons == ["stop", "length"]


# A token depends on (seed, position, logits) only


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.5, seed=11), Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3)]
)
def test_tokens_do_not_depend_on_neighbours_slot_or_chunk_size(model, sampling):
    text = prompt(33)
    _, alone = jaxkv.generate(new_state(model), [text], max_new_tokens=10, sampling=sampling)
    others = [prompt(50, 1), prompt(3, 2), prompt(16, 3)]
    for place in range(B):
        texts = others[:place] + [text] + others[place:]
        rows = np.roll(np.arange(B), place)
        state, output = jaxkv.generate(
            new_state(model), texts, rows=rows, max_new_tokens=10, sampling=sampling, chunk_size=(512, 20, 5, 32)[place]
        )
        assert tokens_of(output)[place] == tokens_of(alone)[0]
        jaxkv.check_integrity(state)


def test_a_seeded_text_continues_as_if_it_had_not_been_interrupted(model):
    sampling = Sampling(temperature=1.2, seed=5)
    _, whole = jaxkv.generate(new_state(model), [prompt(20)], max_new_tokens=12, sampling=sampling)
    state, first = jaxkv.generate(new_state(model, seed=99), [prompt(20)], rows=[3], max_new_tokens=5, sampling=sampling)
    state = jaxkv.fork(state, 3, 1)
    state, _ = jaxkv.generate(state, [prompt(9)], rows=[3], max_new_tokens=3)
    state, second = jaxkv.generate(state, [[]], rows=[1], max_new_tokens=7, sampling=sampling)
    assert tokens_of(first)[0] + tokens_of(second)[0] == tokens_of(whole)[0]


def test_idle_slots_stay_as_they_are(model):
    state, _ = jaxkv.generate(new_state(model), [prompt(10), prompt(20)], max_new_tokens=3)
    before = [state.tokens(row).tolist() for row in (0, 1)]
    state, _ = jaxkv.generate(state, [prompt(30)], rows=[2], max_new_tokens=20)
    assert [state.tokens(row).tolist() for row in (0, 1)] == before
    state, output = jaxkv.generate(state, [[], []], max_new_tokens=4)
    assert tokens_of(output) == [greedy(model, history, 4) for history in before]


def test_a_host_buffer_may_be_reused_at_once(model):
    text = prompt(16)
    buffer, lengths, rows = np.array([text]), np.array([16]), np.array([1])
    state, logits = jaxkv.prefill(new_state(model), buffer, lengths, rows)
    buffer[:], lengths[:], rows[:] = 0, 0, 0
    tokens, rows = np.array([3]), np.array([1])
    state, next_logits = jaxkv.decode(state, tokens, rows)
    tokens[:], rows[:] = 0, 0
    expected = oracle(model, text + [3])
    np.testing.assert_allclose(logits[0], expected[-2], atol=ATOL, rtol=0)
    np.testing.assert_allclose(next_logits[0], expected[-1], atol=ATOL, rtol=0)
    assert state.tokens(1).tolist() == text + [3]


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
    assert (jax.random.key_data(after.key) == jax.random.key_data(state.key)).all()


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


# Text, stop strings, streams


@pytest.fixture(scope="module")
def speaking(model):
    return dataclasses.replace(model, tokenizer=FakeTokenizer())


def test_text_is_what_the_tokenizer_makes_of_the_tokens(speaking, long_text):
    text, expected = long_text
    _, output = jaxkv.generate(new_state(speaking), [text, prompt(3)], max_new_tokens=[24, 2])
    assert output.text == [speaking.tokenizer.decode(tokens) for tokens in output.tokens]
    _, output = jaxkv.generate(new_state(dataclasses.replace(speaking, tokenizer=None)), [text], max_new_tokens=1)
    assert output.text is None


@pytest.mark.parametrize("span", [(5, 8), (4, 6), (4, 5), (0, 1), (1, 12), (47, 48)])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_roll_back_what_they_are_part_of(speaking, long_text, span, stream):
    text, expected = long_text
    said = speaking.tokenizer.decode(expected)
    stop = said[slice(*span)]
    at = said.find(stop)
    kept = expected[: at // 2]  # two letters a token
    got = jaxkv.generate(
        new_state(speaking),
        [text, prompt(5)],
        max_new_tokens=[24, 3],
        sampling=Sampling(stop=[[stop, "?"], []], logprobs=0),
        stream=stream,
    )
    state, output = got.finish() if stream and not list(got) else (got.finish() if stream else got)
    assert output.finish_reasons == ["stop", "length"]
    assert tokens_of(output) == [kept, greedy(speaking, prompt(5), 3)]
    assert output.text[0] == said[:at]
    assert len(output.logprobs[0]) == len(kept)
    assert state.tokens(0).tolist() == text + kept
    jaxkv.check_integrity(state)
    state, rest = jaxkv.generate(state, [[]], max_new_tokens=24 - len(kept))
    assert tokens_of(rest) == [expected[len(kept) :]]


def test_a_stop_string_that_does_not_come_holds_nothing_back(speaking, long_text):
    text, expected = long_text
    said = speaking.tokenizer.decode(expected[:6])
    run = jaxkv.generate(new_state(speaking), [text], max_new_tokens=6, sampling=Sampling(stop=said[-3:] + "?"), stream=True)
    assert "".join(e.text for e in run) == said
    assert run.finish()[1].text == [said]


def test_characters_are_shown_whole(model, long_text):
    text, expected = long_text
    at = next(i for i in range(3, 20) if expected[i] != expected[i + 1])
    tokenizer = FakeTokenizer({expected[at]: b"\xc3", expected[at + 1]: b"\xa9"})
    speaking = dataclasses.replace(model, tokenizer=tokenizer)
    for count in (at + 1, at + 2):
        run = jaxkv.generate(new_state(speaking), [text], max_new_tokens=count, stream=True)
        shown = [e.text for e in run]
        assert "".join(shown) == run.finish()[1].text[0] == tokenizer.decode(expected[:count])
        assert shown[at] == ("\ufffd" if count == at + 1 else "")
        assert count == at + 1 or shown[at + 1] == "é"


def test_a_character_begun_in_one_call_is_completed_in_the_next(model, long_text):
    text, expected = long_text
    at = next(i for i in range(3, 20) if expected[i] != expected[i + 1])
    halves = {expected[at]: b"\xc3", expected[at + 1]: b"\xa9"}
    tokenizer = FakeTokenizer({expected[i]: b"." for i in range(24)} | halves)
    state, first = jaxkv.generate(new_state(dataclasses.replace(model, tokenizer=tokenizer)), [text], max_new_tokens=at + 1)
    assert first.text[0].endswith("\ufffd")
    state, second = jaxkv.generate(state, [[]], max_new_tokens=1)
    assert second.text == ["é"]
    state, again = jaxkv.generate(jaxkv.truncate(state, [0], [len(text) + at + 1]), [[]], max_new_tokens=1)  # none is pending now
    assert again.text == ["é"]


def test_stop_strings_need_a_tokenizer(model):
    state = new_state(model)
    with pytest.raises(ValueError, match="tokenizer"):
        jaxkv.generate(state, [prompt(3)], sampling=Sampling(stop="x"))
    jaxkv.check_integrity(state)


def test_a_stream_is_the_whole_output_in_pieces(speaking):
    texts, limits = [prompt(20), prompt(3), prompt(7)], [9, 0, 4]
    sampling = Sampling(temperature=1.0, seed=6, logprobs=1)
    _, whole = jaxkv.generate(new_state(speaking), texts, rows=[2, 0, 1], max_new_tokens=limits, sampling=sampling)
    run = jaxkv.generate(new_state(speaking), texts, rows=[2, 0, 1], max_new_tokens=limits, sampling=sampling, stream=True)
    tokens, text, reasons = [[], [], []], ["", "", ""], [None] * 3
    for event in run:
        assert reasons[event.index] is None, "an event after the end"
        assert event.row == [2, 0, 1][event.index]
        tokens[event.index] += event.tokens
        text[event.index] += event.text
        reasons[event.index] = event.finish_reason
    state, output = run.finish()
    assert run.finish()[0] is state  # as often as one likes
    assert tokens == tokens_of(output) == tokens_of(whole)
    assert text == output.text == whole.text
    assert output.logprobs == whole.logprobs
    assert reasons == ["length", None, "length"] and output.finish_reasons == ["length"] * 3
    jaxkv.check_integrity(state)


@pytest.mark.parametrize("read", [0, 1, 2, 5, 11])
def test_leaving_a_stream_early_loses_nothing(speaking, read):
    texts = [prompt(16), prompt(21)]
    expected = [greedy(speaking, text, 12) for text in texts]
    run = jaxkv.generate(new_state(speaking), texts, max_new_tokens=12, stream=True)
    tokens = [[], []]
    for event in itertools.islice(run, read):
        tokens[event.index] += event.tokens
    state, output = run.finish()
    assert list(run) == []
    jaxkv.check_integrity(state)
    for row in range(2):
        got = tokens_of(output)[row]
        assert got == expected[row][: len(got)] and len(got) >= len(tokens[row])
        assert state.tokens(row).tolist() == texts[row] + got
        assert output.text[row] == speaking.tokenizer.decode(got)
    state, rest = jaxkv.generate(state, [[], []], max_new_tokens=[12 - len(t) for t in output.tokens])
    assert [a + b for a, b in zip(tokens_of(output), tokens_of(rest), strict=True)] == expected
    assert_all_pages_return(state)


def test_a_stream_can_be_finished_inside_its_loop(speaking):
    run = jaxkv.generate(new_state(speaking), [prompt(16)], max_new_tokens=12, stream=True)
    seen = 0
    for event in run:
        seen += len(event.tokens)
        state, output = run.finish()
    assert seen == len(output.tokens[0]) == 1
    jaxkv.check_integrity(state)


def test_timings_add_up(model):
    _, output = jaxkv.generate(new_state(model), [prompt(16), prompt(3)], max_new_tokens=[4, 2])
    timings = output.timings
    assert (timings.prompt_tokens, timings.new_tokens) == (19, 6)
    assert 0 < timings.ttft_s <= timings.total_s
    assert timings.tpot_s * 3 == pytest.approx(timings.total_s - timings.ttft_s, rel=0.5)
