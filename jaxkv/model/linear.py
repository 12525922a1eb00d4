"""A weight and its product with activations: the one place that knows in which forms a device multiplies fast.

A weight is stored `[out, in]` as f32, bf16 or int8 with f32 scales. What a product does with it depends on the backend and on
how many rows of activations there are; the figures behind each choice are in docs/performance.md:

  CPU, one row        a dot over the upcast weight, which XLA:CPU fuses into one pass over the stored bytes
  CPU, 2..15 rows     one variadic reduce: a pass over the weight serves 8 rows
  CPU, 16 rows and up a bf16 dot (AMX where the CPU has it); int8 weights keep a bf16 copy, `wide`, for these products
  elsewhere           a dot in the compute dtype

On CPU, bf16 arrays travel through scans and gathers as their bits in uint16 (`as_bits`): XLA:CPU would otherwise convert a whole
stack of layers to f32 at every step.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

WEIGHT_KINDS = ("float32", "bfloat16", "int8")
# From this many rows on XLA:CPU's bf16 dot beats the variadic reduce.
_MANY_ROWS = 16
# Rows one variadic reduce serves; 8 accumulators and the weight fit the 32 vector registers.
_REDUCE_ROWS = 8


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

    weight: jax.Array  # [.., N, D] f32, bf16 or int8
    scale: jax.Array | None = None  # f32[.., N, D/group], int8 only
    wide: jax.Array | None = None  # bf16[.., N, D], int8 on CPU only: what many rows multiply
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
            return _matmul(x.astype(jnp.bfloat16), _from_bits(wide))
        x = x.astype(jnp.float32)
        if self.weight.dtype != jnp.int8:
            return _few_rows(x, self.weight)
        if self.scale.shape[-1] == 1:
            return _few_rows(x, self.weight) * self.scale[:, 0]
        return _few_rows_grouped(x, self.weight, self.scale)

    def _dot(self, x):
        dtype = jnp.dtype(self.dtype)
        if self.scale is None:
            return _matmul(x.astype(dtype), self.weight.astype(dtype))
        if self.scale.shape[-1] == 1:
            return _matmul(x.astype(dtype), self.weight.astype(dtype)) * self.scale[:, 0]
        return _matmul(x.astype(dtype), _scaled(self.weight.astype(jnp.float32), self.scale).astype(dtype))


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "scale"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class Experts:
    """One weight per expert, multiplied group by group: rows of x sorted by expert, `sizes` rows each."""

    weight: jax.Array  # [.., E, N, D] f32, bf16 or int8
    scale: jax.Array | None = None  # f32[.., E, N, 1], int8 only
    dtype: str = "float32"

    def __call__(self, x, sizes):  # x [R, D], sizes i32[E] -> f32[R, N]
        dtype = jnp.dtype(self.dtype)
        weight = _upcast(self.weight).astype(dtype) if self.scale is None else _scaled(_upcast(self.weight), self.scale).astype(dtype)
        precision = "highest" if dtype == jnp.float32 else None
        return lax.ragged_dot(
            x.astype(dtype), jnp.swapaxes(weight, 1, 2), sizes, precision=precision, preferred_element_type=jnp.float32
        )


def as_bits(tree, platform: str):
    """On CPU, the same tree with every bf16 array as uint16 bits; free, and done once at the edge of a jitted step."""
    if platform != "cpu":
        return tree
    to_bits = lambda a: lax.bitcast_convert_type(a, jnp.uint16) if a.dtype == jnp.bfloat16 else a
    return jax.tree.map(to_bits, tree)


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


def _matmul(x, weight):  # [R, D], [N, D] -> f32[R, N]
    precision = "highest" if x.dtype == jnp.float32 else None
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _few_rows(x, weight):  # f32[R, D], [N, D] -> f32[R, N]
    if x.shape[0] == 1 or x.shape[0] >= _MANY_ROWS:
        return _matmul(x, _upcast(weight))
    weight = _upcast(weight)
    return jnp.concatenate(
        [
            jnp.stack(_reduce_add(tuple(weight * row for row in x[start : start + _REDUCE_ROWS]), axis=1))
            for start in range(0, x.shape[0], _REDUCE_ROWS)
        ]
    )


def _few_rows_grouped(x, weight, scale):  # f32[R, D], int8[N, D], f32[N, groups] -> f32[R, N]
    groups = scale.shape[-1]
    weight = _upcast(weight).reshape(weight.shape[0], groups, -1)
    x = x.reshape(x.shape[0], groups, -1)
    out = []
    for start in range(0, x.shape[0], _REDUCE_ROWS):
        partial_sums = _reduce_add(tuple(weight * row for row in x[start : start + _REDUCE_ROWS]), axis=2)
        out += [jnp.sum(p * scale, 1) for p in partial_sums]
    return jnp.stack(out)


def _reduce_add(operands, axis: int):
    zeros = (jnp.float32(0),) * len(operands)
    return lax.reduce(operands, zeros, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), (axis,))
