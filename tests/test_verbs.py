"""prefill, decode, fork, truncate, release: against `score`, and with stale states (test_misuse.py has the errors)."""

import dataclasses

import jax
import numpy as np
import pytest
from engine import ATOL, WINDOW, B, P, V, assert_all_pages_return, greedy, new_state, oracle, prompt

import jaxkv
from jaxkv import Sampling, StaleStateError

FAST_FAMILIES = ("mistral_swa", "gemma2")  # test_generate.py has GQA, MQA and experts
SLOW_FAMILIES = (
    "llama_mha",
    "llama_mqa",
    "llama_gqa_llama3rope",
    "llama_yarn",
    "gemma3",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)


def families():
    return [*FAST_FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES)]


def close(got, expected):
    np.testing.assert_allclose(got, expected, atol=ATOL, rtol=0)


# Logits


@pytest.mark.parametrize("name", families())
def test_every_way_to_store_a_text_gives_the_logits_of_a_pass_without_cache(hf_tiny, name):
    model = hf_tiny(name)
    text = prompt(46)  # longer than any window there
    expected = oracle(model, text)
    state, logits = jaxkv.prefill(new_state(model), [text[:40]], rows=[0])  # at once
    close(logits[0], expected[39])
    for start, stop in ((0, 16), (16, 27), (27, 40)):  # in chunks
        state, logits = jaxkv.prefill(state, [text[start:stop]], rows=[2])
        close(logits[0], expected[stop - 1])
    for at in range(40, 46):  # token by token, behind both
        state, logits = jaxkv.decode(state, [text[at]] * 2, rows=[2, 0])
        close(logits, [expected[at]] * 2)
    assert state.tokens(0).tolist() == state.tokens(2).tolist() == text
    jaxkv.check_integrity(state)


def test_all_logits_are_those_of_the_chunk(model):
    texts = [prompt(20), prompt(13)]
    state, _ = jaxkv.generate(new_state(model), [prompt(5), prompt(9)], max_new_tokens=[0, 3])  # slot 1 has a pending token
    histories = [state.tokens(row).tolist() for row in (0, 1)]
    state, logits = jaxkv.prefill(state, texts, all_logits=True)
    assert logits.shape == (2, 20, V)
    for got, history, text in zip(np.asarray(logits), histories, texts, strict=True):
        close(got[: len(text)], oracle(model, history + text)[len(history) :])
    jaxkv.check_integrity(state)


def test_decode_of_all_of_some_and_of_pending_rows(model):
    texts = [prompt(n) for n in (8, 3, 17, 1)]
    state, _ = jaxkv.prefill(new_state(model), texts)
    state, logits = jaxkv.decode(state, [1, 2, 3, 4])
    histories = [text + [token] for text, token in zip(texts, (1, 2, 3, 4), strict=True)]
    close(logits, [oracle(model, h)[-1] for h in histories])
    state, logits = jaxkv.decode(state, np.array([9, 8]), rows=[3, 1])
    for row, token, got in zip((3, 1), (9, 8), logits, strict=True):
        histories[row] += [token]
        close(got, oracle(model, histories[row])[-1])
    state, output = jaxkv.generate(state, [[], []], rows=[0, 3], max_new_tokens=2)  # leaves a pending token in each
    histories[0] += output.tokens[0].tolist()
    histories[3] += output.tokens[1].tolist()
    assert (state.pending >= 0).tolist() == [True, False, False, True]
    state, logits = jaxkv.decode(state, [5, 6, 7], rows=[2, 0, 3])
    for row, token, got in zip((2, 0, 3), (5, 6, 7), logits, strict=True):
        histories[row] += [token]
        close(got, oracle(model, histories[row])[-1])
    assert [state.tokens(row).tolist() for row in range(B)] == histories
    assert (state.pending == -1).all()
    jaxkv.check_integrity(state)


def test_logits_follow_the_order_of_rows(model):
    texts = [prompt(n) for n in (8, 3, 17, 1)]
    order = [2, 0, 3, 1]
    state, logits = jaxkv.prefill(new_state(model), texts, rows=order)
    close(logits, [oracle(model, text)[-1] for text in texts])
    state, logits = jaxkv.decode(state, [1, 2, 3, 4], rows=order)  # every slot, and not in the order of slots
    close(logits, [oracle(model, text + [token])[-1] for text, token in zip(texts, (1, 2, 3, 4), strict=True)])
    assert state.tokens(order[2]).tolist() == texts[2] + [3]


