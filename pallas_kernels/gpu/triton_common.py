"""What the Triton decode and prefill kernels share: how keys and values are read, converted and multiplied.

An 8-bit pool is read as int16, two neighbours of a head at a time: the *even* and the *odd* part of a tile. Triton can transpose
16-bit values only (8-bit ones it would gather from shared memory byte by byte, for every tile of values), two conversions then take
three instructions, and arrays of up to 4 GiB keep offsets that fit 31 bits. A product with an 8-bit tile is the sum of two. A 16-bit
pool that meets f32 is read as int32 in the same way, since its conversion in one piece spills.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpu.splits import LN2, LOG2E
from pallas_kernels.quantise import has_scales, value_dtype

# Where a running maximum starts: finite, so that a row that has seen nothing yet meets exp2(-inf) and never -inf - -inf.
LOWEST = -1e30
# v scales below this count as this where they only steer the range of P: keeps their logarithm and 1/scale finite.
_TINY_SCALE = 2.0**-60
# e4m3 bits shifted into a float16 read 2^-8 of their value, since the exponents' biases are 7 and 15; subnormals too.
_E4M3_IN_F16 = 256.0


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How scores are made, all static.

    Attributes:
      dtype: of the operands of both products; sums are f32.
      pool: dtype of the numbers in the pool: a float, int8 or float8_e4m3fn.
      scale, soft_cap: as in the public op.
      interpret: runs as plain jnp on any device.
    """

    dtype: str
    pool: str
    scale: float
    soft_cap: float | None
    interpret: bool

    @property
    def scaled(self) -> bool:
        """Whether the pool's numbers go with scales."""
        return has_scales(self.pool)

    @property
    def parts(self) -> int:
        """Into how many column-interleaved parts a tile is read."""
        return 2 if self.scaled or (self.dtype == "float32" and self.pool != "float32") else 1

    @property
    def key_unit(self) -> float:
        """What the numbers of a tile must be multiplied by, beside their scale."""
        return _E4M3_IN_F16 if self.pool == "float8_e4m3fn" and self.dtype == "float16" else 1.0


def numerics(q, pool, scale: float, soft_cap: float | None, interpret: bool) -> Numerics:
    """The operands' type: f32 if q or the pool is; else the pool's own; float16 for 8 bits, whose values it holds exactly."""
    held = value_dtype(pool.dtype)
    dtype = "float16" if has_scales(held) else str(held)
    if "float32" in (str(q.dtype), dtype):
        dtype = "float32"
    return Numerics(dtype, str(held), float(scale), None if soft_cap is None else float(soft_cap), interpret)


def pool_view(num: Numerics, pool):
    """Returns the pool as the kernels read it: the same bytes, never a copy."""
    if num.parts == 2:
        pairs = jnp.int16 if pool.dtype.itemsize == 1 else jnp.int32
        return lax.bitcast_convert_type(pool.reshape(*pool.shape[:-1], -1, 2), pairs)
    return lax.bitcast_convert_type(pool, jnp.dtype(num.pool))  # uint16 holds bf16


def query_view(num: Numerics, q):
    """Returns q as the kernels read it: f32 operands are converted before, as Triton spills over an f32 operand of 16 bits."""
    return q.astype(num.dtype) if num.dtype == "float32" else q


def check_tile(kernel: str, num_warps: int | None, **tokens: int | None) -> None:
    """Raises ValueError unless the sides of a tile are what Triton multiplies."""
    for name, value in tokens.items():
        if value is None or value < 16 or value & (value - 1):
            raise ValueError(f"{name}={value} of {kernel} must be a power of two of at least 16: such are Triton's tiles")
    if num_warps is None or num_warps > 32 or num_warps & (num_warps - 1):
        raise ValueError(f"num_warps={num_warps} of {kernel} must be a power of two of at most 32")


