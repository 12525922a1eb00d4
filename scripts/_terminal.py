"""What a person at a terminal sees of slow work: a line on stderr once it has taken a second, with a bar where the end is known."""

from __future__ import annotations

import shutil
import sys
import threading
import time

_QUIET_S = 1.0  # work shorter than this is not worth a line
_REDRAW_S = 0.1
_LOG_S = 30.0  # where lines stay, a detail is told so often
_BAR = 24
# The line below the cursor, made by scrolling where there is none; the cursor comes back (VT100: IND, CUU, DECSC, CUD, DECRC).
_GO_BELOW, _COME_BACK = "\x1bD\x1b[A\x1b7\x1b[B\r", "\x1b8"


class Terminal:
    """A `jaxkv.progress.Report` that writes to stderr. Call `done()` when the slow part is over.

    On a terminal the line is redrawn in place and vanishes when the work is done; elsewhere it is written once, and again from time to
    time if there is a `detail` to tell. Set `midline` while the cursor stands behind text that must stay: the line is then drawn below it,
    and elsewhere not written: both streams may go to one file.
    """

    def __init__(self, stream=None) -> None:
        self.midline = False
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._lock = threading.Lock()
        self._what: str | None = None
        self._fraction: float | None = None
        self._detail = ""
        self._since = self._written = 0.0
        self._shown = False
        threading.Thread(target=self._watch, daemon=True).start()

    def __call__(self, what: str, fraction: float | None = None, detail: str = "") -> None:
        with self._lock:
            if what != self._what:
                self._clear()
                self._what, self._since = what, time.monotonic()
            self._fraction, self._detail = fraction, detail

    def done(self) -> None:
        """Nothing slow is going on any more."""
        with self._lock:
            self._clear()
            self._what = None

    def _watch(self) -> None:
        while True:
            time.sleep(_REDRAW_S)
            with self._lock:
                if self._what is not None and time.monotonic() - self._since >= _QUIET_S:
                    self._show()

    def _show(self) -> None:
        if self._live:
            self._draw(self._line())
        elif self.midline:
            return
        elif not self._shown:
            self._write(f"{self._what} ...\n")
            self._written = time.monotonic()
        elif self._detail and time.monotonic() - self._written >= _LOG_S:
            self._write(f"{self._what}: {self._detail} ...\n")
            self._written = time.monotonic()
        self._shown = True

    def _line(self) -> str:
        bar = ""
        if self._fraction is not None:
            full = round(min(max(self._fraction, 0.0), 1.0) * _BAR)
            bar = f" [{'#' * full}{'.' * (_BAR - full)}] {self._fraction:.0%}"
        end = f"{bar} {self._detail or f'{time.monotonic() - self._since:.0f} s'}"
        return f"{self._what}"[: max(0, shutil.get_terminal_size().columns - 1 - len(end))] + end

    def _clear(self) -> None:
        if self._shown and self._live:
            self._draw("")
        self._shown = False

    def _draw(self, line: str) -> None:
        self._write(f"{_GO_BELOW}\x1b[K{line}{_COME_BACK}" if self.midline else f"\r\x1b[K{line}")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
