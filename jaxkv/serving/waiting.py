"""The queue before the slots: by priority with ageing, first come first served within one priority."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Generator, Iterable

from jaxkv.serving.sequence import SequenceGroup

# Entries of groups that were taken out, beyond as many as wait: below it a rebuild would cost more than they hold.
_MOST_GAPS = 64


class WaitingQueue:
    """Groups in the order in which they may start. Every operation is O(log n); a group taken out in the middle leaves a gap.

    A group's order is its arrival plus ageing_s seconds for each step of priority: who has waited that much longer goes first, whatever
    the priorities, so nobody starves, and no order ever changes while groups wait.

    A group whose next pages somebody is computing is parked under the last of their keys, and costs nothing until that is settled.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceGroup]] = []
        self._parked: dict[bytes, list[SequenceGroup]] = {}  # by the key that they await
        self.awaited: dict[bytes, float] = {}  # these keys, and the most urgent order that awaited each
        self._of_id: dict[int, list[SequenceGroup]] = {}  # a request that was preempted may wait in several groups
        self._count, self._ties = 0, itertools.count()
        self.num_sequences = 0  # samples of one request count each

    def __len__(self) -> int:
        return self._count

    def push(self, group: SequenceGroup) -> None:
        """Adds a group."""
        group.tie, group.is_waiting = next(self._ties), True
        heapq.heappush(self._heap, (group.order, group.tie, group))
        self._of_id.setdefault(group.first.id, []).append(group)
        self._count += 1
        self.num_sequences += len(group.sequences)

    def in_order(self, most: int) -> Generator[SequenceGroup]:
        """The first `most` groups in order. They stay; the one yielded last may be removed or parked before the next is asked for."""
        seen: list[tuple[float, int, SequenceGroup]] = []
        try:
            while self._heap and len(seen) < most:
                entry = heapq.heappop(self._heap)
                if entry[2].is_waiting:
                    seen.append(entry)
                    yield entry[2]
        finally:
            for entry in seen:
                if entry[2].is_waiting and entry[2].awaits is None:
                    heapq.heappush(self._heap, entry)

    def park(self, group: SequenceGroup, key: bytes) -> None:
        """Leaves out the group that `in_order` yielded last, until `wake` is told of this key."""
        group.awaits = key
        self._parked.setdefault(key, []).append(group)
        self.awaited[key] = min(group.order, self.awaited.get(key, group.order))

    def wake(self, keys: Iterable[bytes]) -> int:
        """Pages of these keys are there, or nobody is computing them any more: who awaits them has its place in the order again.
        Returns how many those are."""
        woken = [group for key in keys for group in self._parked.pop(key, ())]
        for group in woken:
            assert group.awaits is not None
            self.awaited.pop(group.awaits, None)
            group.awaits = None
            heapq.heappush(self._heap, (group.order, group.tie, group))
        return len(woken)

    def remove(self, group: SequenceGroup) -> None:
        """Takes a waiting group out."""
        group.is_waiting = False
        if group.awaits is not None:
            parked = self._parked[group.awaits]
            parked.remove(group)
            if not parked:
                del self._parked[group.awaits], self.awaited[group.awaits]
        groups = self._of_id[group.first.id]
        groups.remove(group)
        if not groups:
            del self._of_id[group.first.id]
        self._count -= 1
        self.num_sequences -= len(group.sequences)
        if len(self._heap) > 2 * self._count + _MOST_GAPS:
            self._heap = [entry for entry in self._heap if entry[2].is_waiting]
            heapq.heapify(self._heap)

    def of_request(self, id: int) -> list[SequenceGroup]:
        """The waiting groups of a request."""
        return list(self._of_id.get(id, ()))
