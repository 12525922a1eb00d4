"""What a model knows of a text, read through the cache as it is served: log-likelihoods by token, and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxkv.loading import Model
from jaxkv.state import init_state
from jaxkv.verbs import prefill

# Rows that are scored together, and tokens a row of a chunk: they bound the logits that are held.
_ROWS_TOKENS, _LOGITS = 16_384, 1 << 28


def token_losses(model: Model, rows: Sequence[np.ndarray], kv_dtype: str | None = None, chunk_size: int = 512) -> list[np.ndarray]:
    """Negative log-likelihoods in nats, f64[n - 1] of tokens[1:] of each row i32[n]; rows are read side by side in their own slots.

    Every token but a chunk's own reads keys and values as `kv_dtype` stores them; a chunk's own count as if stored, so `chunk_size`
    decides nothing but memory.

    Raises:
      ValueError: a row of fewer than two tokens.
    """
    sizes = [len(row) - 1 for row in rows]
    if not rows or min(sizes) < 1:
        raise ValueError(f"a likelihood needs two tokens, a row has {min(sizes, default=-1) + 1}")
    chunk_size = max(1, min(chunk_size, _LOGITS // (len(rows) * model.config.vocab_size)))
    state = init_state(model, num_slots=len(rows), max_tokens_per_slot=max(sizes), kv_dtype=kv_dtype)
    losses: list[list[np.ndarray]] = [[] for _ in rows]
    for start in range(0, max(sizes), chunk_size):
        slots = [i for i, size in enumerate(sizes) if size > start]
        chunks = [rows[i][start : min(start + chunk_size, sizes[i])] for i in slots]
        state, logits = prefill(state, chunks, rows=slots, all_logits=True)
        for i, chunk, given in zip(slots, chunks, np.asarray(logits), strict=True):
            targets = rows[i][start + 1 : start + 1 + len(chunk)]
            losses[i].append(scores(given[: len(chunk)], targets)[0])
    return [np.concatenate(parts) for parts in losses]


def bits_per_byte(model: Model, text: str, kv_dtype: str | None = None, context: int = 1024) -> float:
    """Negative log-likelihood of a text in bits over its bytes, read in rows of `context` tokens, each alone; a row's first is given.

    Raises:
      ValueError: the model has no tokenizer, or the text has fewer than two tokens.
    """
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer to read a text with")
    tokens = np.asarray(model.tokenizer.encode(text, add_special=False), np.int32)
    rows = [tokens[start : start + context] for start in range(0, len(tokens), context)]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        raise ValueError(f"bits per byte need two tokens: the text has {len(tokens)}, a row {context}")
    together = max(1, _ROWS_TOKENS // context)
    groups = [rows[start : start + together] for start in range(0, len(rows), together)]
    nats = sum(float(loss.sum()) for group in groups for loss in token_losses(model, group, kv_dtype))
    num_bytes = sum(len(model.tokenizer.backend.token_bytes(int(token))) for row in rows for token in row[1:])
    return nats / math.log(2) / num_bytes


def scores(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # f32[T, V], i32[T]
    """(negative log-likelihood in nats, f64[T]; whether the target is the most likely token, bool[T])."""
    logits = logits.astype(np.float64)
    top, own = logits.max(-1), logits[np.arange(len(targets)), targets]
    return np.log(np.exp(logits - top[:, None]).sum(-1)) + top - own, own >= top
