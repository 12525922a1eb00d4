"""Whether a `PageCache` contradicts itself: what any test may ask after any operation. Recounts everything, O(C)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from jaxkv.kv.integrity import IntegrityError
from jaxkv.serving.fingerprint import page_keys
from jaxkv.serving.page_states import PageStates
from jaxkv.serving.prefix_index import Entry, PrefixIndex
from jaxkv.serving.sequence_pages import SequencePages


def check_page_cache(
    states: PageStates, sequences: Mapping[int, SequencePages], secret: bytes, announced: Mapping[bytes, int]
) -> None:
    """Raises IntegrityError, naming the page, unless counts, states, index and sequences agree."""
    _check_references(states, sequences)
    _check_states(states)
    _check_tenants(states)
    _check_index(states.index, secret)
    _check_closure(states)
    _check_sequences(states, sequences, announced)


def _require(good: bool, message: str) -> None:
    if not good:
        raise IntegrityError(message)


def _check_references(states: PageStates, sequences: Mapping[int, SequencePages]) -> None:
    live: Counter[int] = Counter()
    holds: Counter[int] = Counter()
    for sequence in sequences.values():
        split = len(sequence.pages) if sequence.held_until_s is None else sequence.found
        live.update(sequence.pages[:split])
        live.update(list(sequence.pins))
        holds.update(sequence.pages[split:])
    for page in range(len(states.live)):
        counted, kept = (live[page], holds[page]), (states.live[page], states.holds[page])
        _require(counted == kept, f"page {page}: {kept} (live, hold) references, but sequences have {counted}")
    _require(live[0] == holds[0] == 0, "a sequence points at the null page")


def _check_states(states: PageStates) -> None:
    """Each page but the null page is in one state, and the counts say how many are."""
    pages = range(1, len(states.live))
    active = {page for page in pages if states.live[page]}
    held = {page for page in pages if states.is_held(page)}
    free = set(states.free)
    reusable = {page for page in pages if states.is_idle(page) and states.index.of_page[page]}
    _require(len(free) == len(states.free), "a page is in the free list twice")
    counted, kept = (len(active), len(held), len(reusable)), (states.active, states.held, states.reusable)
    _require(counted == kept, f"(active, held, reusable) pages are {counted}, but counted as {kept}")
    together = len(free) + len(active) + len(held) + len(reusable)
    _require(free | active | held | reusable == set(pages), "some page is in no state, or the null page is in one")
    _require(together == len(pages), f"{together} pages in all states, but there are {len(pages)}: some are in two")
    for page in pages:
        leaf = page in reusable and not states.index.children[page]
        _require(states.order.is_queued(page) == leaf, f"page {page}: {leaf=}, but queued for eviction is {not leaf}")


def _check_tenants(states: PageStates) -> None:
    free = set(states.free)
    pages = Counter(states.tenant[page] for page in range(1, len(states.live)) if page not in free)
    _require(pages == states.tenant_pages, f"tenants have {dict(pages)} pages, but counted are {states.tenant_pages}")
    over = {tenant for tenant, quota in states.quotas.items() if pages[tenant] > quota}
    _require(over == set(states.over_quota), f"over quota are {over}, not {list(states.over_quota)}")


def _check_index(index: PrefixIndex, secret: bytes) -> None:
    children: Counter[int] = Counter()
    of_page: dict[int, list[Entry]] = {}
    sizes: Counter[int] = Counter()
    for key, entry in index.entries.items():
        _require(key == entry.key, f"page {entry.page}: its entry stands under another key")
        of_page.setdefault(entry.page, []).append(entry)
        sizes[id(entry.family)] += 1
        above = entry.parent
        if above is None:
            _require(entry.depth == 0, f"page {entry.page}: no parent at depth {entry.depth}")
            above_key = entry.family.fingerprint.root(secret)
        else:
            children[above.page] += 1
            above_key = above.key
            _require(above in index, f"page {entry.page} is published, its ancestor page {above.page} is not")
            right = above.depth + 1 == entry.depth and above.family is entry.family
            _require(right, f"page {entry.page}: depth or fingerprint do not follow from its parent's")
        named = page_keys(above_key, index.tokens[entry.page], index.tokens.shape[1])
        _require(named == [key], f"page {entry.page}: its key does not name its tokens")
    for page in range(len(index.of_page)):
        _require(set(index.of_page[page]) == set(of_page.get(page, ())), f"page {page}: its entries are not the index's")
        _require(index.children[page] == children[page], f"page {page}: {children[page]} children, not {index.children[page]}")
    for fingerprint, family in index.families.items():
        right = family.fingerprint == fingerprint and family.size == sizes.pop(id(family), 0)
        _require(right, f"{fingerprint}: the number of its entries is not {family.size}")
    _require(not sizes, "an entry's fingerprint is not known")


def _check_closure(states: PageStates) -> None:
    """Whoever points at a page points at what is above it; and nobody's page is found under another tenant."""
    for entry in states.index.entries.values():
        page, above = entry.page, entry.parent
        if above is not None and not states.is_idle(page):
            _require(not states.is_idle(above.page), f"page {page} is in use, page {above.page} above it could be evicted")
        tenant = states.tenant[page]
        _require(tenant in (None, entry.family.fingerprint.tenant), f"page {page} of {tenant!r} is found by another tenant")


def _check_sequences(states: PageStates, sequences: Mapping[int, SequencePages], announced: Mapping[bytes, int]) -> None:
    """A page that may still be written has one holder and no entry."""
    for owner, sequence in sequences.items():
        _require(len(set(sequence.pages)) == len(sequence.pages), f"{owner=} has a page twice")
        for page in sequence.pages[sequence.sealed :]:
            alone = states.live[page] + states.holds[page] == 1 and not states.index.of_page[page]
            _require(alone, f"page {page} may still be written by {owner=}, but others can read it")
        mine = {key for key, other in announced.items() if other == owner}
        _require(mine == set(sequence.announced), f"{owner=}: what it announced is not what is known of it")
    _require(set(announced.values()) <= set(sequences), "someone without pages has announced some")
