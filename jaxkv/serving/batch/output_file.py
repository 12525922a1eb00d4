"""The output file of a batch job: records are appended whole, reach the disk within a fraction of a second, and survive a kill.

A record is one line of JSON with a whole number "line", that of the input's line it answers, and an "error" that is null if it was
answered. At any moment the file is some whole records and, after a kill, at most a piece of one more.
"""

from __future__ import annotations

import array
import dataclasses
import fcntl
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from jaxkv.serving.batch.lines import hash_of
from jaxkv.serving.batch.names import temporary

# Records that come meanwhile share an fsync, which costs milliseconds.
_SYNC_S = 0.1
# Line ends to some readers of text, and allowed in JSON's strings as they are.
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a file of records holds. Arrays have an entry a record, in the file's order."""

    lines: np.ndarray  # i64, of the input
    ids: np.ndarray  # u64, hashes of their custom_ids
    failed: np.ndarray  # bool, whether there is an error
    starts: np.ndarray  # i64, byte offsets, and the end of the last record


class OutputFile:
    """An open output file, locked against other processes. Close it, or use it as a context."""

    def __init__(self, path: Path):
        """Opens or makes the file.

        Raises:
          OSError: it cannot be written.
          ValueError: it is no regular file, or another process writes it.
        """
        self.path = path
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file that answers can be added to")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise ValueError(f"{path} is being written by another process: wait for it, or end it") from None
        except OSError:
            pass  # a file system without locks
        self._end = os.fstat(self._fd).st_size
        self._failure: OSError | None = None
        self._dirty, self._closing = threading.Event(), threading.Event()
        self._syncer = threading.Thread(target=self._sync_when_dirty, daemon=True)
        self._syncer.start()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Bytes of whole records."""
        return self._end

    def recover(self) -> Scan:
        """Cuts off what a kill left of a record, and returns what is there.

        Raises:
          ValueError: there is something else than records before the last record, or a line is answered twice.
        """
        scan = scan_records(self.path)
        self._end = int(scan.starts[-1])
        if self._end < os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
        return scan

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record. It is on the disk a fraction of a second later, or at `close`.

        Raises:
          OSError: the disk is full or broken; the file then ends with the record before.
        """
        if self._failure is not None:
            raise self._failure
        data = encode(record)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise OSError(
                f"{self.path}: {error.strerror}. Its {self._end:,} bytes are whole records: make room and run the same command again, it"
                " goes on from there"
            ) from None
        self._end += written
        self._dirty.set()

    def close(self) -> None:
        """Brings everything to the disk."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._dirty.set()
        self._syncer.join()
        try:
            if self._failure is not None:
                raise self._failure  # a second fsync would succeed without having written what the first one lost
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def sort(self) -> None:
        """Puts the records in the order of the input's lines: the sorted file replaces this one, whole, by a rename.

        The disk must have room for both. In memory are 33 bytes a record.
        """
        scan = scan_records(self.path)
        if bool((np.diff(scan.lines) >= 0).all()):
            return

        def write(file: BinaryIO) -> None:
            os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(self._fd).st_mode))
            for i in np.argsort(scan.lines, kind="stable"):
                start, end = int(scan.starts[i]), int(scan.starts[i + 1])
                file.write(os.pread(self._fd, end - start, start))

        replace(self.path, write)

    def _sync_when_dirty(self) -> None:
        while not self._closing.is_set():
            self._dirty.wait()
            self._dirty.clear()
            try:
                os.fsync(self._fd)
            except OSError as error:
                self._failure = error
                return
            self._closing.wait(_SYNC_S)


def scan_records(path: Path) -> Scan:
    """What a file of records holds, without what follows the last whole one.

    Raises:
      ValueError: other lines before the last record: this is no output of a batch job.
    """
    lines, ids, failed, starts = array.array("q"), array.array("Q"), array.array("b"), array.array("q", [0])
    end = strange = 0
    with path.open("rb") as file:
        for i, raw in enumerate(file, 1):
            end += len(raw)
            record = _decode(raw)
            if record is None:
                strange = strange or i
                continue
            if strange:
                raise ValueError(
                    f"{path}, line {strange} is no record of a batch job: give another output, or mend or delete this one"
                )
            lines.append(record["line"])
            ids.append(hash_of(str(record.get("custom_id", "\0"))))  # none: no line's
            failed.append(record["error"] is not None)
            starts.append(end)
    return Scan(np.array(lines), np.array(ids), np.array(failed, np.bool_), np.array(starts))


def encode(record: Mapping[str, Any]) -> bytes:
    """A record as one line of UTF-8. A lone surrogate stays the escape that JSON has for it."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode("utf-8", "backslashreplace") + b"\n"


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Gives the file at `path` what `write` writes, whole or not at all: temporary file, fsync, rename, fsync of the folder.

    Where that is a link, the file that it points at.
    """
    path = path.resolve()
    temp = temporary(path)
    try:
        with temp.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _decode(raw: bytes) -> dict[str, Any] | None:
    """The record in a line, None when it holds none or a piece of one."""
    if not raw.endswith(b"\n"):
        return None
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    line = record.get("line") if isinstance(record, dict) and "error" in record else None
    return record if isinstance(line, int) and not isinstance(line, bool) and 1 <= line < 2**63 else None
