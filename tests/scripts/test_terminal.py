"""The line of slow work, on a terminal and in a file."""

import io
import time

import pytest

from scripts import _terminal


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(_terminal, "_QUIET_S", 0.0)
    monkeypatch.setattr(_terminal, "_REDRAW_S", 0.01)


def after(stream, midline):
    """What stands in the stream after some slow work and its end."""
    terminal = _terminal.Terminal(stream)
    terminal.midline = midline
    terminal("compiling")
    time.sleep(0.2)
    terminal.done()
    return stream.getvalue()


def test_a_file_gets_a_line_but_not_in_the_middle_of_text(quick):
    assert after(io.StringIO(), midline=False) == "compiling ...\n"
    assert after(io.StringIO(), midline=True) == ""


def test_a_screen_gets_one_that_vanishes(quick):
    plain, below = after(Screen(), midline=False), after(Screen(), midline=True)
    assert "compiling" in plain and plain.endswith("\r\x1b[K")
    assert "compiling" in below and below.endswith(f"\x1b[K{_terminal._COME_BACK}") and "\n" not in below
