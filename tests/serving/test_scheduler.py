"""The scheduler over a simulated device: its own speed, and that nobody starves, whatever comes."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.planning.plan import CapacityPlan
from jaxkv.planning.units import GIB
from jaxkv.sampling import Sampling
from jaxkv.serving.admission import Admission
from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.metrics import Metrics
from jaxkv.serving.page_cache import PageCache
from jaxkv.serving.request import Request
from jaxkv.serving.scheduler import Scheduler
from jaxkv.serving.sequence import Sequence, SequenceGroup
from jaxkv.serving.simulate import (
    CostModel,
    SimulatedClock,
    SimulatedRestores,
    SimulatedRunner,
    SimulatedTier,
    SimulatedTiers,
)
from jaxkv.stream import Track

P = 16
FINGERPRINT = Fingerprint(
    model_revision="m", tokenizer_revision=None, position_encoding=None, adapter=None, system_prompt=None, tenant="a",
    acl_epoch=None, kv_dtype="float32", layout="", page_size=P,
)  # fmt: skip


class World:
    """A scheduler with all that it needs."""

    def __init__(self, num_slots=8, num_pages=300, costs=None, tiers=(), plan=None, page_bytes=1000, slot_tokens=4096, **options):
        self.clock = SimulatedClock()
        self.runner = SimulatedRunner(num_slots, self.clock, costs or CostModel())
        self.metrics = Metrics()
        self.restores = None
        on_evict = lambda evicted: self.restores.on_evict(evicted) if self.restores else None
        self.cache = PageCache(num_pages, P, secret=b"secret", clock=self.clock, on_evict=on_evict)
        if tiers:
            self.tiers = SimulatedTiers(tiers, P * 1000, self.clock)
            self.restores = SimulatedRestores(self.tiers, self.cache, self.runner)
        admission = Admission(
            plan, num_pages=num_pages, page_size=P, max_tokens_per_slot=slot_tokens, bytes_per_page=page_bytes, num_slots=num_slots
        )
        self.scheduler = Scheduler(
            self.runner, self.cache, admission, self.metrics, self.clock, lambda one: one.track.limit - len(one.track.tokens),
            restores=self.restores, **options,
        )  # fmt: skip
        self._next = 0

    def add(self, tokens, new, priority=0, n=1, tenant="a"):
        id, now = self._next, self.clock()
        self._next += n
        request = Request((), new, Sampling(n=n), priority=priority, tenant=tenant)
        order = now + 10.0 * priority
        fingerprint = dataclasses.replace(FINGERPRINT, tenant=tenant)
        tokens = np.asarray(tokens, np.int32)
        self.metrics.queued(n)
        sequences = [
            Sequence(id + i, id, request, tokens, fingerprint, Track(i, -1, new, None, None, False), 0, now, order)
            for i in range(n)
        ]
        self.scheduler.add(SequenceGroup(list(sequences), order))
        return sequences

    def run(self, most_steps=100_000, audit=True):
        for _ in range(most_steps):
            if self.scheduler.is_idle:
                return
            self.scheduler.step()
            if audit:
                self.cache.check()
        raise AssertionError(
            f"not done after {most_steps} steps: {self.scheduler.num_running} run, {self.scheduler.num_waiting} wait"
        )


def random_tokens(rng, low, high):
    return rng.integers(0, 50_000, int(rng.integers(low, high)))


def step_ms(waiting: int) -> float:
    """Median host time of a step at 64 rows in steady state, with so many waiting."""
    rng = np.random.default_rng(0)
    world = World(num_slots=64, num_pages=20_000)
    for _ in range(64 + waiting):
        world.add(random_tokens(rng, 20, 600), int(rng.integers(200, 300)))
    for _ in range(100):
        world.scheduler.step()
    times = []
    for _ in range(60):
        started = time.process_time()
        world.scheduler.step()
        times.append(time.process_time() - started)
    assert world.scheduler.num_running >= 63
    return float(np.median(times)) * 1e3


def test_host_work_is_short_and_does_not_depend_on_who_waits():
    few, many = (min(step_ms(waiting) for _ in range(3)) for waiting in (10, 10_000))
    assert few < 0.5
    assert many < 0.5
    assert many < 1.2 * few + 0.02


def test_pages_are_used():
    """Requests reserve all they can need, but take pages as they grow: over 96 % of the slots they hold are used."""
    rng = np.random.default_rng(1)
    world = World(num_slots=32, num_pages=3000)
    for _ in range(200):
        world.add(random_tokens(rng, 100, 500), int(rng.integers(50, 150)))  # 400 tokens in the mean
    world.run(audit=False)
    assert world.metrics.summary()["block_fragmentation"] < 0.04


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60), st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=25),
    st.integers(20, 60),
    st.integers(3, 6),
    st.booleans(),
    st.sampled_from([8, 100, 512]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_everything_ends_and_every_page_returns(requests, pages, slots, overcommit, budget, tiered, random):
    tiers = (SimulatedTier("host", 30, 1e9),) if tiered else ()
    world = World(slots, pages, tiers=tiers, overcommit=overcommit, prefill_tokens=budget)
    sequences = []
    for prompt, new, priority, n in requests:
        total = -(-(prompt + new) // P)
        if prompt // P + n * (total - prompt // P) > pages - 1:
            continue
        shared = random.choice([0, 0, 48, 96])
        tokens = [7] * min(shared, prompt) + [random.randrange(1000) for _ in range(max(prompt - shared, 0))]
        sequences += world.add(tokens, new, priority, n)
        for _ in range(random.randrange(4)):
            world.scheduler.step()
            world.cache.check()
    world.run(20_000)
    assert all(one.track.finish_reason == "length" and len(one.track.tokens) == one.track.limit for one in sequences)
    assert (world.cache.active_pages, world.scheduler.promised_pages) == (0, 0)
    summary = world.metrics.summary()
    assert summary["request_success"]["length"] == summary["requests_received"] == len(sequences)
    if not overcommit:
        assert sum(summary["num_preemptions"].values()) == 0


def test_the_oldest_is_never_preempted_and_goes_on():
    """Each holds half of what the other needs: the younger one gives way."""
    world = World(num_slots=2, num_pages=21, overcommit=True)
    old, young = world.add([1] * 100, 200)[0], world.add([2] * 100, 200)[0]
    ends = []
    while not world.scheduler.is_idle:
        ends += [one.id for one, event in world.scheduler.step() if event.finish_reason]
        assert old.row >= 0 or old.finished
    assert ends == [old.id, young.id]
    assert sum(world.metrics.summary()["num_preemptions"].values()) > 0


def test_samples_whose_prompt_is_being_stored_can_give_way():
    """The youngest is a request for three samples in the middle of its prompt: all three come back."""
    world = World(num_slots=4, num_pages=30, prefill_tokens=4, overcommit=True)
    old = world.add([1] * 200, 200)[0]
    while old.first_token_at is None:
        world.scheduler.step()
    samples = world.add([2] * 200, 30, n=3)
    while not sum(world.metrics.summary()["num_preemptions"].values()):
        world.scheduler.step()
        assert not any(one.first_token_at for one in samples)
    assert (samples[0].row, world.scheduler.num_waiting) == (-1, 1)  # together
    world.run()
    assert [len(one.track.tokens) for one in (old, *samples)] == [200, 30, 30, 30]
    assert world.metrics.summary()["prompt_tokens"] == 400


def test_a_follower_waits_for_the_pages_another_is_computing():
    world = World(prefill_tokens=32)
    first, second = world.add([5] * 100, 4)[0], world.add([5] * 100, 4)[0]
    other = world.add([6] * 10, 4)[0]
    world.scheduler.step()
    assert (first.row >= 0, second.row, other.row >= 0) == (True, -1, True)  # who does not need them goes first
    world.run()
    assert second.cached == {"device": 96}
    assert world.runner.prefill_tokens == 100 + 4 + 10


def test_a_follower_waits_for_the_shared_pages_alone():
    """The leader's prompt is long; what the follower shares of it is stored by the third chunk, and it is more urgent."""
    world = World(num_pages=1000, prefill_tokens=32, slot_tokens=16_000)
    leader = world.add([5] * 96 + [1] * 8000, 4)[0]
    world.scheduler.step()
    follower = world.add([5] * 96 + [2] * 40, 4, priority=-1)[0]
    while not follower.finished:
        world.scheduler.step()
    assert follower.cached == {"device": 96}
    assert leader.stored < 96 + 32 * 12 and leader.first_token_at is None
    world.run()
    assert world.runner.prefill_tokens == 96 + 8000 + 40


