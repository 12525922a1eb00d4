"""Which pages hold which prefixes: a tree of keys, kept as a flat map from key to page.

An entry says "this page holds the tokens that this key names". Its parent is the entry of the page before. A page may
carry several entries: one under its publisher's fingerprint, and one for each tenant that continues a public prefix
under a fingerprint of its own. All of them are at one depth, and their tokens are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable

import numpy as np

from jaxkv.serving.fingerprint import Fingerprint, next_key

_REMEMBERED = 1 << 16  # digests, at 340 bytes each: a million tokens in pages of 16


@dataclasses.dataclass(slots=True, eq=False)
class Family:
    """All entries of one fingerprint."""

    fingerprint: Fingerprint
    size: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """One key and the page that holds what it names."""

    key: bytes
    page: int
    parent: Entry | None
    depth: int  # pages before it
    family: Family


class PrefixIndex:
    """The entries, by key and by page, and the tokens of every page that has one."""

    def __init__(self, num_pages: int, page_size: int):
        self.entries: dict[bytes, Entry] = {}
        self.of_page: list[tuple[Entry, ...]] = [()] * num_pages
        self.children = [0] * num_pages  # entries right below any entry of this page
        self.tokens = np.zeros((num_pages, page_size), np.int32)  # valid where of_page is not empty
        self.families: dict[Fingerprint, Family] = {}
        # A digest costs 2 us, remembering it 0.3: prompts that share pages come together.
        self.next_key = functools.lru_cache(min(4 * num_pages, _REMEMBERED))(next_key)

    def __contains__(self, entry: Entry) -> bool:
        return self.entries.get(entry.key) is entry

    def find(self, fingerprint: Fingerprint, keys: Iterable[bytes], rows: np.ndarray) -> list[Entry]:
        """Returns the longest known chain of keys, at most len(rows): rows i32[n, P] are the tokens they stand for.

        Tokens are compared, so that no digest, however made, can pass another prompt's pages for this one's.
        """
        known = map(self.entries.get, itertools.islice(keys, len(rows)))
        chain: list[Entry] = list(itertools.takewhile(operator.truth, known))  # type: ignore[arg-type]
        if not chain or chain[0].family.fingerprint != fingerprint:
            return []
        same = (self.tokens[[entry.page for entry in chain]] == rows[: len(chain)]).all(axis=1)
        return chain if same.all() else chain[: int(np.argmin(same))]

    def add(self, key: bytes, page: int, parent: Entry | None, family: Family) -> Entry:
        """Returns the new entry. Its page's tokens are to be written by `set_tokens`."""
        entry = Entry(key, page, parent, 0 if parent is None else parent.depth + 1, family)
        self.entries[key] = entry
        self.of_page[page] += (entry,)
        family.size += 1
        if family.size == 1:
            self.families[family.fingerprint] = family
        if parent is not None:
            self.children[parent.page] += 1
        return entry

    def remove(self, entry: Entry) -> None:
        """Takes an entry out; what is below it is the caller's to have removed."""
        del self.entries[entry.key]
        self.of_page[entry.page] = tuple(other for other in self.of_page[entry.page] if other is not entry)
        entry.family.size -= 1
        if entry.family.size == 0:
            del self.families[entry.family.fingerprint]
        if entry.parent is not None:
            self.children[entry.parent.page] -= 1

    def set_tokens(self, pages: list[int], rows: np.ndarray) -> None:
        """Stores rows i32[n, P], the tokens of n pages."""
        self.tokens[pages] = rows

    def family(self, fingerprint: Fingerprint) -> Family:
        """Returns the family of a fingerprint, a new and empty one if it has no entry yet."""
        return self.families.get(fingerprint) or Family(fingerprint)