def test_a_text_can_begin_with_decode(model):
    state, logits = jaxkv.decode(new_state(model), [17], rows=[2])
    close(logits[0], oracle(model, [17])[-1])
    assert state.num_tokens.tolist() == [0, 0, 1, 0]


def test_two_states_of_one_model_are_independent(model):
    a, b = new_state(model), new_state(model)
    a, _ = jaxkv.prefill(a, [prompt(20)])
    b, _ = jaxkv.prefill(b, [prompt(9)])
    a, got_a = jaxkv.decode(a, [1], rows=[0])
    b = jaxkv.release(b, [0])
    a, got_a = jaxkv.decode(a, [2], rows=[0])
    close(got_a[0], oracle(model, prompt(20) + [1, 2])[-1])
    assert b.num_tokens.sum() == 0
    jaxkv.check_integrity(b)


# CASES 7: the pages, not only the output


def stored(state, row):
    """Keys and values of a slot by position, [2, L, tokens, K, H]."""
    layers = state.static.model.num_layers
    pages_of = np.asarray(state.kv.page_table[row])
    out = []
    for pool in (state.kv.k_pages, state.kv.v_pages):
        pool = np.asarray(pool).reshape(layers, -1, *pool.shape[1:])[:, pages_of]  # [L, M, K, P, H]
        out.append(np.moveaxis(pool, 2, 3).reshape(layers, -1, pool.shape[2], pool.shape[4])[:, : state.kv.lengths[row]])
    return np.stack(out)


def test_every_token_is_in_the_pages_whatever_the_window_skips(model):
    text = prompt(3 * WINDOW + 5)
    state, _ = jaxkv.prefill(new_state(model), [text], rows=[0])
    state, _ = jaxkv.generate(state, [text[:-1]], rows=[1], max_new_tokens=0, chunk_size=16)
    for token in text:
        state, _ = jaxkv.decode(state, [token], rows=[2])
    whole, chunked, single = (stored(state, row) for row in range(3))
    assert whole.shape[2] == len(text) and (np.abs(whole).max((0, 1, 3, 4)) > 0.1).all()
    np.testing.assert_allclose(chunked, whole[:, :, :-1], atol=1e-5, rtol=0)
    np.testing.assert_allclose(single, whole, atol=1e-5, rtol=0)


def test_a_rolled_back_text_is_read_back_from_before_the_window(model):
    """What the window had skipped is seen again once the text is cut back to it."""
    text = prompt(4 * WINDOW)
    state, _ = jaxkv.prefill(new_state(model), [text])
    state = jaxkv.truncate(state, [0], [10])
    state, logits = jaxkv.decode(state, [3], rows=[0])
    close(logits[0], oracle(model, text[:10] + [3])[-1])


# fork, truncate, release


def test_fork_then_write_both_ways(model):
    text = prompt(19)  # two full pages and a part of a third
    state, _ = jaxkv.prefill(new_state(model), [text])
    state = jaxkv.fork(state, 0, 3)
    jaxkv.check_integrity(state)
    assert (state.kv.refcounts == 2).sum() == 3
    state, child = jaxkv.decode(state, [5], rows=[3])
    state, parent = jaxkv.decode(state, [6], rows=[0])
    close(child[0], oracle(model, text + [5])[-1])
    close(parent[0], oracle(model, text + [6])[-1])
    assert (state.kv.refcounts == 2).sum() == 2
    state, both = jaxkv.decode(state, [7, 7], rows=[3, 0])
    close(both, [oracle(model, text + [5, 7])[-1], oracle(model, text + [6, 7])[-1]])
    assert_all_pages_return(state)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_forks_of_forks_released_in_any_order(model, order):
    histories = {0: prompt(13)}
    state, _ = jaxkv.prefill(new_state(model), [histories[0]])
    for src, dst in ((0, 1), (1, 2), (0, 3)):
        state = jaxkv.fork(state, src, dst)
        histories[dst] = list(histories[src])
        state, _ = jaxkv.prefill(state, [prompt(4, dst)], rows=[dst])
        histories[dst] += prompt(4, dst)
        jaxkv.check_integrity(state)
    left = set(range(4))
    for row in order:
        state = jaxkv.release(state, row)
        jaxkv.check_integrity(state)
        left -= {row}
        if left:
            rows = sorted(left)
            state, logits = jaxkv.decode(state, [row] * len(rows), rows=rows)
            for got, other in zip(logits, rows, strict=True):
                histories[other] += [row]
                close(got, oracle(model, histories[other])[-1])
    assert not state.kv.refcounts.any()


