"""What every implementation may assume, checked once, with the numbers in the message."""

from __future__ import annotations

import math
import numbers

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Choice
from pallas_kernels.heads import LANES, heads_packed, scales_shape
from pallas_kernels.quantise import HELD_AS_BITS, has_scales

_POOL_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", *HELD_AS_BITS)
_INT32_RANGE = 2**31
# Rows of a TPU tile by bytes a value: a page of fewer is padded in memory, and a copy of it is no longer one transfer.
_TPU_TILE_ROWS = {4: 8, 2: 16, 1: 32}


def check_attention(
    q, k_pages, v_pages, kv_scales, page_table, lengths, chunk_lengths, k_new, v_new, sinks, *, page_offset, scale, window, soft_cap
) -> None:
    """Checks shapes, dtypes and options of one call; `q` is `[B, T, K, G, H]` here (T 1 for decode)."""
    if len(q.shape) != 5:
        raise ValueError(f"q has shape {tuple(q.shape)}, expected [B, K, G, H] for decode or [B, T, K, G, H] for prefill")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"q must be floating point, got {q.dtype}")
    _expect_axes("q", q)
    B, T, K, G, H = q.shape
    _check_pool(k_pages, v_pages, kv_scales, K, H)
    _check_rows(B, k_pages.shape[2], page_table, lengths, chunk_lengths)
    if (k_new is None) != (v_new is None):
        raise ValueError("k_new and v_new go together: give both or neither")
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        if new is not None:
            _expect(name, new, (B, T, K, H))
            _expect_floating(name, new)
    if sinks is not None:
        _expect("sinks", sinks, (K, G))
        _expect_floating("sinks", sinks)
    _expect_number("scale", scale)
    if soft_cap is not None:
        _expect_number("soft_cap", soft_cap)
        if not soft_cap > 0:
            raise ValueError(f"soft_cap must be positive or None, got {soft_cap}")
    _expect_whole_number("page_offset", page_offset)
    _expect_whole_number("window", window)
    if not isinstance(window, jax.core.Tracer) and window < 0:
        raise ValueError(f"window must be 0 (no window) or a positive number of tokens, got {window}")


def check_write(k_pages, v_pages, kv_scales, k_new, v_new, page_table, lengths, chunk_lengths, *, page_offset) -> None:
    """Checks one call of write_kv; k_new is `[L, B, T, K, H]` here."""
    if len(k_new.shape) != 5:
        raise ValueError(f"k_new has shape {tuple(k_new.shape)}, expected [L, B, T, K, H], or [B, T, K, H] for one layer")
    _expect_axes("k_new", k_new)
    L, B, T, K, H = k_new.shape
    _expect("v_new", v_new, k_new.shape)
    _expect_floating("k_new", k_new)
    _expect_floating("v_new", v_new)
    _check_pool(k_pages, v_pages, kv_scales, K, H)
    if k_pages.shape[0] % L:
        raise ValueError(f"a pool of {k_pages.shape[0]} pages does not divide into the L={L} layers of k_new")
    _check_rows(B, k_pages.shape[2], page_table, lengths, chunk_lengths)
    _expect_whole_number("page_offset", page_offset)


def check_platform(choice: Choice, k_pages) -> None:
    """Checks what only the chosen implementation asks of a pool, with the reason.

    Raises:
      ValueError: the implementation cannot run on this pool.
    """
    if not choice.is_pallas:
        return
    dtype, (_, _, P, H) = k_pages.dtype, k_pages.shape
    if dtype.name in HELD_AS_BITS and not choice.interpret:
        raise ValueError(
            f"implementation {choice.name!r} takes no {dtype} pool: bits held as integers are for XLA:CPU; give it "
            f"{jnp.dtype(HELD_AS_BITS[dtype.name])}"
        )
    if choice.name == "pallas_tpu":
        _check_tpu(choice, dtype, P, H)
    if choice.name == "pallas_gpu":
        _check_gpu(choice, k_pages)


def _check_tpu(choice: Choice, dtype, P: int, H: int) -> None:
    if dtype == jnp.float16 and not choice.interpret:
        raise ValueError(f"implementation {choice.name!r} takes no float16 pool: Mosaic cannot load it on a TPU; give it bfloat16")
    rows = _TPU_TILE_ROWS[dtype.itemsize]
    if P % rows:
        raise ValueError(
            f"page_size {P} of a {dtype} pool must be a multiple of {rows} for {choice.name!r}: a TPU holds {dtype} in tiles of "
            f"({rows}, {LANES}), and a page must be whole tiles to be copied as it lies"
        )
    if dtype.itemsize == 1 and P % LANES and LANES % P:
        raise ValueError(
            f"page_size {P} of a {dtype} pool must divide {LANES} or be a multiple of it for {choice.name!r}: scales lie head after "
            f"head in rows of {LANES} lanes, and a head's must not straddle two"
        )
    if H % LANES and not choice.interpret:
        raise ValueError(
            f"k_pages has head_dim {H}, which must be a multiple of {LANES} lanes for {choice.name!r}: XLA would lay such a pool out "
            f"transposed and copy it on every call; pool_heads(K, H, 'tpu') says how to pad or pair heads"
        )


