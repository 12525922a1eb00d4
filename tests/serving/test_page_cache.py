"""`PageCache` case by case: isolation, sharing, eviction order, holds, quotas, announcements, and speed."""

import dataclasses
import itertools
import time

import numpy as np
import pytest
from cache_world import SECRET, fingerprint

from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.page_cache import PageCache, StaleMatch

P = 4
BASE = Fingerprint("model", "tok", "rope", "adapter", "system", "tenant", 3, "bf16", "KPH", P)
TEXTS = [name for name, value in BASE.parts() if isinstance(value, str)]
OPTIONAL = [name for name in TEXTS if name not in ("kv_dtype", "layout")]
A = fingerprint("a", page_size=P)


def text(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, num_tokens).astype(np.int32)


class Cache(PageCache):
    """A cache of pages of 4 tokens, with a clock to turn and a list of what was evicted; audited after every step."""

    def __init__(self, num_pages=64, **options):
        self.now, self.gone, self.ids = 0.0, [], itertools.count(100)
        options = {"secret": SECRET, "on_evict": self.gone.extend, **options}
        super().__init__(num_pages, P, clock=lambda: self.now, **options)

    def run(self, tokens, fp=A, publish=True, release=True, public=None):
        """One request: match, allocate, publish, release. Returns (owner, match)."""
        owner, match = next(self.ids), self.match(fp, tokens, public=public)
        assert self.allocate(owner, fp.tenant, -(-len(tokens) // P) - len(match.pages), match) is not None
        if publish:
            self.publish(owner, fp, tokens, match.keys)
        if release:
            self.release(owner)
        self.check()
        return owner, match

    def hit(self, tokens, fp=A, public=None):
        return self.match(fp, tokens, public=public).num_tokens


# Isolation


@pytest.mark.parametrize("name", [name for name, _ in BASE.parts() if name != "page_size"])
def test_isolation_by_each_part(name):
    value = getattr(BASE, name)
    others = [value + 1, 0] if isinstance(value, int) else [value + "x", "", value + "\0"]
    others += [None] if name in (*OPTIONAL, "acl_epoch") else []
    for one, other in itertools.permutations([value, *others], 2):
        cache, mine, theirs = Cache(), *(dataclasses.replace(BASE, **{name: v}) for v in (one, other))
        cache.run(text(13), mine)
        assert cache.hit(text(13), theirs) == 0
        assert cache.hit(text(13), dataclasses.replace(mine)) == 12  # the positive control


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(TEXTS, 2)))
def test_isolation_of_equal_strings_in_two_parts(one, other):
    unset = dataclasses.replace(BASE, **{name: None if name in OPTIONAL else "" for name in TEXTS})
    cache, mine, theirs = Cache(), dataclasses.replace(unset, **{one: "X"}), dataclasses.replace(unset, **{other: "X"})
    cache.run(text(13), mine)
    assert cache.hit(text(13), theirs) == 0 and cache.hit(text(13), mine) == 12


def test_a_cache_has_one_page_size():
    with pytest.raises(ValueError, match="page_size=8"):
        Cache().match(dataclasses.replace(A, page_size=8), [1])


def test_tokens_are_compared_on_a_hit():
    """Even if a key named other tokens, their page would not be matched."""
    cache = Cache()
    cache.run(text(13))
    cache._states.index.tokens[2, -1] += 1
    assert cache.hit(text(13)) == P


def test_keys_of_another_fingerprint_are_refused():
    cache, b = Cache(), fingerprint("b", page_size=P)
    stolen = cache.run(text(13))[1].keys
    with pytest.raises(ValueError, match="of another fingerprint"):
        cache.match(b, text(13), keys=stolen)
    cache.allocate(1, "b", 4)
    with pytest.raises(ValueError, match="of another fingerprint"):
        cache.publish(1, b, text(13), stolen)
    with pytest.raises(ValueError, match="cannot publish for 'a'"):
        cache.publish(1, A, text(13))
    with pytest.raises(ValueError, match="the match is of tenant 'a'"):
        cache.allocate(2, "b", 1, cache.match(A, text(13)))
    cache.check()


