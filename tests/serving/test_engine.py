"""The engine on a small real model: whatever happens around a request, its tokens are those it would have alone."""

import dataclasses
import json

import engine
import jax
import jax.numpy as jnp
import pytest
from engine import SMALL, V, greedy, make_model, new_engine, prompt, restores_pay, wait_for_stores
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv import Engine, Request, RequestRefused, Sampling
from jaxkv.serving.ladder import LadderConfig

NEW = 6
LENGTHS = (5, 20, 40, 33, 16, 61, 17, 8)
# What may happen to a request on its way; each must leave its tokens as they are.
WAYS = {
    "cold": {},
    "chunked": dict(prefill_tokens=7),
    "no cache": dict(prefix_cache=False),
    "small pool": dict(num_pages=SMALL),
    "preempted": dict(overcommit=True, num_pages=SMALL),
}


@pytest.fixture(scope="module")
def texts():
    return [prompt(n, seed=i) for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(model, texts):
    return [greedy(model, text, NEW) for text in texts]


def run(e: Engine, texts, new=NEW, **options):
    """The tokens of each text, submitted together; the page cache is audited on the way."""
    ids = [e.submit(Request(text, new, **options)) for text in texts]
    while e.num_running or e.num_waiting:
        e.step()
        e.cache.check()
    return [e.collect(id)[0].tokens.tolist() for id in ids]


def fill_with_nan(e: Engine) -> None:
    """Every page holds NaN until somebody writes it."""
    pools = e.runner._loop.pools
    nan = lambda a: jnp.full_like(a, jnp.nan)
    pools = dataclasses.replace(pools, k_pages=nan(pools.k_pages), v_pages=nan(pools.v_pages))
    e.runner._loop = dataclasses.replace(e.runner._loop, pools=pools)


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_do_not_depend_on_the_way(model, texts, expected, way):
    e = new_engine(model, **WAYS[way])
    fill_with_nan(e)
    assert run(e, texts) == expected
    assert run(e, texts) == expected  # prefix hits, where they are on
    usable = e.cache.num_pages - 1
    assert (e.cache.active_pages, e.cache.held_pages) == (0, 0)
    assert e.cache.free_pages + e.cache.reusable_pages == usable
    assert e.scheduler.promised_pages == 0


def test_preemption_happened(model, texts, expected):
    e = new_engine(model, overcommit=True, num_pages=SMALL)
    assert run(e, texts, 30) == [greedy(model, text, 30) for text in texts]
    assert e.metrics.summary()["num_preemptions"]["recompute"] > 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_tokens_come_back_from_a_tier(model, texts, expected, tier, tmp_path):
    kept = dict(disk_folder=tmp_path / "kv", disk_bytes=1 << 26) if tier == "disk" else dict(host_bytes=1 << 26)
    e = new_engine(model, num_pages=SMALL, **kept)
    fill_with_nan(e)
    restores_pay(e)
    for _ in range(3):
        assert run(e, texts) == expected
        wait_for_stores(e)
    assert e.metrics.summary()["cached_tokens"][tier] > 0
    e.close()


def test_swap_brings_a_preempted_sequence_back(model, texts):
    e = new_engine(model, num_pages=SMALL, overcommit=True, host_bytes=1 << 26)
    restores_pay(e)
    assert run(e, texts, 30) == [greedy(model, text, 30) for text in texts]
    assert e.metrics.summary()["num_preemptions"]["swap"] > 0
    e.close()


@pytest.mark.parametrize("overcommit", [False, True])
def test_samples_are_those_of_generate(model, texts, overcommit):
    """n > 1 shares the prompt's pages; with a seed the draws are the same in any batch."""
    sampling = Sampling(temperature=1.0, n=3, seed=5, top_p=0.9)
    state = jaxkv.init_state(model, num_slots=4, max_tokens_per_slot=96, page_size=8)
    _, wanted = jaxkv.generate(state, [texts[1]], max_new_tokens=12, sampling=sampling)
    e = new_engine(model, num_pages=SMALL if overcommit else None, overcommit=overcommit)
    neighbours = [e.submit(Request(text, 9, Sampling(temperature=1.0, seed=i))) for i, text in enumerate(texts[2:5])]
    id = e.submit(Request(texts[1], 12, sampling))
    results = e.run()
    assert [r.tokens.tolist() for r in results[id]] == [t.tolist() for t in wanted.tokens]
    assert [r.index for r in results[id]] == [0, 1, 2]
    assert len(results) == len(neighbours) + 1
    e.cache.check()
    assert e.cache.active_pages == 0


def test_nothing_is_traced_after_warmup(model, texts, tmp_path):
    e = new_engine(model, overcommit=True, num_pages=SMALL + 6, host_bytes=1 << 26)
    e.warmup()
    before = jaxkv.trace_counts()
    restores_pay(e)
    for sampling in (
        Sampling(),
        Sampling(temperature=0.7, n=2, logprobs=3, top_k=4),
        Sampling(repetition_penalty=1.3, stop_token_ids=[5]),
    ):
        for text in texts:
            e.submit(Request(text, 20, sampling))
        e.run()
        wait_for_stores(e)
    aborted = e.submit(Request(texts[0], 5))
    e.step()
    e.abort(aborted)
    e.run()
    e.close()
    assert e.metrics.summary()["cached_tokens"]["host"] > 0  # read_pages and write_pages ran
    assert jaxkv.trace_counts() == before


PROMPTS = [prompt(n, seed=100 + i) for i, n in enumerate((3, 8, 9, 24, 31))]
PROMPTS += [PROMPTS[3] + prompt(5, seed=200), PROMPTS[3][:16] + prompt(9, seed=201)]


@pytest.fixture(scope="module")
def continuations(model):
    return [greedy(model, text, 14) for text in PROMPTS]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    overcommit=st.booleans(),
    pages=st.sampled_from([SMALL, None]),
    budget=st.sampled_from([5, 16, 64]),
    cache=st.booleans(),
)
def test_a_storm_of_requests_and_aborts(model, continuations, data, overcommit, pages, budget, cache):
    """Every request that is not aborted gets its tokens, whoever came, went or gave way; then the pool is as it was."""
    e = new_engine(model, num_pages=pages, prefill_tokens=budget, overcommit=overcommit, prefix_cache=cache)
    wanted, aborted = {}, set()
    for _ in range(data.draw(st.integers(5, 40))):
        action = data.draw(st.sampled_from(["submit", "submit", "step", "step", "step", "abort"]))
        if action == "submit":
            which, new = data.draw(st.integers(0, len(PROMPTS) - 1)), data.draw(st.integers(1, 14))
            try:
                id = e.submit(Request(PROMPTS[which], new, priority=data.draw(st.integers(0, 2))))
            except RequestRefused as refused:
                assert refused.reason == "never_fits"
                assert -(-(len(PROMPTS[which]) + new) // 8) > e.cache.num_pages - 1
                continue
            wanted[id] = continuations[which][:new]
        elif action == "abort" and wanted:
            id = data.draw(st.sampled_from(sorted(wanted)))
            e.abort(id)
            aborted.add(id)
        else:
            e.step()
        e.cache.check()
    results = e.run()
    e.cache.check()
    assert set(results) == set(wanted)
    for id, (result,) in results.items():
        tokens = result.tokens.tolist()
        if id in aborted and result.finish_reason == "abort":
            assert tokens == wanted[id][: len(tokens)]
        else:
            assert (tokens, result.finish_reason) == (wanted[id], "length")
    assert (e.cache.active_pages, e.num_running, e.num_waiting, e.scheduler.promised_pages) == (0, 0, 0, 0)
    summary = e.metrics.summary()
    assert summary["requests_received"] - sum(summary["requests_rejected"].values()) == len(wanted)
    assert sum(summary["request_success"].values()) == len(wanted)


def test_a_prompt_whose_pages_are_all_cached_recomputes_a_token(model):
    text = prompt(16, seed=7)
    e = new_engine(model)
    first, again = run(e, [text])[0], run(e, [text])[0]
    assert first == again == greedy(model, text, NEW)
    assert e.metrics.summary()["cached_tokens"]["device"] == 8  # not 16: one token is computed, so its page is too


def test_usage_receipt_and_metrics_agree(model, texts):
    e = new_engine(model)
    run(e, [texts[2]])
    id = e.submit(Request(texts[2], NEW))
    result = e.run()[id][0]
    receipt = e.receipt(id)
    assert receipt["reusable_tokens"] == result.usage.cached_tokens == 32
    assert receipt["suffix_tokens"] == 8
    assert receipt["gates"] == {"cross_tenant": "pass", "acl_epoch_mismatch": "pass", "active_sequence": "never_evict"}
    assert receipt["decision"] == "reuse"
    json.dumps(receipt)
    summary = e.metrics.summary()
    assert summary["kv_hit_rate"] == 32 / 80
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (40, NEW)


@pytest.mark.parametrize(
    ("second", "hits", "gates"),
    [
        ({}, 32, {}),
        (dict(tenant="b"), 0, {"cross_tenant": "reject"}),
        (dict(acl_epoch=2), 0, {"acl_epoch_mismatch": "miss_and_recompute"}),
        (dict(acl_epoch=None), 0, {"acl_epoch_mismatch": "miss_and_recompute"}),
        (dict(system_prompt="be terse"), 0, {}),
        (dict(system_prompt=""), 0, {}),
        (dict(adapter="a"), 0, {}),
        (dict(use_cache=False), 0, {}),
    ],
    ids=str,
)
def test_who_may_reuse(model, texts, expected, second, hits, gates):
    e = new_engine(model)
    first = dict(tenant="a", acl_epoch=1)
    assert run(e, [texts[2]], **first) == [expected[2]]
    id = e.submit(Request(texts[2], NEW, **(first | second)))
    result = e.run()[id][0]
    assert result.tokens.tolist() == expected[2]
    assert result.usage.cached_tokens == hits
    assert gates.items() <= e.receipt(id)["gates"].items()


def test_only_the_operator_publishes_for_all(model, texts, expected):
    e = new_engine(model)
    e.publish(texts[2])
    for tenant in ("a", "b"):
        id = e.submit(Request(texts[2], NEW, tenant=tenant, acl_epoch=3))
        result = e.run()[id][0]
        assert (result.tokens.tolist(), result.usage.cached_tokens) == (expected[2], 32)
        assert e.receipt(id)["gates"]["cross_tenant"] == "public"


def test_new_weights_match_nothing_old(model, texts, tmp_path):
    other = make_model(seed=1)
    e = new_engine(model, num_pages=SMALL, host_bytes=1 << 26)
    restores_pay(e)
    for _ in range(2):
        run(e, texts)
        wait_for_stores(e)
    assert e.metrics.summary()["cached_tokens"]["host"] > 0  # the old weights would have found their pages
    e.submit(Request(texts[0], NEW))
    e.step()
    with pytest.raises(ValueError, match="run\\(\\) first"):
        e.swap_weights(other)
    e.run()
    e.swap_weights(other)
    assert e.cache.reusable_pages == 0
    hits = e.metrics.summary()["cached_tokens"]
    assert run(e, texts) == [greedy(other, text, NEW) for text in texts]
    assert e.metrics.summary()["cached_tokens"] == hits
    with pytest.raises(ValueError, match="make a new Engine"):
        e.swap_weights(make_model(engine.tiny_config(num_layers=1, layer_windows=(0,), layer_ropes=(0,))))
    e.close()


def test_revoke_forgets_a_tenant(model, texts):
    e = new_engine(model)
    run(e, [texts[2]], tenant="a", acl_epoch=1)
    run(e, [texts[3]], tenant="b", acl_epoch=1)
    assert e.revoke("a", 2) > 0
    id = e.submit(Request(texts[2], NEW, tenant="a", acl_epoch=1))
    assert e.run()[id][0].usage.cached_tokens == 0
    id = e.submit(Request(texts[3], NEW, tenant="b", acl_epoch=1))
    assert e.run()[id][0].usage.cached_tokens == 32


def test_a_hold_keeps_pages_until_it_is_reconciled(model, texts):
    now = [0.0]
    e = new_engine(model, clock=lambda: now[0], hold_ttl_s=900.0)
    id = e.submit(Request(texts[2], NEW, hold=True))
    e.run()
    assert e.cache.held_pages > 0
    other = e.submit(Request(texts[2], NEW))
    assert e.run()[other][0].usage.cached_tokens == 0  # held pages are not matched
    e.reconcile(id)
    assert e.cache.held_pages == 0
    e.reconcile(id)  # again: nothing
    id = e.submit(Request(texts[3], NEW, hold=True))
    e.run()
    now[0] = 901.0
    e.step()
    assert e.cache.held_pages == 0
    e.reconcile(id)  # late, and of no effect


def test_nan_logits_fail_one_request_and_are_not_published(model, texts, expected):
    """A token whose embedding is NaN: its request ends with "error", its neighbours do not notice, nobody finds its pages."""
    poisoned = dict(model.params)
    path = next(k for k in poisoned if "embed" in k)
    leaf = poisoned[path]
    broken = jax.tree.map(lambda a: a.at[3].set(jnp.nan) if a.ndim == 2 and a.shape[0] == V else a, leaf)
    bad_model = dataclasses.replace(model, params={**poisoned, path: broken})
    clean = [text for text in texts if 3 not in text]
    bad = [3] * 20
    e = new_engine(bad_model)
    ids = [e.submit(Request(text, 3)) for text in (*clean, bad)]
    results = e.run()
    assert results[ids[-1]][0].finish_reason == "error"
    assert all(results[id][0].finish_reason in ("length", "stop") for id in ids[:-1])
    again = e.submit(Request(bad, 3))
    assert e.run()[again][0].usage.cached_tokens == 0
    assert e.metrics.summary()["request_success"]["error"] == 2
    e.cache.check()


def test_priorities_and_ageing(model):
    now = [0.0]
    e = new_engine(model, clock=lambda: now[0], num_slots=1, ageing_s=10.0)
    first = e.submit(Request(prompt(5), 2))
    e.step()
    late = e.submit(Request(prompt(6), 2, priority=1))
    urgent = e.submit(Request(prompt(7), 2, priority=0))
    now[0] = 11.0
    newest = e.submit(Request(prompt(8), 2, priority=0))
    order = []
    while e.num_running or e.num_waiting:
        order += [event.id for event in e.step() if event.finish_reason]
    assert order == [first, urgent, late, newest]  # `late` has waited for more than a step of priority when `newest` comes


def test_the_ladder_leaves_active_work_alone(model, texts):
    now = [0.0]
    ladder = LadderConfig(up=(0.3, 0.5, 0.7), down=(0.2, 0.4, 0.6), dwell_s=1.0)
    e = new_engine(model, clock=lambda: now[0], num_pages=SMALL, ladder=ladder)
    ids = [e.submit(Request(text, 20)) for text in (texts[1], texts[3])]
    for _ in range(4):
        e.step()
    assert e._ladder.level == 3
    with pytest.raises(RequestRefused, match="ladder level") as refused:
        e.submit(Request(texts[2], 20))
    assert refused.value.reason == "ladder"
    waits = e.submit(Request(texts[0], 2))
    events = [event for _ in range(5) for event in e.step()]
    assert not [event for event in events if event.id == waits]
    for _ in range(200):
        now[0] += 0.5
        e.step()
    results = e.run()
    assert [results[id][0].tokens.tolist() for id in ids] == [greedy(model, text, 20) for text in (texts[1], texts[3])]
    assert len(results[waits][0].tokens) == 2
    assert e._ladder.level == 0


def test_received_is_rejected_finished_running_and_waiting(model, texts):
    e = new_engine(model)

    def adds_up():
        summary, values = e.metrics.summary(), e.metrics._values
        held = values["num_requests_running"][""] + values["num_requests_waiting"][""]
        assert (
            summary["requests_received"]
            == sum(summary["requests_rejected"].values()) + sum(summary["request_success"].values()) + held
        )

    ids = [e.submit(Request(text, 5, Sampling(n=1 + i % 2))) for i, text in enumerate(texts)]
    adds_up()
    for id in ids[::3]:
        e.step()
        adds_up()
        e.abort(id)
        adds_up()
    e.close()
    adds_up()


def test_drain_abort_and_unknown_ids(model, texts, expected):
    e = new_engine(model)
    id = e.submit(Request(texts[0], NEW))
    e.abort(99)
    assert e.drain()[id][0].tokens.tolist() == expected[0]
    with pytest.raises(RequestRefused, match="draining") as refused:
        e.submit(Request(texts[0], NEW))
    assert refused.value.reason == "draining"
    e.abort(id)
    e.close()


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16", "float8_e4m3fn"])
def test_16_and_8_bit_pages_are_shared_and_restored_bit_by_bit(model, texts, kv_dtype):
    e = new_engine(model, num_pages=SMALL, kv_dtype=kv_dtype, host_bytes=1 << 26)
    restores_pay(e)
    first = run(e, texts)
    wait_for_stores(e)
    assert run(e, texts) == first == run(new_engine(model, kv_dtype=kv_dtype, prefix_cache=False), texts)
    assert e.metrics.summary()["cached_tokens"]["host"] > 0
    e.close()


def test_another_process_finds_what_is_on_disk(model, texts, expected, tmp_path):
    """Under the same secret and weights; under another secret, or with a broken file, it computes."""
    kept = dict(num_pages=SMALL, disk_folder=tmp_path / "kv", disk_bytes=1 << 26)

    def serve(secret, m=model):
        e = new_engine(m, secret=secret, **kept)
        restores_pay(e)
        assert run(e, texts) == ([greedy(m, text, NEW) for text in texts] if m is not model else expected)
        e.close()
        return e.metrics.summary()["cached_tokens"]["disk"]

    serve(b"one secret of the server")
    assert serve(b"one secret of the server") > 0
    assert serve(b"another secret of it") == 0
    assert serve(b"one secret of the server", make_model(seed=1)) == 0
    for path in (tmp_path / "kv").rglob("*"):
        if path.is_file():
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    assert serve(b"one secret of the server") == 0
