"""The verbs that run the model on a state: prefill, decode, fork, and score which needs no state.

Each decides on the host, in numpy, whether it can run (pages, lengths, vocabulary) and raises ValueError before anything is
touched; then it dispatches one jitted step and returns the successor state without waiting for the device.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.kv import pages
from jaxkv.state import State, as_integers, check_rows, frozen, require_live
from jaxkv.steps import Pools, step

# Prompt buckets: a chunk is padded to the next of these (past the last, to the next power of two), so that few shapes are traced.
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 512)
# Tokens of one prefill dispatch of generate over all its rows: bounds its temporaries; more rows go in several dispatches.
MAX_PREFILL_TOKENS = 2048


def prefill(state: State, tokens, lengths=None, rows=None, *, all_logits: bool = False):
    """Appends a chunk of tokens to slots and returns (state, logits f32[R, V] of each row's last token).

    Args:
      state: consumed.
      tokens: a list of token lists, or an array i32[R, T] with `lengths`.
      lengths: i32[R], how many of each row of an array count; None: all.
      rows: the slot of each row; None: slots 0 to R-1.
      all_logits: return f32[R, T, V], the logits of every token of the chunk, instead.

    Raises:
      ValueError: tokens outside the vocabulary, an empty row, a slot that would pass max_tokens_per_slot, too few free pages;
        the state is then still usable.
      StaleStateError: the state was already consumed.
    """
    require_live(state)
    chunks, rows = check_tokens(state, tokens, lengths, rows)
    if any(c.size == 0 for c in chunks):
        raise ValueError(f"prefill got an empty row (row {rows[[c.size for c in chunks].index(0)]}): leave it out of `rows`")
    feed = with_pending(state, chunks, rows)
    own, copies = claim(state, rows, [f.size for f in feed])
    pools = pools_of(state, copies)
    T = bucket_tokens(max(f.size for f in feed))
    pools, logits = dispatch_prefill(state, pools, own, rows, feed, state.kv.lengths[rows], T, all_logits)
    state = successor(state, pools, own, rows, -1)
    if not all_logits:
        return state, logits[: len(rows)]
    skip = [f.size - c.size for f, c in zip(feed, chunks, strict=True)]  # logits of a pending token are not of the chunk
    width = max(c.size for c in chunks)
    columns = np.minimum(np.arange(width) + np.asarray(skip)[:, None], T - 1)
    return state, jnp.take_along_axis(logits[: len(rows)], jnp.asarray(columns)[:, :, None], 1)


def decode(state: State, tokens, rows=None):
    """Appends one token to each slot and returns (state, logits f32[R, V] for the next).

    tokens is i32[R]; rows names the slots (None: all, R = num_slots). One trace whatever the rows, but a row with a pending token
    goes through `prefill`, since two tokens are to be run. Errors as in `prefill`.
    """
    require_live(state)
    rows = check_rows(state, np.arange(state.num_slots) if rows is None else rows)
    tokens = np.atleast_1d(np.asarray(tokens))
    if tokens.shape != rows.shape:
        raise ValueError(f"decode takes one token a row: got tokens of shape {tokens.shape} for {len(rows)} rows")
    if (state.pending[rows] >= 0).any():
        return prefill(state, tokens[:, None], rows=rows)
    chunks, rows = check_tokens(state, tokens[:, None], None, rows)
    own, copies = claim(state, rows, [1] * len(rows))
    pools = pools_of(state, copies)
    pools, logits = dispatch_decode(state, pools, own, rows, np.concatenate(chunks))
    in_order = np.array_equal(rows, np.arange(state.num_slots))
    return successor(state, pools, own, rows, -1), logits if in_order else logits[jnp.asarray(rows)]


def fork(state: State, src, dst) -> State:
    """Returns a state in which empty slot(s) dst hold the history of slot(s) src on shared pages, copied only when written.

    Raises:
      ValueError: a slot out of range, or a dst that is not empty (release it first).
    """
    require_live(state)
    src, dst = as_integers(src, "src"), as_integers(dst, "dst")
    own = pages.fork(state.kv.own, src, dst)
    none = np.full(1, own.refcounts.shape[0], np.int32)
    pools = copy(state, pools_of(state, None), np.zeros(1, np.int32), none, src, dst)
    pending = state.pending.copy()
    pending[dst] = pending[src]
    return successor(state, pools, own, dst, pending[dst])


def score(model, tokens, lengths=None):
    """Returns logits f32[B, T, V] of token lists or an array i32[B, T], without a cache; positions past a row's length are junk."""
    chunks = as_rows(tokens, lengths)
    check_vocabulary(model.config, chunks)
    if not chunks or not max(c.size for c in chunks):
        raise ValueError("score needs at least one token")
    width = max(c.size for c in chunks)
    T = bucket_tokens(width)
    padded, counts = pad(chunks, T, len(chunks))
    logits = step("score", model.storage.platform)(model.params, padded, counts, static=model.static)
    return logits[:, :width]


def as_rows(tokens, lengths=None) -> list[np.ndarray]:
    """Token input of any allowed form as one i32 array a row."""
    if tokens is None or isinstance(tokens, str) or (isinstance(tokens, list | tuple) and any(isinstance(t, str) for t in tokens)):
        raise TypeError("tokens must be lists of token ids, one a row; for text: [model.tokenizer.encode(text)]")
    if isinstance(tokens, np.ndarray | jax.Array):
        array = np.asarray(tokens)
        if array.ndim == 1:
            array = array[None]
        if array.ndim != 2:
            raise ValueError(f"tokens must be [rows, tokens], got shape {array.shape}")
        sizes = np.full(array.shape[0], array.shape[1]) if lengths is None else as_integers(lengths, "lengths")
        if sizes.shape != (array.shape[0],) or (sizes < 0).any() or (sizes > array.shape[1]).any():
            raise ValueError(f"lengths must be {array.shape[0]} numbers in 0..{array.shape[1]}, got {sizes.tolist()}")
        rows = [row[:size] for row, size in zip(array, sizes, strict=True)]
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


def check_vocabulary(config, chunks) -> None:
    """Raises ValueError naming the first token outside the vocabulary."""
    for i, chunk in enumerate(chunks):
        bad = np.flatnonzero((chunk < 0) | (chunk >= config.vocab_size))
        if bad.size:
            raise ValueError(
                f"token {chunk[bad[0]]} at position {bad[0]} of row {i} is outside the vocabulary of {config.vocab_size} tokens"
            )


def check_tokens(state: State, tokens, lengths, rows) -> tuple[list[np.ndarray], np.ndarray]:
    """Validated (chunks, rows): one i32 array and one slot a row."""
    chunks = as_rows(tokens, lengths)
    check_vocabulary(state.static.model, chunks)
    chunks = [c.astype(np.int32) for c in chunks]
    if rows is None:
        if len(chunks) > state.num_slots:
            raise ValueError(
                f"{len(chunks)} rows of tokens for {state.num_slots} slots: give fewer, or init_state with more num_slots"
            )
        rows = np.arange(len(chunks))
    rows = check_rows(state, rows)
    if len(rows) != len(chunks):
        raise ValueError(f"{len(chunks)} rows of tokens but {len(rows)} rows named")
    if not chunks:
        raise ValueError("no rows of tokens were given")
    return chunks, rows


def with_pending(state: State, chunks, rows) -> list[np.ndarray]:
    """The chunks with each row's pending token before them: what must be run to store them."""
    return [
        chunk if state.pending[row] < 0 else np.concatenate([state.pending[row : row + 1], chunk])
        for chunk, row in zip(chunks, rows, strict=True)
    ]


def claim(state: State, rows, sizes):
    """Ownership with room for `sizes` more tokens in `rows`, lengths grown, and the page copies to make first.

    Raises:
      ValueError: a slot or the pool is too small; says by how much.
    """
    counts = np.zeros(state.num_slots, np.int32)
    counts[rows] = sizes
    check_room(state, state.kv.lengths + counts)
    own, copies, shortfall = pages.append(state.kv.own, counts)
    if shortfall:
        raise pool_full(state.kv.own, shortfall)
    return own, copies


def check_room(state: State, totals) -> None:
    """Raises ValueError if a slot would hold more than max_tokens_per_slot."""
    row = int(np.argmax(totals))
    if totals[row] > state.max_tokens_per_slot:
        raise ValueError(
            f"slot {row} would hold {totals[row]} tokens ({state.num_tokens[row]} now) but max_tokens_per_slot is"
            f" {state.max_tokens_per_slot}: shorten the input, release the slot, or init_state with a larger one"
        )


def pool_full(own, shortfall) -> ValueError:
    """The error for a pool with too few free pages."""
    total = own.refcounts.shape[0] - 1
    return ValueError(
        f"the KV pool is short of {shortfall} page{'' if shortfall == 1 else 's'} of {own.page_size} tokens: {pages.free_pages(own)} of"
        f" {total} are free."
        " Release slots, ask for fewer tokens, or init_state with a larger num_pages"
    )


def bucket_tokens(size: int) -> int:
    """The bucket a chunk of `size` tokens is padded to."""
    for bucket in TOKEN_BUCKETS:
        if size <= bucket:
            return bucket
    return 1 << (size - 1).bit_length()


def row_buckets(num_slots: int) -> list[int]:
    """How many rows a prefill dispatch can be padded to: powers of four, and all slots."""
    buckets = [1]
    while buckets[-1] * 4 < num_slots:
        buckets.append(buckets[-1] * 4)
    return buckets if num_slots == 1 else [*buckets, num_slots]


def bucket_rows(size: int, num_slots: int) -> int:
    """The bucket a dispatch of `size` rows is padded to."""
    return next(bucket for bucket in row_buckets(num_slots) if size <= bucket)


def most_rows(T: int, num_slots: int) -> int:
    """Rows of T tokens that generate puts into one dispatch at most: a whole bucket within MAX_PREFILL_TOKENS."""
    return max(bucket for bucket in row_buckets(num_slots) if bucket == 1 or bucket * T <= MAX_PREFILL_TOKENS)


def pad(chunks, T: int, R: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens i32[R, T] and counts i32[R] of ragged chunks."""
    tokens, counts = np.zeros((R, T), np.int32), np.zeros(R, np.int32)
    for i, chunk in enumerate(chunks):
        tokens[i, : chunk.size] = chunk
        counts[i] = chunk.size
    return tokens, counts


def dispatch_prefill(state: State, pools: Pools, own, rows, chunks, lengths, T: int, all_logits: bool = False):
    """Runs one prefill step of up to T tokens for each of `rows`; returns (pools, logits of the padded rows)."""
    R = bucket_rows(len(rows), state.num_slots)
    tokens, counts = pad(chunks, T, R)
    slots = np.full(R, state.num_slots, np.int32)
    slots[: len(rows)] = rows
    table, before = np.zeros((R, own.page_table.shape[1]), np.int32), np.zeros(R, np.int32)
    table[: len(rows)], before[: len(rows)] = own.page_table[rows], lengths
    return step("prefill", state.static.platform)(
        state.params, pools, table, before, slots, tokens, counts, static=state.static, all_logits=all_logits
    )


def dispatch_decode(state: State, pools: Pools, own, rows, tokens):
    """Runs one token for each of `rows` in a step over all slots; returns (pools, logits f32[B, V])."""
    B = state.num_slots
    counts, column, lengths = np.zeros(B, np.int32), np.zeros((B, 1), np.int32), np.zeros(B, np.int32)
    counts[rows], column[rows, 0], lengths[rows] = 1, tokens, state.kv.lengths[rows]
    return step("decode", state.static.platform)(
        state.params, pools, own.page_table, lengths, np.arange(B, dtype=np.int32), column, counts,
        static=state.static, all_logits=False,
    )  # fmt: skip


def pools_of(state: State, copies) -> Pools:
    """The state's pools, with the copies that copy-on-write asks for made (which consumes the state)."""
    pools = Pools(state.kv.k_pages, state.kv.v_pages, state.history)
    if copies is None or (copies.dst >= state.kv.refcounts.shape[0]).all():
        return pools
    nowhere = np.full(1, state.num_slots, np.int32)
    return copy(state, pools, copies.src, copies.dst, np.zeros(1, np.int32), nowhere)


def copy(state: State, pools: Pools, page_src, page_dst, row_src, row_dst) -> Pools:
    """Copies pages and history rows, padded to B entries each so that one trace serves every call."""
    B, C = state.num_slots, state.kv.refcounts.shape[0]
    padded = lambda a, fill: np.concatenate([np.asarray(a, np.int32), np.full(B - len(a), fill, np.int32)])
    return step("copy_rows", state.static.platform)(
        pools, padded(page_src, 0), padded(page_dst, C), padded(row_src, 0), padded(row_dst, B),
        num_layers=state.static.model.num_layers,
    )  # fmt: skip


def successor(state: State, pools: Pools, own, rows, pending) -> State:
    """The state after a step: new pools and ownership, `pending` set for `rows`."""
    kv = dataclasses.replace(state.kv, k_pages=pools.k_pages, v_pages=pools.v_pages, own=own)
    everything = state.pending.copy()
    everything[rows] = pending
    return dataclasses.replace(state, kv=kv, history=pools.history, pending=frozen(everything))