# Public prefixes

PUBLIC, B = fingerprint(None, page_size=P), fingerprint("b", page_size=P)


def test_only_what_the_operator_published_crosses():
    cache = Cache()
    cache.run(text(13))
    assert cache.hit(text(13), B, PUBLIC) == 0
    cache.run(text(13), PUBLIC)
    match = cache.match(B, text(13), public=PUBLIC)
    assert match.num_tokens == 12 and match.is_public and cache.hit(text(13), B) == 0
    for public in (A, dataclasses.replace(PUBLIC, adapter="other"), dataclasses.replace(PUBLIC, model_revision="r1")):
        with pytest.raises(ValueError, match="public"):
            cache.match(B, text(13), public=public)


def test_a_tenant_continues_a_public_prefix_for_itself():
    cache, long = Cache(), np.concatenate([text(12), text(9, seed=1)])
    cache.run(text(12), PUBLIC)
    _, match = cache.run(long, B, public=PUBLIC)
    assert match.is_public and match.num_tokens == 12
    again = cache.match(B, long, public=PUBLIC)
    assert again.num_tokens == 20 and not again.is_public and again.pages[:3] == match.pages  # no page twice
    assert cache.hit(long, A, PUBLIC) == 12
    assert cache.drop(lambda fp: fp.tenant == "b") == 5
    cache.check()
    assert cache.hit(long, B, PUBLIC) == 12 and cache.reusable_pages == 3


# Sharing


@pytest.mark.parametrize("num_tokens", [0, 1, P - 1, P, P + 1, 3 * P, 3 * P + 1])
def test_at_least_one_token_is_computed(num_tokens):
    cache = Cache()
    cache.run(text(num_tokens))
    hit = cache.hit(text(num_tokens))
    assert hit == max(num_tokens - 1, 0) // P * P <= max(num_tokens - 1, 0)
    assert cache.hit(text(num_tokens + 1)) == num_tokens // P * P


def test_twins_publish_once_and_continue_each():
    """Two sequences computed one prefix at the same time: one's pages are found; both can be continued."""
    cache, tails = Cache(), [np.concatenate([text(8), text(8, seed)]) for seed in (1, 2)]
    owners = [cache.run(tail, publish=False, release=False)[0] for tail in tails]
    assert [cache.publish(o, A, text(8)) for o in owners] == [2, 0]
    assert [cache.publish(o, A, tail) for o, tail in zip(owners, tails, strict=True)] == [2, 2]
    cache.release(owners[0])
    cache.check()
    assert cache.evict(64) == 2  # the prefix stays: the second sequence's entries hang below it
    assert cache.hit(np.append(tails[1], 0)) == 16
    cache.release(owners[1])
    cache.check()
    assert cache.evict(64) == 4 and cache.free_pages == 63


def test_publishing_takes_no_more_pages_than_it_may():
    cache, long = Cache(), np.concatenate([text(8), text(8, seed=1)])
    twin, _ = cache.run(long, publish=False, release=False)
    cache.run(text(8))  # gone by now: its two pages are reusable
    before = cache.available_pages
    assert cache.publish(twin, A, long, spare_pages=1) == 0 and cache.available_pages == before
    assert cache.publish(twin, A, long, spare_pages=2) == 2 and cache.available_pages == before - 2
    cache.check()


def test_restored_pages_continue_a_chain():
    cache = Cache()
    cache.run(text(9))
    match = cache.match(A, text(25))
    pages = cache.allocate(1, "a", 5, match)
    assert match.num_tokens == 8 and pages[:2] == list(match.pages)
    assert cache.publish(1, A, text(20), match.keys) == 3  # as it was read from a tier
    assert cache.hit(text(25)) == 20 and cache.publish(1, A, text(25)) == 1
    cache.check()


