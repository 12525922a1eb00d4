"""GGML's quantised blocks as float32, bit for bit what gguf-py's `quants.dequantize` gives.

Plain numpy in chunks that stay in a core's cache, spread over threads (numpy releases the lock): no compilation, and
the only large array is the result. All of Gemma 3 270M (253 MB, 268M weights) takes 1.0 to 1.2 s of processor time,
page faults of the result included: half of that on two cores.

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


def _cut(b: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Contiguous u8[n, stop - start] of columns of u8[n, m]: a row moves as one item, 10 times faster than by bytes."""
    column = np.ndarray(len(b), f"V{stop - start}", b, offset=start, strides=(b.shape[1],))
    return column.copy().view(_U8).reshape(len(b), -1)


def _half(b: np.ndarray, at: int) -> np.ndarray:
    """f32[n, 1] of the float16 at column `at`."""
    return _cut(b, at, at + 2).view(np.float16).astype(np.float32)


def _interleave(planes: list[np.ndarray], group: int) -> np.ndarray:
    """Planes u8[n, m] -> u8[n, len(planes) * m]: a group of the first, then the same group of the second, and so on."""
    out = np.empty((planes[0].size // group, len(planes)), f"V{group}")
    for j, plane in enumerate(planes):
        out[:, j] = plane.reshape(-1).view(out.dtype)
    return out.view(_U8).reshape(len(planes[0]), -1)


def _nibbles(packed: np.ndarray, group: int) -> np.ndarray:
    """u8[n, m] -> u8[n, 2 * m]: of each group of bytes first the low halves, then the high ones."""
    return _interleave([packed & _U8(15), packed >> _U8(4)], group)


def _fields(packed: np.ndarray, bits: int) -> np.ndarray:
    """u8[n, m] -> u8[n, 8 / bits * m]: of each 32 bytes first their lowest `bits`, then the next ones, and so on."""
    mask = _U8((1 << bits) - 1)
    return _interleave([(packed >> _U8(shift)) & mask for shift in range(0, 8, bits)], 32)


def _shift_up(q: np.ndarray, bits: int) -> np.ndarray:
    """q << bits for small q, eight bytes at a time (numpy's byte shift is slow); nothing may overflow a byte."""
    return (q.view(np.uint64) << np.uint64(bits)).view(_U8)


def _fifth_bits(b: np.ndarray, at: int) -> np.ndarray:
    """u8[n, 32]: bit j of the little-endian word at column `at`, moved to bit 4."""
    bits = np.unpackbits(_cut(b, at, at + 4).reshape(-1), bitorder="little")
    return _shift_up(bits, 4).reshape(-1, 32)


def _q4_0(b: np.ndarray, out: np.ndarray) -> None:
    out[...] = _nibbles(_cut(b, 2, 18), 16).view(np.int8) - np.int8(8)
    out *= _half(b, 0)


def _q4_1(b: np.ndarray, out: np.ndarray) -> None:
    out[...] = _nibbles(_cut(b, 4, 20), 16)
    out *= _half(b, 0)
    out += _half(b, 2)


def _q5_0(b: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(_cut(b, 6, 22), 16)
    q |= _fifth_bits(b, 2)
    out[...] = q.view(np.int8) - np.int8(16)
    out *= _half(b, 0)


def _q5_1(b: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(_cut(b, 8, 24), 16)
    q |= _fifth_bits(b, 4)
    out[...] = q
    out *= _half(b, 0)
    out += _half(b, 2)


def _q8_0(b: np.ndarray, out: np.ndarray) -> None:
    out[...] = _cut(b, 2, 34).view(np.int8)
    out *= _half(b, 0)


def _scale(out: np.ndarray, q: np.ndarray, scales: np.ndarray, minima: np.ndarray | None = None) -> None:
    """out = scales * q - minima, with one f32 scale (and minimum) a group: both f32[n, groups]."""
    grouped = out.reshape(*scales.shape, -1)
    grouped[...] = q.reshape(grouped.shape)
    grouped *= scales[:, :, None]
    if minima is not None:
        grouped -= minima[:, :, None]


def _q2_k(b: np.ndarray, out: np.ndarray) -> None:
    scales = _cut(b, 0, 16)
    dl = _half(b, 80) * (scales & _U8(15)).astype(np.float32)
    ml = _half(b, 82) * (scales >> _U8(4)).astype(np.float32)
    _scale(out, _fields(_cut(b, 16, 80), 2), dl, ml)


def _q3_k(b: np.ndarray, out: np.ndarray) -> None:
    low, high = _cut(b, 96, 104), _cut(b, 104, 108)
    scales = np.concatenate([low & _U8(15), low >> _U8(4)], axis=1)
    scales |= np.concatenate([(high >> _U8(shift)) & _U8(3) for shift in (0, 2, 4, 6)], axis=1) << _U8(4)
    dl = _half(b, 108) * (scales.view(np.int8) - np.int8(32)).astype(np.float32)
    q = _fields(_cut(b, 32, 96), 2).view(np.int8)
    missing = _fields(_cut(b, 0, 32), 1) ^ _U8(1)  # a set bit means: subtract nothing
    q -= _shift_up(missing, 2).view(np.int8)
    _scale(out, q, dl)


def _k_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima f32[n, 8] of Q4_K and Q5_K: two float16 and 2 x 8 six-bit integers in 12 bytes."""
    lo, mid, hi = _cut(b, 4, 8), _cut(b, 8, 12), _cut(b, 12, 16)
    scale = np.concatenate([lo & _U8(0x3F), (hi & _U8(15)) | ((lo >> _U8(2)) & _U8(0x30))], axis=1)
    least = np.concatenate([mid & _U8(0x3F), (hi >> _U8(4)) | ((mid >> _U8(2)) & _U8(0x30))], axis=1)
    return _half(b, 0) * scale.astype(np.float32), _half(b, 2) * least.astype(np.float32)


def _q4_k(b: np.ndarray, out: np.ndarray) -> None:
    _scale(out, _nibbles(_cut(b, 16, 144), 32), *_k_scales(b))


def _q5_k(b: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(_cut(b, 48, 176), 32)
    q |= _shift_up(_fields(_cut(b, 16, 48), 1), 4)
    _scale(out, q, *_k_scales(b))


def _q6_k(b: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(_cut(b, 0, 128), 64)
    q |= _shift_up(_fields(_cut(b, 128, 192), 2), 4)
    scales = _half(b, 208) * _cut(b, 192, 208).view(np.int8).astype(np.float32)
    _scale(out, q.view(np.int8) - np.int8(32), scales)


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
