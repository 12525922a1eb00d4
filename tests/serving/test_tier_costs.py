"""Whether a transfer pays, by what is believed and what is measured, and what the choice itself costs."""

import os
import threading
import time

import numpy as np
import pytest
from tier_pages import BIG, FINGERPRINT, LAYOUT, PAGE_S, SECRET, Slow, all_done, make_chain, run_of, store

from jaxkv.serving.disk_tier import DiskTier
from jaxkv.serving.host_tier import HostTier
from jaxkv.serving.tier_choice import best_run
from jaxkv.serving.transfer_costs import Rate, TransferCosts


class Clock:
    def __init__(self, step_s):
        self.now, self.step_s = 0.0, step_s

    def __call__(self):
        self.now += self.step_s
        return self.now


def test_what_is_believed_gives_way_to_what_is_measured_and_comes_back(open_tiers):
    tier, chain, clock = HostTier(BIG), make_chain(4), Clock(0.0)
    tiers = open_tiers(tier, clock=clock, cost=TransferCosts({"host": LAYOUT.nbytes / 0.1}, half_life_s=10.0))
    keys, tokens = [r.key for r in chain], np.concatenate([r.tokens for r in chain])
    worth = lambda page_s: (run_of(tiers, keys, page_s)[0] == "host", tiers.takers(1, page_s) == ["host"])
    assert tiers.bytes_per_s()["host"] == pytest.approx(LAYOUT.nbytes / 0.1)
    all_done(store(tiers, chain))
    assert worth(0.101) == (True, True) and worth(0.099) == (False, False)  # as believed: 0.1 s a page
    clock.step_s = 2.0
    for _ in range(30):
        tiers.load_async(keys, FINGERPRINT, tokens, "host").result()  # 2 s for 4 pages
    clock.step_s = 0.0
    measured = tiers.bytes_per_s()["host"]
    assert measured == pytest.approx(LAYOUT.nbytes / 0.5, rel=0.02)
    assert worth(LAYOUT.nbytes / measured * 1.01) == (True, True)
    assert worth(LAYOUT.nbytes / measured * 0.99) == (False, False)
    clock.now += 200.0
    assert worth(0.101) == (True, True)  # what was measured long ago is not held against it


def test_a_load_that_brings_nothing_after_a_long_time_makes_a_tier_slow(open_tiers):
    tier, (record,), clock = Slow(), make_chain(1), Clock(0.0)
    tiers = open_tiers(tier, clock=clock, cost=TransferCosts({"slow": LAYOUT.nbytes / 0.1}))
    tier.go.set()
    clock.step_s = 5.0
    assert tiers.load_async([record.key], FINGERPRINT, record.tokens, "slow").result() == []
    clock.step_s = 0.0
    assert tiers.bytes_per_s()["slow"] < LAYOUT.nbytes / 10


def test_a_rate_follows_what_is_measured_and_large_transfers_more():
    rate = Rate(1e9, 1 << 16, 0.5, half_life_s=10.0)
    assert rate.bytes_per_s(0.0) == pytest.approx(1e9)
    for _ in range(20):
        rate.measured(10**8, 1.0, 0.0)
    assert rate.bytes_per_s(0.0) == pytest.approx(1e8, rel=1e-2)
    rate.measured(10**5, 1e-5, 0.0)  # one small page that was fast
    assert rate.bytes_per_s(0.0) == pytest.approx(1e8, rel=1e-2)
    for _ in range(20):
        rate.measured(10**8, 0.25, 0.0)
    assert rate.bytes_per_s(0.0) == pytest.approx(4e8, rel=1e-2)
    assert rate.bytes_per_s(-5.0) == rate.bytes_per_s(0.0)
    estimates = [rate.bytes_per_s(10.0 * i) for i in range(30)]
    assert estimates == sorted(estimates) and estimates[-1] == pytest.approx(1e9, rel=1e-2)


def test_the_run_that_saves_the_most_time_wins(open_tiers):
    """Pages of 1 s from the slow tier, of 0.1 s from the fast one, which has the first 2 of 8."""
    fast, slow, chain = HostTier(BIG), Slow(), make_chain(8)
    keys, tokens = [r.key for r in chain], np.concatenate([r.tokens for r in chain])
    cost = TransferCosts({"host": LAYOUT.nbytes / 0.1, "slow": LAYOUT.nbytes / 1.0})
    tiers = open_tiers(fast, slow, cost=cost, clock=Clock(0.0))
    slow.held = {r.key: r for r in chain}
    for record in chain[:2]:
        fast.store(record)
    assert run_of(tiers, keys, 0.05) == (None, 0)
    assert run_of(tiers, keys, 0.9) == ("host", 2)  # the slow one saves nothing
    assert run_of(tiers, keys, 1.2) == ("host", 2)  # 2.2 s against 1.6 s
    assert run_of(tiers, keys, 1.4) == ("slow", 8)  # 2.6 s against 3.2 s
    assert tiers.how_many(keys, 1.4).saved_s == pytest.approx(3.2)
    assert run_of(tiers, keys[:2], 1.4) == ("host", 2)
    # What waits for a tier counts: 4 s now.
    future = tiers.load_async(keys[:4], FINGERPRINT, tokens, "slow")
    assert run_of(tiers, keys, 1.4) == ("host", 2)
    assert run_of(tiers, keys[2:], 1.4) == (None, 0) and run_of(tiers, keys[2:], 2.0) == ("slow", 6)
    assert tiers.takers(1, 1.4) == ["host", "slow"]  # it will be over when these come back
    slow.go.set()
    future.result()


