"""Which pages of a prompt the cache knows: the answer, and whether it still holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxkv.serving.eviction import Tenant
from jaxkv.serving.fingerprint import Fingerprint, complete_keys, iter_page_keys
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
    secret: bytes,
    fingerprint: Fingerprint,
    tokens: np.ndarray,
    public: Fingerprint | None,
    keys: Sequence[bytes],
    generation: int,
) -> Match:
    """Returns the longer of the chains under the two fingerprints (`PageCache.match`)."""
    page_size = fingerprint.page_size
    limit = max(len(tokens) - 1, 0) // page_size
    rows = tokens[: limit * page_size].reshape(limit, page_size)
    own_keys = complete_keys(fingerprint.root(secret), tokens, page_size, keys)
    chain, is_public = _find(states, fingerprint, own_keys, rows), False
    if public is not None:
        _check_public(fingerprint, public)
        if len(chain) < limit:
            public_chain = _find(states, public, iter_page_keys(public.root(secret), tokens, page_size), rows)
            if len(public_chain) > len(chain):
                chain, is_public = public_chain, True
    pages = tuple(entry.page for entry in chain)
    entry = chain[-1] if chain else None
    return Match(fingerprint, pages, len(pages) * page_size, tuple(own_keys), is_public, entry, generation)


def _find(states: PageStates, fingerprint: Fingerprint, keys: Iterable[bytes], rows: np.ndarray) -> list[Entry]:
    chain = states.index.find(fingerprint, keys, rows)
    if states.held:
        held = (i for i, entry in enumerate(chain) if states.is_held(entry.page))
        chain = chain[: next(held, len(chain))]
    return chain


def check_match(states: PageStates, match: Match, tenant: Tenant, generation: int) -> None:
    """StaleMatch unless each page of the match is what it was, and no fingerprint lost its right to be found since."""
    if match.fingerprint.tenant != tenant:
        raise ValueError(f"the match is of tenant {match.fingerprint.tenant!r}, the sequence of {tenant!r}")
    if match.generation != generation:
        raise StaleMatch("entries were dropped since this match was made: match again, under what holds now")
    entry = match.entry if match.entry is not None and match.entry in states.index else None
    for page in reversed(match.pages):
        if entry is None or entry.page != page or states.is_held(page):
            raise StaleMatch(f"page {page} of the match was evicted, dropped or put on hold since: match again")
        entry = entry.parent


def _check_public(fingerprint: Fingerprint, public: Fingerprint) -> None:
    """Whoever may read differs; what the page holds must not."""
    if public.tenant is not None:
        raise ValueError(f"{public.tenant=} must be None: only the operator publishes for all")
    for name, same in fingerprint.differences(public).items():
        if same == "different" and name not in ("tenant", "acl_epoch"):
            raise ValueError(f"public and fingerprint differ in {name}: their pages do not hold the same")
