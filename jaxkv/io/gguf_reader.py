"""The GGUF container (versions 2 and 3): header parsed with bounds checks over a memory map, tensors found lazily.

Layout: magic, version u32, tensor count u64, metadata count u64, metadata (key, type, value)*, tensor descriptions
(name, n_dims u32, dims u64*, type u32, offset u64)*, padding to `general.alignment`, data. All little-endian.
Every length is compared with what is left of the file before anything of that size is made.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.io.gguf_quants import BLOCKS, dequantize

GGML_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 30: "BF16",
}  # fmt: skip
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MIN_PAIR_BYTES = 8 + 4 + 1  # empty key, type, one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # empty name, n_dims, one dim, type, offset
_MAX_NAME_BYTES = 65_535

_TENSOR_COUNT_AT = 8  # behind magic and version


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is outermost first (numpy's order, the reverse of the file's)."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int  # bytes from the start of the file
    nbytes: int


class _Cursor:
    """Reads little-endian fields and refuses to leave the file."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.pos, self.end = data, path, 0, len(data)

    def fail(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: {message} (at byte {self.pos} of {self.end})")

    def unpack(self, layout: str, what: str) -> tuple:
        size = struct.calcsize(layout)
        if size > self.end - self.pos:
            raise self.fail(f"the file ends inside {what}, which takes {size} bytes")
        values = struct.unpack_from(layout, self.data, self.pos)
        self.pos += size
        return values

    def text(self, what: str) -> str:
        (length,) = self.unpack("<Q", f"the length of {what}")
        if length > self.end - self.pos:
            raise self.fail(f"{what} says it has {length} bytes, {self.end - self.pos} are left")
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error}") from None

    def name(self, what: str) -> str:
        text = self.text(what)
        if not 0 < len(text) <= _MAX_NAME_BYTES or not text.isprintable():
            raise self.fail(f"{what} is empty, longer than {_MAX_NAME_BYTES} or not printable: {text[:80]!r}")
        return text

    def value(self, key: str) -> Any:
        (kind,) = self.unpack("<I", f"the type of {key!r}")
        if kind == _STRING:
            return self.text(f"the value of {key!r}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.fail(f"metadata {key!r} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        (raw,) = self.unpack(f"<{dtype.itemsize}s", f"the value of {key!r}")
        return np.frombuffer(raw, dtype)[0].item()

    def array(self, key: str) -> np.ndarray | list[bytes]:
        kind, count = self.unpack("<IQ", f"the array header of {key!r}")
        if kind != _STRING and kind not in _SCALARS:
            raise self.fail(f"metadata {key!r} is an array of the unsupported value type {kind}")
        itemsize = 8 if kind == _STRING else np.dtype(_SCALARS[kind]).itemsize
        if count > (self.end - self.pos) // itemsize:
            raise self.fail(f"array {key!r} says it has {count} entries, {self.end - self.pos} bytes are left")
        if kind == _STRING:
            return self.strings(key, count)
        values = np.frombuffer(self.data, np.dtype(_SCALARS[kind]), count, self.pos)
        self.pos += count * itemsize
        return values

    def strings(self, key: str, count: int) -> list[bytes]:
        """Raw bytes, not text: a vocabulary has 262,144 of them and this loop is the cost of opening the file."""
        data, pos, end, length_at = self.data, self.pos, self.end, struct.Struct("<Q").unpack_from
        out: list[bytes] = []
        for _ in range(count):
            self.pos = pos
            if end - pos < 8:
                raise self.fail(f"the file ends inside entry {len(out)} of {count} of {key!r}")
            (length,) = length_at(data, pos)
            pos += 8
            if length > end - pos:
                raise self.fail(f"entry {len(out)} of {key!r} says it has {length} bytes, {end - pos} are left")
            out.append(data[pos : pos + length])
            pos += length
        self.pos = pos
        return out


class GGUFFile:
    """An open GGUF file: `.metadata`, `.tensors`, and reads that touch only the bytes they need.

    Arrays of strings are lists of bytes; other arrays are numpy views of the map.
    """

    def __init__(self, path: Path, data: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, TensorInfo], metadata_end: int):
        self.path, self.metadata, self.tensors = path, metadata, tensors
        self._data, self._metadata_end = data, metadata_end

    def header(self) -> bytes:
        """The metadata as a GGUF file of its own, without tensors: a vocabulary to keep beside converted weights."""
        start = bytearray(self._data[: self._metadata_end])
        struct.pack_into("<Q", start, _TENSOR_COUNT_AT, 0)
        return bytes(start)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) along the outermost axis: F32, F16, BF16 as stored (views), quantised types as float32."""
        info = self.tensors[name]
        rows = info.shape[0] if stop is None else stop
        if not 0 <= start <= rows <= info.shape[0]:
            raise ValueError(f"rows [{start}, {rows}) are outside of tensor {name!r} of shape {info.shape}")
        row_bytes = info.nbytes // info.shape[0]
        first, count = info.offset + start * row_bytes, (rows - start) * row_bytes
        values = dequantize(np.frombuffer(self._data, np.uint8, count, first), info.type_name)
        if BLOCKS[info.type_name][0] > 1:
            self._forget(first, count)
        return values.reshape(rows - start, *info.shape[1:])

    def _forget(self, first: int, count: int) -> None:
        """Drops these pages from our resident set (they stay in the system's cache): a load's peak stays low."""
        page = mmap.PAGESIZE
        start, stop = -(-first // page) * page, (first + count) // page * page
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, start, stop - start)


def read_gguf(path: str | Path) -> GGUFFile:
    """Opens a GGUF file and checks its whole header; ValueError names what is wrong and where."""
    path = Path(path)
    with path.open("rb") as file:
        if file.seek(0, 2) < 24:
            raise ValueError(f"{path}: not a GGUF file: {file.tell()} bytes are too few for a header")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data, path)
    num_tensors, num_pairs = _preamble(cursor)
    metadata: dict[str, Any] = {}
    for index in range(num_pairs):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 30:
        raise cursor.fail(f"general.alignment must be a power of two, got {alignment!r}")
    metadata_end = cursor.pos
    return GGUFFile(path, data, metadata, _tensor_table(cursor, num_tensors, alignment), metadata_end)


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    """The counts of tensors and of metadata pairs, both possible for a file of this size."""
    magic, version = cursor.unpack("<4sI", "the magic number")
    if magic != b"GGUF":
        raise cursor.fail(f"not a GGUF file: it starts with {magic!r}")
    if version not in (2, 3):
        if version and version % 65_536 == 0:
            raise cursor.fail("this is a big-endian GGUF file; only little-endian ones are supported")
        raise cursor.fail(f"GGUF version {version} is not supported; supported: 2, 3")
    num_tensors, num_pairs = cursor.unpack("<QQ", "the counts")
    for what, count, least in (
        ("tensors", num_tensors, _MIN_TENSOR_BYTES),
        ("metadata pairs", num_pairs, _MIN_PAIR_BYTES),
    ):
        if count > (cursor.end - cursor.pos) // least:
            raise cursor.fail(f"{count} {what} cannot fit into {cursor.end - cursor.pos} bytes")
    return num_tensors, num_pairs


def _tensor_table(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    raw = []
    for index in range(count):
        name = cursor.name(f"the name of tensor {index}")
        (num_dims,) = cursor.unpack("<I", f"n_dims of tensor {name!r}")
        if not 1 <= num_dims <= 4:
            raise cursor.fail(f"tensor {name!r} has {num_dims} dims; 1 to 4 are possible")
        dims = cursor.unpack(f"<{num_dims}Q", f"the dims of tensor {name!r}")
        kind, offset = cursor.unpack("<IQ", f"the type and offset of tensor {name!r}")
        if kind not in GGML_TYPES:
            raise cursor.fail(f"tensor {name!r} has type id {kind}; supported: {', '.join(GGML_TYPES.values())}")
        raw.append((name, tuple(reversed(dims)), GGML_TYPES[kind], offset))
    base = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in raw:
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} appears twice")
        tensors[name] = _checked(cursor, name, shape, kind, offset, base, alignment)
    ordered = sorted(tensors.values(), key=lambda t: t.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.fail(f"tensors {before.name!r} and {after.name!r} overlap at byte {after.offset}")
    return tensors


def _checked(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: str, offset: int, base: int, alignment: int) -> TensorInfo:
    block, block_bytes = BLOCKS[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise cursor.fail(f"tensor {name!r} has shape {shape}: {kind} needs positive dims and rows of multiples of {block}")
    nbytes = math.prod(shape) // block * block_bytes
    if offset % alignment:
        raise cursor.fail(f"tensor {name!r} has offset {offset}, which is not a multiple of the alignment {alignment}")
    if nbytes > cursor.end - base - offset:
        raise cursor.fail(f"tensor {name!r} ({kind}{list(shape)}, {nbytes} bytes) ends at {base + offset + nbytes} of {cursor.end}")
    return TensorInfo(name, shape, kind, base + offset, nbytes)
