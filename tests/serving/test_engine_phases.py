"""The engine at its edges: bucket sizes, samplers after preemption, aborts while pages are on their way, buffers that are reused."""

import dataclasses
import threading

import engine
import jax
import numpy as np
import pytest
from engine import SMALL, greedy, make_model, new_engine, prompt, restores_pay, tiny_config, wait_for_stores

import jaxkv
from jaxkv import Engine, EngineConfig, Request, RequestRefused, Sampling


@pytest.fixture(scope="module")
def model():
    return make_model(tokenizer=engine.FakeTokenizer())


@pytest.mark.parametrize("chunk", [pytest.param(512, marks=pytest.mark.slow), 300])
def test_prompts_around_a_bucket(chunk):
    """One token fewer or more than a bucket or a page: the tokens are those of a forward pass, nothing is traced after warm-up."""
    model = make_model(tiny_config(max_positions=2048))
    lengths = (511, 512, 513, 1023, 1024, 1025)
    e = Engine(model, EngineConfig(num_slots=2, max_tokens_per_slot=1040, page_size=16, prefill_tokens=chunk))
    e.warmup()
    before = jaxkv.trace_counts()
    texts = [prompt(n, seed=n) for n in lengths]
    rounds = []
    for _ in range(2):  # the second time as hits
        ids = [e.submit(Request(text, 3)) for text in texts]
        results = e.run()
        rounds.append([results[id][0].tokens.tolist() for id in ids])
    assert jaxkv.trace_counts() == before
    state = jaxkv.init_state(model, num_slots=2, max_tokens_per_slot=1040, page_size=16)  # the engine's shapes: compiled already
    for i, text in enumerate(texts):
        state, output = jaxkv.generate(jaxkv.release(state, [0]), [text], max_new_tokens=3)
        assert rounds[0][i] == rounds[1][i] == output.tokens[0].tolist()


