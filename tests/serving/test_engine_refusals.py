"""What an engine does not do, and says so at once: requests that cannot run, configs that cannot work, steps that raised."""

import pytest
from engine import SMALL, V, greedy, make_model, new_engine, prompt

from jaxkv import EngineConfig, Request, RequestRefused, Sampling
from jaxkv.serving.engine import EngineFailed

NEW = 6


@pytest.mark.parametrize(
    ("request_", "reason", "words"),
    [
        (Request([]), "invalid", "at least one token"),
        (Request([1, V]), "invalid", f"vocabulary of {V}"),
        (Request([1], max_new_tokens=0), "invalid", "max_new_tokens"),
        (Request([1] * 90, 10), "too_long", "100"),
        (Request([1] * 60, 30, Sampling(n=2)), "never_fits", "12 "),
        (Request([1], 4, Sampling(n=5)), "never_fits", "5"),
        (Request([1], 4, Sampling(stop="x")), "invalid", "tokenizer"),
        (Request([1], 4, Sampling(temperature=[0.0, 1.0])), "invalid", "entries"),
        (Request([1], 4, Sampling(stop_token_ids=[V])), "invalid", "vocabulary"),
        (Request("text"), "invalid", "encode"),
        (Request(b"text"), "invalid", "bytes"),
        (Request({1: 2}), "invalid", "dict"),
        (Request([1], 2.5), "invalid", "max_new_tokens"),
        (Request([1], True), "invalid", "max_new_tokens"),
        (Request([1], 4, Sampling(max_new_tokens=2)), "invalid", "Sampling.max_new_tokens"),
        (Request([1], 4, None), "invalid", "NoneType"),
        (Request([1], 4, tenant=None), "invalid", "tenant"),
        (Request([1], 4, tenant="\0request 0"), "invalid", "NUL"),
        (Request([1], 4, priority=float("nan")), "invalid", "priority"),
        (Request([1], 4, priority=10**400), "invalid", "priority"),
        (Request([1], 4, acl_epoch="1"), "invalid", "acl_epoch"),
        (Request([1], 4, acl_epoch=10**5000), "invalid", "below 2\\*\\*63"),
        (Request([1], 4, system_prompt=b"x"), "invalid", "system_prompt"),
        (Request([1], 4, allow_truncation="no"), "invalid", "allow_truncation"),
        ("no request", "invalid", "expected a Request"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_what_can_never_run_is_refused_at_once(model, request_, reason, words):
    e = new_engine(model, num_pages=SMALL)
    running = e.submit(Request(prompt(5), NEW))
    e.step()
    with pytest.raises(RequestRefused, match=words) as refused:
        e.submit(request_)
    assert refused.value.reason == reason
    assert e.metrics.summary()["requests_rejected"][reason] == 1
    assert e.metrics.summary()["requests_received"] == 2
    assert e.run()[running][0].tokens.tolist() == greedy(model, prompt(5), NEW)


def test_a_long_prompt_may_lose_its_beginning(model):
    text = prompt(120, seed=3)
    e = new_engine(model)
    id = e.submit(Request(text, NEW, allow_truncation=True))
    result = e.run()[id][0]
    assert result.usage.prompt_tokens == 96 - NEW
    assert result.tokens.tolist() == greedy(model, text[-(96 - NEW) :], NEW)


@pytest.mark.parametrize("call", ["prefill", "begin", "decode", "read", "seat", "set_pages", "copy_pages"])
def test_an_engine_whose_step_raised_says_so(model, call):
    """What it believes and what the device holds may differ from then on: nothing more comes of it, least of all wrong tokens."""
    e = new_engine(model)
    right = getattr(e.runner, call)

    def wrong(*args):
        setattr(e.runner, call, right)
        raise MemoryError("no room")

    setattr(e.runner, call, wrong)
    e.submit(Request(prompt(40), 9, Sampling(n=2)))
    with pytest.raises(MemoryError):
        e.run()
    for again in (e.step, e.run, lambda: e.submit(Request(prompt(5), 2)), lambda: e.publish(prompt(40))):
        with pytest.raises(EngineFailed, match="no room"):
            again()
    e.close()


@pytest.mark.parametrize(
    "wrong",
    [
        dict(prefill_tokens=0),
        dict(prefill_tokens=2.5),
        dict(ageing_s=float("nan")),
        dict(ageing_s=-1.0),
        dict(hold_ttl_s=-1.0),
        dict(reusable_ttl_s=0.0),
        dict(host_bytes=1.5e6),
        dict(secret=b"x"),
        dict(model_revision=5),
        dict(disk_bytes=5),
        dict(disk_folder="somewhere"),
        dict(host_dtype="int8"),
        dict(quotas={"a": 1.5}),
    ],
    ids=str,
)
def test_a_config_that_cannot_work_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EngineConfig(**wrong)


def test_requests_that_wait_for_holds_say_so(model):
    now = [0.0]
    e = new_engine(model, clock=lambda: now[0], num_pages=SMALL)
    first = e.submit(Request(prompt(80, seed=1), 10, hold=True))
    e.run()
    second = e.submit(Request(prompt(80, seed=2), 10))
    with pytest.raises(RuntimeError, match="12 pages are on hold"):
        e.run()
    with pytest.raises(RuntimeError, match="on hold"):
        list(e.stream(second))
    e.reconcile(first)
    assert len(e.run()[second][0].tokens) == 10


def test_a_publish_that_cannot_run_leaves_nothing(model):
    e, text = new_engine(model, num_pages=SMALL), prompt(80, seed=2)
    held = e.submit(Request(prompt(80, seed=1), 10, hold=True))
    e.run()
    with pytest.raises(RuntimeError, match="on hold"):
        e.publish(text)
    assert (e.num_waiting, e.step(), e.run()) == (0, [], {})
    e.reconcile(held)
    e.publish(text)
    id = e.submit(Request(text, NEW, tenant="a"))
    assert e.run()[id][0].tokens.tolist() == greedy(model, text, NEW)
    e.cache.check()


def test_weights_are_not_swapped_under_an_answer_that_has_begun(model):
    e = new_engine(model, num_pages=SMALL, overcommit=True)
    ids = [e.submit(Request(prompt(30, seed=k), 40)) for k in range(3)]
    while not e.metrics.summary()["num_preemptions"]["recompute"]:
        e.step()
    for id in [one.id for one in e._delivery.live() if one.row >= 0]:
        e.abort(id)
    assert e.num_running == 0
    with pytest.raises(ValueError, match="have begun"):
        e.swap_weights(make_model(seed=1))
    assert len(e.run()[ids[-1]]) == 1
    stops = make_model(seed=1, eos=(greedy(make_model(seed=1), prompt(5), 2)[1],))
    e.swap_weights(stops)
    id = e.submit(Request(prompt(5), NEW))
    result = e.run()[id][0]
    assert (len(result.tokens), result.finish_reason) == (2, "stop")
