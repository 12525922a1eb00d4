"""Tiers together: who may have which page back, transfers beside the steps, and whether they pay."""

import dataclasses
import logging
import os
import threading
import time
from concurrent.futures import wait

import numpy as np
import pytest
import tier_pages
from tier_pages import FINGERPRINT, LAYOUT, SECRET, bits, changed, load, make_chain

from jaxkv.serving.disk_tier import DiskTier
from jaxkv.serving.fingerprint import Fingerprint, page_keys
from jaxkv.serving.host_tier import HostTier
from jaxkv.serving.tier_choice import best_run
from jaxkv.serving.tier_counts import TierCounts
from jaxkv.serving.tiers import Tiers
from jaxkv.serving.transfer_costs import Rate, TransferCosts

BIG = 1 << 30


def host(folder):
    return HostTier(BIG)


def host_int8(folder):
    return HostTier(BIG, "int8")


def disk(folder):
    return DiskTier(folder / "tier", BIG, SECRET)


PAGE_S = 1.0  # what computing a page takes in these tests, unless one says otherwise: so long that every tier pays


def store(tiers, records, num_pages=None):
    """Stores pages wherever there is room, as `Restores` does."""
    count = len(records) if num_pages is None else num_pages
    return tiers.store_async(records, count, tiers.takers(count, PAGE_S))


def run_of(tiers, keys, page_s=PAGE_S):
    """(tier, pages) that `how_many` names."""
    return tuple(tiers.how_many(keys, page_s))[:2]


def all_done(futures):
    """The results of what Tiers returns by tier."""
    wait(futures.values())
    return {name: future.result() for name, future in futures.items()}


@pytest.fixture
def open_tiers():
    """Makes Tiers that are closed at the end."""
    made = []

    def make(*tiers, **options):
        made.append(Tiers(tiers, LAYOUT, **options))
        return made[-1]

    yield make
    for tiers in made:
        tiers.close()


# Isolation. A pair of fingerprints that differ in one way, for each part and each way.


def pairs():
    parts = dict(FINGERPRINT.parts())
    texts = [name for name, value in parts.items() if name not in ("acl_epoch", "page_size")]
    optional = [name for name in texts if name not in ("kv_dtype", "layout")]
    bare = changed(**dict.fromkeys(optional), acl_epoch=None, kv_dtype="", layout="")
    for name in texts:
        yield name, "different", changed(**{name: "one"}), changed(**{name: "two"})
        yield name, "case", changed(**{name: "one"}), changed(**{name: "One"})
        yield name, "empty against set", changed(**{name: ""}), changed(**{name: "one"})
        for other in texts:
            if other != name:
                one, two = (dataclasses.replace(bare, **{part: "equal"}) for part in (name, other))
                yield name, f"equal string in {other}", one, two
    for name in optional:
        yield name, "unset against set", changed(**{name: None}), changed(**{name: "one"})
        yield name, "unset against empty", changed(**{name: None}), changed(**{name: ""})
        yield name, "unset against its name", changed(**{name: None}), changed(**{name: "None"})
    for old, new in ((1, 2), (2, 1), (None, 0), (None, 1), (0, 1)):
        yield "acl_epoch", f"{old} against {new}", changed(acl_epoch=old), changed(acl_epoch=new)
    yield "acl_epoch", "equal to a text", changed(acl_epoch=1, adapter=None), changed(acl_epoch=None, adapter="1")


PAIRS = list(pairs())


def keys_of(fingerprint: Fingerprint, tokens) -> list[bytes]:
    return page_keys(fingerprint.root(SECRET), tokens, fingerprint.page_size)


