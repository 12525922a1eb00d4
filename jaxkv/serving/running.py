"""The sequences that have rows: which row, which pages, and what is promised to them beyond those."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxkv.serving.match import Match
from jaxkv.serving.page_cache import PageCache
from jaxkv.serving.runner import Runner
from jaxkv.serving.sequence import Sequence, SequenceGroup


class Running:
    """Rows of a runner and pages of a cache, and whose they are. Whoever changes one of them does it here.

    Args:
      options: what the runner's `seat` takes of a sequence.

    Attributes:
      prefilling: whose prompts are being stored, in the order in which their chunks go.
      decoding: whose tokens are being sampled, by row.
      promised_pages: that the running ones may still take: they were counted when those started.
    """

    def __init__(self, runner: Runner, cache: PageCache, options: Callable[[Sequence], Any]):
        self._runner, self._cache, self._options = runner, cache, options
        self._free_rows = list(range(runner.num_slots - 1, -1, -1))
        self._children: dict[int, list[Sequence]] = {}  # by owner: samples that begin when its prompt is stored
        self.prefilling: list[Sequence] = []
        self.decoding: dict[int, Sequence] = {}
        self.promised_pages = 0

    def __len__(self) -> int:
        """Rows taken."""
        return self._runner.num_slots - len(self._free_rows)

    def __iter__(self) -> Iterator[Sequence]:
        return itertools.chain(self.prefilling, *self._children.values(), self.decoding.values())

    @property
    def num_free_rows(self) -> int:
        """Rows that nobody has."""
        return len(self._free_rows)

    @property
    def spare_pages(self) -> int:
        """Pages that can be had and are promised to nobody."""
        return self._cache.available_pages - self.promised_pages

    def children(self, first: Sequence) -> list[Sequence]:
        """The samples that wait for this one's prompt."""
        return self._children[first.owner]

    def group_of(self, one: Sequence) -> list[Sequence]:
        """Who can only give way together: a sequence whose prompt is being stored and the samples that wait for it; else it alone."""
        groups = ([first, *self._children[first.owner]] for first in self.prefilling)
        return next((group for group in groups if one in group), [one])

    def allocate(self, group: SequenceGroup, match: Match, each: int) -> None:
        """Takes the pages of a group's prompt, and promises every sequence so much that it will have `each` pages.

        The caller has made sure that they are there.
        """
        first, cache, P = group.first, self._cache, self._cache.page_size
        shared, now = group.goal.size // P, -(-group.goal.size // P)
        pages = cache.allocate(first.owner, first.fingerprint.tenant, now - len(match.pages), match)
        assert pages is not None
        first.pages = pages
        for child in group.sequences[1:]:
            pages = cache.fork(first.owner, child.owner, shared, now - shared)
            assert pages is not None
            child.pages = pages
        for one in group.sequences:
            one.promised = each - now
            self.promised_pages += one.promised

    def seat(self, group: SequenceGroup, match: Match) -> None:
        """Gives each sequence of a group a row; its first one begins to store what the match lacks."""
        first, nothing = group.first, group.goal[:0]
        for one in group.sequences:
            one.row, one.keys = self._free_rows.pop(), match.keys
            found = group.goal[: match.num_tokens] if one is first else nothing
            self._runner.seat(one.row, one.pages, self._options(one), found)
        first.goal, first.stored, first.hurry = group.goal, match.num_tokens, math.inf
        bisect.insort(self.prefilling, first, key=_place)
        self._children[first.owner] = group.sequences[1:]
        self._cache.announce(first.owner, match.keys[len(match.pages) :])

    def hurry(self, orders: Mapping[int, float]) -> None:
        """Says for whom somebody waits: the most urgent order, by owner of the pages awaited. Nobody waits for the others."""
        for one in self.prefilling:
            one.hurry = orders.get(one.owner, math.inf)
        self.prefilling.sort(key=_place)

    def begin(self, first: Sequence) -> list[Sequence]:
        """The prompt is stored: samples share its full pages, each has its partial page, and all decode. Returns them."""
        self.prefilling.remove(first)
        children = self._children.pop(first.owner)
        if children:
            full, partial = divmod(first.stored, self._cache.page_size)
            src = [first.pages[full]] * len(children) if partial else []
            dst = [child.pages[full] for child in children] if partial else []
            self._runner.copy_pages(src, dst, [first.row] * len(children), [child.row for child in children])
        for one in (first, *children):
            one.stored, one.goal = first.stored, None
            self.decoding[one.row] = one
        return [first, *children]

    def extend(self, one: Sequence) -> bool:
        """Gives a sequence a page more; False: there is none that is not promised to others."""
        if not one.promised and self.spare_pages < 1:
            return False
        more = self._cache.extend(one.owner, 1)
        assert more is not None  # promises never exceed what is there
        self._runner.set_pages(one.row, more, len(one.pages))
        one.pages += more
        taken = min(one.promised, 1)
        one.promised -= taken
        self.promised_pages -= taken
        return True

    def publish(self, one: Sequence, tokens: np.ndarray) -> None:
        """Makes the full pages of a sequence's first tokens findable, unless its request keeps out of the cache."""
        if one.request.use_cache:
            # Publishing may point at pages that were reusable; those promised to others must stay available.
            self._cache.publish(one.owner, one.fingerprint, tokens, one.keys, spare_pages=self.spare_pages)

    def retire(self, one: Sequence) -> None:
        """What a sequence stored is not sound: neither it nor the samples that share its prompt publish anything."""
        for other in self:
            if other.id == one.id:
                self._cache.retire(other.owner)

    def leave(self, one: Sequence) -> None:
        """Takes a sequence off its row. Steps in flight may still write to its pages: whoever gets those writes after them."""
        if one in self.prefilling:
            self.prefilling.remove(one)
            self._children.pop(one.owner)
        for siblings in self._children.values():
            if one in siblings:
                siblings.remove(one)
        self.decoding.pop(one.row, None)
        self._runner.clear(one.row)
        self._free_rows.append(one.row)
        one.row = -1

    def release(self, one: Sequence, hold: bool = False) -> None:
        """Lets go of the pages of a sequence that has left its row, and of what it was promised."""
        self._cache.release(one.owner, hold=hold)
        self.promised_pages -= one.promised
        one.promised = 0


def _place(one: Sequence) -> tuple[float, int]:
    """Whose chunks go first."""
    return min(one.order, one.hurry), one.owner