def pow2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def part_columns(num: Numerics, H: int):
    """Returns the columns of q and o of each part, i32 `[width]`, and which of them exist, bool `[width]`."""
    at = jnp.arange(pow2(-(-H // num.parts), 16), dtype=jnp.int32)
    return [at * num.parts + part for part in range(num.parts)], at < -(-H // num.parts)


def token_span(tile, block: int, start, end):
    """Positions i32 `[block]` of a tile's tokens, tiles counting from position 0, and which of them lie in [start, end)."""
    positions = tile * block + jnp.arange(block, dtype=jnp.int32)
    return positions, (positions >= start) & (positions < end)


def load_pages(table_ref, row, page_offset, page_size: int, tile, block: int, start, end):
    """Pool rows i32 `[block]` of a tile's tokens; no entry of the table is read for a token outside [start, end)."""
    if page_size % block == 0:  # one page holds the tile: a scalar keeps the address arithmetic off the lanes
        first = tile * block
        there = (first + (block - 1) >= start) & (first < end)
        page = plgpu.load(table_ref.at[row, lax.div(first, jnp.int32(page_size))], mask=there, other=0)
        return jnp.broadcast_to(page + page_offset, (block,))
    positions, seen = token_span(tile, block, start, end)
    return plgpu.load(table_ref.at[row, lax.div(positions, jnp.int32(page_size))], mask=seen, other=0) + page_offset


def load_tile(ref, pages, head, offsets, seen, columns_exist):
    """Keys or values `[block, width]` of the tokens `(pages, offsets)`; what is not seen is 0, whatever its slot holds.

    A masked asynchronous copy writes zeros and reads nothing, so the select costs neither instructions nor bytes.
    """
    columns = jnp.arange(columns_exist.shape[0], dtype=jnp.int32)
    mask = seen[:, None] & columns_exist[None, :]
    other = jnp.zeros((), ref.dtype)
    return plgpu.load(ref.at[pages[:, None], head, offsets[:, None], columns[None, :]], mask=mask, other=other)


def load_scales(ref, which: int, pages, head, offsets, seen, page_size: int):
    """Scales f32 `[block]` of keys (0) or values (1) from `[pages, 2, R*128]`, index head * P + offset; 0 where not seen."""
    if ref is None:
        return None
    return plgpu.load(ref.at[pages, which, head * page_size + offsets], mask=seen, other=0.0)


def tile_parts(num: Numerics, tile):
    """Returns the parts of a tile, or of a list that holds them, as operands; e4m3 in float16 is off by `key_unit`."""
    if num.parts == 1:
        return [x.astype(num.dtype) for x in (tile if isinstance(tile, list) else [tile])]
    convert = {"int8": _int8_part, "float8_e4m3fn": _e4m3_part}.get(num.pool, _f32_part)
    return [convert(num, tile, part) for part in range(2)]


def _f32_part(num: Numerics, tile, part: int):
    if num.pool == "bfloat16":  # the upper half of an f32
        return lax.bitcast_convert_type(tile << 16 if part == 0 else tile & -0x10000, jnp.float32)
    half = (tile if part == 0 else tile >> 16).astype(jnp.int16)
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)


def _int8_part(num: Numerics, tile, part: int):
    if num.interpret or num.dtype == "float32":
        return lax.shift_right_arithmetic(tile << 8 if part == 0 else tile, jnp.int16(8)).astype(num.dtype)
    # 0x6400 is 1024 in float16, whose last bits count ones: 1152 + b for a byte b with its sign flipped in.
    shift = "" if part == 0 else "shr.b32 x, x, 8;"
    return _pairs(f"{shift} lop3.b32 x, x, 0x00ff00ff, 0x64806480, 0x6a; sub.rn.f16x2 $0, x, c;", "mov.b32 c, 0x64806480;", tile)


def _e4m3_part(num: Numerics, tile, part: int):
    if num.interpret or num.dtype == "float32":
        bits = lax.bitcast_convert_type(tile, jnp.uint16)
        bits = bits << 8 if part == 0 else bits
        half = lax.bitcast_convert_type((bits & 0x8000) | ((bits >> 1) & 0x3F80), jnp.float16)
        return half if num.dtype == "float16" else half.astype(num.dtype) * _E4M3_IN_F16
    shift = "shl.b32 x, x, 8;" if part == 0 else ""
    return _pairs(f"{shift} shr.b32 c, x, 1; and.b32 c, c, 0x3f803f80; lop3.b32 $0, x, 0x80008000, c, 0xea;", "", tile)


def _pairs(asm: str, first: str, tile):
    """Runs PTX on two int16 of `tile` at a time, x; returns float16. Triton itself would unpack every value to 32 bits."""
    (out,) = plgpu.elementwise_inline_asm(
        "{ .reg .b32 x, c; mov.b32 x, $1; " + first + asm + " }",
        args=[tile],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(tile.shape, jnp.float16)],
    )
    return out


def normalised(num: Numerics, parts):
    """Returns the parts of q `[rows, width]` as operands, and what their scores must be multiplied by: f32 `[rows]` or None.

    bf16 has numbers that float16 has not: such rows are divided by their largest magnitude.
    """
    if num.dtype != "float16" or parts[0].dtype == jnp.float16:
        return [q.astype(num.dtype) for q in parts], None
    parts = [q.astype(jnp.float32) for q in parts]
    top = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(q), 1) for q in parts])
    top = jnp.where(top > 0, top, 1.0)
    return [(q / top[:, None]).astype(num.dtype) for q in parts], top


