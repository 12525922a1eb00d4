"""Pages on their way: what is copied out and when, whose pages come back to whom, and what is decided by measurement."""

import dataclasses
import types

import numpy as np
import pytest
from tier_pages import LAYOUT, SECRET, P, bits, changed, make_chain, make_data

from jaxkv.serving.host_tier import HostTier
from jaxkv.serving.page_cache import PageCache
from jaxkv.serving.restore import Restores
from jaxkv.serving.tiers import Tiers
from jaxkv.serving.transfer_costs import TransferCosts

PUBLIC = changed(tenant=None, acl_epoch=None)
MINE = changed(tenant="me", acl_epoch=3)


class Device:
    """A runner whose pages are arrays; it knows how often it was asked to copy some out."""

    def __init__(self):
        self.pages, self.copied, self.seated = {}, [], []

    def read_pages(self, pages):
        self.copied.append(list(pages))
        return [self.pages[page] for page in pages]

    def page_data(self, ticket):
        return ticket

    def write_pages(self, pages, data):
        self.pages.update(zip(pages, data, strict=True))

    def seat(self, row, pages, options, cached):
        self.seated.append((row, cached.tolist()))


class World:
    """A cache, a tier in host memory, and sequences that store real pages."""

    def __init__(self, num_pages=20, secret=SECRET, tiers=None, **costs):
        self.device, self.now, self._ids = Device(), 0.0, 0
        self.cache = PageCache(num_pages, P, secret=SECRET, clock=lambda: self.now, on_evict=self._on_evict)
        self.host = HostTier(1 << 30)
        self.tiers = Tiers(tiers or [self.host], LAYOUT, cost=TransferCosts(**costs))
        self.restores = Restores(self.tiers, self.cache, self.device, secret=secret)
        self.restores.recompute_s_per_token = 1.0
        self.evicted = []

    def _on_evict(self, evicted):
        self.evicted += evicted
        self.restores.on_evict(evicted)

    def settle(self):
        """Waits until what is being stored is there."""
        for lane in self.tiers._lanes.values():
            lane.stores.submit(lambda: None).result()

    def start(self, fingerprint, tokens, use_cache=True):
        """A sequence that has its row; what continues its match is on its way."""
        public = dataclasses.replace(fingerprint, tenant=None, acl_epoch=None)
        match = self.cache.match(fingerprint, tokens, public=public if use_cache else None)
        self._ids += 1
        pages = self.cache.allocate(self._ids, fingerprint.tenant, -(-len(tokens) // P) - len(match.pages), match)
        one = types.SimpleNamespace(
            owner=self._ids, row=self._ids, pages=pages, goal=np.asarray(tokens, np.int32), stored=match.num_tokens, cached={},
            fingerprint=fingerprint, started_at=None, request=types.SimpleNamespace(use_cache=use_cache),
            receipt=self.cache.receipt(match),
        )  # fmt: skip
        self.restores.start(one, match)
        return one

    def arrive(self, one):
        """What a sequence waited for is in its pages; how many tokens that are."""
        before = one.stored
        if self.restores.is_pending(one):
            self.restores.wait()
        self.restores.finish(0)
        return one.stored - before

    def serve(self, fingerprint, tokens):
        """From start to end: restores, computes the rest, publishes, lets go; the sequence."""
        one = self.start(fingerprint, tokens)
        self.arrive(one)
        for i in range(one.stored // P, len(tokens) // P):
            self.device.pages[one.pages[i]] = content(tokens[: (i + 1) * P])
        self.cache.publish(one.owner, fingerprint, np.asarray(tokens, np.int32))
        self.cache.release(one.owner)
        self.cache.check()
        return one

    def evict_all(self):
        self.cache.evict(1000)
        self.settle()


def content(prefix):
    """What computing gives for the last page of a prefix."""
    return make_data(hash(tuple(prefix)) % 2**32)


def prompt(seed, pages, more=1):
    return np.random.default_rng(seed).integers(0, 1000, pages * P + more).tolist()


@pytest.fixture
def open_world():
    made = []

    def make(**options):
        made.append(World(**options))
        return made[-1]

    yield make
    for world in made:
        world.tiers.close()


def has_right_pages(world, one):
    """Whether what a sequence has stored is what computing would have given."""
    goal = one.goal.tolist()
    return all(
        bits(world.device.pages[one.pages[i]]) == bits(content(goal[: (i + 1) * P])) for i in range(one.stored // P)
    )  # fmt: skip


# The operator's pages


def test_evicted_public_pages_come_back_for_any_tenant(open_world):
    world, tokens = open_world(), prompt(0, 5)
    world.serve(PUBLIC, tokens)
    world.evict_all()
    assert world.cache.reusable_pages == 0
    one = world.start(MINE, tokens)
    assert world.arrive(one) == 5 * P and has_right_pages(world, one)
    assert one.cached == {"host": 5 * P} and world.device.seated[-1] == (one.row, tokens[: 5 * P])
    told = one.receipt.to_json(len(tokens), one.cached)
    assert told["gates"]["cross_tenant"] == "public" and told["decision"] == "reuse"
    # The tenant has them under its own fingerprint from now on, and nobody else by that.
    assert len(world.cache.match(MINE, tokens).pages) == 5
    other = changed(tenant="other", acl_epoch=None)
    assert not world.cache.match(other, tokens, public=PUBLIC).pages
    world.cache.check()


def test_a_public_chain_goes_on_where_the_device_has_no_more_of_it(open_world):
    world, tokens = open_world(), prompt(1, 6)
    world.serve(PUBLIC, tokens)
    world.cache.evict(4)  # the deepest
    world.settle()
    one = world.start(MINE, tokens)
    assert one.stored == 2 * P and world.arrive(one) == 4 * P and has_right_pages(world, one)
    world.cache.check()


def test_of_the_own_and_the_public_chain_the_one_that_saves_more_comes_back(open_world):
    world, tokens = open_world(), prompt(2, 6)
    world.serve(PUBLIC, tokens)
    world.evict_all()
    longer = tokens[: 4 * P] + prompt(3, 3)  # of the tenant's own beyond what is public
    world.serve(MINE, longer)
    world.evict_all()
    one = world.start(MINE, longer)
    assert world.arrive(one) == 7 * P and has_right_pages(world, one)
    assert one.receipt.gates["cross_tenant"] == "pass"
    world.cache.release(one.owner)
    world.evict_all()
    one = world.start(MINE, tokens)  # own: 4 pages; public: 6
    assert world.arrive(one) == 6 * P and has_right_pages(world, one)
    assert one.receipt.gates["cross_tenant"] == "public"


def test_the_own_chain_on_the_device_goes_on_in_public(open_world):
    world, tokens = open_world(), prompt(4, 6)
    world.serve(PUBLIC, tokens)
    world.evict_all()
    world.serve(MINE, tokens[: 2 * P + 1])
    one = world.start(MINE, tokens)
    assert one.stored == 2 * P and world.arrive(one) == 4 * P and has_right_pages(world, one)
    world.cache.check()


def parts():
    """Every part in which a page may differ from what is public, each once."""
    yield "tenant", dict(tenant="other")
    yield "acl_epoch", dict(acl_epoch=7)
    for name in ("model_revision", "tokenizer_revision", "position_encoding", "adapter", "system_prompt", "kv_dtype", "layout"):
        yield name, {name: "another"}


@pytest.mark.parametrize("name, difference", list(parts()), ids=lambda value: value if isinstance(value, str) else "")
def test_nothing_but_public_pages_crosses_tenants(open_world, name, difference):
    world, tokens = open_world(), prompt(5, 4)
    theirs = dataclasses.replace(PUBLIC, **difference)
    world.serve(theirs, tokens)
    world.evict_all()
    one = world.start(MINE, tokens)
    assert world.arrive(one) == 0 and one.cached == {}
    world.cache.release(one.owner)
    again = world.start(theirs, tokens)  # the positive control
    assert world.arrive(again) == 4 * P and has_right_pages(world, again)


def test_a_tier_that_lies_about_a_public_page_is_not_believed(open_world):
    """A tenant's page under the key of a public one: the fingerprint is compared itself."""
    world, tokens = open_world(), prompt(6, 3)
    world.serve(PUBLIC, tokens)
    world.evict_all()
    entries = world.host._entries
    for key, entry in list(entries.items()):
        entries[key] = dataclasses.replace(entry, fingerprint=changed(tenant="other"))
    one = world.start(MINE, tokens)
    assert world.restores.is_pending(one) and world.arrive(one) == 0
    assert world.host.counts.misses == {"fingerprint": 1}


def test_requests_without_the_cache_and_restores_without_the_secret_get_none(open_world):
    tokens = prompt(7, 4)
    for secret, use_cache in ((None, True), (SECRET, False)):
        world = open_world(secret=secret)
        world.serve(PUBLIC, tokens)
        world.evict_all()
        one = world.start(MINE, tokens, use_cache)
        assert not world.restores.is_pending(one)
        operators = world.start(PUBLIC, tokens)
        assert world.arrive(operators) == 4 * P


def test_one_token_is_always_left_to_compute(open_world):
    world, tokens = open_world(), prompt(8, 4, more=0)
    world.serve(PUBLIC, tokens)
    world.evict_all()
    for fingerprint in (PUBLIC, MINE):
        one = world.start(fingerprint, tokens)
        assert world.arrive(one) == 3 * P
        world.cache.release(one.owner)
        world.evict_all()


def test_a_public_prompt_that_nobody_stored_costs_one_key(open_world, monkeypatch):
    world, tokens, made = open_world(num_pages=600), prompt(9, 500), []
    from jaxkv.serving import restore

    real = restore.iter_page_keys
    monkeypatch.setattr(restore, "iter_page_keys", lambda *args: (made.append(key) or key for key in real(*args)))
    one = world.start(MINE, tokens)
    assert not world.restores.is_pending(one) and len(made) == 1


# Out


def test_pages_are_copied_only_if_a_tier_takes_them(open_world):
    world = open_world(max_pending_bytes=3 * LAYOUT.nbytes)
    tokens = prompt(10, 6)
    world.serve(MINE, tokens)
    world.restores.recompute_s_per_token = 0.0  # computing is faster than any tier
    world.cache.evict(2)
    assert world.device.copied == [] and world.host.counts.failures == {}
    world.restores.recompute_s_per_token = 1.0
    lane = world.tiers._lanes["host"]
    go = lane.stores.submit(lambda: None)
    go.result()
    with lane._lock:
        lane._pending[lane.stores] += LAYOUT.nbytes  # so that two more may wait
    world.cache.evict(3)  # three at once are too many
    assert world.device.copied == [] and world.host.counts.failures == {"backlog": 3}
    world.cache.evict(1)
    world.settle()
    assert len(world.device.copied) == 1 and world.host.num_pages == 1


def test_an_eviction_larger_than_what_may_wait_goes_in_parts(open_world):
    world = open_world(num_pages=200, max_pending_bytes=3 * LAYOUT.nbytes)
    world.serve(MINE, prompt(11, 7))
    world.cache.evict(7)
    world.settle()
    copied = [len(pages) for pages in world.device.copied]
    assert max(copied) <= 3 and sum(copied) == world.host.num_pages >= 3
    world = open_world(num_pages=200)
    world.serve(MINE, prompt(11, 150))
    world.evict_all()
    assert [len(pages) for pages in world.device.copied] == [64, 64, 22] and world.host.num_pages == 150


def test_a_page_with_several_entries_is_copied_once_and_kept_under_each(open_world):
    world, tokens = open_world(), prompt(12, 3)
    world.serve(PUBLIC, tokens)
    for tenant in ("a", "b"):  # they continue the public prefix under their own fingerprints
        world.serve(changed(tenant=tenant), tokens + prompt(13, 1))
    entries, pages = len(world.cache._states.index.entries), world.cache.reusable_pages
    assert entries > pages
    world.evict_all()
    copied = [page for pages in world.device.copied for page in pages]
    assert len(copied) == len(set(copied)) == pages == len({one.page for one in world.evicted})
    assert world.host.num_pages == entries == len(world.evicted)
    for fingerprint in (PUBLIC, changed(tenant="a"), changed(tenant="b")):
        one = world.start(fingerprint, tokens)
        assert world.arrive(one) == 3 * P and has_right_pages(world, one)
        world.cache.release(one.owner)
        world.cache.evict(100)


def test_what_came_from_a_tier_is_not_copied_there_again(open_world):
    world, tokens = open_world(), prompt(15, 4)
    world.serve(MINE, tokens)
    world.evict_all()
    copied = len(world.device.copied)
    others = make_chain(3)  # older than the chain once that is used again
    for record in others:
        world.host.store(record)
    longer = tokens[: 4 * P] + prompt(16, 2)
    one = world.serve(MINE, longer)
    assert one.cached == {"host": 4 * P}
    world.evict_all()
    assert [len(pages) for pages in world.device.copied[copied:]] == [2]  # the two that are new
    order = [(entry.fingerprint, len(entry.tokens)) for entry in world.host._entries.values()]
    assert [fingerprint == MINE for fingerprint, _ in order] == [False] * 3 + [True] * 6
    keys = world.cache.match(MINE, longer).keys
    assert list(world.host._entries)[3:] == list(reversed(keys))  # the deepest leaves first
    again = world.start(MINE, longer)
    assert world.arrive(again) == 6 * P and has_right_pages(world, again)


def test_nothing_is_looked_for_in_another_tenants_chain(open_world):
    """However many tenants stored a prompt, a request asks for its own and the public keys."""
    world, tokens = open_world(num_pages=100), prompt(14, 3)
    for i in range(5):
        world.serve(changed(tenant=f"t{i}"), tokens)
    world.evict_all()
    one = world.start(MINE, tokens)
    assert not world.restores.is_pending(one) and world.host.counts.misses == {}
