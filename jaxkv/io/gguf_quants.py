"""GGML's quantised blocks as float32, bit for bit what gguf-py's `quants.dequantize` gives.

Plain numpy in chunks that stay in a core's cache, spread over threads (numpy releases the lock): no compilation, and
the only large array is the result. All of Gemma 3 270M (256 MB, 270M weights) takes about 0.5 s on two cores.

Every kernel takes u8[n, block_bytes] and fills f32[n, block]. Multiplications and additions stay separate, in gguf-py's
order, since a fused one rounds differently.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np

# type: (elements a block, bytes a block)
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
_PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_CHUNK = 1 << 17  # elements a step: 0.5 MiB of float32 and as much of temporaries fit a core's L2
_THREADED_FROM = 1 << 20  # elements; below, starting threads costs more than it saves

_U8 = np.uint8


def _half(raw: np.ndarray) -> np.ndarray:
    """f32[n, 1] of the float16 in u8[n, 2]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: np.ndarray, group: int) -> np.ndarray:
    """u8[n, m] -> u8[n, m/group, 2, group]: of each group of bytes first the low halves, then the high ones."""
    packed = np.ascontiguousarray(raw).reshape(len(raw), -1, group)
    out = np.empty((*packed.shape[:2], 2, group), _U8)
    np.bitwise_and(packed, _U8(15), out=out[:, :, 0])
    np.right_shift(packed, _U8(4), out=out[:, :, 1])
    return out


def _planes(raw: np.ndarray, group: int, bits: int, count: int) -> np.ndarray:
    """u8[n, m] -> u8[n, m/group, count, group]: plane j holds the j-th `bits`-wide field of each byte."""
    packed = np.ascontiguousarray(raw).reshape(len(raw), -1, group)
    out = np.empty((*packed.shape[:2], count, group), _U8)
    for j in range(count):
        np.right_shift(packed, _U8(j * bits), out=out[:, :, j])
    return np.bitwise_and(out, _U8((1 << bits) - 1), out=out)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """u8[n, 4] -> u8[n, 32]: bit j of the little-endian word, moved to bit 4."""
    return np.left_shift(np.unpackbits(raw, axis=-1, bitorder="little"), _U8(4))


def _q4_0(b: np.ndarray, out: np.ndarray) -> None:
    out[...] = _nibbles(b[:, 2:], 16).reshape(-1, 32).view(np.int8) - np.int8(8)
    out *= _half(b[:, :2])


def _q4_1(b: np.ndarray, out: np.ndarray) -> None:
    out[...] = _nibbles(b[:, 4:], 16).reshape(-1, 32)
    out *= _half(b[:, :2])
    out += _half(b[:, 2:4])