def test_followers_of_followers_and_of_those_who_gave_up():
    """Each shares a page more with the one before; some leaders are aborted in the middle of their prompts."""
    world = World(num_slots=4, num_pages=1000, prefill_tokens=16)
    sequences = [world.add([7] * (P * (i + 1)) + [i] * 200, 3)[0] for i in range(12)]
    for i in (0, 3, 4):
        for _ in range(3):
            world.scheduler.step()
        for one in world.scheduler.abort(sequences[i].id):
            one.track.finish_reason = "abort"
    world.run()
    assert [one.track.finish_reason for one in sequences].count("length") >= 9
    assert world.scheduler.promised_pages == 0


def test_waiting_for_a_long_prompt_costs_nothing():
    """16 followers of 20,000 tokens: a step looks none of them up again."""
    world = World(num_slots=32, num_pages=3000, prefill_tokens=64, slot_tokens=30_000)
    for i in range(17):
        world.add([5] * 20_000 + [i] * 40, 4)
    times = []
    for _ in range(60):
        started = time.process_time()
        world.scheduler.step()
        times.append(time.process_time() - started)
    assert world.scheduler.num_running == 1 and world.scheduler.num_waiting == 16
    assert float(np.median(times[5:])) < 0.5e-3


def test_pages_that_prompts_share_are_digested_once():
    """A digest costs more than all else that a start does for a page."""
    world = World(num_slots=20, num_pages=3000, slot_tokens=30_000)
    for i in range(16):
        world.add([5] * 2000 + [i] * 40, 4)
    world.run(audit=False)
    assert world.cache._states.index.next_key.cache_info().misses == 125 + 16 * 2


