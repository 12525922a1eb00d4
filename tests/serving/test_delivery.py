"""What comes out of an engine: every event once, every result until it is collected, one receipt a request."""

import engine
import numpy as np
import pytest
from engine import SMALL, make_model, new_engine, prompt, restores_pay, wait_for_stores

from jaxkv import Request, Sampling, TextEvent
from jaxkv.serving.delivery import Delivery
from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.sequence import Sequence, SequenceGroup
from jaxkv.stream import Track

FINGERPRINT = Fingerprint(
    model_revision="m", tokenizer_revision=None, position_encoding=None, adapter=None, system_prompt=None, tenant="a",
    acl_epoch=None, kv_dtype="float32", layout="", page_size=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return make_model(tokenizer=engine.FakeTokenizer())


def test_streaming_one_request_loses_no_other(model, monkeypatch):
    """Twelve end while one is streamed, though results of five are kept: nobody was told of those twelve yet."""
    monkeypatch.setattr("jaxkv.serving.delivery.KEPT", 5)
    e = new_engine(model)
    long = e.submit(Request(prompt(5), 60))
    others = [e.submit(Request(prompt(5, seed=i), 2)) for i in range(12)]
    list(e.stream(long))
    assert len(e.collect(long)[0].tokens) == 60
    told = [event.id for event in e.step() if event.finish_reason]
    assert told == others
    assert sorted(e.run()) == others[-5:]  # now all were told, and those that nobody collected are the last five


def test_streams_that_are_left_at_the_end_do_not_pile_up(model, monkeypatch):
    monkeypatch.setattr("jaxkv.serving.delivery.KEPT", 5)
    e = new_engine(model)
    for i in range(12):
        for event in e.stream(e.submit(Request(prompt(5, seed=i), 2))):
            if event.finish_reason:
                break
    assert len(e.run()) == 5


def test_run_returns_everything_however_much_that_is(model, monkeypatch):
    monkeypatch.setattr("jaxkv.serving.delivery.KEPT", 5)
    e = new_engine(model)
    ids = [e.submit(Request(prompt(5, seed=i), 2)) for i in range(12)]
    assert list(e.run()) == ids
    for call in (e.collect, e.receipt):
        with pytest.raises(KeyError, match="request 99 "):
            call(99)
    assert e.receipt(ids[-1])["decision"] == "recompute"
    with pytest.raises(KeyError, match="5 ended after it"):
        e.receipt(ids[0])


def test_samples_have_one_receipt(model):
    """What a tier brought back counts for each sample of the prompt, and the receipt says that something was reused."""
    e = new_engine(model, num_pages=SMALL, host_bytes=1 << 26)
    restores_pay(e)
    texts = [prompt(40, seed=k) for k in range(3)]
    for text in texts:
        e.submit(Request(text, 4))
        e.run()
        wait_for_stores(e)
    id = e.submit(Request(texts[0], 4, Sampling(temperature=1.0, seed=1, n=2)))
    results = e.run()[id]
    receipt = e.receipt(id)
    assert receipt["cached_tokens"]["host"] > 0
    assert receipt["decision"] == "reuse" and receipt["reusable_tokens"] + receipt["suffix_tokens"] == 40
    assert [one.usage.cached_tokens for one in results] == [receipt["reusable_tokens"]] * 2
    e.close()


def test_text_that_a_stop_string_held_back_comes_with_an_abort(model):
    text = prompt(20, seed=1)
    e = new_engine(model)
    id = e.submit(Request(text, 12))
    plain = e.run()[id][0]
    stop = plain.text[3:7] + "\0 never"
    id = e.submit(Request(text, 12, Sampling(stop=stop)))
    events = []
    while not events or len(events[-1].text) > 0:  # until a token's text is held back
        events += e.step()
    shown = "".join(event.text for event in events)
    e.abort(id)
    events += e.step()
    result = e.collect(id)[0]
    assert "".join(event.text for event in events) == result.text
    assert plain.text.startswith(result.text) and len(result.text) > len(shown)


def test_holds_that_ran_out_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("jaxkv.serving.delivery.KEPT", 4)
    held = set()
    delivery = Delivery(held.__contains__, with_text=False)
    for id in range(50):
        held.add(id)
        track = Track(0, -1, 1, None, None, False)
        one = Sequence(id, id, Request([1], 1, hold=True), np.ones(1, np.int32), FINGERPRINT, track, 0, 0.0, 0.0)
        delivery.expect(SequenceGroup([one], 0.0))
        delivery.take(one, TextEvent(0, -1, (), "", "length"))
        held.discard(id - 2)
    assert len(delivery._held) <= 12
    assert delivery.take_held(49) == [49] and delivery.take_held(49) == [] == delivery.take_held(3)


def test_streams_text_and_stop_strings(model):
    text = prompt(20, seed=1)
    e = new_engine(model)
    plain = e.submit(Request(text, 12))
    other = e.submit(Request(prompt(9), 5))
    events = list(e.stream(plain))
    result = e.collect(plain)[0]
    assert "".join(event.text for event in events) == result.text
    assert [t for event in events for t in event.tokens] == result.tokens.tolist()
    assert events[-1].finish_reason == "length"
    assert events[-1].usage.completion_tokens == 12
    assert [event.finish_reason for event in events[:-1]] == [None] * 11
    e.run()
    stop = result.text[4:6]
    id = e.submit(Request(text, 12, Sampling(stop=stop)))
    stopped = e.run()[id][0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == result.text[: result.text.index(stop)]
    with pytest.raises(KeyError, match="collected already"):
        e.collect(other)
    with pytest.raises(KeyError):
        next(e.stream(10_000))


def test_streams_and_steps_share_out_the_events(model):
    """Each event is told once, to the stream if one is open, and in order."""
    e = new_engine(model)
    ids = [e.submit(Request(prompt(n), 8)) for n in (5, 20, 40)]
    first = e.stream(ids[0])
    told = {id: [] for id in ids}
    for _ in range(4):
        told[ids[0]].append(next(first))
    second = e.stream(ids[1])
    told[ids[1]].append(next(second))
    for event in e.step():
        told[event.id].append(event)
    told[ids[1]] += list(second)
    results = e.run()
    told[ids[0]] += list(first)
    with pytest.raises(KeyError):
        next(e.stream(ids[1]))
    for id in ids[:2]:
        assert [t for event in told[id] for t in event.tokens] == results[id][0].tokens.tolist()
        assert [event.finish_reason for event in told[id]] == [None] * 7 + ["length"]


def test_a_stream_left_early_leaves_its_events(model):
    e = new_engine(model)
    id = e.submit(Request(prompt(5), 8))
    stream = e.stream(id)
    seen = [next(stream)]
    stream.close()
    seen += list(e.stream(id))
    assert [t for event in seen for t in event.tokens] == e.collect(id)[0].tokens.tolist()


def test_results_of_a_request_come_together_and_do_not_pile_up(model, monkeypatch):
    monkeypatch.setattr("jaxkv.serving.delivery.KEPT", 5)
    e = new_engine(model)
    id = e.submit(Request(prompt(9), 30, Sampling(temperature=2.0, seed=4, n=3, stop_token_ids=list(range(0, 60, 2)))))
    while id not in e._delivery._results:
        e.step()
    with pytest.raises(KeyError, match="has not ended"):
        e.collect(id)
    while e.num_running:
        e.step()
    assert len(e.collect(id)) == 3
    for _ in range(12):
        list(e.stream(e.submit(Request(prompt(3), 1))))
    assert len(e._delivery._results) <= 6
