"""Arrays for the GPU kernels and attention as its definition says, in float64 numpy, one row and one head at a time."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.quantise import quantise

LAYERS = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static of one call; `pool` is the dtype of the numbers in the pool."""

    K: int
    G: int
    H: int
    P: int
    M: int
    q: str = "float32"
    pool: str = "float32"
    B: int = 3
    T: int = 0  # prefill: tokens of the chunk
    soft_cap: float | None = None
    held_as_bits: bool = False

    @property
    def pages(self) -> int:
        return self.B * self.M + 5  # of one layer: more than the table reaches

    @property
    def tolerance(self) -> float:
        """f32 stays f32; operands of 16 bits are allowed 1e-2."""
        return 1e-5 if self.q == "float32" else 1e-2

    def __str__(self):
        T = f"T{self.T}" if self.T else ""
        return f"{T}K{self.K}G{self.G}H{self.H}P{self.P}-{self.q}-{self.pool}{'-cap' if self.soft_cap else ''}{'-bits' * self.held_as_bits}"


def make(shape: Shape, seed: int, lengths, first_seen=None):
    """(arguments by name, keys, values): N(0,1), shuffled pages, poison wherever a row must not look.

    keys and values f64 `[B, M*P, K, H]` are what the row's pages hold, dequantised, in token order. What is poisoned: slots outside
    [first_seen, length), pages that nobody owns, the null page, and table entries past the row's last page or before its first.
    """
    rng = np.random.default_rng(seed)
    B, K, H, P, M = shape.B, shape.K, shape.H, shape.P, shape.M
    lengths = np.asarray(lengths, np.int32)
    first_seen = np.zeros_like(lengths) if first_seen is None else np.asarray(first_seen, np.int32)
    offset = shape.pages * (LAYERS - 1)
    table = rng.permutation(np.arange(1, shape.pages, dtype=np.int32))[: B * M].reshape(B, M)
    position = np.arange(M * P)
    real = (position >= first_seen[:, None]) & (position < lengths[:, None])  # [B, S]
    live = np.zeros((LAYERS * shape.pages, P), bool)
    live[offset + table] = real.reshape(B, M, P)

    normal = lambda *dims: rng.standard_normal(dims, np.float32)
    tokens = [normal(LAYERS * shape.pages, K, P, H) for _ in range(2)]
    pools, scales, rounded = zip(
        *(_store(shape, x * factor, live) for x, factor in zip(tokens, (1.0, 3.0), strict=True)), strict=True
    )
    keys, values = (np.moveaxis(x[offset + table], 2, 3).reshape(B, M * P, K, H) for x in rounded)

    column = np.arange(M)
    owned = (column * P < lengths[:, None]) & ((column + 1) * P > first_seen[:, None])
    arguments = {
        "q": _cast(normal(B, *((shape.T,) if shape.T else ()), K, shape.G, H), shape.q),
        "k_pages": pools[0],
        "v_pages": pools[1],
        "kv_scales": None if scales[0] is None else np.stack([_pack(x) for x in scales], 1),
        "page_table": np.where(owned, table, -12345).astype(np.int32),
        "lengths": lengths,
        "page_offset": np.int32(offset),
    }
    return arguments, keys, values


def _cast(x, dtype: str):
    return x.astype(jnp.dtype(dtype))


def _store(shape: Shape, x, live):
    """(pool, scales or None, numbers f64) of tokens x `[pages, K, P, H]`."""
    dead = ~live[:, None, :]
    if shape.pool in ("int8", "float8_e4m3fn"):
        pool, scale = jax.tree.map(np.asarray, quantise(jnp.asarray(x), jnp.dtype(shape.pool)))
        numbers = pool.astype(np.float64) * scale.astype(np.float64)[..., None]
        poison = np.int8(-128) if shape.pool == "int8" else np.array(np.nan, ml_dtypes.float8_e4m3fn)
        pool, scale = np.where(dead[..., None], poison, pool), np.where(dead, np.float32(np.nan), scale)
    else:
        pool, scale = _cast(x, shape.pool), None
        numbers = pool.astype(np.float64)
        pool = np.where(dead[..., None], np.array(np.nan, pool.dtype), pool)
    if shape.held_as_bits:
        pool = pool.view({1: np.uint8, 2: np.uint16}[pool.dtype.itemsize])
    return pool, scale, np.where(dead[..., None], 0.0, numbers)


def _pack(scale):  # [pages, K, P] -> [pages, R, 128]
    flat = scale.reshape(scale.shape[0], -1)
    rows = -(-flat.shape[1] // 128)
    return np.pad(flat, ((0, 0), (0, rows * 128 - flat.shape[1])), constant_values=np.nan).reshape(-1, rows, 128)


def attend(q, keys, values, visible, scale: float, soft_cap: float | None):
    """o [Q, G, H] and natural lse [Q, G] of queries q [Q, G, H] over keys, values [S, H]; visible bool [Q, S]."""
    scores = np.einsum("qgh,sh->qgs", q.astype(np.float64), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(visible[:, None], scores, -np.inf)
    top = scores.max(-1, initial=-1e300)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(total > 0, top, 0)
    return np.einsum("qgs,sh->qgh", weights, values) / np.where(total > 0, total, 1)[..., None], lse


def assert_close(shape: Shape, o, lse, want_o, want_lse):
    """o relative to the length of each [H] vector, lse absolutely; exactly 0 and -inf where nothing is seen."""
    empty = np.isneginf(want_lse)
    assert np.isneginf(lse[empty]).all()
    assert not o[empty].any()
    error = np.linalg.norm(o.astype(np.float64) - want_o, axis=-1)[~empty]
    size = np.linalg.norm(want_o, axis=-1)[~empty]
    assert (error <= shape.tolerance * size + shape.tolerance * 1e-3).all(), (error / size).max()
    np.testing.assert_allclose(lse[~empty], want_lse[~empty], rtol=shape.tolerance, atol=shape.tolerance)
