"""The queue before the slots: by priority with ageing, first come first served within one priority."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from jaxkv.serving.sequence import Job

# Entries of jobs that were taken out, beyond as many as wait: below it a rebuild would cost more than they hold.
_MOST_GAPS = 64


class WaitingQueue:
    """Jobs in the order in which they may start. Every operation is O(log n); a job taken out in the middle leaves a gap.

    A job's order is its arrival plus ageing_s seconds for each step of priority: who has waited that much longer goes first, whatever
    the priorities, so nobody starves, and no order ever changes while jobs wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._ids: dict[int, list[Job]] = {}  # a request that was preempted may wait in several jobs
        self._count, self._tie = 0, itertools.count()
        self.num_sequences = 0  # samples of one request count each

    def __len__(self) -> int:
        return self._count

    def push(self, job: Job) -> None:
        """Adds a job."""
        heapq.heappush(self._heap, (job.order, next(self._tie), job))
        self._ids.setdefault(job.first.id, []).append(job)
        self._count += 1
        self.num_sequences += len(job.sequences)

    def in_order(self, most: int) -> Iterator[Job]:
        """The first `most` jobs in order. They stay; the one yielded last may be removed before the next is asked for."""
        seen: list[tuple[float, int, Job]] = []
        try:
            while self._heap and len(seen) < most:
                entry = heapq.heappop(self._heap)
                if self._is_waiting(entry[2]):
                    seen.append(entry)
                    yield entry[2]
        finally:
            for entry in seen:
                if self._is_waiting(entry[2]):
                    heapq.heappush(self._heap, entry)

    def remove(self, job: Job) -> None:
        """Takes a waiting job out."""
        jobs = self._ids[job.first.id]
        jobs.remove(job)
        if not jobs:
            del self._ids[job.first.id]
        self._count -= 1
        self.num_sequences -= len(job.sequences)
        if len(self._heap) > 2 * self._count + _MOST_GAPS:
            self._heap = [entry for entry in self._heap if self._is_waiting(entry[2])]
            heapq.heapify(self._heap)

    def of_request(self, id: int) -> list[Job]:
        """The waiting jobs of a request."""
        return list(self._ids.get(id, ()))

    def _is_waiting(self, job: Job) -> bool:
        return any(job is other for other in self._ids.get(job.first.id, ()))