@pytest.mark.parametrize("decoding", [False, True])
def test_at_most_two_prefills_are_in_flight(decoding):
    """However long a prompt, the device is never so far ahead that somebody new would wait for it."""
    world = World(num_pages=1000, prefill_tokens=32)
    runner, flying, most = world.runner, 0, 0
    prefill, read = runner.prefill, runner.read_prefill

    def counted_prefill(chunks):
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        return prefill(chunks)

    def counted_read(ticket):
        nonlocal flying
        flying -= 1
        return read(ticket)

    runner.prefill, runner.read_prefill = counted_prefill, counted_read
    if decoding:
        world.add([1] * 10, 300)
    world.add([2] * 3000, 2)
    world.run()
    assert (most, flying) == (2 - decoding, 0)


def test_chunks_go_by_priority():
    world = World(num_pages=1000, prefill_tokens=32)
    slow = world.add([1] * 2000, 4)[0]
    for _ in range(5):
        world.scheduler.step()
    urgent, later = world.add([2] * 500, 4, priority=-5)[0], world.add([3] * 500, 4)[0]
    ends = []
    while not world.scheduler.is_idle:
        ends += [one.id for one, event in world.scheduler.step() if event.finish_reason]
    assert ends == [urgent.id, slow.id, later.id]


def test_a_chunk_with_nan_is_not_published():
    """Only the second chunk is bad: what lies before it can be found, nothing behind it, then or at the end, for no sample."""
    world = World(prefill_tokens=32)
    runner, calls = world.runner, iter(range(100))
    read = runner.read_prefill
    runner.read_prefill = lambda ticket: [next(calls) != 1 and ok for ok in read(ticket)]
    world.add([1] * 100, 30, n=2)
    follower = world.add([1] * 120, 4)[0]
    most = 0
    while not world.scheduler.is_idle:
        world.scheduler.step()
        if follower.row < 0 and not follower.finished:
            most = max(most, world.cache.match(FINGERPRINT, [1] * 100).num_tokens)
    assert most == 32 and follower.cached == {"device": 32}
    world.cache.check()


@pytest.mark.parametrize("decoding", [False, True])
def test_the_cost_of_recomputing_is_that_of_prefill(decoding):
    costs = CostModel(s_per_cached_token=0.0)
    world = World(num_pages=2000, prefill_tokens=128, costs=costs)
    if decoding:
        world.add([1] * 10, 300)
        for _ in range(4):
            world.scheduler.step()
    world.add(list(range(3000)), 2)
    world.run()
    assert world.scheduler.recompute_s_per_token == pytest.approx(costs.s_per_prefill_token, rel=0.05)


