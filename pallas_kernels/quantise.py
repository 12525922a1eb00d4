"""What a pool stores of a vector: a float type as it is, or 8-bit values with one f32 scale a vector, x ~ values * scale.

Caches are compared exactly between implementations, so every one of them takes these steps in this order. The pieces below work on
arrays and inside Pallas kernels alike:

    scale = amax * f32(1 / most)            most is 127 for int8, 448 for fp8 (float8_e4m3fn)
    inverse = 1 / scale                     0 where the vector is (as good as) zero
    values = nearest(x * inverse)           ties to even, clipped to [-most, most]

XLA:CPU converts a whole bf16 or fp8 pool to a wider type whenever it gathers from it or scatters into it; on CPU such pools are
held as their bits, in uint16 and uint8.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

FP8 = jnp.float8_e4m3fn
_MOST = {"int8": 127.0, "float8_e4m3fn": 448.0}
# Pool dtypes that hold the bits of another.
HELD_AS_BITS = {"uint16": jnp.bfloat16, "uint8": FP8}
# Scales below the smallest normal float are 0: some units flush subnormals and some do not, and 1/scale could overflow.
_SMALLEST_SCALE = np.float32(2.0**-126)


def value_dtype(pool_dtype):
    """Returns the dtype of the numbers a pool of `pool_dtype` holds: bfloat16 for uint16, fp8 for uint8, else itself."""
    return jnp.dtype(HELD_AS_BITS.get(jnp.dtype(pool_dtype).name, pool_dtype))


def has_scales(pool_dtype) -> bool:
    """Returns whether a pool of `pool_dtype` goes with an array of scales."""
    return value_dtype(pool_dtype).name in _MOST


def quantise(x, dtype):  # x [.., H] -> values dtype[.., H], scale f32[..]
    """Returns (values, scale) of x's last axis; `dtype` is int8 or float8_e4m3fn.

    A vector that holds NaN or Inf gets a NaN or Inf scale, so that it stays visible; its values mean nothing.
    """
    x = x.astype(jnp.float32)
    scale = scale_of(jnp.max(jnp.abs(x), -1), dtype)
    return nearest(x * inverse_of(scale)[..., None], dtype), scale


def dequantise(values, scale):  # [.., H], f32[..] -> f32[.., H]
    """Returns values * scale."""
    return values.astype(jnp.float32) * scale[..., None]


def scale_of(amax, dtype):
    """Returns the f32 scale of vectors whose largest magnitude is `amax` f32."""
    scale = amax * np.float32(1 / _MOST[jnp.dtype(dtype).name])
    return jnp.where(scale < _SMALLEST_SCALE, np.float32(0), scale)


def inverse_of(scale):
    """Returns what x is multiplied by, f32; 0 where the scale is 0."""
    return jnp.where(scale > 0, np.float32(1) / jnp.where(scale > 0, scale, np.float32(1)), np.float32(0))


def nearest(scaled, dtype):
    """Returns f32 `scaled` in `dtype`, rounded to nearest even and clipped."""
    most = np.float32(_MOST[jnp.dtype(dtype).name])
    if jnp.dtype(dtype) == jnp.int8:
        return jnp.clip(jnp.round(scaled), -most, most).astype(jnp.int8)
    return jnp.clip(scaled, -most, most).astype(FP8)


def to_pool(x, pool_dtype):  # x [.., H] -> values pool_dtype[.., H], scale f32[..] or None
    """Returns what a pool of `pool_dtype` stores of x: its values, and their scales where it goes with scales."""
    dtype = value_dtype(pool_dtype)
    values, scale = quantise(x, dtype) if has_scales(dtype) else (x.astype(dtype), None)
    return lax.bitcast_convert_type(values, pool_dtype) if dtype != pool_dtype else values, scale


def from_pool(values):
    """Returns the numbers (without their scale) of a pool's values; f32 where they are held as bits."""
    if values.dtype == jnp.uint16:
        return lax.bitcast_convert_type(values.astype(jnp.uint32) << 16, jnp.float32)
    if values.dtype == jnp.uint8:
        # As a float16 of the same sign and fraction, whose exponent is too small by 8: XLA:CPU converts that in one instruction,
        # subnormals too, and fp8 itself in 20. The two NaNs become 480; a vector that is not finite has a scale to say so.
        bits = values.astype(jnp.uint16)
        half = lax.bitcast_convert_type((bits & 0x80) << 8 | (bits & 0x7F) << 7, jnp.float16)
        return half.astype(jnp.float32) * np.float32(256)
    return values


def rounded(x, pool_dtype):  # [.., H] -> [.., H]
    """Returns x as it reads back from a pool: in the pool's own float type, or f32 where that is values times scale."""
    dtype = value_dtype(pool_dtype)
    if not has_scales(dtype):
        return x.astype(dtype)
    return dequantise(*quantise(x, dtype))
