"""Text, stop strings, streams and timings of `generate`."""

import collections
import dataclasses
import itertools

import pytest
from engine import (
    FakeTokenizer,
    assert_all_pages_return,
    greedy,
    new_state,
    prompt,
    tokens_of,
)

import jaxkv
from jaxkv import Sampling

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
    assert timings.tpot_s * 3 == pytest.approx(timings.decode_s)
    assert 0 < timings.decode_s <= timings.total_s - timings.ttft_s
    _, none = jaxkv.generate(new_state(model), [prompt(16)], max_new_tokens=0)
    assert (none.timings.decode_s, none.timings.tpot_s, none.timings.new_tokens) == (0, 0, 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_compiling_is_told_apart_from_decoding(model, streamed):
    """Streamed, the decode step is compiled between the first token and the second: that is no time between tokens."""
    state = new_state(model, num_slots=2, max_tokens_per_slot=40 + 8 * streamed, num_pages=13)  # a shape of its own
    timings = []
    for _ in range(2):
        run = jaxkv.generate(state, [prompt(16)], max_new_tokens=6, stream=True) if streamed else None
        if run:
            collections.deque(run, maxlen=0)
        state, output = run.finish() if run else jaxkv.generate(state, [prompt(16)], max_new_tokens=6)
        state, timings = jaxkv.release(state, [0]), [*timings, output.timings]
    first, second = timings
    assert second.compile_s == 0 < first.compile_s < first.total_s
    assert first.decode_s + first.compile_s < first.total_s
    assert first.decode_s < first.compile_s  # 5 steps of a tiny model
