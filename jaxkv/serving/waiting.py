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
        self._ties: dict[SequenceGroup, int] = {}  # of all who wait: who came first goes first among equal orders
        self._awaits: dict[SequenceGroup, bytes] = {}  # of those who are parked
        self._next_tie = itertools.count()
        self.num_sequences = 0  # samples of one request count each

    def __len__(self) -> int:
        return len(self._ties)

    def push(self, group: SequenceGroup) -> None:
        """Adds a group."""
        self._ties[group] = next(self._next_tie)
        self._enter(group)
        self._of_id.setdefault(group.first.id, []).append(group)
        self.num_sequences += len(group.sequences)

    def in_order(self, most: int) -> Generator[SequenceGroup]:
        """The first `most` groups in order. They stay; the one yielded last may be removed or parked before the next is asked for."""
        seen: list[tuple[float, int, SequenceGroup]] = []
        try:
            while self._heap and len(seen) < most:
                entry = heapq.heappop(self._heap)
                if entry[2] in self._ties:
                    seen.append(entry)
                    yield entry[2]
        finally:
            for entry in seen:
                if entry[2] in self._ties and entry[2] not in self._awaits:
                    heapq.heappush(self._heap, entry)

    def park(self, group: SequenceGroup, key: bytes) -> None:
        """Leaves out the group that `in_order` yielded last, until `wake` is told of this key."""
        self._awaits[group] = key
        self._parked.setdefault(key, []).append(group)
        self.awaited[key] = min(group.order, self.awaited.get(key, group.order))

    def wake(self, keys: Iterable[bytes]) -> int:
        """Pages of these keys are there, or nobody is computing them any more: who awaits them has its place in the order again.
        Returns how many those are."""
        woken = [group for key in keys for group in self._parked.pop(key, ())]
        for group in woken:
            self.awaited.pop(self._awaits.pop(group), None)
            self._enter(group)
        return len(woken)

    def remove(self, group: SequenceGroup) -> None:
        """Takes a waiting group out."""
        del self._ties[group]
        if (key := self._awaits.pop(group, None)) is not None:
            self._parked[key].remove(group)
            if not self._parked[key]:
                del self._parked[key], self.awaited[key]
        groups = self._of_id[group.first.id]
        groups.remove(group)
        if not groups:
            del self._of_id[group.first.id]
        self.num_sequences -= len(group.sequences)
        if len(self._heap) > 2 * len(self) + _MOST_GAPS:
            self._heap = [entry for entry in self._heap if entry[2] in self._ties]
            heapq.heapify(self._heap)

    def of_request(self, id: int) -> list[SequenceGroup]:
        """The waiting groups of a request."""
        return list(self._of_id.get(id, ()))

    def _enter(self, group: SequenceGroup) -> None:
        heapq.heappush(self._heap, (group.order, self._ties[group], group))
