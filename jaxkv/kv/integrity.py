"""Whether an `Ownership` contradicts itself: what any test may ask after any operation.

Every page that a table names is counted, owned entries are a prefix, and a page is shared only as a fork shares it.
"""

from __future__ import annotations

import numpy as np

from jaxkv.kv.pages import Ownership, num_pages_needed


class IntegrityError(AssertionError):
    """An Ownership contradicts itself: a bug in whoever made it, never a user's mistake."""


def check_integrity(own: Ownership) -> None:
    """Raises IntegrityError, naming slot, page and numbers, unless own (numpy or concrete jax) is consistent."""
    table, lengths, refcounts = (np.asarray(x) for x in (own.page_table, own.lengths, own.refcounts))
    for name, array, ndim in (("page_table", table, 2), ("lengths", lengths, 1), ("refcounts", refcounts, 1)):
        if array.dtype != np.int32 or array.ndim != ndim:
            raise IntegrityError(f"{name} must be int32 with {ndim} axes, it is {array.dtype}{list(array.shape)}")
    if lengths.shape[0] != table.shape[0]:
        raise IntegrityError(f"{table.shape[0]} rows in the page_table but {lengths.shape[0]} lengths")
    held = num_pages_needed(lengths.astype(np.int64), own.page_size)
    _check_rows(table, lengths, refcounts.shape[0], held)
    _check_refcounts(table, lengths, refcounts, held)


def _check_rows(table: np.ndarray, lengths: np.ndarray, num_pages: int, held: np.ndarray) -> None:
    for b, j in np.argwhere((table < 0) | (table >= num_pages)):
        raise IntegrityError(f"slot {b} entry {j}: page {table[b, j]} is outside [0, {num_pages})")
    owned = np.count_nonzero(table, axis=1)
    for b, j in np.argwhere((table != 0) != (np.arange(table.shape[1]) < owned[:, None])):
        raise IntegrityError(f"slot {b} entry {j} is page {table[b, j]}, but its {owned[b]} pages must be a prefix")
    for b in np.flatnonzero((lengths < 0) | (owned < held)):
        raise IntegrityError(f"slot {b}: {lengths[b]} tokens need {held[b]} pages, it owns {owned[b]}")


def _check_refcounts(table: np.ndarray, lengths: np.ndarray, refcounts: np.ndarray, held: np.ndarray) -> None:
    """A shared page comes from a fork: the same logical page for each holder, filled, and never one reserved ahead."""
    slots, columns = np.nonzero(table)
    pages = table[slots, columns]
    recount = np.bincount(pages, minlength=refcounts.size)
    if refcounts[0] != 0:
        raise IntegrityError(f"page 0 is the null page but refcounts[0] = {refcounts[0]}")
    for page in np.flatnonzero(recount != refcounts):
        raise IntegrityError(
            f"page {page}: refcount {refcounts[page]}, but {recount[page]} entries of slots {slots[pages == page]}"
        )
    column_of = np.zeros(refcounts.size, np.int64)
    column_of[pages] = columns
    for i in np.flatnonzero(columns != column_of[pages]):
        page, b, j = pages[i], slots[i], columns[i]
        raise IntegrityError(f"page {page} is entry {j} of slot {b} and entry {column_of[page]} of this or another")
    for i in np.flatnonzero((recount[pages] > 1) & (columns >= held[slots])):
        page, b, j = pages[i], slots[i], columns[i]
        raise IntegrityError(
            f"page {page} has {recount[page]} holders but slot {b} only reserved it: entry {j}, {lengths[b]} tokens"
        )
