"""One sequence's pages, and how they enter the index.

    sequence    [ 7 | 9 | 4 | 8 ]           page 7 found in the index; 9, 4, 8 its own
    index        7 -- 2 -- 4                another sequence published page 2 with the tokens of page 9 first

Page 9 then stays private. Page 4 can be published below page 2, and the sequence points at page 2 as well from then on
(a pin), so that the chain above its entries cannot leave before them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv.serving.eviction import Tenant
from jaxkv.serving.fingerprint import Fingerprint, as_tokens, complete_keys
from jaxkv.serving.page_states import PageStates
from jaxkv.serving.prefix_index import Entry


@dataclasses.dataclass(slots=True)
class SequencePages:
    """What one sequence points at."""

    tenant: Tenant
    pages: list[int]  # in logical order
    found: int  # leading pages that came from the index: a hold is not about them
    sealed: int  # leading pages that are full: others may point at them, nobody writes them
    fingerprint: Fingerprint | None = None  # under which it publishes; known from its match or its first publish
    entry: Entry | None = None  # the deepest one of its chain that publish has seen
    duplicates: list[int] = dataclasses.field(default_factory=list)  # others' pages in that chain, not pinned yet
    pins: dict[int, None] = dataclasses.field(default_factory=dict)
    announced: dict[bytes, int] = dataclasses.field(default_factory=dict)  # the logical page of each key
    retired: bool = False  # its fingerprint was dropped while it ran, or its pages are not sound: it publishes nothing
    held_until_s: float | None = None  # None: it runs

    def check_publisher(self, owner: int, fingerprint: Fingerprint) -> None:
        """Raises ValueError unless this sequence may publish under a fingerprint."""
        if fingerprint.tenant != self.tenant:
            raise ValueError(f"{owner=} runs for tenant {self.tenant!r} and cannot publish for {fingerprint.tenant!r}")
        if self.fingerprint is not None and fingerprint != self.fingerprint:
            names = [n for n, same in fingerprint.differences(self.fingerprint).items() if same == "different"]
            raise ValueError(f"{owner=} was matched under another fingerprint, which differs in {', '.join(names)}")


def pages_of_tokens(tokens: Sequence[int] | np.ndarray, page_size: int) -> np.ndarray:
    """Returns i32[n, P]: the tokens of n full pages; what fills no page is left out."""
    tokens = as_tokens(tokens)
    num_full = len(tokens) // page_size
    return tokens[: num_full * page_size].reshape(num_full, page_size)


def publish(
    states: PageStates,
    sequence: SequencePages,
    fingerprint: Fingerprint,
    rows: np.ndarray,  # i32[n, P] tokens of its full pages
    root: bytes,
    keys: Sequence[bytes] | None,
    spare_pages: int | None,
) -> int:
    """Enters a sequence's full pages into the index; returns how many entries that adds. O(pages new since the last call)."""
    if sequence.entry is not None and sequence.entry not in states.index:
        sequence.entry, sequence.duplicates = None, []  # evicted or dropped: begin again
    start = 0 if sequence.entry is None else sequence.entry.depth + 1
    new_keys = _new_keys(states, sequence, rows, root, keys or ())
    sequence.sealed = max(sequence.sealed, len(rows))
    if sequence.retired:
        return 0
    sequence.fingerprint = fingerprint
    added = _enter(states, sequence, fingerprint, start, new_keys, spare_pages)
    if added:
        states.index.set_tokens([sequence.pages[i] for i in added], rows[added])
    return len(added)


def _new_keys(states: PageStates, sequence: SequencePages, rows: np.ndarray, root: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """Returns the keys below `sequence.entry`: those given, checked where they begin, then computed ones."""
    index, last, start = states.index, root, 0
    if sequence.entry is not None:
        last, start = sequence.entry.key, sequence.entry.depth + 1
        if len(rows) >= start and not np.array_equal(index.tokens[sequence.entry.page], rows[start - 1]):
            raise ValueError(f"page {start - 1} was published with other tokens: give the whole sequence, from its first token")
    known = [i for i in range(start, len(rows)) if index.of_page[sequence.pages[i]]]
    pages = [sequence.pages[i] for i in known]
    wrong = (index.tokens[pages] != rows[known]).any(axis=1)
    if wrong.any():
        raise ValueError(f"page {pages[int(np.argmax(wrong))]} is published with other tokens than these")
    return complete_keys(last, rows[start:].reshape(-1), rows.shape[1], keys[start:], index.next_key)


def _enter(
    states: PageStates, sequence: SequencePages, fingerprint: Fingerprint, start: int, keys: list[bytes], spare_pages: int | None
) -> list[int]:
    """Adds an entry for each key from page `start` on that the index lacks; returns which pages got one."""
    index, now_s = states.index, states.clock()
    family, parent, added = index.family(fingerprint), sequence.entry, []
    for i, key in enumerate(keys, start):
        page, entry = sequence.pages[i], index.entries.get(key)
        if entry is None:
            known = bool(index.of_page[page])  # a public page, about to be known under this fingerprint too
            if (known or states.is_shared(page)) and (sequence.duplicates or sequence.pins):
                # Others point at this page and at the pages above it in this sequence, but not at the others' pages
                # that would be above it in the index.
                break
            if sequence.duplicates and not _pin(states, sequence, spare_pages):
                break
            if not known:
                states.order.published(page, now_s)
            entry = index.add(key, page, parent, family)
            added.append(i)
        elif entry.page != page:
            sequence.duplicates.append(entry.page)
        parent = entry
    sequence.entry = parent
    return added


def _pin(states: PageStates, sequence: SequencePages, spare_pages: int | None) -> bool:
    """Points at the others' pages in the chain, since an entry is about to hang below them; False: that took too many."""
    new = [page for page in sequence.duplicates if page not in sequence.pins]
    if spare_pages is not None and sum(map(states.is_idle, new)) > spare_pages:
        return False
    states.reference(new)
    sequence.pins.update(dict.fromkeys(new))
    sequence.duplicates.clear()
    return True
