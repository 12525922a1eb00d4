"""Sizes of query and key channels evened out, exactly and at no cost, so that 8-bit keys lose less.

q.k does not change when channel c of every key is multiplied by f[c] and that of every query divided by it. What 8 bits lose does:
stored keys have an error of about the same size in every channel (`layers.spread` makes it so), and a channel's error counts as much
as the queries there are large. The sum of both is least where f[c]^4 = mean q[c]^2 / mean k[c]^2: queries and keys are then equally
large in every channel.

The factors are folded into the weights as they are read: into the weights of the norms of queries and keys, or into the rows of the
two projections. They are powers of two, and equal for the two channels that rope mixes: every rounding on the way to a score is
then the same as without them, and so are a model's logits, to the last bit, unless its KV is in 8 bits.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.io.source import WeightSource

# Of the factors' exponents: balanced weights stay far from the ends of float16.
_MOST_BITS = 8
_CHUNK_ROWS = 4096


class Balanced:
    """A WeightSource whose queries and keys are balanced; `statistics` is the same source, read a second time for the factors."""

    def __init__(self, source: WeightSource, statistics: WeightSource):
        self.config, self.shape, self.has = source.config, source.shape, source.has
        self._source = source
        self._factors = cache(lambda layer: _factors(statistics, layer))

    def read(self, name, layer=None):
        """The weight, balanced."""
        array = self._source.read(name, layer)
        return self._scaled(name, layer, array, slice(None))

    def read_rows(self, name, layer, start, stop):
        """Rows of the weight, balanced."""
        array = self._source.read_rows(name, layer, start, stop)
        return self._scaled(name, layer, array, slice(start, stop))

    def _scaled(self, name, layer, array, rows: slice):
        ends = ("", "_bias") if self.config.qk_norm == "none" else ("_norm",)
        for part in ("q", "k"):
            if name in (part + end for end in ends):
                factors = self._factors(layer)[part][rows]
                return np.asarray(array, np.float32) * factors.reshape(-1, *(1,) * (array.ndim - 1))
        return array


def _factors(source: WeightSource, layer: int) -> dict[str, np.ndarray]:
    """f32 factors of q's and k's rows, or of their norms' weights where the model has such norms."""
    config = source.config
    N, K, H = config.num_q_heads, config.num_kv_heads, config.head_dim
    q = np.mean(_mean_squares(source, "q", layer).reshape(K, N // K, H), 1)
    k = _mean_squares(source, "k", layer)
    if config.qk_norm == "head":  # one weight serves all heads
        q, k = np.mean(q, 0, keepdims=True), np.mean(k, 0, keepdims=True)
    exponents = _exponents(_of_pairs(config, layer, q), _of_pairs(config, layer, k))
    for_k = np.exp2(exponents).astype(np.float32)
    for_q = 1 / for_k if config.qk_norm == "head" else np.repeat(1 / for_k, N // K, 0)
    return {"q": for_q.reshape(-1), "k": for_k.reshape(-1)}


def _mean_squares(source: WeightSource, part: str, layer: int) -> np.ndarray:
    """f64[heads, H] expected squares of every channel of queries or keys, for inputs whose channels are alike.

    The squared error that 8 bits are expected to leave in Gemma 3 270M's scores, from 800 tokens' queries and keys, in units of its
    rounding: 570 without factors, 186 with those from these estimates, 148 with exact ones from the same tokens.
    """
    config = source.config
    rows, width = source.shape(part, layer)
    gain = np.asarray(source.read("attn_norm", layer), np.float32) if source.has("attn_norm", layer) else np.ones(width, np.float32)
    squares = np.empty(rows)
    for start in range(0, rows, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, rows)
        chunk = np.asarray(source.read_rows(part, layer, start, stop), np.float32) * gain
        squares[start:stop] = np.einsum("nd,nd->n", chunk, chunk)
    if source.has(f"{part}_bias", layer):
        squares += np.square(np.asarray(source.read(f"{part}_bias", layer), np.float64))
    per_head = squares.reshape(-1, config.head_dim)
    if config.qk_norm != "none":
        weight = np.asarray(source.read(f"{part}_norm", layer), np.float64)
        per_head = per_head / np.maximum(np.mean(per_head, -1, keepdims=True), np.finfo(np.float32).tiny)
        per_head = per_head * np.square(weight).reshape(-1, config.head_dim)
    return per_head


def _of_pairs(config: ModelConfig, layer: int, squares: np.ndarray) -> np.ndarray:
    """The mean squares [.., H] with those of the two channels that rope turns into each other made equal."""
    half = (config.ropes[config.layer_ropes[layer]].rotary_dim or config.head_dim) // 2
    mean = (squares[..., :half] + squares[..., half : 2 * half]) / 2
    return np.concatenate([mean, mean, squares[..., 2 * half :]], -1)


def _exponents(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """log2 of the keys' factors, whole; 0 for a channel that queries or keys do not use.

    A factor common to a head's channels changes nothing: with their median taken out, a head of like channels keeps its weights.
    """
    used = (q > 0) & (k > 0) & np.isfinite(q) & np.isfinite(k)
    exact = np.log2(np.where(used, q, 1) / np.where(used, k, 1)) / 4
    middle = np.ma.median(np.ma.array(exact, mask=~used), -1, keepdims=True).filled(0)
    return np.where(used, np.clip(np.rint(exact - middle), -_MOST_BITS, _MOST_BITS), 0)
