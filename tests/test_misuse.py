"""Every misuse of a verb: a clear error with the numbers, and the state goes on."""

import numpy as np
import pytest
from engine import ATOL, B, C, S, V, assert_all_pages_return, greedy, new_state, oracle, prompt

import jaxkv
from jaxkv import Sampling


def close(got, expected):
    np.testing.assert_allclose(got, expected, atol=ATOL, rtol=0)


def ask(*args, **options):
    return lambda state: jaxkv.generate(state, *args, **({"max_new_tokens": 2} | options))


def chunk(*args, **options):
    return lambda state: jaxkv.prefill(state, *args, **options)


def one(*args, **options):
    return lambda state: jaxkv.decode(state, *args, **options)


TWO = np.array([[1, 2, 3], [4, 5, 6]])
# In the state that these meet slot 0 holds 9 + 2 tokens, slot 1 holds 20, slots 2 and 3 are empty.
MISUSES = {
    "token of V": (ask([[1], [2, V]]), ValueError, f"token {V} at position 1 of row 1 .* {V} tokens"),
    "token below 0": (ask([[-1]]), ValueError, "token -1 at position 0 of row 0"),
    "token far above": (chunk([[2**40]]), ValueError, f"token {2**40}"),
    "token in decode": (one([V], rows=[1]), ValueError, f"token {V}"),
    "token in decode with pending": (one([V], rows=[0]), ValueError, f"token {V}"),
    "float tokens": (ask([[0.5, 1.0]]), TypeError, "float64"),
    "float array": (chunk(np.ones((1, 4), np.float32)), TypeError, "float32"),
    "float token in decode": (one([1.0], rows=[0]), TypeError, "float64"),
    "bool tokens": (ask([[True]]), TypeError, "bool"),
    "text for tokens": (ask("hello"), TypeError, "tokenizer.encode"),
    "nested tokens": (ask([[[1, 2]]]), TypeError, r"\(1, 2\)"),
    "a number among rows": (ask([[1, 2], 3]), TypeError, "row 1"),
    "three axes": (ask(np.ones((1, 2, 3), int)), ValueError, r"\(1, 2, 3\)"),
    "no rows": (ask([]), ValueError, "no rows"),
    "no rows in prefill": (chunk([]), ValueError, "no rows"),
    "an empty row in an empty slot": (ask([[1], []], rows=[1, 2]), ValueError, "slot 2 is empty"),
    "an empty row in prefill": (chunk([[1], []]), ValueError, "empty row .row 1"),
    "a row too long": (ask([prompt(S + 1)], rows=[2]), ValueError, rf"slot 2 would hold \d+ tokens .* {S}"),
    "a chunk too long": (chunk([prompt(S - 19)], rows=[1]), ValueError, f"slot 1 would hold {S + 1} tokens .20 now.* {S}"),
    "new tokens too many": (ask([[1]], rows=[1], max_new_tokens=S - 20), ValueError, f"slot 1 would hold {S + 1} tokens"),
    "new tokens far too many": (ask([[1]], max_new_tokens=2**31), ValueError, "max_tokens_per_slot"),
    "new tokens that wrap": (ask([[1]], max_new_tokens=2**32 + 3), ValueError, "max_tokens_per_slot"),
    "pool too small in prefill": (chunk([prompt(S), prompt(S), prompt(60)], rows=[2, 3, 1]), ValueError, "short of 4 pages of 8 .*27 of 32"),
    "pool too small for prompts": (ask([prompt(90), prompt(90), prompt(60)], rows=[2, 3, 1]), ValueError, "short of 5 pages .*27 of 32"),
    "pool too small for new tokens": (ask([prompt(80), prompt(80), prompt(20)], rows=[2, 3, 1], max_new_tokens=16), ValueError, "short of 1 page .*27 of 32"),
    "more rows than slots": (ask([[1]] * 5), ValueError, "5 rows .* 4 slots"),
    "a slot that is not there": (ask([[1]], rows=[B]), ValueError, f"row {B} .* 4 slots"),
    "a slot below 0": (ask([[1]], rows=[-1]), ValueError, "row -1"),
    "a slot twice": (ask([[1], [2]], rows=[1, 1]), ValueError, r"twice: \[1, 1\]"),
    "a slot twice in decode": (one([1, 2], rows=[0, 0]), ValueError, "twice"),
    "rows for other tokens": (ask([[1], [2]], rows=[0]), ValueError, "2 rows of tokens but 1"),
    "float rows": (ask([[1]], rows=[0.0]), TypeError, "float64"),
    "mask rows": (ask([[1]], rows=[True]), TypeError, "bool"),
    "decode of a slot that is not there": (one([1], rows=[99]), ValueError, "row 99"),
    "decode of float rows": (one([1], rows=[0.5]), TypeError, "float64"),
    "decode of too few": (one([1, 2]), ValueError, "4 rows"),
    "decode of two tokens a row": (one([[1, 2]], rows=[1]), ValueError, r"\(1, 2\)"),
    "lengths beyond the array": (ask(TWO, [1, 4]), ValueError, r"2 numbers in 0..3, got \[1, 4\]"),
    "lengths below 0": (ask(TWO, [1, -1]), ValueError, r"\[1, -1\]"),
    "lengths for other rows": (ask(TWO, [1]), ValueError, r"2 numbers in 0..3, got \[1\]"),
    "float lengths": (ask(TWO, [1.0, 2.0]), TypeError, "lengths .*float64"),
    "lengths of a list": (ask([[1, 2]], [1]), ValueError, "lists carry their own"),
    "max_new_tokens below 0": (ask([[1]], max_new_tokens=-1), ValueError, "max_new_tokens .*-1"),
    "max_new_tokens below 0 of a row": (ask([[1], [2]], max_new_tokens=[1, -1]), ValueError, r"2 rows; got \[1, -1\]"),
    "max_new_tokens of other rows": (ask([[1], [2]], max_new_tokens=[1]), ValueError, "2 rows"),
    "max_new_tokens and a half": (ask([[1]], max_new_tokens=1.5), ValueError, "1.5"),
    "n for which slots lack": (ask([[1]], rows=[2], sampling=Sampling(n=3)), ValueError, "n=3 .* 2 more empty slots, 1 are empty"),
    "sampling of another kind": (ask([[1]], sampling={"temperature": 1}), TypeError, "Sampling, got dict"),
    "temperatures of other rows": (ask([[1]], sampling=Sampling(temperature=[1.0, 0.5])), ValueError, "temperature .*2 .*1"),
    "stop strings of other rows": (ask([[1]], sampling=Sampling(stop=[["a"], ["b"]])), ValueError, "stop .*2 .*1"),
    "stop token of V": (ask([[1]], sampling=Sampling(stop_token_ids=[V])), ValueError, f"{V}.* 0 to {V - 1}"),
    "bias of V": (ask([[1]], sampling=Sampling(logit_bias={V: 1.0})), ValueError, f"{V}.* 0 to {V - 1}"),
    "chunk_size 0": (ask([[1]], chunk_size=0), ValueError, "chunk_size=0"),
    "chunk_size and a half": (ask([[1]], chunk_size=1.5), ValueError, "chunk_size=1.5"),
    "truncate to more": (lambda s: jaxkv.truncate(s, [0], [12]), ValueError, "slot 0 holds 11 .* 12"),
    "truncate below 0": (lambda s: jaxkv.truncate(s, [0], [-1]), ValueError, "-1"),
    "truncate to a half": (lambda s: jaxkv.truncate(s, [0], [2.5]), TypeError, "float64"),
    "truncate of other rows": (lambda s: jaxkv.truncate(s, [0, 1], [2]), ValueError, "2 rows and 1 length"),
    "truncate twice": (lambda s: jaxkv.truncate(s, [0, 0], [2, 3]), ValueError, "twice"),
    "truncate of no slot": (lambda s: jaxkv.truncate(s, [7], [0]), ValueError, "row 7"),
    "release of no slot": (lambda s: jaxkv.release(s, [7]), ValueError, "7"),
    "release of a float": (lambda s: jaxkv.release(s, [0.5]), TypeError, "float64"),
    "fork onto a full slot": (lambda s: jaxkv.fork(s, 0, 1), ValueError, "slot 1.* 20 tokens.* release"),
    "fork onto itself": (lambda s: jaxkv.fork(s, 0, 0), ValueError, "slot 0"),
    "fork of no slot": (lambda s: jaxkv.fork(s, 9, 2), ValueError, "slot 9"),
    "fork twice onto one": (lambda s: jaxkv.fork(s, [0, 1], [2, 2]), ValueError, "slot 2"),
    "fork of unequal lists": (lambda s: jaxkv.fork(s, [0], [2, 3]), ValueError, "equal length"),
}  # fmt: skip


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_is_refused_and_the_state_goes_on(model, misuse):
    call, error, message = MISUSES[misuse]
    state, _ = jaxkv.generate(new_state(model), [prompt(9), prompt(20)], max_new_tokens=[2, 0])
    histories = [state.tokens(row).tolist() for row in range(B)]
    with pytest.raises(error, match=message):
        call(state)
    jaxkv.check_integrity(state)
    assert [state.tokens(row).tolist() for row in range(B)] == histories
    state, output = jaxkv.generate(state, [[], [], [3]], max_new_tokens=2)
    assert [t.tolist() for t in output.tokens] == [greedy(model, h, 2) for h in (*histories[:2], [3])]
    assert_all_pages_return(state)


