"""A weight and its product with activations: the one place that knows in which forms a device multiplies fast.

A weight is stored `[out, in]` as f32, bf16 or int8 with f32 scales. What a product does with it depends on the backend and on
how many rows of activations there are; the figures behind each choice are in docs/performance.md:

  CPU, one row        a dot over the upcast weight, which XLA:CPU fuses into one pass over the stored bytes
  CPU, 2..15 rows     one variadic reduce: one pass over the weight serves all of them
  CPU, 16 rows and up a bf16 dot (AMX where the CPU has it), block by block; int8 weights keep a bf16 copy, `wide`, for it
  elsewhere           a dot in the compute dtype

On CPU, bf16 arrays are kept as their bits in uint16: XLA:CPU would otherwise convert a whole stack of layers, or a whole table,
to f32 at every step.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WEIGHT_KINDS = ("float32", "bfloat16", "int8")
# From this many rows on XLA:CPU's bf16 dot beats the variadic reduce, whose accumulators must fit the vector registers.
_MANY_ROWS = 16
# Rows of a weight that one dot multiplies; from 2,048 to 8,192 it made no difference (head of 262,144 rows, 16 to 256 rows of x:
# 2.0 to 2.7 times faster than one dot).
_BLOCK_ROWS = 4096


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "scale", "wide", "bias"],
    meta_fields=["dtype", "platform"],
)
@dataclasses.dataclass(frozen=True)
class Linear:
    """y = x @ weight.T + bias, over any leading axes of x; also a table of rows (`take`).

    A stack of layers has a leading L axis on every array; `lax.scan` peels it off.
    """

    weight: jax.Array  # [.., N, D] f32, bf16 (on CPU its bits in uint16) or int8
    scale: jax.Array | None = None  # f32[.., N, groups], int8 only: D/groups columns share one
    wide: jax.Array | None = None  # bf16 bits [.., N, D], int8 on CPU only: what many rows multiply
    bias: jax.Array | None = None  # f32[.., N]
    dtype: str = "float32"  # of the operands of products over many rows
    platform: str = "cpu"

    def __call__(self, x):  # x [.., D] -> f32[.., N]
        rows = x.reshape(-1, x.shape[-1])
        y = self._cpu(rows) if self.platform == "cpu" else self._dot(rows)
        if self.bias is not None:
            y = y + self.bias
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def take(self, ids):  # i32[..] -> f32[.., D]
        """Rows of the table: an embedding."""
        rows = _upcast(self.weight.at[ids].get(mode="clip"))
        return rows if self.scale is None else _scaled(rows, self.scale.at[ids].get(mode="clip"))

    def _cpu(self, x):
        if x.shape[0] >= _MANY_ROWS and self.weight.dtype != jnp.float32:
            wide = self.weight if self.wide is None else self.wide
            return _in_blocks(lambda x, w: _matmul(x, _from_bits(w)), x.astype(jnp.bfloat16), wide)
        if x.shape[0] >= _MANY_ROWS:
            return _in_blocks(_matmul, x.astype(jnp.float32), self.weight)
        return _few_rows(_materialised(x.astype(jnp.float32)), self._upcast())

    def _dot(self, x):
        weight = self.weight if self.scale is None else self._upcast()
        # A TPU rounds f32 operands to bf16 unless told otherwise.
        precision = "highest" if self.dtype == "float32" else None
        return _matmul(x.astype(self.dtype), weight.astype(self.dtype), precision)

    def _upcast(self):  # f32[N, D], fused into whatever consumes it
        weight = _upcast(self.weight)
        return weight if self.scale is None else _scaled(weight, self.scale)


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "scale"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class Experts:
    """One weight per expert, multiplied group by group: rows of x sorted by expert, `sizes` rows each."""

    weight: jax.Array  # [.., E, N, D] f32, bf16 or int8
    scale: jax.Array | None = None  # f32[.., E, N, groups], int8 only
    dtype: str = "float32"

    def __call__(self, x, sizes):  # x [R, D], sizes i32[E] -> f32[R, N]
        dtype = jnp.dtype(self.dtype)
        weight = (
            _upcast(self.weight).astype(dtype) if self.scale is None else _scaled(_upcast(self.weight), self.scale).astype(dtype)
        )
        precision = "highest" if dtype == jnp.float32 else None
        return lax.ragged_dot(
            x.astype(dtype), jnp.swapaxes(weight, 1, 2), sizes, precision=precision, preferred_element_type=jnp.float32
        )


def stored_dtype(dtype: str, platform: str) -> np.dtype:
    """The dtype that holds values of `dtype` on a backend: uint16 for bfloat16 on CPU."""
    return np.dtype(jnp.uint16) if (dtype, platform) == ("bfloat16", "cpu") else jnp.dtype(dtype)


def _from_bits(a):
    return lax.bitcast_convert_type(a, jnp.bfloat16) if a.dtype == jnp.uint16 else a


def _upcast(a):
    """f32 from f32, bf16 (also as bits) or int8, in a form XLA:CPU fuses into the consumer."""
    if a.dtype == jnp.uint16:
        return lax.bitcast_convert_type(a.astype(jnp.uint32) << 16, jnp.float32)
    return a.astype(jnp.float32)


def _scaled(rows, scale):  # f32[.., D], f32[.., groups] -> f32[.., D]
    groups = scale.shape[-1]
    return (rows.reshape(*rows.shape[:-1], groups, -1) * scale[..., None]).reshape(rows.shape)


def _matmul(x, weight, precision=None):  # [R, D], [N, D] -> f32[R, N]
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _in_blocks(product, x, weight):
    """product(x, weight) [R, N], a block of the weight's rows at a time where there are many.

    XLA:CPU repacks the whole right-hand side of a dot before it multiplies; a block is still in cache when it is read again.
    """
    N = weight.shape[0]
    if N < 2 * _BLOCK_ROWS:
        return product(x, weight)
    whole = N // _BLOCK_ROWS
    block = lambda i: product(x, lax.dynamic_slice_in_dim(weight, i * _BLOCK_ROWS, _BLOCK_ROWS, 0))
    y = jnp.moveaxis(lax.map(block, jnp.arange(whole)), 0, 1).reshape(x.shape[0], -1)
    return y if N % _BLOCK_ROWS == 0 else jnp.concatenate([y, product(x, weight[whole * _BLOCK_ROWS :])], 1)


def _materialised(x):
    """x itself, in a form that XLA:CPU computes once: fused into a product, a norm would be evaluated once per output.

    XLA:CPU drops an optimization_barrier late, but it never fuses a concatenate into what consumes it.
    """
    half = x.shape[-1] // 2
    return jnp.concatenate(lax.optimization_barrier((x[..., :half], x[..., half:])), -1)


def _few_rows(x, weight):  # f32[R, D], f32[N, D] -> f32[R, N]
    if x.shape[0] == 1:
        return x @ weight.T  # in this form XLA:CPU fuses the upcast; as a dot_general it writes the whole upcast weight out
    products = tuple(weight * row for row in x)
    zeros = (jnp.float32(0),) * len(products)
    return jnp.stack(lax.reduce(products, zeros, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), (1,)))