def dots(num: Numerics, a, b, *, transpose_b: bool = False):
    """The sum of a @ b (or a @ b.T) over their parts, f32."""
    contract = ((1,), (1 if transpose_b else 0,))
    precision = lax.Precision.HIGHEST if num.dtype == "float32" else None
    product = lambda x, y: lax.dot_general(x, y, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)
    return sum(map(product, a[1:], b[1:]), start=product(a[0], b[0]))


def scores(num: Numerics, q, row_scale, keys, key_scale):
    """Base-2 scores f32 `[rows, block]`: log2(e) times what the public op calls a score.

    All scales go onto the scores, never into q or the keys, where they would be rounded.
    """
    factor = num.scale * num.key_unit * (LOG2E if num.soft_cap is None else 1 / num.soft_cap)
    s = dots(num, q, tile_parts(num, keys), transpose_b=True)
    s = s * factor if key_scale is None else s * (key_scale * factor)[None, :]
    if row_scale is not None:
        s = s * row_scale[:, None]
    return s if num.soft_cap is None else jnp.tanh(s) * (num.soft_cap * LOG2E)


def softmax_step(num: Numerics, acc, m, total, s, values, value_scale):
    """One step of the online softmax in base 2 (arXiv:2205.14135) over masked scores s `[rows, block]`.

    acc f32 `[rows, width]` of each part, m f32 `[rows]` from LOWEST, total f32 `[rows, block]`: its sum, which crosses warps, is
    taken once, at the end.
    """
    top = s
    if value_scale is not None:
        # P times its scale must fit float16 well, so m is about the maximum of that product: the scale's exponent is enough.
        bits = lax.bitcast_convert_type(jnp.maximum(value_scale, _TINY_SCALE), jnp.int32)
        top = s + ((bits >> 23) - 127).astype(jnp.float32)[None, :]
    m_new = jnp.maximum(m, jnp.max(top, 1))
    decay, p = jnp.exp2(m - m_new), jnp.exp2(s - m_new[:, None])
    total = total * decay[:, None] + p
    if value_scale is not None:
        p = p * value_scale[None, :]
    p = p.astype(num.dtype)
    acc = [a * decay[:, None] + dots(num, [p], [v]) for a, v in zip(acc, tile_parts(num, values), strict=True)]
    return acc, m_new, total


def finish(acc, m, total, unit: float = 1.0):
    """Returns o f32 `[rows, width]` of each part and the natural lse f32 `[rows]`; 0 and -inf where nothing was seen.

    acc holds numbers that are `unit` times too small.
    """
    total = jnp.sum(total, 1)
    alive = total != 0  # NaN is alive
    safe = jnp.where(alive, total, 1.0)
    return [a * (unit / safe)[:, None] for a in acc], jnp.where(alive, m * LN2 + jnp.log(safe), -jnp.inf)
