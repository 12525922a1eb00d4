"""The state of every page, and the few moves between states.

    free ---take---> active ---let go---> reusable (has an entry in the index) ---evicted---> free
                       |  ^                   |                                      (no entry: free at once)
                       |  +----reference------+
                       +--hold--> held ---end of the hold---> reusable or free

    active    at least one sequence points at it, or found it in the cache and is on hold
    held      only sequences on hold point at it: it is neither matched nor evicted
    reusable  nobody points at it, and the index knows it
    free      nobody points at it, and nobody can find it;  page 0 is the null page and in no state

Whoever points at a page points at its whole chain in the index. So the pages of a chain that somebody points at come before
the reusable ones: the leaves can always go first, every reusable page can be had, and a search by halves finds where they begin.
Active and held ones come in any order: who is on hold keeps what it found active, and holds what it computed on either side.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv.serving.eviction import EvictionOrder, Policy, Tenant
from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.prefix_index import Entry, PrefixIndex


class Evicted(NamedTuple):
    """A page that leaves the device, under one of its keys. Its data is intact until `on_evict` returns."""

    page: int
    key: bytes
    parent_key: bytes | None  # None at depth 0
    depth: int  # pages before it
    fingerprint: Fingerprint
    tokens: np.ndarray  # i32[P], a copy


class PageStates:
    """Reference counts, the free list, tenants' shares, and the index and eviction order that go with them."""

    def __init__(self, num_pages: int, page_size: int, policy: Policy, clock: Callable[[], float]):
        self.clock = clock
        self.index = PrefixIndex(num_pages, page_size)
        self.order = EvictionOrder(num_pages, policy)
        self.free = list(range(num_pages - 1, 0, -1))  # the lowest is handed out first
        self.live = [0] * num_pages  # references of running sequences
        self.holds = [0] * num_pages  # references of sequences on hold
        self.tenant: list[Tenant] = [None] * num_pages  # who took it; meaningless while it is free
        self.active = self.reusable = self.held = 0
        self.evicted = 0  # pages evicted so far
        self.tenant_pages: dict[Tenant, int] = {}
        self.quotas: dict[Tenant, int] = {}
        self.over_quota: dict[Tenant, None] = {}
        self.on_evict: Callable[[Sequence[Evicted]], None] | None = None

    @property
    def available(self) -> int:
        return len(self.free) + self.reusable

    def take(self, tenant: Tenant, num_pages: int) -> list[int]:
        """Returns pages with one reference each; there must be as many available. Reusable ones are evicted as needed."""
        self._charge(tenant, num_pages)  # first: a tenant that grows past its quota pays with its own pages
        try:
            self.evict(num_pages - len(self.free))
        except BaseException:
            self._charge(tenant, -num_pages)
            raise
        pages = [self.free.pop() for _ in range(num_pages)]
        for page in pages:
            self.live[page] = 1
            self.tenant[page] = tenant
        self.active += num_pages
        return pages

    def reference(self, pages: Iterable[int]) -> None:
        """Adds a live reference to each page."""
        for page in pages:
            if self.live[page] == 0:
                if self.holds[page]:
                    self.held -= 1
                else:
                    self.reusable -= 1
                    self.order.discard(page)
                self.active += 1
            self.live[page] += 1

    def let_go(self, pages: Sequence[int]) -> None:
        """Takes a live reference from each page, the deepest first. pages: in the order of their depths."""
        now_s = self.clock()
        for page in reversed(pages):
            self.live[page] -= 1
            if self.live[page] == 0:
                self.active -= 1
                if self.holds[page]:
                    self.held += 1
                else:
                    self._idle(page, now_s)

    def hold(self, pages: Iterable[int]) -> None:
        """Turns a live reference to each page into one of a sequence on hold."""
        for page in pages:
            self.holds[page] += 1
            self.live[page] -= 1
            if self.live[page] == 0:
                self.active -= 1
                self.held += 1

    def end_hold(self, pages: Sequence[int]) -> None:
        """Takes a reference of a sequence on hold from each page, the deepest first."""
        now_s = self.clock()
        for page in reversed(pages):
            self.holds[page] -= 1
            if self.holds[page] == 0 and self.live[page] == 0:
                self.held -= 1
                self._idle(page, now_s)

    def evict(self, num_pages: int) -> int:
        """Evicts so many reusable pages, or all there are; returns how many. Linear in that number."""
        return self._evict(num_pages, lambda: self.order.first(self.over_quota))

    def evict_older_than(self, time_s: float) -> int:
        """Evicts what was last used (fifo: published) at time_s or before; returns how many pages. O(evicted)."""
        return self._evict(self.reusable, lambda: self.order.first_older_than(time_s))

    def _evict(self, num_pages: int, next_page: Callable[[], int | None]) -> int:
        gone: list[Evicted] = []
        count = 0
        while count < num_pages and (page := next_page()) is not None:
            for entry in self.index.of_page[page]:
                if self.on_evict is not None:
                    gone.append(self._record(entry))
                self.unpublish(entry)
            count += 1
        self.evicted += count
        if gone and self.on_evict is not None:
            self.on_evict(gone)  # last: whatever it raises, the pages are free and all counts agree
        return count

    def _record(self, entry: Entry) -> Evicted:
        parent_key = None if entry.parent is None else entry.parent.key
        tokens = self.index.tokens[entry.page].copy()
        return Evicted(entry.page, entry.key, parent_key, entry.depth, entry.family.fingerprint, tokens)

    def unpublish(self, entry: Entry) -> None:
        """Takes an entry out of the index. A page that nobody points at is free with its last one."""
        index, page = self.index, entry.page
        index.remove(entry)
        if self.is_idle(page) and not index.of_page[page]:
            self.order.discard(page)
            self.reusable -= 1
            self._free(page)
        if entry.parent is not None:
            self._queue_if_leaf(entry.parent.page)

    def is_idle(self, page: int) -> bool:
        """Returns whether nobody points at this page."""
        return self.live[page] == 0 and self.holds[page] == 0

    def num_in_use(self, chain: Sequence[int]) -> int:
        """Returns how many pages of a chain, its first ones, somebody points at. O(log n)."""
        return bisect.bisect_left(chain, True, key=self.is_idle)

    def first_held(self, chain: Sequence[int]) -> int:
        """Returns the place of the first page of a chain that is held; len(chain): none is. O(n) while any page is held."""
        if not self.held:
            return len(chain)
        return next((i for i, page in enumerate(chain) if self.is_held(page)), len(chain))

    def is_shared(self, page: int) -> bool:
        """Returns whether more than one sequence points at this page."""
        return self.live[page] + self.holds[page] > 1

    def is_held(self, page: int) -> bool:
        """Returns whether only sequences on hold point at this page."""
        return self.live[page] == 0 and self.holds[page] > 0

    def set_quota(self, tenant: Tenant, num_pages: int | None) -> None:
        """Sets or (None) ends a tenant's quota."""
        if num_pages is None:
            self.quotas.pop(tenant, None)
            self.order.unwatch(tenant)
        else:
            self.quotas[tenant] = num_pages
            self.order.watch(tenant, self.tenant)
        self._charge(tenant, 0)

    def _idle(self, page: int, now_s: float) -> None:
        if self.index.of_page[page]:
            self.reusable += 1
            self.order.idle(page, now_s)
            self._queue_if_leaf(page)
        else:
            self._free(page)

    def _queue_if_leaf(self, page: int) -> None:
        if self.is_idle(page) and self.index.of_page[page] and not self.index.children[page]:
            self.order.add(page, self.tenant[page])

    def _free(self, page: int) -> None:
        self.free.append(page)
        self._charge(self.tenant[page], -1)

    def _charge(self, tenant: Tenant, num_pages: int) -> None:
        pages = self.tenant_pages.get(tenant, 0) + num_pages
        if pages:
            self.tenant_pages[tenant] = pages
        else:
            self.tenant_pages.pop(tenant, None)
        if pages > self.quotas.get(tenant, pages):
            self.over_quota[tenant] = None
        else:
            self.over_quota.pop(tenant, None)