@pytest.mark.parametrize("make", [host, host_int8, disk])
def test_no_page_crosses_a_fingerprint(tmp_path, make):
    tier = make(tmp_path)
    assert {name for name, *_ in PAIRS} == {name for name, _ in FINGERPRINT.parts()} - {"page_size"}
    for name, way, one, two in PAIRS:
        for mine, theirs in ((one, two), (two, one)):
            (record,) = make_chain(1, mine)
            assert tier.store(record)
            assert load(tier, record) is not None, (name, way)  # the same: the positive control
            (key,) = keys_of(theirs, record.tokens)
            assert key not in tier and load(tier, record, key=key, fingerprint=theirs) is None, (name, way)
            # Even whoever had the key: the fingerprint is compared itself.
            before = tier.counts.misses["fingerprint"]
            assert load(tier, record, fingerprint=theirs) is None, (name, way)
            assert tier.counts.misses["fingerprint"] == before + 1
            tier.drop(record.key)
    assert tier.num_pages == 0


@pytest.mark.parametrize("make", [host, host_int8, disk])
def test_another_page_size_is_another_page(tmp_path, make):
    tier, (record,) = make(tmp_path), make_chain(1)
    tier.store(record)
    assert load(tier, record, fingerprint=changed(page_size=2), tokens=record.tokens[:2]) is None
    assert load(tier, record, fingerprint=changed(page_size=8), tokens=np.tile(record.tokens, 2)) is None
    assert load(tier, record, tokens=record.tokens[::-1]) is None
    assert load(tier, record) is not None


@pytest.mark.parametrize("make", [host, disk])
@pytest.mark.parametrize("part, old, new", [("model_revision", "w1", "w2"), ("acl_epoch", 1, 2)])
def test_an_epoch_or_weights_that_move_on_match_nothing_older(tmp_path, open_tiers, make, part, old, new):
    before, after = changed(**{part: old}), changed(**{part: new})
    tier, chain = make(tmp_path), make_chain(3, before)
    tiers = open_tiers(tier)
    all_done(store(tiers, chain))
    tokens = np.concatenate([record.tokens for record in chain])
    keys = keys_of(after, tokens)
    assert run_of(tiers, keys) == (None, 0)  # at once, before anything is freed
    assert tiers.load_async(keys, after, tokens, tier.name).result() == []
    assert tiers.load_async([r.key for r in chain], after, tokens, tier.name).result() == []
    assert all_done(tiers.drop_where(lambda fingerprint: fingerprint != after)) == {tier.name: 3}
    assert tier.num_pages == 0 and tier.nbytes == 0


# Transfers


def test_pages_go_to_every_tier_and_come_back(tmp_path, open_tiers):
    tiers, chain = open_tiers(host(tmp_path), disk(tmp_path)), make_chain(5)
    tokens, keys = np.concatenate([r.tokens for r in chain]), [r.key for r in chain]
    assert run_of(tiers, keys) == (None, 0)
    assert all_done(store(tiers, chain[::-1])) == {"host": 5, "disk": 5}
    assert run_of(tiers, keys) == ("host", 5)
    for tier in ("host", "disk", "host"):
        data = tiers.load_async(keys, FINGERPRINT, tokens, tier).result()
        assert [bits(d) for d in data] == [bits(r.data) for r in chain]
    # From the middle of a chain on, with tokens beyond the last page.
    data = tiers.load_async(keys[2:4], FINGERPRINT, tokens[2 * tier_pages.P :], "host").result()
    assert [bits(d) for d in data] == [bits(r.data) for r in chain[2:4]]
    assert tiers.counts()["host"]["events"] == {"store": 5, "hit": 12} and tiers.nbytes()["host"] == 5 * LAYOUT.nbytes


