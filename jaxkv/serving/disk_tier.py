"""Pages in files of one folder, which several processes may share and which outlives them.

A file appears whole or not at all, and its name is its page's key in hex. Files of other processes come and go at any time: what is
known about the folder here is only a memory of it, brought up to date by `refresh`, and a file is judged each time it is read. Its
modification time says when it was last used, to every process. `in`, `nbytes` and `num_pages` answer from memory; everything else may
wait for the disk, and is for a tier's own threads.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxkv.io.cache import atomic_write
from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.page_data import KEY_BYTES, PageData, PageLayout, PageRecord, mismatch
from jaxkv.serving.page_file import BadFile, mac_key, pack, read_data, read_header, zstd
from jaxkv.serving.tier_counts import TierCounts

_SUFFIX = ".page"
_NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}}){re.escape(_SUFFIX)}")
_TEMP = re.compile(rf"\.{_NAME.pattern}\..*\.tmp")  # atomic_write's
# After so much of its capacity was written, a process looks at the whole folder again, for what others wrote meanwhile.
_RESCAN_FRACTION = 1 / 16
_TICK_NS = 2_000_000_000  # the coarsest time of change that file systems keep
_REASONS = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
    errno.ENOENT: "no_folder",
}
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _File:
    nbytes: int
    used_ns: int
    fingerprint: Fingerprint | None = None  # known once its header was read


class DiskTier:
    """The least recently used files leave when the folder holds capacity_bytes. Every method may be called from any thread;
    after the constructor none raises for anything that the disk does.

    Args:
      folder: created with mode 0700; one that exists must have it.
      capacity_bytes: of files. Processes that share the folder count each other's files now and then, so that it may hold a
        sixteenth more for each.
      secret: the server's; files written under another are misses.
      level: zstd's.
      stale_temp_s: age in seconds at which what an interrupted write left is removed; far above the time a write takes.
      wall_clock: seconds since 1970, as file systems count.

    Raises:
      ValueError: a folder that others may read or that cannot be made, a negative capacity, an empty secret.
      ImportError: zstandard is not installed.
    """

    name = "disk"

    def __init__(
        self,
        folder: str | Path,
        capacity_bytes: int,
        secret: bytes,
        *,
        level: int = 1,
        stale_temp_s: float = 3600.0,
        wall_clock: Callable[[], float] = time.time,
    ):
        zstd()
        if capacity_bytes < 0:
            raise ValueError(f"{capacity_bytes=} must not be negative")
        if not secret:
            raise ValueError("secret must not be empty: without one, whoever can write to the folder can forge pages")
        self.folder, self.capacity_bytes = Path(folder), capacity_bytes
        _make_private(self.folder)
        self.counts = TierCounts()
        self._key, self._level = mac_key(secret), level
        self._stale_temp_s, self._wall_clock = stale_temp_s, wall_clock
        self._lock = threading.Lock()
        self._files: collections.OrderedDict[bytes, _File] = collections.OrderedDict()
        self._nbytes = self._written_since_scan = self._last_ns = self._refreshed_ns = 0
        self._warned: set[str] = set()
        self._scan()

    @property
    def nbytes(self) -> int:
        """Bytes of the files known here."""
        return self._nbytes

    @property
    def num_pages(self) -> int:
        """Files known here."""
        return len(self._files)

    def __contains__(self, key: bytes) -> bool:
        """Whether a file of this name exists, as far as memory knows; its content is judged when it is loaded."""
        return key in self._files

    def refresh(self) -> None:
        """Learns which files others have written or removed since. Reads the folder's names if that has changed, and looks at new
        files only."""
        with self._lock:
            before, here = set(self._files), set()
        try:
            changed_ns = os.stat(self.folder).st_mtime_ns
            if changed_ns == self._refreshed_ns:
                return
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if match := _NAME.fullmatch(entry.name):
                        here.add(bytes.fromhex(match[1]))
        except OSError as error:
            self._failed(error, pages=0)
            return
        # What comes in the same tick of the folder's clock as this would not show: a folder that has just changed is read again.
        self._refreshed_ns = changed_ns if self._wall_clock() * 1e9 - changed_ns > _TICK_NS else 0
        for key in before - here:  # what was written while the names were read may not be among them: it was not known before
            self._forget(key)
        found = {key: file for key in here - before if (file := self._stat(key)) is not None}
        with self._lock:
            for key in sorted(found, key=lambda key: found[key].used_ns):
                if key not in self._files:
                    self._add(key, found[key])

    def store(self, record: PageRecord) -> bool:
        """Writes a page, if its file is not there already; returns whether it is now. A failure is counted and logged once."""
        if self._look(record.key):
            self.touch([record.key])
            return True
        content = pack(record, self._key, self._level)
        if len(content) > self.capacity_bytes:
            self.counts.failure("too_large")
            return False
        self._make_room(len(content))
        try:
            with atomic_write(self._path(record.key)) as out:
                out.write(content)
                out.flush()
                used_ns = self._now_ns()
                os.utime(out.fileno(), ns=(used_ns, used_ns))
        except OSError as error:
            self._failed(error)
            return False
        with self._lock:
            self._add(record.key, _File(len(content), used_ns, record.fingerprint))
            self._written_since_scan += len(content)
        self.counts.event("store")
        return True

    def load(self, key: bytes, fingerprint: Fingerprint, tokens: np.ndarray, layout: PageLayout) -> PageData | None:
        """The page of these tokens under this fingerprint, its arrays read-only; None for any doubt, counted by its reason."""
        try:
            with self._open(key) as file:
                header = read_header(file, self._key)
                if header.key != key:
                    raise BadFile("key")
                reason = mismatch(header, fingerprint, tokens, layout)
                data = read_data(file, header, self._key) if reason is None else None
        except BadFile as bad:  # for whoever asks: the page may be written anew
            self.drop(key)
            reason = bad.reason
        except FileNotFoundError:
            reason = "vanished" if self._forget(key) else "absent"
        except OSError:
            self._forget(key)  # a later refresh finds it again, if it is a file by then
            reason = "io"
        if reason is not None:
            self.counts.miss(reason)
            return None
        if not self.touch([key]):
            self._look(key)
        self.counts.event("hit")
        return data

    def touch(self, keys: Sequence[bytes]) -> int:
        """Makes the pages of one chain, first page first, the last to leave, the deepest before the others; returns how many
        of them are here."""
        with self._lock:
            here = [key for key in reversed(keys) if key in self._files]
            for key in here:
                self._files[key].used_ns = self._now_ns()
                self._files.move_to_end(key)
            times = [(key, self._files[key].used_ns) for key in here]
        for key, used_ns in times:
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(used_ns, used_ns))
        return len(here)

    def drop(self, key: bytes) -> bool:
        """Removes a page's file; returns whether it was known here."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))
        return self._forget(key)

    def drop_where(self, predicate: Callable[[Fingerprint], bool]) -> int:
        """Removes every file whose fingerprint the predicate is true for, those of other processes too; returns how many.

        Reads the headers that were not read yet. A file whose header says nothing stays until its turn comes.
        """
        self._scan()
        with self._lock:
            files = list(self._files.items())
        keys = [key for key, file in files if (known := self._fingerprint(key, file)) is not None and predicate(known)]
        for key in keys:
            self.drop(key)
        return len(keys)

    # Inside

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{_SUFFIX}"

    def _open(self, key: bytes) -> BinaryIO:
        """A page's file for reading. Neither a link nor a pipe is followed or waited for."""
        return open(self._path(key), "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK))

    def _fingerprint(self, key: bytes, file: _File) -> Fingerprint | None:
        if file.fingerprint is None:
            with contextlib.suppress(BadFile, OSError), self._open(key) as opened:
                file.fingerprint = read_header(opened, self._key).fingerprint
        return file.fingerprint

    def _scan(self) -> None:
        """Brings what is known here up to date with the folder, and removes what interrupted writes left."""
        found: dict[bytes, _File] = {}
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if match := _NAME.fullmatch(entry.name):
                        with contextlib.suppress(OSError):
                            stat = entry.stat(follow_symlinks=False)
                            found[bytes.fromhex(match[1])] = _File(stat.st_size, stat.st_mtime_ns)
                    elif _TEMP.fullmatch(entry.name):
                        self._remove_stale(entry)
        except OSError as error:
            self._failed(error, pages=0)
        with self._lock:
            for key, file in found.items():
                if (known := self._files.get(key)) is not None:
                    file.fingerprint, file.used_ns = known.fingerprint, max(known.used_ns, file.used_ns)
            ordered = sorted(found.items(), key=lambda item: (item[1].used_ns, item[0]))
            self._files = collections.OrderedDict(ordered)
            self._nbytes = sum(file.nbytes for file in found.values())
            self._written_since_scan = 0

    def _remove_stale(self, entry: os.DirEntry) -> None:
        with contextlib.suppress(OSError):  # another process may be quicker
            if self._wall_clock() - entry.stat(follow_symlinks=False).st_mtime > self._stale_temp_s:
                os.unlink(entry.path)
                self.counts.event("stale_temp_removed")

    def _look(self, key: bytes) -> bool:
        """Whether a page's file is in the folder now, whatever was known before; another process may have written or removed it."""
        file = self._stat(key)
        if file is None:
            self._forget(key)
            return False
        with self._lock:
            if key not in self._files:
                self._add(key, file)
        return True

    def _stat(self, key: bytes) -> _File | None:
        try:
            stat = os.stat(self._path(key), follow_symlinks=False)
        except OSError:
            return None
        return _File(stat.st_size, stat.st_mtime_ns)

    def _add(self, key: bytes, file: _File) -> None:
        old = self._files.pop(key, None)
        self._files[key] = file
        self._nbytes += file.nbytes - (old.nbytes if old else 0)

    def _forget(self, key: bytes) -> bool:
        with self._lock:
            file = self._files.pop(key, None)
            self._nbytes -= file.nbytes if file else 0
        return file is not None

    def _make_room(self, nbytes: int) -> None:
        if self._written_since_scan > self.capacity_bytes * _RESCAN_FRACTION:
            self._scan()
        while self._nbytes + nbytes > self.capacity_bytes:
            with self._lock:
                oldest = next(iter(self._files), None)
            if oldest is None:
                return
            self.drop(oldest)
            self.counts.event("evict")

    def _now_ns(self) -> int:
        self._last_ns = max(self._last_ns + 1, int(self._wall_clock() * 1e9))
        return self._last_ns

    def _failed(self, error: OSError, pages: int = 1) -> None:
        reason = _REASONS.get(error.errno or 0, "io")
        self.counts.failure(reason, pages)
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("the disk tier in %s keeps no pages for now (%s); requests go on without it", self.folder, error)


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode & 0o777
    except OSError as error:
        raise ValueError(f"the disk tier cannot use {folder}: {error}") from None
    if mode & 0o077:
        raise ValueError(f"{folder} has mode {mode:o}: others could read pages or remove them; chmod 700 {folder}")
