"""Who holds each page, and which pages can be found again. Knows page numbers and tokens, never device data.

A sequence is known by its owner's id. Its pages in logical order are of two kinds: the leading `sealed` ones are full
and never written again, so others may point at them too; the rest are its own.

    match      which pages of a prompt the index knows            changes nothing
    allocate   points the sequence at them, and gives it pages for the rest
    publish    enters its full pages into the index
    release    lets go: pages become reusable, held, or free

Every method does all it says or, when it raises or returns None, nothing.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxkv.serving import integrity
from jaxkv.serving.eviction import Policy, Tenant
from jaxkv.serving.fingerprint import Fingerprint, as_tokens
from jaxkv.serving.match import Match as Match
from jaxkv.serving.match import StaleMatch as StaleMatch
from jaxkv.serving.match import check_match, find_match
from jaxkv.serving.page_states import Evicted, PageStates
from jaxkv.serving.receipt import Receipt, make_receipt
from jaxkv.serving.sequence_pages import SequencePages, pages_of_tokens, publish

Tokens = Sequence[int] | np.ndarray
_ROOTS = 1024  # remembered: encoding a fingerprint costs 20 us, and a tenant's requests have the same one


class PageCache:
    """The pages of one pool: free, active, reusable, held, and the null page (docs of `page_states`)."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        secret: bytes,
        clock: Callable[[], float],
        policy: Policy = "lru",
        quotas: Mapping[str, int] | None = None,
        hold_ttl_s: float = 900.0,
        reusable_ttl_s: float | None = None,
        on_evict: Callable[[Sequence[Evicted]], None] | None = None,
    ):
        """All but the null page are free.

        Args:
            num_pages: C, one of them the null page.
            page_size: P, tokens a page.
            secret: keys the digests; the same for every process that shares a tier, known to no client.
            clock: monotonic seconds.
            policy: which reusable page goes first, see `eviction`.
            quotas: pages a tenant may keep when others need them; it pays first for what it has above that.
            hold_ttl_s: after how long a hold ends by itself.
            reusable_ttl_s: how long an unused page stays findable; None: until its place is needed.
            on_evict: gets evicted pages before they are handed out. Must not call back, nor raise: what it raises
                reaches the caller, and these pages are gone.
        """
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"{num_pages=} must be at least 2 (page 0 is never used), {page_size=} at least 1 token")
        if not isinstance(secret, bytes) or not secret:
            raise ValueError("secret must be some bytes: without it, whoever knows a prompt could compute its keys")
        self.num_pages, self.page_size = num_pages, page_size
        self.hold_ttl_s, self.reusable_ttl_s = hold_ttl_s, reusable_ttl_s
        self.hold_outcomes = {"delivered": 0, "undelivered": 0, "expired": 0}
        self.on_settled: Callable[[Sequence[bytes]], None] | None = (
            None  # told of announced keys: published, or nobody computes them
        )
        self._secret, self._clock = secret, clock
        self._root = functools.lru_cache(_ROOTS)(lambda fingerprint: fingerprint.root(secret))
        self._drops = 0
        self._states = PageStates(num_pages, page_size, policy, clock)
        self._states.on_evict = on_evict
        self._sequences: dict[int, SequencePages] = {}
        self._announced: dict[bytes, int] = {}
        self._deadlines: list[tuple[float, int]] = []  # of holds, a heap
        for tenant, pages in (quotas or {}).items():
            self.set_quota(tenant, pages)

    @property
    def free_pages(self) -> int:
        return len(self._states.free)

    @property
    def active_pages(self) -> int:
        return self._states.active

    @property
    def reusable_pages(self) -> int:
        return self._states.reusable

    @property
    def held_pages(self) -> int:
        return self._states.held

    @property
    def available_pages(self) -> int:
        """Free and reusable pages: the most that `allocate` can hand out."""
        return self._states.available

    @property
    def evicted_pages(self) -> int:
        """Pages evicted so far."""
        return self._states.evicted

    @property
    def over_quota_tenants(self) -> int:
        """How many tenants have more pages than their quota."""
        return len(self._states.over_quota)

    def tenant_pages(self, tenant: Tenant) -> int:
        """Returns how many pages this tenant took that are not free again; each page counts for one tenant."""
        return self._states.tenant_pages.get(tenant, 0)

    def pages(self, owner: int) -> tuple[int, ...]:
        """Returns a sequence's pages in logical order."""
        return tuple(self._sequence(owner).pages)

    def match(
        self,
        fingerprint: Fingerprint,
        tokens: Tokens,
        *,
        public: Fingerprint | None = None,
        keys: Sequence[bytes] | None = None,
    ) -> Match:
        """Returns the longest cached prefix of a prompt, of at most len(tokens) - 1 tokens: one is always computed.

        public: the fingerprint under which the operator published for all tenants; the longer chain is returned.
        keys: those of an earlier match of this prompt or of its beginning: they need not be computed again.
        """
        self._check_page_size(fingerprint)
        return find_match(self._states, self._root, fingerprint, as_tokens(tokens), public, keys or (), self._drops)

    def idle_pages(self, match: Match) -> int:
        """Returns how many of a match's pages no sequence holds now: `allocate` takes these from the available ones too."""
        return len(match.pages) - self._states.num_in_use(match.pages)

    def allocate(self, owner: int, tenant: Tenant, num_pages: int, match: Match | None = None) -> list[int] | None:
        """Returns the pages of a new sequence: those of the match and then num_pages of its own, in logical order.

        None if fewer are available beside the match. StaleMatch: match again. The tenant None is the operator, whose
        pages, published, are public.
        """
        states = self._states
        if owner in self._sequences:
            raise ValueError(f"{owner=} has pages already: release it first")
        _check_count(num_pages)
        found = () if match is None else match.pages
        if match is not None:
            check_match(self._states, match, tenant, self._drops)
        if num_pages > states.available - (0 if match is None else self.idle_pages(match)):
            return None
        states.reference(found)
        try:
            own = states.take(tenant, num_pages)
        except BaseException:
            states.let_go(found)
            raise
        sequence = SequencePages(tenant, [*found, *own], len(found), len(found))
        if match is not None:
            sequence.fingerprint = match.fingerprint
            sequence.entry = None if match.is_public else match.entry
        self._sequences[owner] = sequence
        return list(sequence.pages)

    def extend(self, owner: int, num_pages: int) -> list[int] | None:
        """Returns num_pages more pages of the sequence's own; None if fewer are available."""
        sequence = self._running(owner)
        _check_count(num_pages)
        if num_pages > self._states.available:
            return None
        pages = self._states.take(sequence.tenant, num_pages)
        sequence.pages += pages
        return pages

    def fork(self, owner: int, child: int, shared_pages: int, num_pages: int) -> list[int] | None:
        """Returns the pages of a new sequence that shares owner's first shared_pages and has num_pages of its own.

        The shared pages must be full: neither writes them again. None if fewer than num_pages are available.
        """
        parent = self._running(owner)
        if child in self._sequences:
            raise ValueError(f"{child=} has pages already: release it first")
        if not 0 <= shared_pages <= len(parent.pages):
            raise ValueError(f"{shared_pages=} must be in [0, {len(parent.pages)}], the pages of {owner=}")
        _check_count(num_pages)
        if num_pages > self._states.available:
            return None
        own = self._states.take(parent.tenant, num_pages)
        shared = parent.pages[:shared_pages]
        self._states.reference(shared)
        self._states.reference(parent.pins)
        parent.sealed = max(parent.sealed, shared_pages)
        self._sequences[child] = SequencePages(
            parent.tenant,
            [*shared, *own],
            found=min(parent.found, shared_pages),
            sealed=shared_pages,
            fingerprint=parent.fingerprint,
            pins=dict(parent.pins),
            retired=parent.retired,
        )
        return list(self._sequences[child].pages)

    def publish(
        self,
        owner: int,
        fingerprint: Fingerprint,
        tokens: Tokens,
        keys: Sequence[bytes] | None = None,
        *,
        spare_pages: int | None = None,
    ) -> int:
        """Makes the sequence's full pages of `tokens` findable; returns how many pages that adds to the index.

        A page whose key another page has stays private. To be called once the steps that fill these pages are
        dispatched; the pages are never written again.

        Args:
            tokens: the whole sequence, from its first token.
            keys: of its first pages, as far as known (`Match.keys`); the others are computed.
            spare_pages: how many available pages this may make active. It does so where a sequence that is gone
                published the same prefix, and this one's entries go below those pages. None: any number.
        """
        sequence = self._running(owner)
        self._check_page_size(fingerprint)
        sequence.check_publisher(owner, fingerprint)
        rows = pages_of_tokens(tokens, self.page_size)
        if len(rows) > len(sequence.pages):
            raise ValueError(f"the tokens fill {len(rows)} pages, {owner=} has {len(sequence.pages)}")
        added = publish(self._states, sequence, fingerprint, rows, self._root(fingerprint), keys, spare_pages)
        # Those too that did not enter the index: whoever waits for them must look again.
        self._unannounce(owner, list(itertools.takewhile(lambda key: sequence.announced[key] < len(rows), sequence.announced)))
        return added

    def announce(self, owner: int, keys: Iterable[bytes]) -> None:
        """Says that this sequence is computing the pages of these keys, which follow those it found, until it publishes or lets go.

        A key keeps the first owner that announced it. Others with the same prefix may wait instead of computing it too.
        """
        sequence = self._running(owner)
        if not sequence.retired:
            for place, key in enumerate(keys, sequence.found):
                if self._announced.setdefault(key, owner) == owner:
                    sequence.announced[key] = place

    def announcer(self, key: bytes) -> int | None:
        """Returns who is computing the page of this key; None if nobody is."""
        return self._announced.get(key)

    def retire(self, owner: int) -> None:
        """This sequence publishes nothing from here on: what it computed is not sound."""
        self._running(owner).retired = True
        self._unannounce(owner, list(self._sequences[owner].announced))

    def _unannounce(self, owner: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self._announced[key], self._sequences[owner].announced[key]
        if keys and self.on_settled is not None:
            self.on_settled(keys)

    def release(self, owner: int, *, hold: bool = False) -> None:
        """Lets go of a sequence's pages. Unknown owner: KeyError.

        hold: nobody knows yet whether its result arrived. The pages it filled itself are neither matched nor evicted
        until `reconcile`, or hold_ttl_s. Those it found stay what they are to others, and are not evicted either.
        """
        sequence = self._running(owner)
        self._unannounce(owner, list(sequence.announced))
        if not hold:
            self._forget(owner)
            return
        self._states.hold(sequence.pages[sequence.found :])
        sequence.held_until_s = self._clock() + self.hold_ttl_s
        heapq.heappush(self._deadlines, (sequence.held_until_s, owner))

    def is_held(self, owner: int) -> bool:
        """Returns whether a hold on this sequence's pages has neither ended nor run out."""
        sequence = self._sequences.get(owner)
        return sequence is not None and sequence.held_until_s is not None

    def reconcile(self, owner: int, delivered: bool) -> None:
        """Ends a hold: the result arrived, or the caller gave it up. Either way its pages are as after a release."""
        if self._sequence(owner).held_until_s is None:
            raise ValueError(f"{owner=} is running, not on hold: release it")
        self.hold_outcomes["delivered" if delivered else "undelivered"] += 1
        self._forget(owner)

    def _forget(self, owner: int) -> None:
        sequence = self._sequences.pop(owner)
        if sequence.held_until_s is None:
            self._states.let_go(sequence.pages)
        else:
            self._states.end_hold(sequence.pages[sequence.found :])
            self._states.let_go(sequence.pages[: sequence.found])
        self._states.let_go(list(sequence.pins))

    def tick(self) -> None:
        """Ends what has lasted its time: holds, and reusable pages (they go to on_evict). O(what ended)."""
        now_s = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, owner = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(owner)
            if sequence is not None and sequence.held_until_s == deadline_s:
                self.hold_outcomes["expired"] += 1
                self._forget(owner)
        if self.reusable_ttl_s is not None:
            self._states.evict_older_than(now_s - self.reusable_ttl_s)

    def evict(self, num_pages: int) -> int:
        """Evicts so many reusable pages, or all there are; returns how many. O(evicted)."""
        _check_count(num_pages)
        return self._states.evict(num_pages)

    def drop(self, predicate: Callable[[Fingerprint], bool]) -> int:
        """Takes all entries of these fingerprints out of the index at once; returns how many. O(entries).

        For new weights or rights. on_evict is not told. Sequences running under these fingerprints keep their pages, and
        publish nothing any more; nor do those that run under none yet.
        """
        index = self._states.index
        self._drops += 1
        index.next_key.cache_clear()  # it remembers their tokens
        doomed = [family for family in index.families.values() if predicate(family.fingerprint)]
        retired = [s.fingerprint is None or predicate(s.fingerprint) for s in self._sequences.values()]
        for (owner, sequence), retire in zip(self._sequences.items(), retired, strict=True):
            if retire:
                sequence.retired = True
                self._unannounce(owner, list(sequence.announced))
        members = {id(family) for family in doomed}
        entries = [entry for entry in index.entries.values() if id(entry.family) in members] if doomed else []
        for entry in reversed(entries):  # children first: they were entered after their parents
            self._states.unpublish(entry)
        return len(entries)

    def set_quota(self, tenant: Tenant, num_pages: int | None) -> None:
        """Sets how many pages a tenant keeps when others need them; None ends its quota."""
        if num_pages is not None:
            _check_count(num_pages)
        self._states.set_quota(tenant, num_pages)

    def receipt(self, match: Match) -> Receipt:
        """Returns why a match found so much of its prompt and no more (`receipt`)."""
        return make_receipt(match.fingerprint, self._states.index.families, secret=self._secret, is_public=match.is_public)

    def check(self) -> None:
        """Raises IntegrityError, naming page and numbers, unless the cache agrees with itself. O(C): for tests."""
        integrity.check_page_cache(self._states, self._sequences, self._secret, self._announced)

    def _sequence(self, owner: int) -> SequencePages:
        if owner not in self._sequences:
            raise KeyError(f"{owner=} has no pages here: it was never allocated, or is released")
        return self._sequences[owner]

    def _running(self, owner: int) -> SequencePages:
        sequence = self._sequence(owner)
        if sequence.held_until_s is not None:
            raise ValueError(f"{owner=} is on hold: reconcile it first")
        return sequence

    def _check_page_size(self, fingerprint: Fingerprint) -> None:
        if fingerprint.page_size != self.page_size:
            raise ValueError(f"{fingerprint.page_size=} tokens, but the pages of this cache have {self.page_size}")


def _check_count(num_pages: int) -> None:
    if num_pages < 0:
        raise ValueError(f"{num_pages=} must be 0 or more")