def test_fork_shares_full_pages():
    cache = Cache(num_pages=8)
    cache.allocate(1, "a", 3)
    pages = cache.fork(1, 2, 2, 1)
    assert pages[:2] == list(cache.pages(1)[:2]) and pages[2] not in cache.pages(1)
    assert cache.fork(2, 3, 2, 4) is None and cache.active_pages == 4
    for owner in (1, 2):
        cache.check()
        cache.release(owner)
    assert cache.free_pages == 7


def test_nothing_is_published_after_a_drop():
    """A sequence whose weights or rights were replaced while it ran, and one that had not said its fingerprint."""
    cache = Cache()
    running = [cache.run(text(9), release=False)[0], 1]
    cache.allocate(1, "a", 3)
    cache.announce(1, [b"key"])
    match = cache.match(A, text(9))
    assert cache.drop(lambda fp: fp.model_revision == "r0") == 2
    assert cache.hit(text(9)) == 0 and cache.announcer(b"key") is None
    assert [cache.publish(owner, A, text(12)) for owner in running] == [0, 0]
    with pytest.raises(StaleMatch, match="dropped"):
        cache.allocate(2, "a", 1, match)
    cache.release(running[0])
    cache.release(1)
    cache.check()
    assert cache.free_pages == 63 and not cache.gone
    assert cache.run(text(9))[1].num_tokens == 0 and cache.hit(text(9)) == 8


def test_publishing_other_tokens_on_a_published_page_is_refused():
    cache = Cache()
    owner, _ = cache.run(text(12), release=False)
    changed = text(12)
    changed[11] += 1
    with pytest.raises(ValueError, match="with other tokens"):
        cache.publish(owner, A, changed)


# Eviction


def test_the_deepest_page_goes_first_and_a_hit_refreshes_the_chain():
    cache = Cache()
    old, new = text(13), text(13, seed=1)
    cache.run(old)
    cache.run(new)
    cache.run(old)
    assert cache.evict(4) == 4
    assert [(one.fingerprint, one.depth, one.tokens.tolist()) for one in cache.gone[:3]] == [
        (A, depth, new[depth * P : (depth + 1) * P].tolist()) for depth in (2, 1, 0)
    ]
    assert cache.gone[3].depth == 2 and cache.gone[3].parent_key == cache.match(A, old).keys[1]
    assert cache.hit(old) == 8


def test_fifo_takes_what_was_published_first():
    cache = Cache(policy="fifo")
    old, new = text(13), text(13, seed=1)
    for tokens in (old, new, old, old):
        cache.run(tokens)
    assert cache.evict(3) == 3 and [one.depth for one in cache.gone] == [2, 1, 0]
    assert cache.hit(old) == 0 and cache.hit(new) == 12


def test_an_active_page_is_never_evicted():
    cache = Cache(num_pages=8)
    owner, _ = cache.run(text(13), release=False)
    assert cache.evict(99) == 0 and cache.extend(owner, 4) is None and cache.available_pages == 3
    assert cache.allocate(1, "a", 4) is None and cache.allocate(1, "a", 3) is not None


def test_allocating_never_evicts_its_own_match():
    cache = Cache(num_pages=8)
    cache.run(text(25))
    match = cache.match(A, text(13))
    assert cache.allocate(1, "a", 5, match) is None
    assert cache.allocate(1, "a", 4, match) is not None and cache.hit(text(13)) == 12
    cache.check()


def test_a_stale_match_is_refused():
    cache = Cache()
    cache.run(text(13))
    match = cache.match(A, text(13))
    cache.evict(1)
    with pytest.raises(StaleMatch, match="match again"):
        cache.allocate(1, "a", 1, match)
    cache.check()


