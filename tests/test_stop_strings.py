"""Stop strings against a search of the whole text after every token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.stop_strings import StopMatcher


def watch(stop, deltas):
    """Feeds deltas until a hit; returns the shown pieces and the matcher."""
    matcher, shown = StopMatcher(stop), []
    for delta in deltas:
        shown.append(matcher.feed(delta))
        if matcher.stopped:
            break
    return shown, matcher


def test_inside_one_token():
    shown, matcher = watch(["END"], ["one", " two END three"])
    assert shown == ["one", " two "] and matcher.stopped and matcher.num_tokens == 1


def test_across_tokens_is_held_back():
    shown, matcher = watch(["</s>"], ["a<", "/", "b", "</", "s", "> tail"])
    assert shown == ["a", "", "</b", "", "", ""]
    assert matcher.stopped and matcher.num_tokens == 3
    assert matcher.feed("more") == "" and matcher.flush() == ""


def test_end_of_text_gives_what_was_held():
    shown, matcher = watch(["stop"], ["it's a st", "o"])
    assert "".join(shown) == "it's a " and not matcher.stopped
    assert matcher.flush() == "sto" and matcher.num_tokens == 2


def test_a_failed_start_may_hide_the_real_one():
    shown, matcher = watch(["aab"], ["a", "a", "a", "b"])
    assert "".join(shown) == "a" and matcher.stopped and matcher.num_tokens == 1


def test_half_a_character_goes_with_its_other_half():
    _, matcher = watch(["é"], ["x", "", "é"])
    assert matcher.num_tokens == 1
    _, matcher = watch(["!"], ["x", "", "é", "!"])
    assert matcher.num_tokens == 3


def test_at_the_very_start():
    shown, matcher = watch(["ab"], ["a", "b"])
    assert shown == ["", ""] and matcher.num_tokens == 0


@pytest.mark.parametrize("stop", [[], [""], ["a", ""]])
def test_empty_stop_strings_are_refused(stop):
    with pytest.raises(ValueError, match="stop strings"):
        StopMatcher(stop)


SMALL = st.text(alphabet="ab", max_size=3)


@given(
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    deltas=st.lists(SMALL, max_size=12),
)
def test_agrees_with_a_search_of_the_whole_text(stop, deltas):
    shown, matcher = watch(stop, deltas)
    text = ""
    for i, delta in enumerate(deltas):
        text += delta
        hits = [text.find(s) for s in stop if s in text]
        if hits:
            start = min(hits)
            assert matcher.stopped and len(shown) == i + 1 and "".join(shown) == text[:start]
            kept = "".join(deltas[: matcher.num_tokens])
            assert len(kept) <= start
            following = deltas[matcher.num_tokens :]
            assert len(kept) + len(next(d for d in following if d)) > start
            return
        # What is shown can never be taken back, and all that is safe is shown.
        held = len(text) - len("".join(shown[: i + 1]))
        longest = max((n for n in range(1, len(text) + 1) for s in stop if len(s) > n and s.startswith(text[-n:])), default=0)
        assert held == longest
    assert not matcher.stopped and "".join(shown) + matcher.flush() == text and matcher.num_tokens == len(deltas)
