"""The input file of a batch job: where its lines are, which ids come twice, and what a shard has of it.

The file is read once from end to end before anything runs. What stays in memory is 33 bytes a line, whatever the lines hold.
"""

from __future__ import annotations

import array
import codecs
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from jaxkv.serving.batch.lines import hash_of, id_of

MAX_LINE_BYTES = 64 * 2**20  # a file without line ends is one line: it is refused as such, and not read into memory


class Source:
    """An open input file. Lines count from 1; those of nothing but white space, or of a byte order mark, are
    no lines, though they count.

    `lines` i64[num_lines] holds the numbers of the shard's lines, those whose remainder by `num_shards` is `shard_index`; `digest` is
    the SHA-256 of the whole file.
    """

    def __init__(self, path: Path, *, num_shards: int = 1, shard_index: int = 0):
        if not 0 <= shard_index < num_shards:
            raise ValueError(f"shard_index must be in 0 to {num_shards - 1} with num_shards={num_shards}, got {shard_index}")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file: the input is read twice, so it cannot be a folder or a pipe")
        self._file = path.open("rb")
        self._index()
        numbers = np.flatnonzero(self._is_line) + 1
        self.lines = numbers[numbers % num_shards == shard_index]

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def read(self, number: int) -> bytes | None:
        """A line's bytes; None when there are too many."""
        start, end = int(self._starts[number - 1]), int(self._starts[number])
        return None if end - start > MAX_LINE_BYTES else os.pread(self._file.fileno(), end - start, start)

    def first_with_id_of(self, number: int) -> int:
        """The first line with the custom_id of line `number`: the same number unless the id comes twice."""
        first = int(self._first[number - 1])
        same = first == number or id_of(first, self.read(first)) == id_of(number, self.read(number))
        return first if same else number  # two ids may share a hash

    def holds(self, lines: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """bool: whether the shard has a line of this number whose id has this hash."""
        held = np.isin(lines, self.lines)
        held[held] = self._hashes[lines[held] - 1] == ids[held]
        return held

    def _index(self) -> None:
        """Fills `_starts` i64[lines + 1] (byte offsets), `_is_line` bool[lines], `_hashes` u64[lines] (of ids), `_first` i64[lines]
        (of equal ones)."""
        digest, starts, hashes, is_line = hashlib.sha256(), array.array("q", [0]), array.array("Q"), array.array("b")
        for number, (length, raw) in enumerate(_read_lines(self._file, digest.update), 1):
            blank = raw is not None and raw.strip() in (b"", codecs.BOM_UTF8)
            starts.append(starts[-1] + length)
            is_line.append(not blank)
            hashes.append(hash_of(f"\0{number}" if blank else id_of(number, raw)))
        self.digest = digest.hexdigest()
        self._starts = np.array(starts)
        self._is_line = np.array(is_line, np.bool_)
        self._hashes = np.array(hashes)
        _, first, group = np.unique(self._hashes, return_index=True, return_inverse=True)
        self._first = first[group] + 1


def _read_lines(file: BinaryIO, update: Callable[[bytes], object]) -> Iterator[tuple[int, bytes | None]]:
    """(bytes, the line with its end, None when it is too long) of each line; every byte goes through `update`."""
    while part := file.readline(MAX_LINE_BYTES + 1):
        update(part)
        length, raw = len(part), part
        while not part.endswith(b"\n") and (part := file.readline(MAX_LINE_BYTES)):
            update(part)
            length += len(part)
        yield length, raw if length <= MAX_LINE_BYTES else None
