"""What callers may hand to a verb, checked on the host: token ids in any allowed form, slot numbers, room.

Every error names the number that is wrong and the way out, and is raised before anything is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.kv import pages
from jaxkv.kv.pages import Array, Ownership

if TYPE_CHECKING:
    from jaxkv.state import State

# Token ids: a list a row, one flat list (one row), or an array i32[R, T] (i32[T]: one row).
Tokens = Sequence[int] | Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray | jax.Array
# A flat list of whole numbers: lengths, or slot numbers; a single number is a list of one.
Integers = Sequence[int] | range | np.ndarray | jax.Array | int


def as_integers(values: Integers, name: str) -> np.ndarray:
    """The values as one axis of integers; TypeError if they are anything else."""
    array = np.atleast_1d(np.asarray(values))
    array = array if array.size else array.astype(np.int32)  # numpy takes [] for floats
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be a flat list of whole numbers, got {array.dtype} of shape {array.shape}")
    return array


def as_rows(tokens: Tokens, lengths: Integers | None = None) -> list[np.ndarray]:
    """Token input of any allowed form as one array of integers a row.

    Raises:
      TypeError: text, or numbers that are not whole.
      ValueError: an array of three axes, lengths that do not fit it or that come with a list.
    """
    if tokens is None or isinstance(tokens, str) or (isinstance(tokens, list | tuple) and any(isinstance(t, str) for t in tokens)):
        raise TypeError("tokens must be lists of token ids, one a row; for text: [model.tokenizer.encode(text)]")
    if isinstance(tokens, np.ndarray | jax.Array):
        rows = _rows_of_array(np.asarray(tokens), lengths)
    else:
        if lengths is not None:
            raise ValueError("lengths goes with an array of tokens; lists carry their own lengths")
        rows = [np.asarray(row) for row in tokens]
        if rows and all(row.ndim == 0 for row in rows):
            rows = [np.asarray(rows)]  # one flat list is one row
    for i, row in enumerate(rows):
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise TypeError(f"row {i} of tokens must be a flat list of whole numbers, got {row.dtype} of shape {row.shape}")
    return rows


def _rows_of_array(array: np.ndarray, lengths: Integers | None) -> list[np.ndarray]:
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2:
        raise ValueError(f"tokens must be [rows, tokens], got shape {array.shape}")
    sizes = np.full(array.shape[0], array.shape[1]) if lengths is None else as_integers(lengths, "lengths")
    if sizes.shape != (array.shape[0],) or (sizes < 0).any() or (sizes > array.shape[1]).any():
        raise ValueError(f"lengths must be {array.shape[0]} numbers in 0..{array.shape[1]}, got {sizes.tolist()}")
    return [row[:size] for row, size in zip(array, sizes, strict=True)]


def check_vocabulary(config: ModelConfig, chunks: list[np.ndarray]) -> None:
    """Raises ValueError naming the first token outside the vocabulary."""
    for i, chunk in enumerate(chunks):
        bad = np.flatnonzero((chunk < 0) | (chunk >= config.vocab_size))
        if bad.size:
            raise ValueError(
                f"token {chunk[bad[0]]} at position {bad[0]} of row {i} is outside the vocabulary of {config.vocab_size} tokens"
            )


def check_rows(state: State, rows: Integers) -> np.ndarray:
    """The rows as an array; raises ValueError unless they are distinct slot numbers of this state, TypeError if no integers."""
    rows = as_integers(rows, "rows")
    for row in rows:
        if not 0 <= row < state.num_slots:
            raise ValueError(f"row {row} is not a slot: this state has {state.num_slots} slots, 0 to {state.num_slots - 1}")
    if len(set(rows.tolist())) != len(rows):
        raise ValueError(f"rows name a slot twice: {rows.tolist()}")
    return rows


def check_tokens(
    state: State, tokens: Tokens, lengths: Integers | None, rows: Integers | None
) -> tuple[list[np.ndarray], np.ndarray]:
    """Validated (chunks, rows): one array i32[length] and one slot a row.

    Raises:
      TypeError, ValueError: as `as_rows`, `check_vocabulary` and `check_rows`; or not as many chunks as rows, or none.
    """
    chunks = as_rows(tokens, lengths)
    check_vocabulary(state.static.model, chunks)
    chunks = [c.astype(np.int32) for c in chunks]
    if rows is None:
        if len(chunks) > state.num_slots:
            raise ValueError(
                f"{len(chunks)} rows of tokens for {state.num_slots} slots: give fewer, or init_state with more num_slots"
            )
        rows = np.arange(len(chunks))
    slots = check_rows(state, rows)
    if len(slots) != len(chunks):
        raise ValueError(f"{len(chunks)} rows of tokens but {len(slots)} rows named")
    if not chunks:
        raise ValueError("no rows of tokens were given")
    return chunks, slots


def check_room(state: State, totals: Array) -> None:
    """Raises ValueError if a slot would hold more than max_tokens_per_slot; totals i64[B] tokens."""
    row = int(np.argmax(totals))
    if totals[row] > state.max_tokens_per_slot:
        raise ValueError(
            f"slot {row} would hold {totals[row]} tokens ({state.num_tokens[row]} now) but max_tokens_per_slot is"
            f" {state.max_tokens_per_slot}: shorten the input, release the slot, or init_state with a larger one"
        )


def pool_full(own: Ownership, shortfall: int) -> ValueError:
    """The error for a pool that is short of so many free pages."""
    total = own.refcounts.shape[0] - 1
    return ValueError(
        f"the KV pool is short of {shortfall} page{'' if shortfall == 1 else 's'} of {own.page_size} tokens:"
        f" {pages.free_pages(own)} of {total} are free."
        " Release slots, ask for fewer tokens, or init_state with a larger num_pages"
    )
