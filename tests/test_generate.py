"""`generate` against `score`: what a cached, chunked, batched, continued, streamed text must equal is the text computed without a cache."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from engine import (
    ATOL,
    MOE,
    B,
    S,
    V,
    assert_all_pages_return,
    greedy,
    make_model,
    new_state,
    oracle,
    prompt,
    tiny_config,
    tokens_of,
)

import jaxkv
from jaxkv import Sampling, stream
from jaxkv.config import RopeConfig
from jaxkv.kv import pages

ALL_AT_ONCE = dict(
    num_kv_heads=1, norm_placement="both", qk_norm="head", attn_soft_cap=5.0, final_soft_cap=8.0, tie_embeddings=True,
    embed_scale=3.0, activation="gelu_tanh", layer_ropes=(0, 1), ropes=(RopeConfig(theta=1e3), RopeConfig(kind="linear", factor=4.0)), **MOE,
)  # fmt: skip


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
    real = stream.step
    monkeypatch.setattr(stream, "step", lambda name, platform: dispatched.append(name) or real(name, platform))
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