def test_an_end_in_flight_whose_pages_go_on_hold_is_no_failure():
    """The only row needs a page, and there is none; what it waits for has ended it, and its pages are held."""
    world = World(num_slots=2, num_pages=7, overcommit=True)
    held = world.add([1] * 20, 12)[0]
    held.request = dataclasses.replace(held.request, hold=True)
    world.run()
    one = world.add([2] * 40, 90)[0]
    one.request = dataclasses.replace(one.request, hold=True)
    take = one.track.take

    def stop_at_the_end_of_the_page(emitted, step):
        event = take(emitted, step)
        if len(one.track.tokens) == 24:
            one.track.finish_reason = "stop"
            event = dataclasses.replace(event, finish_reason="stop")
        return event

    one.track.take = stop_at_the_end_of_the_page
    world.run()
    assert one.track.finish_reason == "stop" and world.cache.held_pages == 6


def test_public_pages_behind_ones_of_the_tenants_own_hold_nobody_back():
    """Pages that cannot be published under the tenant's fingerprint are settled all the same: followers do not wait for the answer."""
    world = World(num_slots=8, num_pages=1000)
    text = list(range(170))
    world.add(text[:20], 2)
    world.run()
    public = dataclasses.replace(FINGERPRINT, tenant=None)
    pages = world.cache.allocate(10_000, None, 10)
    assert pages is not None and world.cache.publish(10_000, public, text[:160]) == 10
    world.cache.release(10_000)
    sequences = [world.add(text, 300)[0] for _ in range(6)]
    most = 0
    while not world.scheduler.is_idle:
        world.scheduler.step()
        most = max(most, world.scheduler.num_running)
    assert most == 6 and all(one.finished for one in sequences)
    world.cache.check()


@pytest.mark.parametrize("size", [96, 100])
def test_equal_prompts_start_together(size):
    """Also where the prompt ends with a page, which is never taken as a whole."""
    world = World(num_slots=16, num_pages=1000)
    for _ in range(16):
        world.add([5] * size, 20)
    for _ in range(4):
        world.scheduler.step()
    assert world.scheduler.num_running == 16


def test_who_is_waited_for_is_as_urgent_as_who_waits():
    """A stream of prompts between the two in priority would starve the leader, and so the follower."""
    world = World(num_slots=8, num_pages=3000, prefill_tokens=64)
    world.add([5] * 1000, 2, priority=5)
    world.scheduler.step()
    urgent = world.add([5] * 1000 + [6] * 20, 2, priority=-5)[0]
    for i in range(200):
        world.add([i + 10] * 640, 2)
        world.scheduler.step()
        if urgent.finished:
            break
    assert urgent.finished and i < 60


def test_a_pause_of_the_caller_is_no_cost():
    costs = CostModel(s_per_cached_token=0.0)
    world = World(num_pages=2000, prefill_tokens=128, costs=costs)
    world.add(list(range(3000)), 40)
    for i in range(100):
        world.scheduler.step()
        if i % 2:
            world.clock.advance_to(world.clock() + 1.0)
    assert world.scheduler.recompute_s_per_token == pytest.approx(costs.s_per_prefill_token, rel=0.1)


def test_a_step_costs_the_same_when_many_long_prompts_come_at_once():
    """And a long prompt that does not fit is not looked up again because somebody else's chunk was published."""
    world = World(num_slots=32, num_pages=8000, prefill_tokens=64, slot_tokens=70_000)
    for i in range(10):
        world.add([i] * 30_000, 4)
    started = time.process_time()
    world.scheduler.step()
    assert time.process_time() - started < 0.02
    blocked = World(num_slots=4, num_pages=3000, prefill_tokens=64, slot_tokens=60_000)
    blocked.add([1] * 40_000, 4)
    blocked.add([2] * 40_000, 4)
    times = []
    for _ in range(60):
        started = time.process_time()
        blocked.scheduler.step()
        times.append(time.process_time() - started)
    assert (blocked.scheduler.num_running, blocked.scheduler.num_waiting) == (1, 1)
    assert float(np.median(times[5:])) < 0.5e-3