SAMPLINGS = {
    "seeded": Sampling(temperature=1.0, seed=11, top_p=0.9),
    "penalised": Sampling(temperature=0.8, seed=3, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    "logprobs": Sampling(temperature=1.0, seed=5, logprobs=3),
    "samples": Sampling(temperature=1.0, seed=7, n=2),
}


@pytest.mark.parametrize("tier", [None, "host"])
def test_samplers_go_on_after_preemption(model, tier):
    """Draws, penalties and log-probabilities are those of an engine with all the room there is."""
    texts = [prompt(20, seed=k) for k in range(len(SAMPLINGS))]

    def serve(**changes):
        e = new_engine(model, **changes)
        if tier and "num_pages" in changes:
            restores_pay(e)
        ids = [e.submit(Request(text, 30, sampling)) for text, sampling in zip(texts, SAMPLINGS.values(), strict=True)]
        results = e.run()
        e.cache.check()
        e.close()
        return e, [one for id in ids for one in results[id]]

    _, wanted = serve()
    e, got = serve(num_pages=SMALL, overcommit=True, host_bytes=1 << 26 if tier else 0)
    assert e.metrics.summary()["num_preemptions"]["swap" if tier else "recompute"] > 0
    for one, other in zip(got, wanted, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.text == other.text
        if other.logprobs is not None:
            np.testing.assert_allclose([p.logprob for p in one.logprobs], [p.logprob for p in other.logprobs], atol=1e-4)


def test_stop_strings_are_found_across_a_preemption(model):
    """The stop string spans the token before and the one after a sequence gave way."""
    texts = [prompt(24, seed=k) for k in range(4)]
    e = new_engine(model)
    ids = [e.submit(Request(text, 40)) for text in texts]
    results = e.run()
    plain = [results[id][0] for id in ids]
    for cut in range(4, 36, 4):
        stops = [one.text[cut : cut + 3] for one in plain]
        e = new_engine(model, num_pages=SMALL, overcommit=True)
        ids = [e.submit(Request(text, 40, Sampling(stop=stop))) for text, stop in zip(texts, stops, strict=True)]
        results = e.run()
        for id, one, stop in zip(ids, plain, stops, strict=True):
            assert results[id][0].text == one.text[: one.text.index(stop)]
    assert e.metrics.summary()["num_preemptions"]["recompute"] > 0


class _Gate:
    """A tier's method that waits until it is opened."""

    def __init__(self, tier, name):
        self.opened, self.reached = threading.Event(), threading.Event()
        inner = getattr(tier, name)

        def gated(*args):
            self.reached.set()
            self.opened.wait(30)
            return inner(*args)

        setattr(tier, name, gated)


@pytest.mark.parametrize("phase", ["store", "load"])
def test_abort_while_pages_are_on_their_way(model, phase):
    """The transfer goes on and its pages have other holders by then: their tokens are what they should be, every page returns."""
    texts = [prompt(40, seed=k) for k in range(3)]
    expected = [greedy(model, text, 6) for text in texts]
    e = new_engine(model, num_pages=SMALL, host_bytes=1 << 26)
    restores_pay(e)
    lane = e._tiers._lanes["host"]
    if phase == "load":
        for text in texts:
            e.submit(Request(text, 6))
            e.run()
        wait_for_stores(e)
        e.submit(Request(prompt(3, seed=9), 40))  # while it decodes, no step waits for a load
        e.step()
    gate = _Gate(lane.tier, phase)
    first = e.submit(Request(texts[0], 6))
    if phase == "store":
        e.submit(Request(texts[1], 6))
        e.run()
        first = e.submit(Request(texts[2], 6))  # evicts pages of the first
    for _ in range(20):
        e.step()
        if gate.reached.wait(0.01):
            break
    assert gate.reached.is_set() and e.num_running == (2 if phase == "load" else 1)
    e.abort(first)
    e.abort(first)
    e.cache.check()
    ids = [e.submit(Request(text, 6)) for text in texts]
    if phase == "store":
        got = e.run()
        gate.opened.set()
    else:
        threading.Timer(0.2, gate.opened.set).start()
        got = e.run()
    assert [got[id][0].tokens.tolist() for id in ids] == expected
    wait_for_stores(e)
    e.cache.check()
    assert (e.cache.active_pages, e.cache.held_pages, e.scheduler.promised_pages) == (0, 0, 0)
    e.close()


def test_a_tier_that_hangs_does_not_hang_the_steps(model):
    """A step returns though all that runs waits for a load, which is given up in the end; others can be aborted, or served."""
    texts = [prompt(40, seed=k) for k in range(3)]
    e = new_engine(model, num_pages=SMALL, host_bytes=1 << 26)
    restores_pay(e)
    for text in texts:
        e.submit(Request(text, 6))
        e.run()
    wait_for_stores(e)
    gate = _Gate(e._tiers._lanes["host"].tier, "load")
    hung = e.submit(Request(texts[0], 6))
    for _ in range(2):
        assert e.step() == []
    assert gate.reached.is_set()
    follower = e.submit(Request(texts[0], 6))  # of pages that never come
    now = e._restores._clock()
    e._restores._clock = lambda: now + 1e6  # waiting is given up, and both compute
    results = e.run()
    assert [results[id][0].tokens.tolist() for id in (hung, follower)] == [greedy(model, texts[0], 6)] * 2
    e._restores._clock = lambda: now
    hung = e.submit(Request(texts[1], 6))
    e.step()
    e.abort(hung)
    id = e.submit(Request(prompt(5, seed=9), 6))
    assert e.run()[id][0].tokens.tolist() == greedy(model, prompt(5, seed=9), 6)
    gate.opened.set()
    e.close()


def test_public_pages_come_back_from_a_tier(model):
    """Evicted, they are found again by a tenant who never had them; those of another tenant are not."""
    texts = [prompt(40, seed=k) for k in range(3)]
    e = new_engine(model, num_pages=SMALL, host_bytes=1 << 26)
    restores_pay(e)
    e.publish(texts[0])
    e.run()
    for text in texts[1:]:
        e.submit(Request(text, 6, tenant="a"))
        e.run()
        wait_for_stores(e)
    e.submit(Request(prompt(60, seed=9), 6, tenant="c"))  # the last of the public pages leave the device
    e.run()
    wait_for_stores(e)
    expected = [greedy(model, text, 6) for text in texts[:2]]
    ids = [e.submit(Request(text, 6, tenant="b")) for text in texts[:2]]
    results = e.run()
    assert [results[id][0].tokens.tolist() for id in ids] == expected
    assert [e.receipt(id)["cached_tokens"].get("host", 0) for id in ids] == [e.receipt(ids[0])["reusable_tokens"], 0]
    assert e.receipt(ids[0])["cached_tokens"]["host"] > 0 and e.receipt(ids[1])["reusable_tokens"] == 0
    assert e.metrics.summary()["cached_tokens"]["host"] == e.receipt(ids[0])["cached_tokens"]["host"]
    e.close()


def test_a_backlog_that_holds_no_page_is_refused(model):
    with pytest.raises(ValueError, match="tier_backlog_bytes=100 must hold a page"):
        new_engine(model, host_bytes=1 << 26, tier_backlog_bytes=100)


def test_what_the_host_hands_over_may_be_reused_at_once(model):
    """The prompt's array, the page table and the options change right after each dispatch, as a host reuses its buffers."""
    texts = [np.asarray(prompt(n, seed=n), np.int32) for n in (9, 17, 30)]
    expected = [greedy(model, text.tolist(), 8) for text in texts]
    e = new_engine(model)
    runner, table = e.runner, e.runner._table
    for name in ("prefill", "decode", "begin"):
        inner = getattr(runner, name)

        def then_scribble(*args, inner=inner):
            result = inner(*args)
            kept, halt = table.copy(), runner._halt.copy()
            options = jax.tree.map(np.copy, runner._options)
            table[:], runner._halt[:] = 1, True
            for field in dataclasses.fields(options):
                getattr(runner._options, field.name).fill(0)
            jax.block_until_ready(runner._loop.pools.history)
            table[:], runner._halt[:] = kept, halt
            for field in dataclasses.fields(options):
                getattr(runner._options, field.name)[:] = getattr(options, field.name)
            return result

        setattr(runner, name, then_scribble)
    ids = []
    for text in texts:
        given = text.copy()
        ids.append(e.submit(Request(given, 8)))
        given[:] = 0
    results = e.run()
    assert [results[id][0].tokens.tolist() for id in ids] == expected


def test_a_refused_request_draws_no_seed(model):
    """Requests without a seed get theirs in the order in which they were accepted."""
    drawn = Request(prompt(9), 8, Sampling(temperature=1.0))
    tokens = []
    for wrong in (False, True):
        e = new_engine(model, seed=3)
        if wrong:
            with pytest.raises(RequestRefused):
                e.submit(Request(prompt(9), 8, Sampling(temperature=1.0, logit_bias={10**6: 1.0})))
        id = e.submit(drawn)
        tokens.append(e.run()[id][0].tokens.tolist())
    assert tokens[0] == tokens[1]


def test_quotas_change_while_it_runs(model):
    """A tenant's quota is set, and ended, between requests: who is over it pays first."""
    e = new_engine(model, num_pages=SMALL)
    for tenant, seed in (("a", 1), ("b", 2)):
        e.submit(Request(prompt(40, seed=seed), 2, tenant=tenant))
        e.run()
    e.set_quota("b", 1)
    assert e.cache.over_quota_tenants == 1
    e.submit(Request(prompt(40, seed=3), 2, tenant="c"))
    e.run()
    assert e.cache.tenant_pages("a") == 5 and e.cache.tenant_pages("b") < 5
    e.set_quota("b", None)
    assert e.cache.over_quota_tenants == 0
    for tenant, pages in ((None, 3), ("a", -1), ("a", 1.5)):
        with pytest.raises(ValueError, match="quota"):
            e.set_quota(tenant, pages)
    assert hash(e.config) == hash(dataclasses.replace(e.config))


def test_without_a_cache_nothing_is_published(model):
    with pytest.raises(ValueError, match="prefix_cache=False"):
        new_engine(model, prefix_cache=False).publish(prompt(20))