def test_a_tenant_over_its_quota_pays_first():
    cache = Cache(num_pages=16, quotas={"a": 4})
    cache.run(text(17, seed=9), B)
    for seed in range(2):
        cache.run(text(17, seed))  # 8 pages of a, newer than b's
    assert cache.over_quota_tenants == 1 and cache.tenant_pages("a") == 8
    cache.run(text(25, seed=3), B, publish=False)
    assert cache.hit(text(17, seed=9), B) == 16 and {one.fingerprint.tenant for one in cache.gone} == {"a"}
    cache.set_quota("a", None)
    assert cache.over_quota_tenants == 0


def test_one_tenants_hot_prefix_cannot_push_out_the_others():
    cache = Cache(num_pages=21, quotas={"a": 10})
    cache.run(text(33, seed=9), B)
    for seed in range(50):  # as many new prompts of a as anyone likes
        cache.run(text(17, seed))
    assert cache.hit(text(33, seed=9), B) == 32


def test_eviction_reports_pages_before_they_are_handed_out():
    cache = Cache(num_pages=8, on_evict=lambda gone: seen.append((cache.active_pages, [one.page for one in gone])))
    seen = []
    cache.run(text(28))
    pages = cache.allocate(1, "a", 6)
    assert seen == [(0, seen[0][1])] and set(seen[0][1]) <= set(pages) and len(seen[0][1]) == 6


def test_an_eviction_listener_that_raises_costs_nothing_but_the_pages():
    cache = Cache(num_pages=8, on_evict=lambda gone: 1 / 0)
    cache.run(text(28))
    match = cache.match(A, text(9))
    with pytest.raises(ZeroDivisionError):
        cache.allocate(1, "a", 5, match)
    cache.check()
    assert cache.active_pages == 0 and cache.free_pages == 5 and cache.hit(text(9)) == 8


def test_reusable_pages_end_by_time():
    cache = Cache(reusable_ttl_s=10.0)
    cache.run(text(13))
    cache.now = 6.0
    cache.run(text(9))
    cache.now = 10.0
    cache.tick()
    assert cache.hit(text(13)) == 8
    cache.reusable_ttl_s = 5.0
    cache.now = 11.0
    cache.tick()
    assert cache.free_pages == 63 and len(cache.gone) == 3


# Holds


def test_a_held_result_is_neither_found_nor_evicted_until_it_is_reconciled():
    cache = Cache(num_pages=8)
    owner, match = cache.run(text(13), release=False)
    cache.release(owner, hold=True)
    assert (cache.held_pages, cache.active_pages, cache.free_pages) == (4, 0, 3) and cache.hit(text(13)) == 0
    assert cache.evict(9) == 0 and cache.allocate(1, "a", 4) is None
    with pytest.raises(ValueError, match="on hold"):
        cache.release(owner)
    cache.check()
    cache.reconcile(owner, delivered=True)
    assert cache.held_pages == 0 and cache.hit(text(13)) == 12 and cache.hold_outcomes["delivered"] == 1
    with pytest.raises(KeyError, match="never allocated, or is released"):
        cache.reconcile(owner, delivered=True)


def test_a_hold_ends_by_itself():
    cache = Cache(hold_ttl_s=900.0)
    owner, _ = cache.run(text(13), release=False)
    cache.release(owner, hold=True)
    cache.now = 899.0
    cache.tick()
    assert cache.held_pages == 4
    cache.now = 900.0
    cache.tick()
    cache.check()
    assert cache.held_pages == 0 and cache.hit(text(13)) == 12 and cache.hold_outcomes["expired"] == 1


def test_a_hold_does_not_hide_the_prefix_it_found():
    """One lost delivery must not cost everyone the system prompt for a quarter of an hour."""
    cache = Cache()
    cache.run(text(9))
    owner, _ = cache.run(text(17), release=False)
    cache.release(owner, hold=True)
    assert cache.held_pages == 3 and cache.hit(text(17)) == 8 and cache.evict(9) == 0
    cache.reconcile(owner, delivered=False)
    assert cache.hit(text(17)) == 16


def test_a_match_made_before_the_hold_is_stale():
    cache = Cache()
    owner, _ = cache.run(text(13), release=False)
    match = cache.match(A, text(13))
    cache.release(owner, hold=True)
    with pytest.raises(StaleMatch):
        cache.allocate(1, "a", 1, match)