def test_the_longest_leading_run_wins_and_the_faster_of_equals(tmp_path, open_tiers):
    fast, slow, chain = host(tmp_path), disk(tmp_path), make_chain(6)
    tiers, keys = open_tiers(fast, slow), [r.key for r in chain]
    for i in (0, 1, 4):
        fast.store(chain[i])
    for i in (0, 1, 2, 3, 5):
        slow.store(chain[i])
    assert run_of(tiers, keys) == ("disk", 4)
    assert run_of(tiers, keys[:2]) == ("host", 2)
    assert run_of(tiers, keys[4:]) == ("host", 1)
    assert run_of(tiers, []) == (None, 0)
    slow.drop(keys[0])
    assert run_of(tiers, keys) == ("host", 2)
    tokens = np.concatenate([r.tokens for r in chain])
    assert len(tiers.load_async(keys, FINGERPRINT, tokens, tiers.how_many(keys, PAGE_S).tier).result()) == 2


def test_a_restored_chain_leaves_deepest_first(open_tiers):
    chain, others = make_chain(4), make_chain(4, seed=1)
    tier = HostTier(4 * LAYOUT.nbytes)
    tiers = open_tiers(tier)
    all_done(store(tiers, chain))
    tiers.load_async([r.key for r in chain], FINGERPRINT, np.concatenate([r.tokens for r in chain]), "host").result()
    for i, record in enumerate(others, 1):
        all_done(store(tiers, [record]))
        assert run_of(tiers, [r.key for r in chain])[1] == 4 - i


def test_records_of_another_layout_or_damaged_ones_end_the_run(tmp_path, open_tiers):
    tier, chain = disk(tmp_path), make_chain(4)
    tiers, keys, tokens = open_tiers(tier), [r.key for r in chain], np.concatenate([r.tokens for r in chain])
    all_done(store(tiers, chain))
    path = tier.folder / f"{keys[2].hex()}.page"
    path.write_bytes(path.read_bytes()[:-1])
    assert run_of(tiers, keys) == ("disk", 4)
    assert len(tiers.load_async(keys, FINGERPRINT, tokens, tiers.how_many(keys, PAGE_S).tier).result()) == 2
    assert run_of(tiers, keys) == ("disk", 2)
    other = Tiers([tier], dataclasses.replace(LAYOUT, dtype="uint16"))
    assert other.load_async(keys, FINGERPRINT, tokens, "disk").result() == []
    other.close()


class Slow:
    """A tier whose methods wait until they may go on, or fail."""

    name = "slow"

    def __init__(self):
        self.counts, self.go, self.error, self.held = TierCounts(), threading.Event(), None, {}
        self.nbytes = self.num_pages = 0

    def refresh(self):
        pass

    def __contains__(self, key):
        return key in self.held

    def _wait(self):
        assert self.go.wait(30)
        if self.error:
            raise self.error

    def store(self, record):
        self._wait()
        self.held[record.key] = record
        return True

    def load(self, key, fingerprint, tokens, layout):
        self._wait()
        return self.held[key].data if key in self.held else None

    def touch(self, keys):
        self._wait()
        return len(keys)

    def drop_where(self, predicate):
        self._wait()
        gone = [key for key, record in self.held.items() if predicate(record.fingerprint)]
        for key in gone:
            del self.held[key]
        return len(gone)


def test_a_slow_tier_holds_up_nobody(open_tiers):
    slow, fast = Slow(), HostTier(BIG)
    tiers, chain = open_tiers(fast, slow), make_chain(3)
    futures = store(tiers, chain)
    assert futures["host"].result(30) == 3
    tokens = np.concatenate([r.tokens for r in chain])
    assert len(tiers.load_async([r.key for r in chain], FINGERPRINT, tokens, "host").result(30)) == 3
    assert not futures["slow"].done()
    dropped = tiers.drop_where(lambda fingerprint: True)
    assert dropped["host"].result(30) == 3 and not dropped["slow"].done()
    slow.go.set()
    assert dropped["slow"].result(30) == 3 and futures["slow"].result() == 3  # after the stores that were asked for before
    assert not slow.held


