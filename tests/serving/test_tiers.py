"""Tiers together: transfers beside the steps, whatever goes wrong there."""

import dataclasses
import logging
import threading

import numpy as np
import pytest
import tier_pages
from tier_pages import BIG, FINGERPRINT, LAYOUT, PAGE_S, Slow, all_done, bits, host, load, make_chain, open_tier, run_of, store

from jaxkv.serving.host_tier import HostTier
from jaxkv.serving.tiers import Tiers
from jaxkv.serving.transfer_costs import TransferCosts


def test_pages_go_to_every_tier_and_come_back(tmp_path, open_tiers):
    tiers, chain = open_tiers(host(tmp_path), open_tier(tmp_path)), make_chain(5)
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
    fast, slow, chain = host(tmp_path), open_tier(tmp_path), make_chain(6)
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
    tier, chain = open_tier(tmp_path), make_chain(4)
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
    tier = open_tier(tmp_path)
    tiers = Tiers([tier], LAYOUT)
    stored = store(tiers, chain)
    tiers.close()
    assert stored["disk"].result(0) == 20 and tier.num_pages == 20
    assert store(tiers, chain) == {} and tiers.drop_where(lambda fingerprint: True) == {}
    assert tiers.load_async([chain[0].key], FINGERPRINT, chain[0].tokens, "disk").result(0) == []
    tiers.close()
    assert len(load(open_tier(tmp_path), chain[3]).arrays) == 2


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
