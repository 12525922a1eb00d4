"""One page outside the device: its bytes, how they lie, and what they may be used for.

Axes: L layers, K kv heads as the pool holds them, P tokens, H head dim as the pool holds it. A pool may hold bfloat16 as its bits
in uint16 and fp8 as its bits in uint8; 8-bit pools go with scales.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import ml_dtypes
import numpy as np

from jaxkv.serving.fingerprint import Fingerprint

DTYPES: dict[str, np.dtype] = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.uint8, np.uint16)
}
KEY_BYTES = 32  # a SHA-256


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Shapes and dtype of a page's arrays: a restore gives exactly these or nothing.

    Raises:
      ValueError: no layout that a pool has.
    """

    shape: tuple[int, int, int, int]  # (L, K, P, H) of keys, and of values
    dtype: str  # a name in DTYPES
    scales_shape: tuple[int, int, int, int] | None = None  # (L, 2, R, 128) of f32 scales

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"a page's dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        for name, shape in (("shape", self.shape), ("scales_shape", self.scales_shape)):
            if shape is not None and not (len(shape) == 4 and all(type(n) is int and n > 0 for n in shape)):
                raise ValueError(f"a page's {name} must be 4 positive sizes, not {shape!r}")

    @property
    def page_size(self) -> int:
        """P, tokens."""
        return self.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        scales = math.prod(self.scales_shape) * 4 if self.scales_shape else 0
        return 2 * math.prod(self.shape) * DTYPES[self.dtype].itemsize + scales


@dataclasses.dataclass(frozen=True, eq=False)
class PageData:
    """A page's keys and values in every layer.

    Raises:
      ValueError: arrays that are no page together.
    """

    k: np.ndarray  # [L, K, P, H]
    v: np.ndarray  # [L, K, P, H]
    scales: np.ndarray | None = None  # f32[L, 2, R, 128]

    def __post_init__(self):
        if self.k.shape != self.v.shape or self.k.dtype != self.v.dtype:
            raise ValueError(f"keys {self.k.dtype}{self.k.shape} and values {self.v.dtype}{self.v.shape} of a page must be alike")
        if self.scales is not None and self.scales.dtype != np.float32:
            raise ValueError(f"scales of a page must be float32, not {self.scales.dtype}")
        self.layout  # noqa: B018  (raises for shapes and dtypes of no pool)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """(k, v), or (k, v, scales)."""
        return (self.k, self.v) if self.scales is None else (self.k, self.v, self.scales)

    @property
    def layout(self) -> PageLayout:
        """How the arrays lie."""
        return PageLayout(self.k.shape, self.k.dtype.name, None if self.scales is None else self.scales.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class PageRecord:
    """A page and all that must be the same before anyone may use it again.

    Raises:
      ValueError: keys of another length, or tokens, data and fingerprint that disagree about the page size.
    """

    key: bytes  # 32 bytes: the chain's digest up to and with this page
    parent_key: bytes  # of the page before it; of the first page: the fingerprint's root, or zeros
    depth: int  # pages before it
    fingerprint: Fingerprint
    tokens: np.ndarray  # i32[P]
    data: PageData

    def __post_init__(self):
        if not len(self.key) == len(self.parent_key) == KEY_BYTES:
            raise ValueError(f"keys of pages have {KEY_BYTES} bytes, not {len(self.key)} and {len(self.parent_key)}")
        if self.depth < 0:
            raise ValueError(f"depth={self.depth} must not be negative")
        P = self.fingerprint.page_size
        if self.tokens.shape != (P,) or self.tokens.dtype != np.int32 or self.data.layout.page_size != P:
            raise ValueError(
                f"tokens {self.tokens.dtype}{self.tokens.shape} and data {self.data.layout.shape} are not one page of {P} int32"
                f" tokens"
            )


class Held(Protocol):
    """What a tier knows of a page it holds."""

    @property
    def fingerprint(self) -> Fingerprint: ...
    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def layout(self) -> PageLayout: ...


def mismatch(held: Held, fingerprint: Fingerprint, tokens: np.ndarray, layout: PageLayout) -> str | None:
    """The first thing in which a page that is held is not the page that is wanted; None: it is that page."""
    if held.fingerprint != fingerprint:
        return "fingerprint"
    if not np.array_equal(held.tokens, tokens):
        return "tokens"
    return "layout" if held.layout != layout else None


def to_bytes(array: np.ndarray) -> memoryview:
    """The array's bytes in C order; no copy where they lie so already."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def from_bytes(buffer: bytes, layout: PageLayout) -> PageData:
    """The inverse of joining `to_bytes` of a page's arrays; read-only views of the buffer, which has layout.nbytes."""
    dtype, count = DTYPES[layout.dtype], math.prod(layout.shape)
    k, v = (np.frombuffer(buffer, dtype, count, i * count * dtype.itemsize).reshape(layout.shape) for i in (0, 1))
    if layout.scales_shape is None:
        return PageData(k, v)
    return PageData(k, v, np.frombuffer(buffer, np.float32, -1, 2 * count * dtype.itemsize).reshape(layout.scales_shape))