# Announcements


def test_a_follower_sees_who_computes_its_pages():
    cache = Cache()
    settled = []
    cache.on_settled = settled.extend
    first, match = cache.run(text(13), publish=False, release=False)
    cache.announce(first, match.keys)
    cache.allocate(2, "a", 4)
    cache.announce(2, match.keys)
    assert [cache.announcer(key) for key in match.keys] == [first] * 3 and not settled
    cache.publish(first, A, text(8))
    assert [cache.announcer(key) for key in match.keys] == [None, None, first]
    assert settled == list(match.keys[:2])
    cache.check()
    cache.release(2)
    assert cache.announcer(match.keys[2]) == first
    cache.release(first)
    assert settled == list(match.keys) and cache.announcer(match.keys[2]) is None


def test_options_are_checked():
    for options in ({"num_pages": 1}, {"secret": b""}, {"policy": "mru"}, {"quotas": {"a": -1}}):
        with pytest.raises(ValueError):
            Cache(**options)


# Speed: of the best of several runs, on CPU time, so that a busy machine changes little.


def seconds(action, repeats=5):
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        action()
        best = min(best, time.process_time() - begin)
    return best


def filled(num_pages, num_chain):
    """A cache of pages of 16 tokens that knows one chain of so many pages."""
    cache = PageCache(num_pages, 16, secret=SECRET, clock=lambda: 0.0)
    fp, tokens = dataclasses.replace(A, page_size=16), text(16 * num_chain)
    cache.allocate(1, "a", num_chain)
    cache.publish(1, fp, tokens)
    cache.release(1)
    return cache, fp, tokens


def test_a_prompt_of_50000_tokens_is_matched_in_10_ms():
    cache, fp, tokens = filled(4000, 3125)
    assert cache.match(fp, tokens).num_tokens == 49984
    assert seconds(lambda: cache.match(fp, tokens)) < 0.010


def test_eviction_of_a_chain_is_linear():
    times = []
    for num_chain in (2000, 20000):
        caches = [filled(num_chain + 1, num_chain)[0] for _ in range(3)]
        times.append(seconds(lambda caches=caches, n=num_chain: caches.pop().evict(n), repeats=3))
    assert times[0] < 0.100 and times[1] < 20 * times[0], times


def test_taking_and_giving_cost_what_changes_not_what_is_there():
    times = []
    for num_pages in (2_000, 200_000):
        cache, _, _ = filled(num_pages, 1000)
        cache.allocate(2, "a", 1)

        def use(cache=cache):
            for owner in range(10, 210):
                cache.allocate(owner, "a", 2)
                cache.extend(owner, 1)
                cache.fork(owner, owner + 1000, 1, 1)
                cache.release(owner)
                cache.release(owner + 1000)

        times.append(seconds(use))
    assert times[1] < 3 * times[0], times


def test_a_page_held_before_a_pinned_one_is_not_matched():
    """Who is on hold keeps what it found active, and holds what it computed before and behind it."""
    cache, tokens = Cache(), text(13)
    for owner, size in ((1, 5), (2, 9)):
        match = cache.match(A, tokens[:size])
        cache.allocate(owner, A.tenant, -(-size // P) - len(match.pages), match)
        cache.publish(owner, A, tokens[: size - 1])
    cache.extend(1, 2)
    before = cache.match(A, tokens)
    cache.publish(1, A, tokens[:12])  # its second page is the other's by now: pinned, and its third lies below that
    cache.release(2)
    cache.release(1, hold=True)
    cache.check()
    held = cache.held_pages
    assert held and cache.hit(tokens) == 0
    with pytest.raises(StaleMatch, match="put on hold"):
        cache.allocate(3, A.tenant, 2, before)
    assert cache.held_pages == held
    cache.reconcile(1, True)
    assert cache.hit(tokens) == 12
