"""What a person at a terminal sees of slow work: a line on stderr once it has taken a second, with a bar where the end is known."""

from __future__ import annotations

import sys
import threading
import time

_QUIET_S = 1.0  # work shorter than this is not worth a line
_BAR = 30


class Terminal:
    """A `jaxkv.progress.Report` that writes to stderr. Call `done()` when the slow part is over."""

    def __init__(self, stream=None):
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._lock = threading.Lock()
        self._what: str | None = None
        self._fraction: float | None = None
        self._since = 0.0
        self._shown = False
        threading.Thread(target=self._watch, daemon=True).start()

    def __call__(self, what: str, fraction: float | None = None) -> None:
        with self._lock:
            if what != self._what:
                self._end_line()
                self._what, self._since, self._shown = what, time.monotonic(), False
            self._fraction = fraction

    def done(self) -> None:
        """Nothing slow is going on any more."""
        with self._lock:
            self._end_line()
            self._what = None

    def _watch(self):
        while True:
            time.sleep(0.1)
            with self._lock:
                if self._what is not None and time.monotonic() - self._since >= _QUIET_S:
                    self._show()

    def _show(self):
        if self._live:
            bar = ""
            if self._fraction is not None:
                full = round(self._fraction * _BAR)
                bar = f" [{'#' * full}{'.' * (_BAR - full)}] {self._fraction:4.0%}"
            self._stream.write(f"\r\x1b[K{self._what}{bar} {time.monotonic() - self._since:.0f} s")
            self._stream.flush()
        elif not self._shown:
            self._stream.write(f"{self._what} ...\n")
            self._stream.flush()
        self._shown = True

    def _end_line(self):
        if self._shown and self._live:
            self._stream.write("\n")
            self._stream.flush()
