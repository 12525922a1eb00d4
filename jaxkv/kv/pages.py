"""Page ownership: which slot holds which page of the pool, as pure functions `(own, x) -> (own, y)`.

The same functions run on numpy arrays (the engine decides on the host; results are read-only) and on jax arrays
(inside a jitted loop; static shapes): if any array given is a jax array the jax path runs. They differ in one way:
numpy raises ValueError for a call that breaks the rules; traced code cannot raise, so each function says what it does
instead. Shapes and dtypes are checked on both.

Axes: B slots, M pages a slot, P tokens a page, C pages in the pool. Everything is int32 and counts pages or tokens,
never bytes. Page 0 is the null page: never handed out, refcounts[0] stays 0, and a table entry 0 means "no page".

    slot 0 (length 6, P = 4)   [ 3 | 5 | 0 ]      page 3 full, page 5 holds 2 tokens
    fork 0 -> 1                [ 3 | 5 | 0 ]      both slots point at 3 and 5, refcounts[3] == refcounts[5] == 2
    append 1 token to slot 1   [ 3 | 1 | 0 ]      page 5 is shared and about to be written: slot 1 gets page 1,
                                                  copies = (src 5, dst 1); slot 0 keeps 5 alone
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray | jax.Array
Rows = Array | Sequence[int] | int

_MAX_INT32 = 2**31 - 1

# The free search counts free pages in groups of this many, then looks inside one group a slot. One search on CPU, B=32,
# groups of 32 | 64 | 128 | 256: 15 | 23 | 73 | 117 us at C=2048, 308 | 269 | 272 | 304 us at C=131072 (2 shared cores;
# jnp.nonzero there: 2700 us).
_GROUP_PAGES = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Ownership:
    """Who owns which page. Owned entries are a prefix of a row, which may reach past the length (reserved ahead)."""

    page_table: Array  # i32[B, M] pool page of slot b's logical page j; 0 = none
    lengths: Array  # i32[B] tokens stored in slot b
    refcounts: Array  # i32[C] slots that point at a page; 0 = free
    page_size: int = dataclasses.field(metadata={"static": True})  # P


class PageCopies(NamedTuple):
    """The page to copy for each slot before it writes: `pool.at[dst].set(pool[src], mode="drop")`, one scatter.

    No copy is (0, C), out of range and so dropped. (In a flat pool of L*C rows, `l*C + dst` names the next layer's null
    page instead, and src the null page of layer l: junk copied onto junk.) No dst is ever the src of another slot.
    """

    src: Array  # i32[B]
    dst: Array  # i32[B]


def empty(num_slots: int, pages_per_slot: int, num_pages: int, page_size: int) -> Ownership:
    """Returns a numpy Ownership of empty slots, all pages free. One of the `num_pages` is the null page."""
    for name, value, least in (
        ("num_slots", num_slots, 1),
        ("pages_per_slot", pages_per_slot, 1),
        ("num_pages", num_pages, 2),
        ("page_size", page_size, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}" + " (page 0 is never used)" * (least == 2))
    if pages_per_slot * page_size > _MAX_INT32 or num_pages >= _MAX_INT32:
        raise ValueError(f"{pages_per_slot=} * {page_size=} tokens a slot and {num_pages=} must stay below 2**31 (int32 positions)")
    shapes = ((num_slots, pages_per_slot), num_slots, num_pages)
    table, lengths, refcounts = (_frozen(np.zeros(shape, np.int32)) for shape in shapes)
    return Ownership(table, lengths, refcounts, page_size)


def num_pages_needed(tokens: Any, page_size: int) -> Any:
    """Returns ceil(tokens / page_size), of the kind that tokens is: int, numpy or jax."""
    return -(-tokens // page_size)


def pages_in_use(own: Ownership) -> Array | int:
    """Returns how many pages at least one slot points at."""
    return _count(own.refcounts > 0)


def free_pages(own: Ownership) -> Array | int:
    """Returns how many pages can still be handed out (the null page cannot)."""
    return own.refcounts.shape[0] - 1 - pages_in_use(own)


def reserve(own: Ownership, tokens: Array) -> tuple[Ownership, PageCopies, Array | int]:
    """Returns (own, copies, shortfall): slot b can now write tokens[b] more tokens; lengths stay.

    A slot with tokens[b] == 0 keeps everything. The lowest free pages are taken in slot order. A slot whose next token
    falls into a page that others hold too (after a fork, or a truncate into a shared page) gets its own page: the
    caller must apply `copies` before it writes. If all k holders write in one call, the last keeps the page.

    shortfall is the number of pages missing (int on numpy, i32[] on jax). If it is not 0 the returned ownership is the
    input (on numpy the same object) and there are no copies. Rows that would pass M*P tokens, and negative tokens:
    ValueError on numpy; on jax the pages past M count into the shortfall (saturating) and a negative count is 0.
    """
    xp = _namespace(own, tokens)
    own = _converted(xp, own)
    return _reserve(xp, own, _per_slot(xp, own, tokens, "tokens"))


def append(own: Ownership, tokens: Array) -> tuple[Ownership, PageCopies, Array | int]:
    """Returns (own, copies, shortfall): as `reserve`, and lengths grow by tokens unless pages are missing.

    Cheap when no slot needs a page: O(B*B) small compares, no pass over the table or the pool.
    """
    xp = _namespace(own, tokens)
    own = _converted(xp, own)
    tokens = _per_slot(xp, own, tokens, "tokens")
    own, copies, shortfall = _reserve(xp, own, tokens)
    if xp is np and (shortfall or not tokens.any()):
        return own, copies, shortfall
    lengths = own.lengths + xp.where(shortfall == 0, tokens, 0)
    return dataclasses.replace(own, lengths=_frozen(lengths)), copies, shortfall


def fork(own: Ownership, src: Rows, dst: Rows) -> Ownership:
    """Returns own where slot dst holds the tokens of slot src, on the same pages (pages reserved ahead stay with src).

    src and dst are ints or equally long sequences, applied at once. A slot out of range, a dst that is not empty, named
    twice or also a src: ValueError on numpy; on jax that pair is skipped.
    """
    xp = _namespace(own, src, dst)
    own = _converted(xp, own)
    src, dst = _slots(xp, src, "src"), _slots(xp, dst, "dst")
    if src.ndim != 1 or src.shape != dst.shape:
        raise ValueError(f"{src.shape=} and {dst.shape=} must be one equal length")
    num_slots, pages_per_slot = own.page_table.shape
    in_range = (src >= 0) & (src < num_slots) & (dst >= 0) & (dst < num_slots)
    source, target = (xp.where(in_range, x, 0).astype(xp.int32) for x in (src, dst))
    vacant = (own.lengths[target] == 0) & (own.page_table[target, 0] == 0)
    twice = xp.any(xp.tril(dst[:, None] == dst, -1), axis=1)
    also_src = xp.any(dst[:, None] == src, axis=1)
    valid = in_range & vacant & ~twice & ~also_src
    if xp is np and not valid.all():
        i = int(np.argmin(valid))
        raise ValueError(
            f"cannot fork slot {src[i]} to slot {dst[i]}: both must be in [0, {num_slots}); dst must be named once, "
            f"be no src, and be empty (it holds {own.lengths[target[i]]} tokens, "
            f"{_count(own.page_table[target[i]])} pages): release it first"
        )
    held = num_pages_needed(own.lengths[source], own.page_size)
    shared = (xp.arange(pages_per_slot, dtype=xp.int32) < held[:, None]) & valid[:, None]
    pages = xp.where(shared, own.page_table[source], 0)
    to = xp.where(valid, target, num_slots)
    return Ownership(
        _frozen(_set(own.page_table, to, pages)),
        _frozen(_set(own.lengths, to, own.lengths[source])),
        _frozen(_add(own.refcounts, pages, shared, 1)),
        own.page_size,
    )


def release(own: Ownership, rows: Rows) -> Ownership:
    """Returns own with these slots empty; a page is free once nobody points at it. Releasing an empty slot is a no-op.

    rows is bool[B] or slot numbers. Out of range: ValueError on numpy, ignored on jax.
    """
    xp = _namespace(own, rows)
    own = _converted(xp, own)
    num_slots, pages_per_slot = own.page_table.shape
    mask = xp.asarray(rows)
    if mask.dtype != bool:
        slots = _slots(xp, rows, "rows")
        valid = (slots >= 0) & (slots < num_slots)
        if xp is np and not valid.all():
            raise ValueError(f"rows={slots.tolist()} must be in [0, {num_slots})")
        mask = _set(xp.zeros(num_slots, bool), xp.where(valid, slots, num_slots), True)
    elif mask.shape != (num_slots,):
        raise ValueError(f"rows has shape {mask.shape}, but a mask must be ({num_slots},); slot numbers are integers")
    return _shrink(xp, own, xp.where(mask, 0, pages_per_slot), xp.where(mask, 0, own.lengths))


def truncate(own: Ownership, lengths: Array) -> Ownership:
    """Returns own with slot b cut to lengths[b] tokens and exactly ceil(lengths[b] / P) pages.

    Pages reserved ahead go too, also for slots that keep their length. A new length outside [0, old]: ValueError on
    numpy, clamped on jax.
    """
    xp = _namespace(own, lengths)
    own, lengths = _converted(xp, own), _per_slot(xp, own, lengths, "lengths")
    if xp is np and (bad := lengths > own.lengths).any():
        b = int(np.argmax(bad))
        raise ValueError(f"slot {b}: cannot truncate {own.lengths[b]} tokens to {lengths[b]}; use append to grow")
    lengths = xp.minimum(lengths, own.lengths)
    return _shrink(xp, own, num_pages_needed(lengths, own.page_size), lengths)


class _Plan(NamedTuple):
    """What each slot wants, i32[B] or bool[B], before anyone looked for free pages."""

    target: Array  # pages the slot must own; 0 = it writes nothing
    short: Array  # it owns fewer
    copying: Array  # it will write into a page that is not its own
    column: Array  # logical page of its next token (clipped to M - 1)
    page: Array  # the pool page there
    excess: Array  # i32[] pages past M, over all slots: cannot be had


def _reserve(xp, own: Ownership, tokens: Array) -> tuple[Ownership, PageCopies, Array | int]:
    rows = xp.arange(own.lengths.shape[0], dtype=xp.int32)
    want = _plan(xp, own, tokens)
    table, refcounts, shortfall = (_grow_numpy if xp is np else _grow_jax)(own, want)
    if table is not own.page_table:
        own = dataclasses.replace(own, page_table=_frozen(table), refcounts=_frozen(refcounts))
    copying = want.copying & (shortfall == 0)
    src = xp.where(copying, want.page, xp.int32(0))
    dst = xp.where(copying, table[rows, want.column], xp.int32(refcounts.shape[0]))
    return own, PageCopies(_frozen(src), _frozen(dst)), shortfall


def _plan(xp, own: Ownership, tokens: Array) -> _Plan:
    """Returns what reserving `tokens` takes, in O(B + B*B): no pass over the table or the pool."""
    (num_slots, pages_per_slot), size = own.page_table.shape, own.page_size
    rows = xp.arange(num_slots, dtype=xp.int32)
    room = xp.int32(pages_per_slot * size) - own.lengths
    if xp is np and (bad := tokens > room).any():
        b = int(np.argmax(bad))
        raise ValueError(
            f"slot {b} holds {own.lengths[b]} tokens and cannot take {tokens[b]} more: {pages_per_slot=} of {size} "
            f"tokens hold {pages_per_slot * size}; release or truncate it, or build with more pages_per_slot"
        )
    writes = tokens > 0
    # tokens - room cannot overflow where lengths + tokens can; each row's part is capped so that the sum cannot either.
    excess = xp.minimum(num_pages_needed(xp.maximum(tokens - room, 0), size), xp.int32(2**30 // num_slots))
    target = xp.where(writes, num_pages_needed(own.lengths + xp.minimum(tokens, room), size), 0)
    # Owned pages are a prefix, so the last page needed is there only if all are.
    short = writes & (own.page_table[rows, xp.maximum(target - 1, 0)] == 0)
    column = xp.minimum(own.lengths // size, pages_per_slot - 1)
    page = own.page_table[rows, column]
    # Only a partly filled page can be shared here: pages past the length are never shared.
    copying = writes & (own.refcounts[page] > 1)
    if xp is jnp or copying.any():
        lower_writer = (rows[:, None] > rows) & (page[:, None] == page) & writes  # it leaves the page to the others
        copying &= own.refcounts[page] - xp.sum(lower_writer, axis=1, dtype=xp.int32) > 1
    return _Plan(target, short, copying, column, page, xp.sum(excess, dtype=xp.int32))


def _pages_to_take(xp, own: Ownership, want: _Plan) -> tuple[Array, Array, Array]:
    """Returns i32[B] x 3: pages slot b takes (a copy's page first), pages lower slots take, pages slot b owns."""
    owned = xp.sum(own.page_table != 0, axis=1, dtype=xp.int32)
    take = xp.maximum(want.target - owned, 0) + want.copying.astype(xp.int32)
    return take, xp.cumsum(take, dtype=xp.int32) - take, owned


def _grow_numpy(own: Ownership, want: _Plan) -> tuple[Array, Array, int]:
    """Returns (page_table, refcounts, shortfall); the arrays of own themselves where nothing changes."""
    if not (want.short | want.copying).any():
        return own.page_table, own.refcounts, 0
    take, first, owned = _pages_to_take(np, own, want)
    free = np.flatnonzero(own.refcounts == 0)[1:]  # [0] is the null page
    total = int(take.sum())
    if total > free.size:
        return own.page_table, own.refcounts, total - free.size
    slot = np.repeat(np.arange(take.size), take)
    nth = np.arange(total) - first[slot]
    column = np.where(want.copying[slot] & (nth == 0), want.column[slot], owned[slot] + nth - want.copying[slot])
    table, refcounts = np.array(own.page_table), np.array(own.refcounts)
    table[slot, column] = free[:total]
    refcounts[free[:total]] = 1
    np.subtract.at(refcounts, want.page[want.copying], 1)
    return table, refcounts, 0


def _grow_jax(own: Ownership, want: _Plan) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (page_table, refcounts, shortfall). The pool is searched only if some slot wants a page."""
    num_slots, num_pages = own.page_table.shape[0], own.refcounts.shape[0]
    rows = jnp.arange(num_slots, dtype=jnp.int32)

    def search(table, refcounts):
        take, first, owned = _pages_to_take(jnp, own, want)
        free = (refcounts == 0) & (jnp.arange(num_pages, dtype=jnp.int32) > 0)
        groups = jnp.pad(free, (0, -num_pages % _GROUP_PAGES)).reshape(-1, _GROUP_PAGES)
        ends = jnp.cumsum(jnp.sum(groups, axis=1, dtype=jnp.int32), dtype=jnp.int32)
        missing = jnp.maximum(jnp.sum(take, dtype=jnp.int32) - ends[-1], 0) + want.excess
        take = jnp.where(missing == 0, take, 0)
        copying = want.copying & (missing == 0)

        def give(nth, carry):  # the nth page of every slot that takes so many: one turn in a decode loop
            table, refcounts = carry
            takes = nth < take
            page = _nth_free(groups, ends, first + nth)
            column = jnp.where(copying & (nth == 0), want.column, owned + nth - copying.astype(jnp.int32))
            table = table.at[jnp.where(takes, rows, num_slots), column].set(page, mode="drop")
            return table, refcounts.at[jnp.where(takes, page, num_pages)].set(1, mode="drop")

        table, refcounts = jax.lax.fori_loop(0, jnp.max(take), give, (table, refcounts))
        return table, refcounts.at[jnp.where(copying, want.page, num_pages)].add(-1, mode="drop"), missing

    def keep(table, refcounts):
        return table, refcounts, want.excess

    return jax.lax.cond(jnp.any(want.short | want.copying), search, keep, own.page_table, own.refcounts)


def _nth_free(groups: jax.Array, ends: jax.Array, nth: jax.Array) -> jax.Array:
    """Returns the page id of the n-th free page (from 0) for each n in nth; meaningless where n >= ends[-1].

    groups is bool[C / G, G], true where a page is free; ends[g] counts the free pages up to and with group g.
    """
    group = jnp.searchsorted(ends, nth, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, ends.size - 1)
    inside = jnp.cumsum(groups[group], axis=1, dtype=jnp.int32)  # [B, G]
    rank = nth - (ends[group] - inside[:, -1])
    return group * _GROUP_PAGES + jnp.argmax(inside > rank[:, None], axis=1).astype(jnp.int32)


def _shrink(xp, own: Ownership, keep_pages: Array, lengths: Array) -> Ownership:
    """Returns own with the first keep_pages[b] pages of each row, and these lengths."""
    column = xp.arange(own.page_table.shape[1], dtype=xp.int32)
    drop = (own.page_table != 0) & (column >= keep_pages[:, None])
    return Ownership(
        _frozen(xp.where(drop, 0, own.page_table)),
        _frozen(lengths),
        _frozen(_add(own.refcounts, own.page_table, drop, -1)),
        own.page_size,
    )


def _namespace(own: Ownership, *arrays):
    return jnp if any(isinstance(x, jax.Array) for x in (own.page_table, own.lengths, own.refcounts, *arrays)) else np


def _converted(xp, own: Ownership) -> Ownership:
    return own if xp is np else jax.tree.map(jnp.asarray, own)


def _integers(xp, array: Array, name: str) -> Array:
    if not xp.issubdtype(array.dtype, xp.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array


def _slots(xp, rows: Rows, name: str) -> Array:
    """Returns slot numbers as one axis of integers, unchecked for range; [] is no slot."""
    array = xp.atleast_1d(xp.asarray(rows))
    return _integers(xp, array if array.size else array.astype(xp.int32), name)


def _per_slot(xp, own: Ownership, array: Array, name: str) -> Array:
    """Returns i32[B], none negative: numpy refuses those (and any past int32: far more than a slot can hold)."""
    array, num_slots = _integers(xp, xp.asarray(array), name), own.lengths.shape[0]
    if array.shape != (num_slots,):
        raise ValueError(f"{name} has shape {array.shape}, but there are {num_slots=}: give one number a slot")
    if xp is np and (bad := (array < 0) | (array > _MAX_INT32)).any():
        b = int(np.argmax(bad))
        raise ValueError(f"slot {b}: {name} {array[b]} must be in [0, {_MAX_INT32}]")
    return xp.maximum(array, 0).astype(xp.int32)


def _count(mask: Array) -> Array | int:
    return int(np.count_nonzero(mask)) if isinstance(mask, np.ndarray) else jnp.sum(mask, dtype=jnp.int32)


def _set(array: Array, index: Array, value) -> Array:
    """Returns array with array[index] = value; an index >= size is dropped."""
    if not isinstance(array, np.ndarray):
        return array.at[index].set(value, mode="drop")
    array = array.copy()
    array[index] = value  # the numpy path has refused bad indices
    return array


def _add(array: Array, index: Array, mask: Array, amount: int) -> Array:
    """Returns array with `amount` added at index once for every True in mask."""
    if not isinstance(array, np.ndarray):
        return array.at[jnp.where(mask, index, array.size)].add(amount, mode="drop")
    array = array.copy()
    np.add.at(array, index[mask], amount)
    return array


def _frozen(array: Array) -> Array:
    """Returns the array, read-only if numpy: successors share it, and jax may still read it after a dispatch."""
    if isinstance(array, np.ndarray):
        array.setflags(write=False)
    return array
