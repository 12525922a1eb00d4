"""A small world around a `PageCache`: sequences that write simulated pages, a tier, crashes; and a naive model beside it.

The model knows no digests, counts or heaps: its index is a dict from (fingerprint, prefix) to a page, and everything
else is recounted from who points where. `World` carries out one operation on both, and compares.
"""

import dataclasses

import numpy as np

from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.page_cache import PageCache, StaleMatch

P = 2
SECRET = b"a secret of the server"
TENANTS = ("a", "b", None)  # None: the operator
HOLD_S, TTL_S = 50.0, 30.0


def fingerprint(tenant="a", epoch=1, revision="r0", **parts):
    if tenant is None:
        epoch = None
    return Fingerprint(revision, "tok", "rope", None, None, tenant, epoch, "bf16", "KPH", parts.pop("page_size", P), **parts)


@dataclasses.dataclass
class Seq:
    fp: Fingerprint
    tokens: list
    pages: list
    found: int
    stored: int  # leading tokens whose data is in pages
    prompt: int
    pins: list = dataclasses.field(default_factory=list)
    held_until: float | None = None
    retired: bool = False


class Model:
    """What the cache should do, the slow way."""

    def __init__(self, num_pages, policy, quotas):
        self.num_pages, self.policy, self.quotas = num_pages, policy, dict(quotas)
        self.index = {}  # (fingerprint, prefix tuple) -> page
        self.order = []  # published pages, the first to go first (as far as it may)
        self.time, self.tenant = {}, {}
        self.seqs = {}

    def live(self):
        for s in self.seqs.values():
            yield from s.pages if s.held_until is None else s.pages[: s.found]
            yield from s.pins

    def states(self):
        active, published = set(self.live()), set(self.index.values())
        held = {page for s in self.seqs.values() for page in s.pages} - active
        reusable = published - active - held
        free = set(range(1, self.num_pages)) - active - held - reusable
        return active, held, reusable, free

    def find(self, fp, tokens):
        """Pages of the longest chain that may be matched."""
        _, held, _, _ = self.states()
        pages = []
        while (len(pages) + 1) * P < len(tokens):
            page = self.index.get((fp, tuple(tokens[: (len(pages) + 1) * P])))
            if page is None or page in held:
                break
            pages.append(page)
        return pages

    def tenant_pages(self):
        free, counts = self.states()[3], {}
        for page in set(range(1, self.num_pages)) - free:
            counts[self.tenant[page]] = counts.get(self.tenant[page], 0) + 1
        return counts

    def next_victim(self, incoming=(None, 0), any_tenant=False):
        _, _, reusable, _ = self.states()
        parents = {self.index.get((fp, prefix[:-P])) for fp, prefix in self.index}
        leaves = [page for page in self.order if page in reusable and page not in parents]
        counts = self.tenant_pages()
        counts[incoming[0]] = counts.get(incoming[0], 0) + incoming[1]
        over = [page for page in leaves if counts[self.tenant[page]] > self.quotas.get(self.tenant[page], 10**9)]
        return next(iter(over if over and not any_tenant else leaves), None)

    def evict_page(self, page):
        self.index = {key: other for key, other in self.index.items() if other != page}
        self.order.remove(page)

    def evict(self, num, incoming=(None, 0)):
        gone = []
        while len(gone) < num and (page := self.next_victim(incoming)) is not None:
            self.evict_page(page)
            gone.append(page)
        return gone

    def expire(self, cutoff):
        while (page := self.next_victim(any_tenant=True)) is not None and self.time[page] <= cutoff:
            self.evict_page(page)

    def room(self, pinned=()):
        _, _, reusable, free = self.states()
        return len(free) + len(reusable - set(pinned))

    def take(self, owner, tenant, num, pages):
        """The sequence `owner` is already pointing at what it shares; `pages` are those the cache chose."""
        free = len(self.states()[3])
        self.evict(num - free, (tenant, num))
        assert set(pages) <= self.states()[3] and len(set(pages)) == len(pages) == num
        self.seqs[owner].pages += pages
        for page in pages:
            self.tenant[page] = tenant

    def publish(self, owner, now, spare=None):
        s, added, other = self.seqs[owner], 0, bool(self.seqs[owner].pins)
        if s.retired:
            return 0
        chain = []
        for i in range(s.stored // P):
            key = (s.fp, tuple(s.tokens[: (i + 1) * P]))
            if key not in self.index:
                known = s.pages[i] in self.index.values()
                pointing = sum(s.pages[i] in (*o.pages, *o.pins) for o in self.seqs.values())
                if other and (known or pointing > 1):
                    break
                pins = [page for page in chain if page not in s.pages and page not in s.pins]
                if spare is not None and len(self.states()[2] & set(pins)) > spare:
                    break
                if self.policy == "fifo" and not known:
                    self.stamp(s.pages[i], now)
                s.pins += pins
                self.index[key] = s.pages[i]
                added += 1
            other |= self.index[key] != s.pages[i]
            chain.append(self.index[key])
        return added

    def stamp(self, page, now):
        self.order = [other for other in self.order if other != page] + [page]
        self.time[page] = now

    def let_go(self, owner, now):
        before = self.states()[2]
        s = self.seqs.pop(owner)
        own_first = s.pages[::-1] if s.held_until is None else s.pages[s.found :][::-1] + s.pages[: s.found][::-1]
        after = self.states()[2]
        for page in own_first + s.pins[::-1]:
            if self.policy == "lru" and page in after and page not in before:
                self.stamp(page, now)
                before.add(page)

    def drop(self, predicate):
        keys = [key for key in self.index if predicate(key[0])]
        for key in keys:
            del self.index[key]
        self.order = [page for page in self.order if page in self.index.values()]
        for s in self.seqs.values():
            s.retired |= predicate(s.fp)
        return len(keys)


class World:
    def __init__(self, policy="lru", num_pages=20, quotas=(("a", 8),)):
        self.now, self.ids, self.clock = 0.0, 0, lambda: self.now
        self.policy, self.num_pages = policy, num_pages
        self.quotas = dict(quotas)
        self.epochs, self.revision = {"a": 1, "b": 1, None: 1}, 0
        self.stored, self.pending = {}, []  # the tier: key -> (fingerprint, tokens, data); records on their way to it
        self.drops, self.waiting, self.matches = (
            0,
            [],
            [],
        )  # preempted (fingerprint, tokens, prompt); (match, tokens) kept for later
        self.operations = self.hits = self.evictions = self.restored = self.aliases = self.pinned = self.stale = 0
        self.reopen()

    def reopen(self):
        """The process starts: the device is empty, what was on its way to the tier is lost."""
        self.cache = PageCache(
            self.num_pages, P, secret=SECRET, clock=self.clock, policy=self.policy, quotas=self.quotas,
            hold_ttl_s=HOLD_S, reusable_ttl_s=TTL_S, on_evict=self.on_evict,
        )  # fmt: skip
        self.model = Model(self.num_pages, self.policy, self.quotas)
        self.memory = {page: [None] * P for page in range(self.num_pages)}
        self.pending, self.matches, self.evicted_now, self.drops = [], [], [], 0

    # Simulated device data: what a token's slot holds is a function of everything before it.

    def content(self, fp, tokens):
        return (fp.model_revision, tuple(tokens))

    def write(self, s, upto):
        for t in range(s.stored, upto):
            page = s.pages[t // P]
            pointing = [other for o in self.model.seqs.values() for other in (*o.pages, *o.pins) if other == page]
            assert len(pointing) == 1, f"page {page} is written by one of {len(pointing)} that point at it"
            assert page not in self.model.index.values(), f"page {page} is written while others can find it"
            self.memory[page][t % P] = self.content(s.fp, s.tokens[: t + 1])
        s.stored = upto

    def check_data(self, s):
        for t in range(s.stored):
            assert self.memory[s.pages[t // P]][t % P] == self.content(s.fp, s.tokens[: t + 1]), f"token {t} of page {s.pages}"

    def on_evict(self, gone):
        for one in gone:
            prefix = next(p for (fp, p), page in self.model.index.items() if page == one.page and fp == one.fingerprint)
            assert tuple(one.tokens) == prefix[-P:] and one.depth == len(prefix) // P - 1 and len(one.key) == 32
            assert (one.parent_key is None) == (one.depth == 0)
            self.pending.append((one.key, one.fingerprint, prefix, list(self.memory[one.page])))
            self.evicted_now.append(one.page)
        self.evictions += len(gone)

    def handed_out(self, pages):
        for page in pages:
            self.memory[page] = [None] * P

    # Operations

    def fp(self, tenant):
        return fingerprint(tenant, self.epochs[tenant], f"r{self.revision}")

    def lookup(self, tenant, tokens):
        fp, public = self.fp(tenant), self.fp(None)
        match = self.cache.match(fp, np.array(tokens, np.int32), public=public if tenant is not None else None)
        own = self.model.find(fp, tokens)
        theirs = self.model.find(public, tokens)
        assert match.is_public == (len(theirs) > len(own) and tenant is not None)
        assert list(match.pages) == (theirs if match.is_public else own)
        assert match.num_tokens == len(match.pages) * P <= max(len(tokens) - 1, 0) and len(match.keys) == len(tokens) // P
        for i, page in enumerate(match.pages):
            assert self.model.tenant[page] in (None, tenant), "a page of another tenant was matched"
            assert self.memory[page][-1] == self.content(fp, tokens[: (i + 1) * P])
        self.hits += match.num_tokens
        return match

    def admit(self, tenant, tokens, spare=0, prompt=None, restore=True, keep_match=False):
        """Allocates a sequence for a prompt, and brings back what the tier has of it. Returns its owner or None."""
        match = self.lookup(tenant, tokens)
        if keep_match:
            self.matches.append((match, tokens))
            return None
        return self._start(match, tenant, tokens, spare, len(tokens) if prompt is None else prompt, restore)

    def _start(self, match, tenant, tokens, spare, prompt, restore):
        owner, num = self.new_id(), -(-len(tokens) // P) + spare - len(match.pages)
        room, before = self.model.room(match.pages), self.snapshot()
        pages = self.cache.allocate(owner, tenant, num, match)
        if pages is None:
            assert num > room and before == self.snapshot()
            return None
        assert num <= room and pages[: len(match.pages)] == list(match.pages)
        found = len(match.pages)
        self.model.seqs[owner] = Seq(match.fingerprint, list(tokens), list(match.pages), found, found * P, prompt)
        self.model.take(owner, tenant, num, pages[found:])
        self.handed_out(pages[found:])
        assert self.cache.announcer(b"nobody's") is None
        self.cache.announce(owner, match.keys[found:])
        if restore:
            self.restore(owner, match)
        return owner

    def restore(self, owner, match):
        """Writes the leading pages that the tier has, whole, into the sequence's own pages, and publishes them."""
        s, upto = self.model.seqs[owner], len(match.pages)
        while upto < len(match.keys) and (upto + 1) * P < len(s.tokens) and match.keys[upto] in self.stored:
            fp, prefix, data = self.stored[match.keys[upto]]
            assert fp == s.fp and list(prefix) == s.tokens[: (upto + 1) * P], "the tier gave another prefix"
            page = s.pages[upto]
            self.memory[page] = list(data)
            upto += 1
            self.restored += 1
        s.stored = max(s.stored, upto * P)
        self.check_data(s)
        self.publish(owner, match.keys)

    def prefill(self, owner, num):
        s = self.model.seqs[owner]
        self.write(s, min(s.stored + num, len(s.tokens)))

    def append(self, owner, token):
        """One decoded token, once the prompt is stored; takes a page if it needs one."""
        s = self.model.seqs[owner]
        self.prefill(owner, len(s.tokens))
        if len(s.tokens) + 1 > len(s.pages) * P and not self.extend(owner, 1):
            return
        s.tokens.append(token)
        self.write(s, len(s.tokens))

    def extend(self, owner, num):
        s, room, before = self.model.seqs[owner], self.model.room(), self.snapshot()
        pages = self.cache.extend(owner, num)
        assert (pages is None) == (num > room)
        if pages is None:
            assert before == self.snapshot()
            return False
        self.model.take(owner, s.fp.tenant, num, pages)
        self.handed_out(pages)
        return True

    def fork(self, owner, spare):
        """A second sequence: shares the full pages, copies the partial one."""
        s, child = self.model.seqs[owner], self.new_id()
        shared, partial = divmod(s.stored, P)
        num, room, before = spare + (partial > 0), self.model.room(), self.snapshot()
        pages = self.cache.fork(owner, child, shared, num)
        assert (pages is None) == (num > room)
        if pages is None:
            assert before == self.snapshot()
            return
        assert pages[:shared] == s.pages[:shared]
        twin = Seq(s.fp, s.tokens[: s.stored], pages[:shared], min(s.found, shared), shared * P, s.prompt, list(s.pins))
        twin.retired = s.retired
        self.model.seqs[child] = twin
        self.model.take(child, s.fp.tenant, num, pages[shared:])
        self.handed_out(pages[shared:])
        self.write(twin, len(twin.tokens))

    def publish(self, owner, keys=None, spare=None):
        s = self.model.seqs[owner]
        published, pins = set(self.model.index.values()), len(s.pins)
        expected, available = self.model.publish(owner, self.now, spare), self.cache.available_pages
        tokens = np.array(s.tokens[: s.stored], np.int32)
        assert self.cache.publish(owner, s.fp, tokens, keys, spare_pages=spare) == expected
        assert spare is None or self.cache.available_pages >= available - spare
        self.aliases += expected - len(set(self.model.index.values()) - published)
        self.pinned += len(s.pins) - pins

    def finish(self, owner, publish=True, hold=False):
        if publish:
            self.publish(owner)
        self.cache.release(owner, hold=hold)
        if hold:
            self.model.seqs[owner].held_until = self.now + HOLD_S
        else:
            self.model.let_go(owner, self.now)

    def preempt(self, owner):
        s = self.model.seqs[owner]
        if not s.retired:
            self.waiting.append((s.fp.tenant, list(s.tokens), s.prompt))
        self.finish(owner)

    def resume(self):
        tenant, tokens, prompt = self.waiting.pop(0)
        if self.admit(tenant, tokens, prompt=prompt) is None:
            self.waiting.append((tenant, tokens, prompt))

    def reconcile(self, owner, delivered):
        self.check_data(self.model.seqs[owner])
        self.cache.reconcile(owner, delivered)
        self.model.let_go(owner, self.now)

    def evict(self, num):
        self.evicted_now = []
        count = self.cache.evict(num)
        gone = self.model.evict(num)
        assert count == len(gone) and list(dict.fromkeys(self.evicted_now)) == gone

    def tick(self, seconds):
        self.now += seconds
        self.cache.tick()
        due = sorted((s.held_until, o) for o, s in self.model.seqs.items() if s.held_until is not None)
        for until, owner in due:
            if until <= self.now:
                self.model.let_go(owner, self.now)
        self.model.expire(self.now - TTL_S)

    def drop(self, predicate):
        self.drops += 1
        assert self.cache.drop(predicate) == self.model.drop(predicate)
        self.stored = {key: record for key, record in self.stored.items() if not predicate(record[0])}
        self.pending = [record for record in self.pending if not predicate(record[1])]

    def bump_epoch(self, tenant):
        self.epochs[tenant] += 1
        if tenant is not None:
            self.drop(lambda fp: fp.tenant == tenant and fp.acl_epoch < self.epochs[tenant])
        else:  # the operator withdraws what it published
            self.drop(lambda fp: fp.tenant is None)

    def bump_revision(self):
        self.revision += 1
        self.drop(lambda fp: fp.model_revision != f"r{self.revision}")

    def set_quota(self, tenant, pages):
        self.cache.set_quota(tenant, pages)
        for quotas in (self.quotas, self.model.quotas):
            quotas.pop(tenant, None)
            if pages is not None:
                quotas[tenant] = pages

    def tier(self, ok):
        """The oldest record on its way to the tier arrives, or does not."""
        if self.pending:
            key, *record = self.pending.pop(0)
            if ok:
                self.stored[key] = tuple(record)

    def use_kept_match(self):
        """A match made some operations ago: still right, or refused."""
        match, tokens = self.matches.pop(0)
        held = self.model.states()[1]
        fps = (match.fingerprint, dataclasses.replace(match.fingerprint, tenant=None, acl_epoch=None))
        now = [self.model.index.get((fps[match.is_public], tuple(tokens[: (i + 1) * P]))) for i in range(len(match.pages))]
        # Evicted and published again on the same pages: right again, but refused, since the entry is another one.
        same = match.entry is None or match.entry in self.cache._states.index
        if same and match.generation == self.drops and list(match.pages) == now and not held & set(now):
            self._start(match, match.fingerprint.tenant, tokens, 0, len(tokens), restore=False)
        else:
            self.stale += 1
            self.refused(StaleMatch, lambda: self.cache.allocate(self.new_id(), match.fingerprint.tenant, 1, match))

    def misuse(self, which, owner):
        """Calls that must be refused, and change nothing."""
        cache, s = self.cache, self.model.seqs.get(owner)
        fp, unknown = self.fp("a"), self.new_id()
        other = self.fp("b" if s is None or s.fp.tenant != "b" else "a")
        error, call = [
            (KeyError, lambda: cache.release(unknown)),
            (KeyError, lambda: cache.extend(unknown, 1)),
            (KeyError, lambda: cache.reconcile(unknown, True)),
            (KeyError, lambda: cache.fork(unknown, unknown + 1, 0, 0)),
            (KeyError, lambda: cache.publish(unknown, fp, [1, 2])),
            (ValueError, lambda: cache.match(dataclasses.replace(fp, page_size=P + 1), [1])),
            (ValueError, lambda: cache.match(fp, [1, 2, 3], public=other)),
            (ValueError, lambda: cache.allocate(unknown, "a", -1)),
            (ValueError, lambda: cache.allocate(unknown, "b", 1, cache.match(fp, [1, 2, 3]))),
            (ValueError, lambda: cache.allocate(owner, "a", 1)),
            (ValueError, lambda: cache.fork(owner, owner, 0, 0)),
            (ValueError, lambda: cache.fork(owner, unknown, self.num_pages + 1, 0)),
            (ValueError, lambda: cache.publish(owner, other, [1, 2])),
            (ValueError, lambda: cache.publish(owner, s.fp, [1] * (P * len(s.pages) + P))),
            (ValueError, lambda: cache.extend(owner, -1)),
            (ValueError, lambda: cache.reconcile(owner, True) if s.held_until is None else cache.release(owner)),
        ][which]
        if s is not None or which < 9:
            self.refused(error, call)

    def refused(self, error, call):
        before = self.snapshot()
        try:
            call()
        except error:
            assert self.snapshot() == before
        else:
            raise AssertionError("it was not refused")

    def new_id(self):
        self.ids += 1
        return self.ids

    def snapshot(self):
        """All that a failed call must leave as it is."""
        states = self.cache._states
        sequences = {o: (tuple(s.pages), s.found, s.sealed, tuple(s.pins)) for o, s in self.cache._sequences.items()}
        return (
            sequences, tuple(states.free), tuple(states.live), tuple(states.holds), tuple(states.index.entries),
            dict(states.tenant_pages), tuple(states.index.of_page), dict(self.cache._announced),
        )  # fmt: skip

    # Audit

    def audit(self, full=True):
        self.operations += 1
        self.cache.check()
        active, held, reusable, free = self.model.states()
        cache = self.cache
        counts = (cache.active_pages, cache.held_pages, cache.reusable_pages, cache.free_pages)
        assert counts == (len(active), len(held), len(reusable), len(free))
        assert sum(counts) + 1 == self.num_pages and cache.available_pages == len(reusable) + len(free)
        entries = cache._states.index.entries
        assert len(entries) == len(self.model.index)
        if full:
            self._audit_contents(entries)

    def _audit_contents(self, entries):
        cache, model = self.cache, self.model
        prefixes = {}
        for key, entry in entries.items():  # parents come first
            above = () if entry.parent is None else prefixes[entry.parent.key]
            prefixes[key] = above + tuple(cache._states.index.tokens[entry.page].tolist())
        found = {(entry.family.fingerprint, prefixes[key]): entry.page for key, entry in entries.items()}
        assert found == model.index
        for (fp, prefix), page in found.items():
            assert self.memory[page][-1] == self.content(fp, prefix), f"page {page} does not hold what the index says"
        counts = model.tenant_pages()
        assert {t: cache.tenant_pages(t) for t in TENANTS} == {t: counts.get(t, 0) for t in TENANTS}
        over = sum(pages > model.quotas.get(tenant, 10**9) for tenant, pages in counts.items())
        assert cache.over_quota_tenants == over
        for owner, s in model.seqs.items():
            assert cache.pages(owner) == tuple(s.pages)
            self.check_data(s)
        assert model.states()[0] == {page for page in range(self.num_pages) if cache._states.live[page]}
