"""Which pages of a prompt the cache knows: the answer, and whether it still holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxkv.serving.eviction import Tenant
from jaxkv.serving.fingerprint import Fingerprint, complete_keys, iter_page_keys, next_key
from jaxkv.serving.page_states import PageStates
from jaxkv.serving.prefix_index import Entry


class StaleMatch(RuntimeError):
    """A match names pages that have left the cache, or are on hold, since it was made: match again."""


@dataclasses.dataclass(frozen=True)
class Match:
    """The longest prefix of a prompt that the cache holds. Good until one of its pages leaves or is held, or any drop."""

    fingerprint: Fingerprint  # whose prompt it is
    pages: tuple[int, ...]
    num_tokens: int  # in these pages; always less than the prompt's
    keys: tuple[bytes, ...]  # of every full page of the prompt, under `fingerprint`: for tiers, `announce` and `publish`
    is_public: bool  # the pages are the operator's
    entry: Entry | None = dataclasses.field(default=None, repr=False, compare=False)  # of the last page
    generation: int = dataclasses.field(default=0, repr=False, compare=False)  # drops before it was made


def find_match(
    states: PageStates,
    root: Callable[[Fingerprint], bytes],
    fingerprint: Fingerprint,
    tokens: np.ndarray,
    public: Fingerprint | None,
    keys: Sequence[bytes],
    generation: int,
) -> Match:
    """Returns the longer of the chains under the two fingerprints (`PageCache.match`). root: `Fingerprint.root` under the server's secret."""
    page_size = fingerprint.page_size
    limit = max(len(tokens) - 1, 0) // page_size
    rows = tokens[: limit * page_size].reshape(limit, page_size)
    # A request that keeps out of the cache has no public fingerprint either; nobody comes again for its digests.
    digest = states.index.next_key if public is not None else next_key
    own_keys = complete_keys(root(fingerprint), tokens, page_size, keys, digest)
    chain, is_public = _find(states, fingerprint, own_keys, rows), False
    if public is not None:
        _check_public(fingerprint, public)
        if len(chain) < limit and public in states.index.families:
            public_keys = iter_page_keys(root(public), tokens, page_size, states.index.next_key)
            public_chain = _find(states, public, public_keys, rows)
            if len(public_chain) > len(chain):
                chain, is_public = public_chain, True
    pages = tuple(entry.page for entry in chain)
    entry = chain[-1] if chain else None
    return Match(fingerprint, pages, len(pages) * page_size, tuple(own_keys), is_public, entry, generation)


def _find(states: PageStates, fingerprint: Fingerprint, keys: Iterable[bytes], rows: np.ndarray) -> list[Entry]:
    chain = states.index.find(fingerprint, keys, rows)
    return chain[: states.first_held([entry.page for entry in chain])] if states.held else chain


def check_match(states: PageStates, match: Match, tenant: Tenant, generation: int) -> None:
    """StaleMatch unless each page of the match is what it was, and no fingerprint lost its right to be found since."""
    if match.fingerprint.tenant != tenant:
        raise ValueError(f"the match is of tenant {match.fingerprint.tenant!r}, the sequence of {tenant!r}")
    if match.generation != generation:
        raise StaleMatch("entries were dropped since this match was made: match again, under what holds now")
    # An entry in the index has all of its ancestors there, the same as when it was found: they leave after it.
    if match.entry is not None and match.entry not in states.index:
        raise StaleMatch(f"page {match.pages[-1]} of the match was evicted or dropped since: match again")
    if (place := states.first_held(match.pages)) < len(match.pages):
        raise StaleMatch(f"page {match.pages[place]} of the match was put on hold since: match again")


def _check_public(fingerprint: Fingerprint, public: Fingerprint) -> None:
    """Whoever may read differs; what the page holds must not."""
    if public.tenant is not None:
        raise ValueError(f"{public.tenant=} must be None: only the operator publishes for all")
    for name, same in fingerprint.differences(public).items():
        if same == "different" and name not in ("tenant", "acl_epoch"):
            raise ValueError(f"public and fingerprint differ in {name}: their pages do not hold the same")