def _check_gpu(choice: Choice, k_pages) -> None:
    """No size of a pool is refused: Triton counts elements in 32 bits and a sign in arrays of up to 4 GiB, and kernels read 8-bit
    pools as pairs, so that there are at most 2^31 elements in these; larger ones it counts in 64 bits."""
    dtype, (_, _, _, H) = k_pages.dtype, k_pages.shape
    if dtype.itemsize == 1 and H % 2:
        raise ValueError(f"head_dim {H} of a {dtype} pool must be even for {choice.name!r}: its kernels read two values at a time")


def _check_pool(k_pages, v_pages, kv_scales, K: int, H: int) -> None:
    if len(k_pages.shape) != 4:
        raise ValueError(f"k_pages has shape {tuple(k_pages.shape)}, expected [L*C, K, P, H]")
    _expect_axes("k_pages", k_pages)
    rows, heads, P, dim = k_pages.shape
    if not heads_packed(K, H, heads, dim):
        raise ValueError(
            f"k_pages has shape {tuple(k_pages.shape)}, expected (any, {K}, any, {H}) for {K} heads of {H}, a last axis of more than "
            f"{H} (padded heads), or (any, {K}/n, any, n*{H}) (n heads side by side)"
        )
    _expect("v_pages", v_pages, k_pages.shape)
    if k_pages.dtype != v_pages.dtype or str(k_pages.dtype) not in _POOL_DTYPES:
        raise TypeError(f"k_pages is {k_pages.dtype} and v_pages {v_pages.dtype}: both must be one of {', '.join(_POOL_DTYPES)}")
    if has_scales(k_pages.dtype):
        if kv_scales is None:
            raise ValueError(f"a {k_pages.dtype} pool needs kv_scales, f32 {scales_shape(rows, heads, P)}")
        _expect("kv_scales", kv_scales, scales_shape(rows, heads, P))
        if kv_scales.dtype != jnp.float32:
            raise TypeError(f"kv_scales must be float32, got {kv_scales.dtype}")
    elif kv_scales is not None:
        raise ValueError(f"kv_scales goes with 8-bit pools, and k_pages is {k_pages.dtype}")


def _check_rows(B: int, P: int, page_table, lengths, chunk_lengths) -> None:
    _expect("page_table", page_table, (B, None))
    _expect_axes("page_table", page_table)
    _expect("lengths", lengths, (B,))
    if chunk_lengths is not None:
        _expect("chunk_lengths", chunk_lengths, (B,))
    for name, array in (("page_table", page_table), ("lengths", lengths), ("chunk_lengths", chunk_lengths)):
        if array is not None and array.dtype != jnp.int32:
            raise TypeError(f"{name} must be int32, got {array.dtype}")
    if page_table.shape[1] * P >= _INT32_RANGE:
        raise ValueError(
            f"a row of {page_table.shape[1]:,} pages of {P} has positions past int32: {page_table.shape[1] * P:,} of at most "
            f"{_INT32_RANGE - 1:,}"
        )


def _expect(name: str, array, shape: tuple) -> None:
    """Raises unless `array.shape` is `shape`; a None in `shape` fits any size."""
    if len(array.shape) != len(shape) or any(b is not None and a != b for a, b in zip(array.shape, shape, strict=False)):
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name} has shape {tuple(array.shape)}, expected ({wanted})")


def _expect_axes(name: str, array) -> None:
    """Raises where there is nothing to do: kernels divide by what is never 0."""
    if 0 in array.shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}: every axis must be at least 1")


def _expect_floating(name: str, array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {array.dtype}")


def _expect_number(name: str, value) -> None:
    """Raises unless `value` is a number known now: it is compiled into the kernel."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a plain number, got {type(value).__name__}; it is static, part of the compiled code")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def _expect_whole_number(name: str, value) -> None:
    """Raises unless `value` is one integer, traced or not: a longer array would broadcast, a float be cut."""
    if hasattr(value, "dtype"):
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"{name} must be one whole number, got {value.dtype} of shape {value.shape}")
    elif not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be one whole number, got {type(value).__name__} {value!r}")
    if not isinstance(value, jax.core.Tracer) and not -(2**31) <= int(value) < 2**31:
        raise ValueError(f"{name} must be in the range of int32, got {value}")
