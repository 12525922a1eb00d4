"""Tiers together: who may have which page back, transfers beside the steps, and whether they pay."""

import dataclasses
import logging
import threading
from concurrent.futures import wait

import numpy as np
import pytest
import tier_pages
from tier_pages import FINGERPRINT, LAYOUT, SECRET, bits, changed, load, make_chain

from jaxkv.serving.disk_tier import DiskTier
from jaxkv.serving.fingerprint import Fingerprint, page_keys
from jaxkv.serving.host_tier import HostTier
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
    all_done(tiers.store_async(chain))
    tokens = np.concatenate([record.tokens for record in chain])
    keys = keys_of(after, tokens)
    assert tiers.how_many(keys) == (None, 0)  # at once, before anything is freed
    assert tiers.load_async(keys, after, tokens).result() == []
    assert tiers.load_async([r.key for r in chain], after, tokens, tier.name).result() == []
    assert all_done(tiers.drop_where(lambda fingerprint: fingerprint != after)) == {tier.name: 3}
    assert tier.num_pages == 0 and tier.nbytes == 0


# Transfers


def test_pages_go_to_every_tier_and_come_back(tmp_path, open_tiers):
    tiers, chain = open_tiers(host(tmp_path), disk(tmp_path)), make_chain(5)
    tokens, keys = np.concatenate([r.tokens for r in chain]), [r.key for r in chain]
    assert tiers.how_many(keys) == (None, 0)
    assert all_done(tiers.store_async(chain[::-1])) == {"host": 5, "disk": 5}
    assert tiers.how_many(keys) == ("host", 5)
    for tier in (None, "host", "disk"):
        data = tiers.load_async(keys, FINGERPRINT, tokens, tier).result()
        assert [bits(d) for d in data] == [bits(r.data) for r in chain]
    # From the middle of a chain on, with tokens beyond the last page.
    data = tiers.load_async(keys[2:4], FINGERPRINT, tokens[2 * tier_pages.P :]).result()
    assert [bits(d) for d in data] == [bits(r.data) for r in chain[2:4]]
    assert tiers.counts()["host"]["events"] == {"store": 5, "hit": 12} and tiers.nbytes()["host"] == 5 * LAYOUT.nbytes


def test_the_longest_leading_run_wins_and_the_faster_of_equals(tmp_path, open_tiers):
    fast, slow, chain = host(tmp_path), disk(tmp_path), make_chain(6)
    tiers, keys = open_tiers(fast, slow), [r.key for r in chain]
    for i in (0, 1, 4):
        fast.store(chain[i])
    for i in (0, 1, 2, 3, 5):
        slow.store(chain[i])
    assert tiers.how_many(keys) == ("disk", 4)
    assert tiers.how_many(keys[:2]) == ("host", 2)
    assert tiers.how_many(keys[4:]) == ("host", 1)
    assert tiers.how_many([]) == (None, 0)
    slow.drop(keys[0])
    assert tiers.how_many(keys) == ("host", 2)
    tokens = np.concatenate([r.tokens for r in chain])
    assert len(tiers.load_async(keys, FINGERPRINT, tokens).result()) == 2


def test_a_restored_chain_leaves_deepest_first(open_tiers):
    chain, others = make_chain(4), make_chain(4, seed=1)
    tier = HostTier(4 * LAYOUT.nbytes)
    tiers = open_tiers(tier)
    all_done(tiers.store_async(chain))
    tiers.load_async([r.key for r in chain], FINGERPRINT, np.concatenate([r.tokens for r in chain])).result()
    for i, record in enumerate(others, 1):
        all_done(tiers.store_async([record]))
        assert tiers.how_many([r.key for r in chain]).num_pages == 4 - i


def test_records_of_another_layout_or_damaged_ones_end_the_run(tmp_path, open_tiers):
    tier, chain = disk(tmp_path), make_chain(4)
    tiers, keys, tokens = open_tiers(tier), [r.key for r in chain], np.concatenate([r.tokens for r in chain])
    all_done(tiers.store_async(chain))
    path = tier.folder / f"{keys[2].hex()}.page"
    path.write_bytes(path.read_bytes()[:-1])
    assert tiers.how_many(keys) == ("disk", 4)
    assert len(tiers.load_async(keys, FINGERPRINT, tokens).result()) == 2
    assert tiers.how_many(keys) == ("disk", 2)
    other = Tiers([tier], dataclasses.replace(LAYOUT, dtype="uint16"))
    assert other.load_async(keys, FINGERPRINT, tokens).result() == []
    other.close()


class Slow:
    """A tier whose methods wait until they may go on, or fail."""

    name = "slow"

    def __init__(self):
        self.counts, self.go, self.error, self.held = TierCounts(), threading.Event(), None, {}
        self.nbytes = 0

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
    futures = tiers.store_async(chain)
    assert futures["host"].result(30) == 3
    tokens = np.concatenate([r.tokens for r in chain])
    assert len(tiers.load_async([r.key for r in chain], FINGERPRINT, tokens).result(30)) == 3
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
    assert set(tiers.store_async(first)) == {"slow", "host"}
    pending = tiers.store_async(second)
    assert set(pending) == {"host"} and pending["host"].result(30) == 3
    assert slow.counts.failures == {"backlog": 3}
    slow.go.set()
    while len(slow.held) < 3 or "slow" not in (futures := tiers.store_async(third)):
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
    futures = tiers.store_async(make, num_pages=3)
    assert not made
    device.set()
    assert all_done(futures) == {"host": 3, "slow": 3}
    assert len(made) == 1 and made[0] is not threading.current_thread()