def test_fragmentation_counts_samples_that_wait_for_their_prompt():
    world = World(num_pages=100, prefill_tokens=16, overcommit=True)
    world.add([1] * 24, 30, n=8)
    world.scheduler.step()
    # One full page, shared, that is filled; eight that are not: nine pages with 16 tokens.
    assert world.metrics.summary()["block_fragmentation"] == pytest.approx(1 - 16 / (9 * 16), abs=0.01)


def test_promises_are_kept_when_somebody_grows_beyond_his():
    """Whoever is within the plan's reserve gives way to the oldest alone."""
    page = 2**20
    plan = CapacityPlan(
        memory_gib=1, weights_gib=0.1, activations_gib=0.1, runtime_and_fragmentation_gib=0.1, kv_budget_gib=30 * page / GIB,
        max_context_tokens=400, max_active_sequences=4, reserve_per_sequence_gib=6 * page / GIB, low_watermark_gib=0,
    )  # fmt: skip
    world = World(num_slots=4, num_pages=31, plan=plan, page_bytes=page, overcommit=True)
    world.add([1] * 20, 60)
    grown = world.add([2] * 20, 300)[0]
    within = [world.add([i] * 20, 76)[0] for i in (3, 4)]
    while not world.scheduler.is_idle:
        world.scheduler.step()
        assert world.scheduler._running.spare_pages >= 0
        for one in within:
            assert one.row >= 0 or one.finished
    assert grown.finished


def test_the_plans_reserve_is_kept_for_every_sequence():
    """Overcommitted, but each has the plan's 6 pages for itself: nobody who stays within them is preempted."""
    page = 2**20
    plan = CapacityPlan(
        memory_gib=1, weights_gib=0.1, activations_gib=0.1, runtime_and_fragmentation_gib=0.1, kv_budget_gib=40 * page / GIB,
        max_context_tokens=400, max_active_sequences=6, reserve_per_sequence_gib=6 * page / GIB, low_watermark_gib=2 * page / GIB,
    )  # fmt: skip
    world = World(num_slots=8, num_pages=41, plan=plan, page_bytes=page, overcommit=True)
    for i in range(12):
        world.add([i] * 20, 70)
    most = 0
    while not world.scheduler.is_idle:
        world.scheduler.step()
        most = max(most, world.scheduler.num_running)
    assert most == 6
    assert sum(world.metrics.summary()["num_preemptions"].values()) == 0


def test_an_aborted_leader_does_not_hold_its_followers_back():
    world = World(prefill_tokens=32)
    leader, follower = world.add([5] * 100, 4)[0], world.add([5] * 100, 4)[0]
    world.scheduler.step()
    leader.track.finish_reason = "abort"
    world.scheduler.abort(leader.id)
    world.run()
    assert follower.track.finish_reason == "length"


@pytest.mark.parametrize("bytes_per_s", [1e12, 1e3])
def test_pages_come_back_only_where_that_is_faster(bytes_per_s):
    world = World(num_slots=1, num_pages=14, tiers=(SimulatedTier("host", 100, bytes_per_s),))
    for tokens in ([1] * 150, [2] * 150, [1] * 150):
        last = world.add(tokens, 4)[0]
        world.run()
    assert last.cached.get("host", 0) == (96 if bytes_per_s == 1e12 else 0)
    assert last.cached["device"] == 48  # the end of the chain went first


def test_decoding_rows_keep_their_pace_beside_long_prompts():
    """A step takes at most prefill_tokens of prompts, so a token never waits for more than those and one decode step."""
    costs = CostModel()
    world = World(num_slots=4, num_pages=2000, prefill_tokens=256, costs=costs)
    row = world.add([1] * 20, 200)[0]
    for i in range(3):
        world.add([i + 2] * 4000, 4)
    gaps, last = [], None
    while not row.finished:
        for one, _ in world.scheduler.step():
            if one is row:
                if last is not None:
                    gaps.append(world.clock() - last)
                last = world.clock()
    step = 256 * costs.s_per_prefill_token + costs.s_per_decode_step + 13_000 * costs.s_per_cached_token
    assert max(gaps) <= 2 * step