def _q5_0(b: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(b[:, 6:], 16).reshape(-1, 32)
    q |= _fifth_bits(b[:, 2:6])
    out[...] = q.view(np.int8) - np.int8(16)
    out *= _half(b[:, :2])


def _q5_1(b: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(b[:, 8:], 16).reshape(-1, 32)
    q |= _fifth_bits(b[:, 4:8])
    out[...] = q
    out *= _half(b[:, :2])
    out += _half(b[:, 2:4])


def _q8_0(b: np.ndarray, out: np.ndarray) -> None:
    out[...] = b[:, 2:].view(np.int8)
    out *= _half(b[:, :2])


def _q2_k(b: np.ndarray, out: np.ndarray) -> None:
    scales, q = b[:, :16], _planes(b[:, 16:80], 32, 2, 4)
    dl = _half(b[:, 80:82]) * (scales & _U8(15)).astype(np.float32)
    ml = _half(b[:, 82:84]) * (scales >> _U8(4)).astype(np.float32)
    grouped = out.reshape(-1, 16, 16)
    grouped[...] = q.reshape(-1, 16, 16)
    grouped *= dl[:, :, None]
    grouped -= ml[:, :, None]


def _q3_k(b: np.ndarray, out: np.ndarray) -> None:
    low, high = b[:, 96:104], b[:, 104:108]
    scales = np.concatenate([low & _U8(15), low >> _U8(4)], axis=1)
    scales |= np.concatenate([(high >> _U8(s)) & _U8(3) for s in (0, 2, 4, 6)], axis=1) << _U8(4)
    dl = _half(b[:, 108:110]) * (scales.view(np.int8) - np.int8(32)).astype(np.float32)
    q = _planes(b[:, 32:96], 32, 2, 4).reshape(-1, 256).view(np.int8)
    missing = _planes(b[:, :32], 32, 1, 8).reshape(-1, 256) ^ _U8(1)  # a set bit means: subtract nothing
    q -= (missing << _U8(2)).view(np.int8)
    grouped = out.reshape(-1, 16, 16)
    grouped[...] = q.reshape(-1, 16, 16)
    grouped *= dl[:, :, None]


def _k_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima f32[n, 8, 1] of Q4_K and Q5_K: two float16 and 2 x 8 six-bit integers in 12 bytes."""
    lo, mid, hi = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate([lo & _U8(0x3F), (hi & _U8(15)) | ((lo >> _U8(2)) & _U8(0x30))], axis=1)
    least = np.concatenate([mid & _U8(0x3F), (hi >> _U8(4)) | ((mid >> _U8(2)) & _U8(0x30))], axis=1)
    d, m = _half(b[:, :2]), _half(b[:, 2:4])
    return (d * scale.astype(np.float32))[:, :, None], (m * least.astype(np.float32))[:, :, None]


def _q4_k(b: np.ndarray, out: np.ndarray) -> None:
    d, m = _k_scales(b)
    grouped = out.reshape(-1, 8, 32)
    grouped[...] = _nibbles(b[:, 16:], 32).reshape(-1, 8, 32)
    grouped *= d
    grouped -= m


def _q5_k(b: np.ndarray, out: np.ndarray) -> None:
    d, m = _k_scales(b)
    q = _nibbles(b[:, 48:], 32).reshape(-1, 8, 32)
    q |= _planes(b[:, 16:48], 32, 1, 8).reshape(-1, 8, 32) << _U8(4)
    grouped = out.reshape(-1, 8, 32)
    grouped[...] = q
    grouped *= d
    grouped -= m


def _q6_k(b: np.ndarray, out: np.ndarray) -> None:
    d = _half(b[:, 208:210]) * b[:, 192:208].view(np.int8).astype(np.float32)
    q = _nibbles(b[:, :128], 64).reshape(-1, 256)
    q |= _planes(b[:, 128:192], 32, 2, 4).reshape(-1, 256) << _U8(4)
    grouped = out.reshape(-1, 16, 16)
    grouped[...] = (q.view(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    grouped *= d[:, :, None]


_KERNELS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def dequantize(raw: np.ndarray, type_name: str) -> np.ndarray:
    """The flat values of u8[nbytes]: F32, F16 and BF16 as views of that dtype, every quantised type as float32.

    Raises:
      ValueError: an unknown type, or bytes that are not whole blocks.
    """
    if type_name not in BLOCKS:
        raise ValueError(f"GGML type {type_name!r} is not supported; supported: {', '.join(BLOCKS)}")
    block, block_bytes = BLOCKS[type_name]
    if raw.dtype != np.uint8 or raw.ndim != 1 or raw.size % block_bytes:
        raise ValueError(f"{type_name} needs u8[n * {block_bytes}], got {raw.dtype}{list(raw.shape)}")
    if type_name in _PLAIN:
        return raw.view(_PLAIN[type_name])
    blocks = raw.reshape(-1, block_bytes)
    out = np.empty((len(blocks), block), np.float32)
    step, kernel = _CHUNK // block, _KERNELS[type_name]

    def fill(first: int) -> None:
        with np.errstate(all="ignore"):  # scales of Inf or NaN are the file's business
            kernel(blocks[first : first + step], out[first : first + step])

    starts = range(0, len(blocks), step)
    if out.size < _THREADED_FROM or _cores() == 1:
        for first in starts:
            fill(first)
    else:
        with ThreadPoolExecutor(min(_cores(), 16)) as pool:
            list(pool.map(fill, starts))
    return out.reshape(-1)
