"""The verbs that run the model on a state: prefill, decode, fork, and score which needs no state.

Each decides on the host, in numpy, whether it can run (pages, lengths, vocabulary) and raises ValueError before anything is
touched; then it dispatches jitted steps and returns the successor state without waiting for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxkv.buckets import bucket_tokens
from jaxkv.dispatch import (
    claim,
    collect,
    copy,
    dispatch_decode,
    dispatch_prompts,
    pad,
    pick,
    pools_of,
    successor,
    with_pending,
)
from jaxkv.inputs import Integers, Tokens, as_integers, as_rows, check_rows, check_tokens, check_vocabulary
from jaxkv.kv import pages
from jaxkv.model.decoder import Kernels
from jaxkv.state import State, Static, require_live
from jaxkv.steps import step

if TYPE_CHECKING:
    from jaxkv.loading import Model


def prefill(
    state: State,
    tokens: Tokens,
    lengths: Integers | None = None,
    rows: Integers | None = None,
    *,
    all_logits: bool = False,
) -> tuple[State, jax.Array | np.ndarray]:
    """Appends tokens to slots and returns (state, logits f32[R, V] of each row's last token).

    Long prompts go through the model in chunks of 512 tokens, as in `generate`: both run the same few shapes.

    Args:
      state: consumed.
      tokens: a list of token lists, one a row, or an array i32[R, T] with `lengths`.
      lengths: i32[R], how many tokens of each row of an array count; None: all.
      rows: i32[R], the slot of each row; None: slots 0 to R-1.
      all_logits: return f32[R, T, V] of every token given instead, T the longest row, zeros behind shorter ones. It is put
        together in the host's memory, as numpy: R * T * V * 4 bytes.

    Returns:
      The successor state, and the logits on the device, which this does not wait for (with all_logits it does).

    Raises:
      TypeError: tokens, lengths or rows that are not whole numbers.
      ValueError: tokens outside the vocabulary, an empty row, a slot that would pass max_tokens_per_slot, too few free pages; with
        the numbers, and the state is then still usable.
      StaleStateError: the state was already consumed.
    """
    require_live(state)
    chunks, slots = check_tokens(state, tokens, lengths, rows)
    if any(c.size == 0 for c in chunks):
        raise ValueError(f"prefill got an empty row (row {slots[[c.size for c in chunks].index(0)]}): leave it out of `rows`")
    return (_every_token if all_logits else _last_token)(state, chunks, slots)


def _last_token(state: State, chunks: list[np.ndarray], slots: np.ndarray) -> tuple[State, jax.Array]:
    """Stores the chunks; logits f32[R, V] of each one's last token."""
    feed = with_pending(state, chunks, slots)
    own, copies = claim(state, slots, [f.size for f in feed])
    buffer = None
    for run in dispatch_prompts(state, pools_of(state, copies), own, slots, feed, state.kv.lengths[slots]):
        if len(run.ends) == len(feed) == run.logits.shape[0]:  # one dispatch ran them all, in their order
            return successor(state, run.pools, own, slots, -1), run.logits
        if run.ends:
            at = [int(slots[part.prompt]) for part in run.ends]
            buffer = collect(state, buffer, run.logits, at, [part.place for part in run.ends])
    assert buffer is not None  # no row is empty, so each has a last token
    return successor(state, run.pools, own, slots, -1), pick(state, buffer, slots)


def _every_token(state: State, chunks: list[np.ndarray], slots: np.ndarray) -> tuple[State, np.ndarray]:
    """Stores the chunks; logits f32[R, T, V] of all their tokens. Those of a pending token are not of the chunk."""
    feed = with_pending(state, chunks, slots)
    own, copies = claim(state, slots, [f.size for f in feed])
    whole = np.zeros((len(chunks), max(c.size for c in chunks), state.static.model.vocab_size), np.float32)
    pools, before = pools_of(state, copies), state.kv.lengths[slots]
    for run in dispatch_prompts(state, pools, own, slots, feed, before, all_logits=True):
        logits = np.asarray(run.logits)
        for part in run.parts:
            skip = feed[part.prompt].size - chunks[part.prompt].size
            first = max(part.start, skip)
            given = logits[part.place, first - part.start : part.stop - part.start]
            whole[part.prompt, first - skip : part.stop - skip] = given
    return successor(state, run.pools, own, slots, -1), whole


def decode(state: State, tokens: Integers, rows: Integers | None = None) -> tuple[State, jax.Array]:
    """Appends one token to each slot and returns (state, logits f32[R, V] for the next).

    One trace whatever the rows; but where a row has a pending token all go through `prefill`, since two tokens are to be run.

    Args:
      state: consumed.
      tokens: i32[R].
      rows: i32[R], the slot of each token; None: all slots, R = num_slots.

    Raises:
      TypeError, ValueError, StaleStateError: as `prefill`; or not one token a row.
    """
    require_live(state)
    slots = check_rows(state, np.arange(state.num_slots) if rows is None else rows)
    column = np.atleast_1d(np.asarray(tokens))
    if column.shape != slots.shape:
        raise ValueError(f"decode takes one token a row: got tokens of shape {column.shape} for {len(slots)} rows")
    chunks, slots = check_tokens(state, column[:, None], None, slots)
    if (state.pending[slots] >= 0).any():
        return _last_token(state, chunks, slots)
    own, copies = claim(state, slots, [1] * len(slots))
    pools = pools_of(state, copies)
    pools, logits = dispatch_decode(state, pools, own, slots, np.concatenate(chunks))
    return successor(state, pools, own, slots, -1), pick(state, logits, slots)


def fork(state: State, src: Integers, dst: Integers) -> State:
    """Returns a state in which empty slot(s) dst hold the history of slot(s) src on shared pages, copied only when written.

    Args:
      state: consumed.
      src: slot numbers, i32[n].
      dst: i32[n], empty slots, each named once.

    Raises:
      TypeError: slots that are not whole numbers.
      ValueError: a slot out of range, or a dst that is not empty (release it first).
      StaleStateError: the state was already consumed.
    """
    require_live(state)
    sources, targets = as_integers(src, "src"), as_integers(dst, "dst")
    own = pages.fork(state.kv.own, sources, targets)
    none = np.full(1, own.refcounts.shape[0], np.int32)
    pools = copy(state, pools_of(state, None), np.zeros(1, np.int32), none, sources, targets)
    return successor(state, pools, own, targets, state.pending[sources])


def score(
    model: Model, tokens: Tokens, lengths: Integers | None = None, implementation: str | None = None, interpret: bool = False
) -> jax.Array:
    """Returns logits f32[R, T, V] of every token, without a cache; positions past a row's length are junk.

    Args:
      model: from `load_model`.
      tokens: token lists, one a row, or an array i32[R, T] with `lengths`.
      lengths: i32[R], how many tokens of each row of an array count; None: all.
      implementation, interpret: of attention, as in `init_state`.

    Raises:
      TypeError: tokens or lengths that are not whole numbers.
      ValueError: tokens outside the vocabulary, or none at all; an implementation that is unknown or cannot run here.
    """
    chunks = as_rows(tokens, lengths)
    check_vocabulary(model.config, chunks)
    if not chunks or not max(c.size for c in chunks):
        raise ValueError("score needs at least one token")
    width = max(c.size for c in chunks)
    padded, counts = pad(chunks, bucket_tokens(width), len(chunks))
    platform = model.storage.platform
    static = Static(model.config, model.storage.dtype, Kernels.here(platform, implementation, interpret))
    logits = step("score", platform)(model.params, padded, counts, static=static)
    return logits[:, :width]
