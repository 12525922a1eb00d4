"""A text as bytes to train on, and spans of it that are held out."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

# One span of so many is held out: 2 % of the text, from all over it, so that it is neither all law nor all letters.
_EVERY = 50
_SPAN = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """What is trained on, and what is not."""

    train: np.ndarray  # u8[n]
    held_out: np.ndarray  # u8[spans, bytes]
    sha256: str  # of the whole


def split_text(data: bytes) -> Text:
    """Holds out the middle one of every 50 spans of 4,096 bytes (shorter ones where the text has fewer than 50 such).

    Raises:
      ValueError: a text of under 3,200 bytes, too short for 50 spans.
    """
    size = min(_SPAN, len(data) // _EVERY)
    if size < 64:
        raise ValueError(f"the text has {len(data)} bytes: give one of at least {64 * _EVERY:,}")
    whole = np.frombuffer(data, np.uint8)
    spans = whole[: len(whole) // size * size].reshape(-1, size)
    out = np.arange(len(spans)) % _EVERY == _EVERY // 2
    train = np.concatenate([spans[~out].reshape(-1), whole[spans.size :]])
    return Text(train, spans[out], hashlib.sha256(data).hexdigest())


def batch(text: Text, seed: int, step: int, rows: int, length: int) -> np.ndarray:
    """Tokens i32[rows, length] of a step, from places that (seed, step) alone decides: a resumed run reads what it would have read.

    Raises:
      ValueError: the text is shorter than a row.
    """
    if len(text.train) < length:
        raise ValueError(f"the text has {len(text.train)} bytes to train on, fewer than a row of {length}: shorten the context")
    starts = np.random.default_rng((seed, step)).integers(0, len(text.train) - length, rows, endpoint=True)
    return text.train[starts[:, None] + np.arange(length)].astype(np.int32)


def rows_of(held_out: np.ndarray, length: int) -> np.ndarray:
    """u8[rows, length]: held-out spans cut into rows (as long as the spans where those are shorter); what is left over is not read."""
    length = min(length, held_out.shape[1])
    per_span = held_out.shape[1] // length
    return held_out[:, : per_span * length].reshape(-1, length)
