"""In which order reusable pages go.

Only leaves stand in the queue: a page whose children are all gone. So the deepest page of a chain goes first, whatever
the policy; the policy says which stamp a page carries.

    lru    stamped each time the last sequence lets go of it, deepest page first
    fifo   stamped once, when it is published

A stamp is a count, so the order never depends on the clock's grain; the time beside it is for TTLs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Literal

Policy = Literal["lru", "fifo"]
Tenant = str | None


class _Queue:
    """A heap of (stamp, page). Entries that no longer count stay until they surface or outnumber the others."""

    __slots__ = ("entries", "limit")

    def __init__(self, entries: Iterable[tuple[int, int]] = ()):
        self.entries = list(entries)
        heapq.heapify(self.entries)
        self.limit = 2 * len(self.entries) + 64

    def push(self, stamp: int, page: int, queued: list[int]) -> None:
        heapq.heappush(self.entries, (stamp, page))
        if len(self.entries) > self.limit:
            self.__init__({entry for entry in self.entries if queued[entry[1]] == entry[0]})  # type: ignore[misc]

    def head(self, queued: list[int]) -> tuple[int, int] | None:
        while self.entries and queued[self.entries[0][1]] != self.entries[0][0]:
            heapq.heappop(self.entries)
        return self.entries[0] if self.entries else None


class EvictionOrder:
    """The queue of leaves over all tenants, and one more for each tenant with a quota."""

    def __init__(self, num_pages: int, policy: Policy):
        if policy not in ("lru", "fifo"):
            raise ValueError(f"{policy=} must be 'lru' or 'fifo'")
        self.policy = policy
        self._count = 0
        self._stamps = [0] * num_pages
        self._times_s = [0.0] * num_pages
        self._queued = [0] * num_pages  # the stamp it is queued under; 0: it is not
        self._all = _Queue()
        self._of_tenant: dict[Tenant, _Queue] = {}

    def published(self, page: int, now_s: float) -> None:
        """A page got its first entry."""
        if self.policy == "fifo":
            self._stamp(page, now_s)

    def idle(self, page: int, now_s: float) -> None:
        """The last sequence let go of a published page."""
        if self.policy == "lru":
            self._stamp(page, now_s)

    def _stamp(self, page: int, now_s: float) -> None:
        self._count += 1
        self._stamps[page], self._times_s[page] = self._count, now_s

    def add(self, page: int, tenant: Tenant) -> None:
        """A page can go now: it is reusable and a leaf."""
        stamp = self._queued[page] = self._stamps[page]
        self._all.push(stamp, page, self._queued)
        if tenant in self._of_tenant:
            self._of_tenant[tenant].push(stamp, page, self._queued)

    def discard(self, page: int) -> None:
        """A page cannot go any more. No-op if it could not."""
        self._queued[page] = 0

    def watch(self, tenant: Tenant, tenants: list[Tenant]) -> None:
        """Keeps a queue of this tenant's pages from now on; tenants[page] says whose each page is. O(queue)."""
        if tenant not in self._of_tenant:
            mine = ((s, page) for s, page in self._all.entries if self._queued[page] == s and tenants[page] == tenant)
            self._of_tenant[tenant] = _Queue(set(mine))

    def unwatch(self, tenant: Tenant) -> None:
        """Drops the queue of a tenant whose quota ended."""
        self._of_tenant.pop(tenant, None)

    def first(self, over_quota: Iterable[Tenant]) -> int | None:
        """Returns the page to go next: the first of the tenants over quota, else the first of all; None if there is none."""
        heads = [head for tenant in over_quota if (head := self._of_tenant[tenant].head(self._queued)) is not None]
        head = min(heads) if heads else self._all.head(self._queued)
        return None if head is None else head[1]

    def first_older_than(self, time_s: float) -> int | None:
        """Returns the first page of all if it was stamped at time_s or before."""
        page = self.first(())
        return page if page is not None and self._times_s[page] <= time_s else None

    def is_queued(self, page: int) -> bool:
        """Returns whether the page can go."""
        return self._queued[page] != 0