@pytest.mark.parametrize("error", [OSError("gone"), MemoryError(), RuntimeError("a bug")])
def test_nothing_that_goes_wrong_reaches_the_steps(open_tiers, caplog, error):
    tier, chain = Slow(), make_chain(2)
    tiers, tokens = open_tiers(tier), np.concatenate([r.tokens for r in chain])
    tier.go.set()
    all_done(tiers.store_async(chain))
    tier.error = error
    with caplog.at_level(logging.ERROR):
        assert all_done(tiers.store_async(chain)) == {"slow": 0}
        assert tiers.load_async([r.key for r in chain], FINGERPRINT, tokens).result() == []
        assert all_done(tiers.drop_where(lambda fingerprint: True)) == {"slow": 0}

        def fail():
            raise error

        assert all_done(tiers.store_async(fail, num_pages=2)) == {"slow": 0}
    assert tier.counts.failures["error"] >= 4 and caplog.records


def test_close_drains_and_takes_nothing_more(tmp_path):
    chain = make_chain(20)
    tier = disk(tmp_path)
    tiers = Tiers([tier], LAYOUT)
    stored = tiers.store_async(chain)
    tiers.close()
    assert stored["disk"].result(0) == 20 and tier.num_pages == 20
    assert tiers.store_async(chain) == {} and tiers.drop_where(lambda fingerprint: True) == {}
    assert tiers.load_async([chain[0].key], FINGERPRINT, chain[0].tokens).result(0) == []
    tiers.close()
    assert len(load(disk(tmp_path), chain[3]).arrays) == 2


def test_a_cancelled_transfer_waits_no_more(open_tiers):
    slow, chain = Slow(), make_chain(2)
    tiers = open_tiers(slow)
    running, waiting = tiers.store_async(chain[:1]), tiers.store_async(chain[1:])
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


def test_restoring_is_worth_it_where_measured_transfers_say_so(open_tiers):
    tier, chain = HostTier(BIG), make_chain(4)
    clock = Clock(2.0)
    tiers = open_tiers(tier, clock=clock, cost=TransferCosts({"host": LAYOUT.nbytes / 0.1}))
    keys, tokens, nbytes = [r.key for r in chain], np.concatenate([r.tokens for r in chain]), 4 * LAYOUT.nbytes
    worth = lambda recompute_s: tiers.worth_restoring(tokens.size, nbytes, recompute_s / tokens.size, "host")
    assert worth(0.41) and not worth(0.39)  # as believed: 0.1 s a page
    assert tiers.bytes_per_s()["host"]["load"] == pytest.approx(LAYOUT.nbytes / 0.1)
    all_done(tiers.store_async(chain))
    for _ in range(30):
        tiers.load_async(keys, FINGERPRINT, tokens).result()  # 2 s for 4 pages
    measured = tiers.bytes_per_s()["host"]["load"]
    assert LAYOUT.nbytes / 0.5 < measured < LAYOUT.nbytes / 0.1
    assert worth(4 * LAYOUT.nbytes / measured * 1.01) and not worth(4 * LAYOUT.nbytes / measured * 0.99)
    for _ in range(200):  # refusals
        worth(0.0)
    assert worth(0.41)  # what was measured long ago is not held against it


def test_a_rate_follows_what_is_measured_and_large_transfers_more():
    rate = Rate(1e9, 0.5)
    assert rate.bytes_per_s == pytest.approx(1e9)
    for _ in range(20):
        rate.measured(10**8, 1.0)
    assert rate.bytes_per_s == pytest.approx(1e8, rel=1e-2)
    rate.measured(10**5, 1e-5)  # one small page that was fast
    assert rate.bytes_per_s == pytest.approx(1e8, rel=1e-2)
    for _ in range(20):
        rate.measured(10**8, 0.25)
    assert rate.bytes_per_s == pytest.approx(4e8, rel=1e-2)


def test_what_waits_before_counts(open_tiers):
    slow, chain = Slow(), make_chain(2)
    slow.held = {r.key: r for r in chain}
    tiers = open_tiers(slow, cost=TransferCosts({"slow": LAYOUT.nbytes / 0.1}))
    tokens = np.concatenate([r.tokens for r in chain])
    assert tiers.worth_restoring(100, LAYOUT.nbytes, 0.0015, "slow")
    future = tiers.load_async([r.key for r in chain], FINGERPRINT, tokens)
    assert not tiers.worth_restoring(100, LAYOUT.nbytes, 0.0015, "slow")
    slow.go.set()
    future.result()


def test_bad_arguments():
    for tiers in ([], [HostTier(1), HostTier(1)]):
        with pytest.raises(ValueError, match="different names"):
            Tiers(tiers, LAYOUT)
    for bad in (dict(load_bytes_per_s={"host": 0}), dict(other_bytes_per_s=-1), dict(decay=1.0), dict(max_pending_bytes=-1)):
        with pytest.raises(ValueError):
            TransferCosts(**bad)