def test_fork_of_many_at_once_and_of_a_pending_token(model):
    state, output = jaxkv.generate(new_state(model), [prompt(16)], max_new_tokens=3)
    history = prompt(16) + output.tokens[0].tolist()
    state = jaxkv.fork(state, [0, 0], [3, 1])
    assert state.num_tokens.tolist() == [19, 19, 0, 19]
    state, output = jaxkv.generate(state, [[4], [], [9, 9]], rows=[0, 1, 3], max_new_tokens=4)
    for row, added, got in zip((0, 1, 3), ([4], [], [9, 9]), output.tokens, strict=True):
        assert got.tolist() == greedy(model, history + added, 4), row
    assert_all_pages_return(state)


def test_fork_of_nothing_is_nothing(model):
    state, _ = jaxkv.prefill(new_state(model), [prompt(5)])
    state = jaxkv.fork(state, [], [])
    state = jaxkv.fork(state, 2, 3)  # an empty slot's future is an empty slot
    state = jaxkv.truncate(state, [], [])
    state = jaxkv.release(state, [])
    jaxkv.check_integrity(state)
    assert state.num_tokens.tolist() == [5, 0, 0, 0]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 20, 21, 22, 23])
def test_truncate_to_any_length(model, length):
    """20 tokens stored, 2 emitted of which one is pending: 22 in all."""
    state, output = jaxkv.generate(new_state(model), [prompt(20)], max_new_tokens=2)
    history = prompt(20) + output.tokens[0].tolist()
    if length > 22:
        with pytest.raises(ValueError, match="holds 22 tokens .* 23"):
            jaxkv.truncate(state, [0], [length])
        return
    state = jaxkv.truncate(state, [0], [length])
    jaxkv.check_integrity(state)
    assert state.num_tokens[0] == length
    assert (state.pending[0] >= 0) == (length == 22)
    assert (state.kv.refcounts > 0).sum() == -(-min(length, 21) // P)
    assert state.tokens(0).tolist() == history[:length]
    state, output = jaxkv.generate(state, [[11]], max_new_tokens=2)
    assert output.tokens[0].tolist() == greedy(model, history[:length] + [11], 2)
    assert_all_pages_return(state)


def test_truncate_into_a_shared_page_copies_before_it_writes(model):
    text = prompt(22)
    state, _ = jaxkv.prefill(new_state(model), [text])
    state = jaxkv.fork(state, 0, 1)
    state = jaxkv.truncate(state, [0, 1], [11, 22])
    jaxkv.check_integrity(state)
    state, parent = jaxkv.decode(state, [3], rows=[0])
    state, child = jaxkv.decode(state, [4], rows=[1])
    close(parent[0], oracle(model, text[:11] + [3])[-1])
    close(child[0], oracle(model, text + [4])[-1])
    state, output = jaxkv.generate(jaxkv.truncate(state, 1, 16), [[]], rows=[1], max_new_tokens=3)  # recomputes a shared token
    assert output.tokens[0].tolist() == greedy(model, text[:16], 3)
    state, output = jaxkv.generate(state, [[]], rows=[0], max_new_tokens=3)
    assert output.tokens[0].tolist() == greedy(model, text[:11] + [3], 3)
    assert_all_pages_return(state)


def test_release_takes_rows_or_a_mask(model):
    state, _ = jaxkv.generate(new_state(model), [prompt(5), prompt(6), prompt(7)], max_new_tokens=2)
    for rows in ([0, 2], np.array([True, False, True, True]), np.array([2, 0])):
        after = jaxkv.release(state, rows)
        assert after.num_tokens.tolist() == [0, 8, 0, 0]
        assert after.pending.tolist()[::2] == [-1, -1]
        jaxkv.check_integrity(after)


# Stale states


def consumed(model):
    state, _ = jaxkv.generate(new_state(model), [prompt(9)], max_new_tokens=2)
    kept = jaxkv.release(state, [1])
    successor, _ = jaxkv.decode(state, [1], rows=[0])
    return [state, kept], successor


VERBS = {
    "prefill": lambda s: jaxkv.prefill(s, [[1]]),
    "decode": lambda s: jaxkv.decode(s, [1], rows=[0]),
    "generate": lambda s: jaxkv.generate(s, [[1]], max_new_tokens=1),
    "stream": lambda s: jaxkv.generate(s, [[1]], max_new_tokens=1, stream=True),
    "fork": lambda s: jaxkv.fork(s, 0, 1),
    "truncate": lambda s: jaxkv.truncate(s, [0], [1]),
    "release": lambda s: jaxkv.release(s, [0]),
    "check_integrity": jaxkv.check_integrity,
    "tokens": lambda s: s.tokens(0),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_consumed_state_says_so(model, verb):
    stale, successor = consumed(model)
    for state in stale:
        with pytest.raises(StaleStateError, match=r"consumed.*state, out = jaxkv\.generate.*jaxkv\.fork"):
            VERBS[verb](state)
    VERBS[verb](successor)


@pytest.mark.parametrize("verb", ["prefill", "decode", "generate", "stream", "fork"])
def test_every_verb_that_runs_consumes(model, verb):
    state, _ = jaxkv.prefill(new_state(model), [prompt(9)])
    VERBS[verb](state)
    with pytest.raises(StaleStateError):
        jaxkv.check_integrity(state)


def test_a_copy_on_write_consumes_too(model):
    state, _ = jaxkv.prefill(new_state(model), [prompt(9)])
    forked = jaxkv.fork(state, 0, 1)
    after, _ = jaxkv.decode(forked, [1], rows=[0])
    with pytest.raises(StaleStateError):
        jaxkv.decode(forked, [1], rows=[1])
    jaxkv.check_integrity(after)


def test_params_are_never_donated(model):
    state = new_state(model)
    state, _ = jaxkv.generate(state, [prompt(9)], max_new_tokens=3, sampling=Sampling(n=2, temperature=1.0))
    state, _ = jaxkv.decode(state, [1], rows=[0])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_a_state_is_frozen(model):
    state = new_state(model)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.key = None
    for array in (state.kv.lengths, state.kv.page_table, state.kv.refcounts, state.pending):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    state, _ = jaxkv.generate(state, [prompt(9)], max_new_tokens=3)
    for array in (state.kv.lengths, state.kv.page_table, state.kv.refcounts, state.pending):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@pytest.mark.parametrize("not_a_state", [None, 3, "state", {}])
def test_what_is_no_state_is_named(not_a_state):
    for verb in VERBS.values():
        with pytest.raises((TypeError, AttributeError)):
            verb(not_a_state)
    with pytest.raises(TypeError, match=f"State.*{type(not_a_state).__name__}"):
        jaxkv.generate(not_a_state, [[1]])


# Pools of other dtypes


# (bits that a stored number keeps, bytes of it with its share of the scales over those of float32)
POOLS = {"bfloat16": (8, 1 / 2), "float16": (11, 1 / 2), "int8": (7, 0), "float8_e4m3fn": (4, 0)}
SLOW_POOLS = ("float16", "float8_e4m3fn")


@pytest.mark.parametrize("kv_dtype", [pytest.param(d, marks=pytest.mark.slow if d in SLOW_POOLS else ()) for d in POOLS])
def test_pools_of_fewer_bits_stay_close_and_chunks_change_nothing(model, kv_dtype):
    """Keys and values are rounded to `bits` bits, a call's own too: logits move by about that, and not with the chunks."""
    bits, share = POOLS[kv_dtype]
    text = prompt(40)
    expected = oracle(model, text)
    state, logits = jaxkv.prefill(new_state(model, kv_dtype=kv_dtype), [text[:16]], rows=[1])
    got = [(15, logits[0])]
    state, logits = jaxkv.prefill(state, [text[16:32]], rows=[1])
    got.append((31, logits[0]))
    for at in range(32, 40):
        state, logits = jaxkv.decode(state, [text[at]], rows=[1])
        got.append((at, logits[0]))
    errors = [np.abs(row - expected[at]).max() for at, row in got]
    assert 0 < max(errors) < 4 * 2.0**-bits * np.abs(expected).max(), errors
    if share:
        assert state.kv.nbytes == new_state(model).kv.nbytes * share
    else:
        assert state.kv.nbytes == 2 * state.kv.k_pages.nbytes + state.kv.kv_scales.nbytes
    _, whole = jaxkv.prefill(new_state(model, kv_dtype=kv_dtype), [text[:32]], rows=[1])
    close(got[1][1], whole[0])
    state = jaxkv.fork(state, 1, 2)
    state, logits = jaxkv.decode(state, [3, 3], rows=[1, 2])
    np.testing.assert_array_equal(logits[0], logits[1])
    jaxkv.check_integrity(state)


def test_the_reference_implementation_says_the_same(model):
    text = prompt(30)
    state, logits = jaxkv.prefill(new_state(model, implementation="reference"), [text[:16]])
    close(logits[0], oracle(model, text)[15])
    state, logits = jaxkv.decode(state, [text[16]], rows=[0])
    close(logits[0], oracle(model, text[:17])[-1])
