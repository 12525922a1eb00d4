"""Any history of operations on a `PageCache` against a naive model (helpers/cache_world.py), audited after each.

JAXKV_CACHE_OPERATIONS=3000000 runs the seeded driver for longer than the 100,000 operations that it does in CI (-m slow).
"""

import os
import random

import hypothesis
import hypothesis.strategies as st
import pytest
from cache_world import TENANTS, World
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

OPERATIONS = int(os.environ.get("JAXKV_CACHE_OPERATIONS", "100000"))
BASES = ([0] * 11, [1] * 11, [0, 1, 1, 0] * 3)  # what the driver's prompts begin with
FULL_AUDIT_EVERY = 8  # the driver compares contents, and not only counts, states and references, every so many

TENANT = st.sampled_from(TENANTS)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=13)
PICK = st.integers(0, 99)


class CacheMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "fifo"]), num_pages=st.integers(4, 24))
    def start(self, policy, num_pages):
        self.world = World(policy, num_pages)

    def pick(self, number, held=False):
        owners = [o for o, s in self.world.model.seqs.items() if (s.held_until is not None) == held]
        hypothesis.assume(owners)
        return owners[number % len(owners)]

    @rule(tenant=TENANT, tokens=TOKENS, spare=st.integers(0, 2), restore=st.booleans(), keep=st.booleans())
    def admit(self, tenant, tokens, spare, restore, keep):
        self.world.admit(tenant, tokens, spare, restore=restore, keep_match=keep)

    @rule(tenant=TENANT, tokens=TOKENS)
    def lookup(self, tenant, tokens):
        self.world.lookup(tenant, tokens)

    @precondition(lambda self: self.world.matches)
    @rule()
    def use_kept_match(self):
        self.world.use_kept_match()

    @rule(number=PICK, num=st.integers(1, 6))
    def prefill(self, number, num):
        self.world.prefill(self.pick(number), num)

    @rule(number=PICK, token=st.integers(0, 1))
    def append(self, number, token):
        self.world.append(self.pick(number), token)

    @rule(number=PICK, num=st.integers(0, 5))
    def extend(self, number, num):
        self.world.extend(self.pick(number), num)

    @rule(number=PICK, spare=st.integers(0, 2))
    def fork(self, number, spare):
        self.world.fork(self.pick(number), spare)

    @rule(number=PICK, spare=st.none() | st.integers(0, 3))
    def publish(self, number, spare):
        self.world.publish(self.pick(number), spare=spare)

    @rule(number=PICK, publish=st.booleans(), hold=st.booleans())
    def finish_or_abort(self, number, publish, hold):
        self.world.finish(self.pick(number), publish, hold)

    @rule(number=PICK, delivered=st.booleans())
    def reconcile(self, number, delivered):
        self.world.reconcile(self.pick(number, held=True), delivered)

    @rule(number=PICK)
    def preempt(self, number):
        self.world.preempt(self.pick(number))

    @precondition(lambda self: self.world.waiting)
    @rule()
    def resume(self):
        self.world.resume()

    @rule(num=st.integers(0, 6))
    def evict(self, num):
        self.world.evict(num)

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0, 60.0]))
    def tick(self, seconds):
        self.world.tick(seconds)

    @rule(tenant=TENANT)
    def bump_epoch(self, tenant):
        self.world.bump_epoch(tenant)

    @rule()
    def bump_revision(self):
        self.world.bump_revision()

    @rule(tenant=TENANT, pages=st.none() | st.integers(0, 12))
    def set_quota(self, tenant, pages):
        self.world.set_quota(tenant, pages)

    @rule(ok=st.booleans())
    def tier_acknowledges_or_fails(self, ok):
        self.world.tier(ok)

    @rule()
    def crash(self):
        self.world.reopen()

    @rule(which=st.integers(0, 15), number=PICK, held=st.booleans())
    def misuse(self, which, number, held):
        owners = list(self.world.model.seqs)
        self.world.misuse(which, owners[number % len(owners)] if owners else -1)

    @invariant()
    def agrees(self):
        if hasattr(self, "world"):
            self.world.audit()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = hypothesis.settings(
    max_examples=30, stateful_step_count=50, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


def one_operation(world, rng):
    """One random operation; frequent ones are those that requests do."""
    running = [o for o, s in world.model.seqs.items() if s.held_until is None]
    held = [o for o, s in world.model.seqs.items() if s.held_until is not None]
    tokens = lambda: rng.choice(BASES)[: rng.randrange(1, 12)] + [rng.randrange(2) for _ in range(rng.randrange(3))]
    tenant = lambda: rng.choice(TENANTS)
    always = {
        lambda: world.admit(tenant(), tokens(), rng.randrange(2)): 20,
        lambda: world.admit(tenant(), tokens(), restore=False): 4,
        lambda: world.admit(tenant(), tokens(), keep_match=True): 2,
        lambda: world.lookup(tenant(), tokens()): 6,
        lambda: world.evict(rng.randrange(4)): 2,
        lambda: world.tick(rng.choice([0.0, 0.5, 2.0, 20.0])): 6,
        lambda: world.tier(rng.random() < 0.8): 25,
        lambda: world.set_quota(tenant(), rng.choice([None, 0, 2, 5, 9])): 1,
        lambda: world.misuse(rng.randrange(16), rng.choice(list(world.model.seqs) or [-1])): 3,
    }
    if rng.random() < 0.01:
        always = {lambda: world.bump_epoch(tenant()): 3, lambda: world.bump_revision(): 1, lambda: world.reopen(): 1}
    elif running:
        owner = rng.choice(running)
        always |= {
            lambda: world.prefill(owner, rng.randrange(1, 8)): 20,
            lambda: world.append(owner, rng.randrange(2)): 20,
            lambda: world.publish(owner): 15,
            lambda: world.publish(owner, spare=rng.randrange(3)): 5,
            lambda: world.finish(owner): 8,
            lambda: world.finish(owner, publish=False): 3,
            lambda: world.finish(owner, hold=True): 2,
            lambda: world.fork(owner, rng.randrange(2)): 5,
            lambda: world.extend(owner, rng.randrange(3)): 1,
            lambda: world.preempt(owner): 3,
        }
    if held:
        always[lambda: world.reconcile(rng.choice(held), rng.random() < 0.8)] = 5
    if world.matches:
        always[lambda: world.use_kept_match()] = 4
    if world.waiting:
        always[lambda: world.resume()] = 8
    rng.choices(list(always), list(always.values()))[0]()


@pytest.mark.parametrize(
    ("policy", "operations"),
    [
        ("lru", 5_000),
        pytest.param("lru", int(0.7 * OPERATIONS), marks=pytest.mark.slow),
        pytest.param("fifo", int(0.3 * OPERATIONS), marks=pytest.mark.slow),
    ],
)
def test_many_operations(policy, operations):
    """Counts, states, references and the cache's own audit after every operation; contents after every eighth."""
    rng = random.Random(policy)
    world = World(policy)
    for i in range(operations):
        one_operation(world, rng)
        world.audit(full=i % FULL_AUDIT_EVERY == 0)
    while world.model.seqs:
        owner, s = next(iter(world.model.seqs.items()))
        world.finish(owner) if s.held_until is None else world.reconcile(owner, True)
        world.audit()
    world.evict(world.num_pages)
    assert world.cache.free_pages == world.num_pages - 1
    # The driver reaches what it is for.
    seen = (world.hits, world.evictions, world.restored, world.aliases, world.pinned, world.stale)
    assert min(seen) > world.operations // 2000, seen
