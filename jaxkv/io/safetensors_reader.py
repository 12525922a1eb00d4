"""The safetensors container: a strictly checked header over a memory map, one file or several behind an index.

Layout: header length u64 (little-endian), that many bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}},
then data. The header must describe the data exactly: every byte once, in no gap and no overlap, begin + shape *
itemsize = end.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import mmap
import struct
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}
_OTHER_ITEM_BITS = {
    "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file, dtype name, shape and bytes [begin, end) of that file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFiles:
    """The tensors of one safetensors file, or of the shards an index names; reads are views of memory maps."""

    def __init__(self, tensors: dict[str, StoredTensor], maps: dict[Path, mmap.mmap]):
        self.tensors, self._maps = tensors, maps

    def read(self, name: str) -> np.ndarray:
        """The tensor as stored (float64, float32, float16 or bfloat16), read-only.

        Raises:
          ValueError: a dtype that is no float of ours.
        """
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise ValueError(f"{stored.path}: dtype {stored.dtype} of tensor {name!r} is not supported; known: {', '.join(DTYPES)}")
        dtype = np.dtype(DTYPES[stored.dtype])
        values = np.frombuffer(self._maps[stored.path], np.uint8, stored.end - stored.begin, stored.begin)
        if stored.begin % dtype.itemsize:  # the format does not align
            values = values.copy()
        return values.view(dtype).reshape(stored.shape)


def open_safetensors(path: Path) -> SafetensorsFiles:
    """Opens one file and checks its whole header."""
    data, tensors = _open(path)
    return SafetensorsFiles(tensors, {path: data})


def open_folder(folder: Path) -> SafetensorsFiles:
    """Opens model.safetensors, or the shards of model.safetensors.index.json, of a folder."""
    index_path, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index_path.exists():
        if not single.exists():
            raise ValueError(f"{folder}: neither model.safetensors nor model.safetensors.index.json; pickled weights are not read")
        return open_safetensors(single)
    weight_map = _object(index_path, index_path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index_path}: weight_map must be an object that names files")
    maps, shards = {}, {}
    for file in dict.fromkeys(str(value) if isinstance(value, str) else "" for value in weight_map.values()):
        path = _inside(folder, file, index_path)
        maps[path], shards[file] = _open(path)
    tensors = {}
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise ValueError(f"{index_path}: tensor {name!r} should be in {file!r}, which does not hold it")
        tensors[name] = shards[file][name]
    return SafetensorsFiles(tensors, maps)


def _inside(folder: Path, file: str, index_path: Path) -> Path:
    """A shard's path; refuses names that leave the folder (a link inside is fine: the hub's cache is made of them)."""
    pure = PurePosixPath(file)
    if not file or pure.is_absolute() or ".." in pure.parts or "\\" in file or "\0" in file or len(pure.parts) != 1:
        raise ValueError(f"{index_path}: shard name {file!r} leaves the folder or is no file name")
    path = folder / file
    if not path.is_file():
        raise ValueError(f"{index_path}: shard {file!r} is missing")
    return path


def _open(path: Path) -> tuple[mmap.mmap, dict[str, StoredTensor]]:
    with path.open("rb") as file:
        total = file.seek(0, 2)
        if total < 8:
            raise ValueError(f"{path}: {total} bytes are too few for a safetensors file")
        file.seek(0)
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(total - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{path}: the header says it has {length} bytes, the file holds {total - 8} behind the length")
        header = _object(path, file.read(length))
        tensors = _table(path, header, 8 + length, total)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), tensors


def _object(path: Path, raw: bytes) -> dict[str, Any]:
    """A JSON object in which no key appears twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            twice, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
            raise ValueError(f"key {twice!r} appears twice")
        return value

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"{path}: the header is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: the header must be a JSON object, got {type(value).__name__}")
    return value


def _table(path: Path, header: dict[str, Any], base: int, total: int) -> dict[str, StoredTensor]:
    tensors = {name: _entry(path, name, entry, base) for name, entry in header.items() if name != "__metadata__"}
    position, before = base, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.begin != position:
            what = "overlaps" if stored.begin < position else f"leaves a gap of {stored.begin - position} bytes after"
            raise ValueError(f"{path}: tensor {name!r} at byte {stored.begin} {what} {before}, which ends at {position}")
        position, before = stored.end, repr(name)
    if position != total:
        raise ValueError(f"{path}: the header describes {position} bytes, the file has {total}")
    return tensors


def _entry(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} must have exactly dtype, shape and data_offsets, got {str(entry)[:120]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = np.dtype(DTYPES[dtype]).itemsize * 8 if isinstance(dtype, str) and dtype in DTYPES else None
    if bits is None and not (isinstance(dtype, str) and (bits := _OTHER_ITEM_BITS.get(dtype))):
        raise ValueError(f"{where} has the unknown dtype {dtype!r}; supported: {', '.join(DTYPES)}")
    if not _counts(shape) or len(shape) > 8:
        raise ValueError(f"{where} has the impossible shape {str(shape)[:120]}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where} has the impossible data_offsets {str(offsets)[:120]}")
    begin, end = offsets
    if math.prod(shape) * bits != (end - begin) * 8:
        raise ValueError(
            f"{where} has {end - begin} bytes, but {dtype} of shape {tuple(shape)} takes {math.prod(shape) * bits // 8}"
        )
    return StoredTensor(path, dtype, tuple(shape), base + begin, base + end)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