def test_a_full_pool_refuses_a_copy_on_write_and_goes_on(model):
    """All 32 pages are held; a fork costs none, but writing to it would."""
    state, _ = jaxkv.prefill(new_state(model), [prompt(95), prompt(95), prompt(60)])
    state = jaxkv.fork(state, 0, 3)
    histories = [state.tokens(row).tolist() for row in range(B)]
    for rows, missing in (([3], 1), ([0, 3], 1), ([2, 3], 1)):
        for call in (one([1] * len(rows), rows=rows), ask([[]] * len(rows), rows=rows, max_new_tokens=0)):
            with pytest.raises(ValueError, match=f"short of {missing} pages? .* 0 of {C - 1} are free"):
                call(state)
            jaxkv.check_integrity(state)
    state, logits = jaxkv.decode(state, [1, 2], rows=[1, 2])  # both have room in their last page
    close(logits, [oracle(model, histories[1] + [1])[-1], oracle(model, histories[2] + [2])[-1]])
    state = jaxkv.release(state, 1)
    state, logits = jaxkv.decode(state, [3, 4], rows=[3, 0])
    close(logits, [oracle(model, histories[3] + [3])[-1], oracle(model, histories[0] + [4])[-1]])
    assert_all_pages_return(state)


def test_a_stream_is_refused_when_it_is_asked_for(model):
    state = new_state(model)
    with pytest.raises(ValueError, match="vocabulary"):
        jaxkv.generate(state, [[V]], stream=True)
    jaxkv.check_integrity(state)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_slots=0), "num_slots .*0"),
        (dict(num_slots=True), "num_slots .*True"),
        (dict(page_size=0), "page_size .*0"),
        (dict(page_size=2.0), "page_size .*2.0"),
        (dict(max_tokens_per_slot=-1), "max_tokens_per_slot .*-1"),
        (dict(max_tokens_per_slot=513), "513.*max_positions=512"),
        (dict(num_pages=-1), "num_pages.*-1"),
        (dict(num_pages=0), "num_pages.*0"),
        (dict(num_pages=1), "num_pages=1 .*2"),
        (dict(num_pages=2.5), "num_pages.*2.5"),
        (dict(num_pages=2**28), f"num_pages={2**28}.*{2**32 * 2:,}.*{2**31:,}"),
        (dict(num_pages=2**30, max_tokens_per_slot=8), r"num_pages.*int32"),
        (dict(kv_dtype="int4"), "int4.*float32, bfloat16, float16"),
        (dict(implementation="cuda"), "cuda.*xla"),
    ],
)
def test_init_state_refuses_sizes_and_names_with_the_numbers(model, changes, message):
    with pytest.raises(ValueError, match=message):
        new_state(model, **changes)


def test_score_refuses_what_it_cannot_score(model):
    for tokens, message in (([], "at least one"), ([[]], "at least one"), ([[1, V]], f"{V} at position 1")):
        with pytest.raises(ValueError, match=message):
            jaxkv.score(model, tokens)
    for implementation, message in (("cuda", "cuda.*xla"), ("pallas_tpu", "interpret=True runs it here")):
        with pytest.raises(ValueError, match=message):
            jaxkv.score(model, [[1, 2]], implementation=implementation)