def test_the_choice_is_the_best_of_all_choices():
    """Against trying all: no tier's run saves more, and the first of equals is named."""

    class Source:
        def __init__(self, name, count, bytes_per_s, waits_s):
            self.name, self.keys, self.bytes_per_s, self.waits_s = name, set(KEYS[:count]), bytes_per_s, waits_s

        def __contains__(self, key):
            return key in self.keys

    KEYS = [bytes([i]) for i in range(6)]
    rng = np.random.default_rng(0)
    for _ in range(500):
        sources = [
            Source(str(i), int(rng.integers(0, 7)), float(rng.choice([1, 2, 5])), float(rng.choice([0, 1, 9]))) for i in range(3)
        ]
        page_s = float(rng.choice([0.0, 0.4, 0.6, 1.1, 3.0]))
        saved = [len(s.keys) * (page_s - 1 / s.bytes_per_s) - s.waits_s if s.keys else 0.0 for s in sources]
        run = best_run(sources, KEYS, 1, page_s)
        if max(saved) <= 1e-12:
            assert run.tier is None or run.saved_s < 1e-9
        else:
            assert run.saved_s == pytest.approx(max(saved))
            assert run.num_pages == len(sources[int(run.tier)].keys)


def test_a_choice_reads_no_disk_and_is_linear(tmp_path, open_tiers, monkeypatch):
    """20,000 keys in memory of a folder: the stepping thread makes no system call on it."""
    tier = DiskTier(tmp_path / "tier", BIG, SECRET)
    keys = [i.to_bytes(32, "big") for i in range(20_000)]
    tier._files.update(dict.fromkeys(keys))
    monkeypatch.setattr(tier, "refresh", lambda: None)
    tiers, mine = open_tiers(HostTier(BIG), tier), threading.get_ident()

    def guarded(real):
        def call(*args, **options):
            assert threading.get_ident() != mine, "the stepping thread went to the disk"
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("stat", "scandir", "open", "utime", "listdir"):
            patch.setattr(os, name, guarded(getattr(os, name)))
        assert run_of(tiers, keys) == ("disk", 20_000)
        assert bytes(32) in tiers and b"unknown" not in tiers and tiers.nbytes()["disk"] == 0
        assert tiers.takers(1, PAGE_S) == ["host", "disk"]
        seconds = [_cpu_seconds(lambda n=n: tiers.how_many(keys[:n], PAGE_S)) for n in (2_000, 20_000)]
    assert seconds[1] < 20 * seconds[0] and seconds[1] < 0.02, seconds


def _cpu_seconds(call):
    """The best of 10."""
    best = 1e9
    for _ in range(10):
        started = time.thread_time()
        call()
        best = min(best, time.thread_time() - started)
    return best


def test_what_another_process_stores_is_learnt_beside_the_steps(tmp_path, open_tiers):
    mine, theirs = DiskTier(tmp_path / "tier", BIG, SECRET), DiskTier(tmp_path / "tier", BIG, SECRET)
    chain, clock = make_chain(3), Clock(0.0)
    tiers, keys = open_tiers(mine, clock=clock), [r.key for r in chain]

    def learnt():
        """What is known once the tier's loading thread has done what it was asked for."""
        tiers._lanes["disk"].loads.submit(lambda: None).result()
        return run_of(tiers, keys)[1]

    tiers.refresh()
    assert learnt() == 0
    for record in chain:
        assert theirs.store(record)
    tiers.refresh()
    assert learnt() == 0  # it looked a moment ago
    clock.now += 1.5
    assert run_of(tiers, keys)[1] == 0 and learnt() == 3  # asking has it look
    tokens = np.concatenate([r.tokens for r in chain])
    assert len(tiers.load_async(keys, FINGERPRINT, tokens, "disk").result()) == 3
    theirs.drop(keys[2])
    clock.now += 1.5
    run_of(tiers, keys)
    assert learnt() == 2


class Throttled:
    """A tier whose loads take so long a page, really."""

    def __init__(self, name, load_s):
        self.name, self.load_s, self.loads, self._tier = name, load_s, 0, HostTier(BIG)

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def __contains__(self, key):
        return key in self._tier

    def load(self, *args):
        self.loads += 1
        time.sleep(self.load_s)
        return self._tier.load(*args)


def test_real_measurements_decide(open_tiers):
    """Believed alike, a tier of 40 ms a page is used until that was measured, one of 0.5 ms stays; time makes the slow one worth a try
    again, and it stays once it has become fast. Computing a page takes 10 ms."""
    chain, page_s = make_chain(6), 0.010
    keys, tokens = [r.key for r in chain], np.concatenate([r.tokens for r in chain])
    slow, fast = Throttled("slow", 0.040), Throttled("fast", 0.0005)
    cost = TransferCosts({"slow": 1e9, "fast": 1e9}, half_life_s=0.2)
    for tier in (slow, fast):
        for record in chain:
            assert tier.store(record)

    def serve(tiers):
        """What a request does; the tier it used."""
        name = tiers.how_many(keys, page_s).tier
        if name is not None:
            assert len(tiers.load_async(keys, FINGERPRINT, tokens, name).result()) == 6
        return name

    tiers = open_tiers(slow, cost=cost)
    assert serve(tiers) == "slow"
    assert [serve(tiers) for _ in range(5)] == [None] * 5 and slow.loads == 6 and tiers.takers(1, page_s) == []
    give_up = time.monotonic() + 30
    while tiers.how_many(keys, page_s).tier is None:  # what was measured fades
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert serve(tiers) == "slow" and serve(tiers) is None  # tried again, and still slow
    slow.load_s = 0.0005
    time.sleep(2.5)
    assert [serve(tiers) for _ in range(5)] == ["slow"] * 5  # it has become fast
    slow.load_s = 0.040
    both = open_tiers(slow, fast, cost=cost)
    assert [serve(both) for _ in range(4)] == ["slow", "fast", "fast", "fast"]