def test_what_a_tier_cannot_take_in_time_is_not_kept(open_tiers):
    slow, fast = Slow(), HostTier(BIG)
    tiers = open_tiers(slow, fast, cost=TransferCosts(max_pending_bytes=5 * LAYOUT.nbytes))
    first, second, third = (make_chain(3, seed=seed) for seed in range(3))
    assert set(store(tiers, first)) == {"slow", "host"}
    pending = store(tiers, second)
    assert set(pending) == {"host"} and pending["host"].result(30) == 3
    assert slow.counts.failures == {"backlog": 3}
    slow.go.set()
    while len(slow.held) < 3 or "slow" not in (futures := store(tiers, third)):
        pass
    assert futures["slow"].result(30) == 3


def test_records_can_be_made_on_the_storing_thread_once(open_tiers):
    made, chain, device = [], make_chain(3), threading.Event()

    def make():
        device.wait(30)
        made.append(threading.current_thread())
        return chain

    tiers = open_tiers(HostTier(BIG), slow := Slow())
    slow.go.set()
    futures = store(tiers, make, num_pages=3)
    assert not made
    device.set()
    assert all_done(futures) == {"host": 3, "slow": 3}
    assert len(made) == 1 and made[0] is not threading.current_thread()


@pytest.mark.parametrize("error", [OSError("gone"), MemoryError(), RuntimeError("a bug")])
def test_nothing_that_goes_wrong_reaches_the_steps(open_tiers, caplog, error):
    tier, chain = Slow(), make_chain(2)
    tiers, tokens = open_tiers(tier), np.concatenate([r.tokens for r in chain])
    tier.go.set()
    all_done(store(tiers, chain))
    tier.error = error
    with caplog.at_level(logging.ERROR):
        assert all_done(store(tiers, chain)) == {"slow": 0}
        assert tiers.load_async([r.key for r in chain], FINGERPRINT, tokens, "slow").result() == []
        assert all_done(tiers.drop_where(lambda fingerprint: True)) == {"slow": 0}

        def fail():
            raise error

        assert all_done(store(tiers, fail, num_pages=2)) == {"slow": 0}
    assert tier.counts.failures["error"] >= 4 and caplog.records


def test_close_drains_and_takes_nothing_more(tmp_path):
    chain = make_chain(20)
    tier = disk(tmp_path)
    tiers = Tiers([tier], LAYOUT)
    stored = store(tiers, chain)
    tiers.close()
    assert stored["disk"].result(0) == 20 and tier.num_pages == 20
    assert store(tiers, chain) == {} and tiers.drop_where(lambda fingerprint: True) == {}
    assert tiers.load_async([chain[0].key], FINGERPRINT, chain[0].tokens, "disk").result(0) == []
    tiers.close()
    assert len(load(disk(tmp_path), chain[3]).arrays) == 2


def test_a_cancelled_transfer_waits_no_more(open_tiers):
    slow, chain = Slow(), make_chain(2)
    tiers = open_tiers(slow)
    running, waiting = store(tiers, chain[:1]), store(tiers, chain[1:])
    assert waiting["slow"].cancel()
    slow.go.set()
    all_done(running)
    assert list(slow.held) == [chain[0].key]
    lane = tiers._lanes["slow"]
    lane.stores.shutdown()
    assert lane.pending_bytes(lane.stores) == 0


# Costs


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


def test_bad_arguments():
    for tiers in ([], [HostTier(1), HostTier(1)]):
        with pytest.raises(ValueError, match="different names"):
            Tiers(tiers, LAYOUT)
    for bad in (
        dict(load_bytes_per_s={"host": 0}),
        dict(other_bytes_per_s=-1),
        dict(decay=1.0),
        dict(half_life_s=0),
        dict(max_pending_bytes=-1),
    ):
        with pytest.raises(ValueError):
            TransferCosts(**bad)
    with pytest.raises(ValueError, match=f"must hold a page, {LAYOUT.nbytes} bytes"):
        Tiers([HostTier(1)], LAYOUT, cost=TransferCosts(max_pending_bytes=LAYOUT.nbytes - 1))
