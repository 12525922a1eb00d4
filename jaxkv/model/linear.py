"""A weight and its product with activations: the one place that knows in which forms a device multiplies fast.

A weight is stored `[out, in]`. What a product does with it depends on the backend and on how many rows of activations there
are; the figures behind each choice are in docs/performance.md:

  CPU, one row        a dot over the upcast weight, which XLA:CPU fuses into one pass over the stored bytes; from 4,096 columns on a
                      reduce with an accumulator for each span of columns
  CPU, 2..15 rows     one variadic reduce: one pass over the weight serves all of them
  CPU, 16 rows and up a bf16 dot (AMX where the CPU has it), block by block, over a second form of the weight, `wide`;
                      in f32 where that was asked for
  elsewhere           a dot in the compute dtype; int8 weights have one scale a row there, which multiplies the result

`weights="bfloat16"` means 16 bits. On CPU the form for few rows is float16: the same bytes at the same speed, and three more
significant bits, which is what keeps greedy tokens equal to float32 weights. bf16 is what AMX multiplies. bf16 arrays are kept as
their bits in uint16: XLA:CPU would otherwise convert a whole stack of layers, or a whole table, to f32 at every step.
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
# Up to this many rows, exact products (f32 operands) are still reduces, 16 rows a pass, and hardly slower than bf16 ones.
EXACT_ROWS = 32
# A dot of one row with so many columns or more is not fused: XLA:CPU writes the whole weight out in f32, at every step.
_LONG_ROW = 4096
# Rows of a weight that one dot multiplies; from 2,048 to 8,192 it made no difference (head of 262,144 rows, 16 to 256 rows of x:
# 2.0 to 2.7 times faster than one dot).
_BLOCK_ROWS = 4096


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "scale", "wide", "bias"], meta_fields=["platform"])
@dataclasses.dataclass(frozen=True)
class Linear:
    """y = x @ weight.T + bias, over any leading axes of x; also a table of rows (`take`).

    A stack of layers has a leading L axis on every array; `lax.scan` peels it off.
    """

    weight: jax.Array  # [.., N, D] f32, 16-bit (CPU: f16, elsewhere bf16) or int8
    scale: jax.Array | None = None  # f32[.., N, groups], int8 only: D/groups columns share one; 1 group but on CPU
    wide: jax.Array | None = None  # bf16 bits [.., N, D], CPU only: what many rows multiply in bf16
    bias: jax.Array | None = None  # f32[.., N]
    platform: str = "cpu"

    def __call__(self, x, dtype: str):  # x [.., D] -> f32[.., N]; dtype of the operands where there are many rows
        rows = x.reshape(-1, x.shape[-1])
        y = self._cpu(rows, dtype) if self.platform == "cpu" else self._dot(rows, dtype)
        if self.bias is not None:
            y = y + self.bias
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def take(self, ids):  # i32[..] -> f32[.., D]
        """Rows of the table: an embedding."""
        rows = self.weight.at[ids].get(mode="clip").astype(jnp.float32)
        return rows if self.scale is None else _scaled(rows, self.scale.at[ids].get(mode="clip"))

    def bytes_read(self, rows: int, dtype: str) -> int:
        """Bytes of this weight that one product with so many rows reads."""
        read = (self.wide,) if self._reads_wide(rows, dtype) else (self.weight, self.scale)
        return sum(a.nbytes for a in (*read, self.bias) if a is not None)

    def _reads_wide(self, rows: int, dtype: str) -> bool:
        return self.platform == "cpu" and rows >= _MANY_ROWS and dtype != "float32" and self.wide is not None

    def _cpu(self, x, dtype):
        R = x.shape[0]
        if self._reads_wide(R, dtype):
            bf16 = lambda x, w: _matmul(x, lax.bitcast_convert_type(w, jnp.bfloat16))
            return _in_blocks(bf16, x.astype(jnp.bfloat16), self.wide)
        x = x.astype(jnp.float32)
        if R < _MANY_ROWS or (R <= EXACT_ROWS and self.weight.dtype != jnp.float32):
            return _few_rows(_materialised(x), _upcast((self.weight, self.scale)))
        return _in_blocks(lambda x, w: _matmul(x, _upcast(w)), x, (self.weight, self.scale))

    def _dot(self, x, dtype):
        # A TPU rounds f32 operands to bf16 unless told otherwise.
        precision = "highest" if dtype == "float32" else None
        y = _matmul(x.astype(dtype), self.weight.astype(dtype), precision)  # int8 is exact in 16 bits
        return y if self.scale is None else y * self.scale[:, 0]


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "scale", "layer"], meta_fields=["dtype", "platform"])
@dataclasses.dataclass(frozen=True)
class Experts:
    """One weight per expert: rows that are sorted by expert multiply group by group (`__call__`), or all rows one expert (`one`).

    A stack of layers is not peeled off by `lax.scan` but indexed (`of_layer`): XLA:CPU would copy a layer's experts, all of them, for
    a loop over the few that are chosen.
    """

    weight: jax.Array  # [.., E, N, D] f32, 16-bit or int8
    scale: jax.Array | None = None  # f32[.., E, N, groups], int8 only
    layer: jax.Array | None = None  # i32[], of a stack: which
    dtype: str = "float32"
    platform: str = "cpu"

    def of_layer(self, layer) -> Experts:
        """Those of one layer of the stack."""
        return dataclasses.replace(self, layer=layer)

    def __call__(self, x, sizes):  # x [R, D] sorted by expert, sizes i32[E] rows of each -> f32[R, N]
        precision = "highest" if self.dtype == "float32" else None
        weight = jnp.swapaxes(_upcast(self._at(())).astype(self.dtype), 1, 2)
        return lax.ragged_dot(x.astype(self.dtype), weight, sizes, precision=precision, preferred_element_type=jnp.float32)

    def one(self, x, expert):  # x f32[R, D], expert i32[] -> f32[R, N]
        """The product with one expert's weight: reads no other's."""
        weight = self._at((expert,))
        few = _MANY_ROWS if self.weight.dtype == jnp.float32 else EXACT_ROWS + 1
        return _few_rows(_materialised(x), _upcast(weight)) if x.shape[0] < few else _matmul(x, _upcast(weight))

    def _at(self, expert: tuple):
        """(weight, scale) of the layer, and of an expert in it."""
        index = expert if self.layer is None else (self.layer, *expert)

        def take(array):
            sizes = (1,) * len(index) + array.shape[len(index) :]
            return lax.dynamic_slice(array, index + (0,) * (array.ndim - len(index)), sizes).reshape(array.shape[len(index) :])

        return jax.tree.map(take, (self.weight, self.scale))


def stored_dtype(dtype: str, platform: str) -> np.dtype:
    """The dtype that holds values of `dtype` on a backend: uint16 for bfloat16 on CPU."""
    return np.dtype(jnp.uint16) if (dtype, platform) == ("bfloat16", "cpu") else jnp.dtype(dtype)


def weight_dtype(weights: str, platform: str) -> np.dtype:
    """The dtype of `Linear.weight` for a kind of weights on a backend."""
    return np.dtype(np.float16) if (weights, platform) == ("bfloat16", "cpu") else jnp.dtype(weights)


def _upcast(weight_and_scale):
    """f32 weights, in a form XLA fuses into the consumer."""
    weight, scale = weight_and_scale
    weight = weight.astype(jnp.float32)
    return weight if scale is None else _scaled(weight, scale)


def _scaled(rows, scale):  # f32[.., D], f32[.., groups] -> f32[.., D]
    groups = scale.shape[-1]
    return (rows.reshape(*rows.shape[:-1], groups, -1) * scale[..., None]).reshape(rows.shape)


def _matmul(x, weight, precision=None):  # [R, D], [N, D] -> f32[R, N]
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _in_blocks(product, x, weight):
    """product(x, weight) [R, N], a block of the weight's rows at a time where there are many.

    XLA:CPU repacks the whole right-hand side of a dot before it multiplies; a block is still in cache when it is read again.
    """
    N = jax.tree.leaves(weight)[0].shape[0]
    if N < 2 * _BLOCK_ROWS:
        return product(x, weight)
    whole = N // _BLOCK_ROWS
    rows = lambda start, size: jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size, 0), weight)
    y = lax.map(lambda i: product(x, rows(i * _BLOCK_ROWS, _BLOCK_ROWS)), jnp.arange(whole))
    y = jnp.moveaxis(y, 0, 1).reshape(x.shape[0], -1)
    rest = N % _BLOCK_ROWS
    return jnp.concatenate([y, product(x, rows(N - rest, rest))], 1) if rest else y


def _materialised(x):
    """x itself, in a form that XLA:CPU computes once: fused into a product, a norm would be evaluated once per output.

    XLA:CPU drops an optimization_barrier late, but it never fuses a concatenate into what consumes it.
    """
    half = x.shape[-1] // 2
    return jnp.concatenate(lax.optimization_barrier((x[..., :half], x[..., half:])), -1)


def _few_rows(x, weight):  # f32[R, D], f32[N, D] -> f32[R, N]
    if x.shape[0] == 1:
        if (spans := _spans(x.shape[1])) > 1:
            weight, x = (a.reshape(a.shape[0], spans, -1) for a in (weight, x))
            return sum(_sums([weight[:, i] * x[0, i] for i in range(spans)]))[None]
        return x @ weight.T  # in this form XLA:CPU fuses the upcast; as a dot_general it writes the whole upcast weight out
    rounds = range(0, x.shape[0], _MANY_ROWS)
    return jnp.stack([y for start in rounds for y in _sums([weight * row for row in x[start : start + _MANY_ROWS]])])


def _sums(products):  # f32[N, D] each -> f32[N] each
    """Their sums over columns, in one pass over what they have in common."""
    zeros = (jnp.float32(0),) * len(products)
    return lax.reduce(tuple(products), zeros, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), (1,))


def _spans(columns: int) -> int:
    """The fewest equal spans of so many columns of which each is short enough for XLA:CPU's fused dot; 1 where there are none."""
    fits = lambda n: columns % n == 0 and columns // n < _LONG_ROW
    return next((n for n in range(1, _MANY_ROWS) if fits(n)), 1)
