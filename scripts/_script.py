"""What the scripts share: how they parse flags, show help, fail in one line and leave quietly."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from absl import app, flags
from absl import logging as absl_logging

from scripts._terminal import Terminal

WEIGHTS = ["float32", "bfloat16", "int8"]
DTYPES = ["float32", "bfloat16", "float16"]
KV_DTYPES = [*DTYPES, "int8", "float8_e4m3fn"]
_HELP = ("--help", "-help", "-h", "--helpshort")
_HELP_COLUMN = 26


def run(main: Callable[[Terminal], None]) -> None:
    """Parses the flags and runs `main(terminal)`; exits 0, 1 after an error in one line, 130 after Ctrl-C."""
    app.run(lambda argv: _guarded(main, argv), flags_parser=_parse)


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_file(name: str) -> None:
    """Refuses the file of a flag that is a folder, or in none, before anything is computed; a flag without value passes."""
    given = flags.FLAGS[name].value
    if not given:
        return
    if Path(given).is_dir():
        raise ValueError(f"--{name}={given} is a folder: name a file")
    folder = Path(given).resolve().parent  # a link is followed
    if not folder.is_dir():
        raise ValueError(f"--{name}={given}: there is no folder {folder}")


class Integers(flags.ArgumentParser):
    """Parses numbers from 1 on, separated by commas, into a list."""

    def parse(self, argument) -> list[int]:
        """The list; ValueError names the part that is no such number."""
        parts = argument if isinstance(argument, list) else argument.split(",")
        for part in parts:
            if not str(part).strip().isdecimal() or int(part) < 1:
                raise ValueError(f"{str(part).strip()!r} is not a whole number from 1 on: write 100 or 100,4000")
        return [int(part) for part in parts]

    def flag_type(self) -> str:
        return "integers"


def _parse(argv: list[str]) -> list[str]:
    if any(arg in _HELP for arg in argv[1:]):
        sys.stdout.write(_help(argv[0]))
        sys.exit(0)
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        _fail(f"{' '.join(str(error).split())} (--help lists the flags)")
    _quiet_logs()
    return rest


def _guarded(main, argv: list[str]) -> None:
    if len(argv) > 1:
        _fail(f"unexpected argument {argv[1]!r}: every value goes behind a flag (--help lists them)")
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process as it ends any other
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    terminal = Terminal()
    try:
        main(terminal)
        terminal.done()
    except KeyboardInterrupt:
        terminal.done()
        sys.stdout.flush()
        sys.stderr.write("\n")
        sys.stderr.flush()
        os._exit(130)  # at once: other threads may be in the middle of seconds of work
    except ModuleNotFoundError as error:
        terminal.done()
        _fail(f"{error}: `pip install .` in the folder of jaxkv installs what it needs")
    except (ValueError, OSError, MemoryError) as error:
        terminal.done()
        _fail(str(error) or type(error).__name__)


def _fail(message: str) -> NoReturn:
    """Says what is wrong in one line; lists that a message lays out in indented lines stay lists."""
    sys.stdout.flush()
    lines = [" ".join(line.split()) for line in message.split("\n  ")]
    sys.stderr.write("error: " + "\n  ".join(lines) + "\n")
    sys.exit(1)


def _quiet_logs() -> None:
    """Only errors of libraries, some of which tell of every step they take; warnings of jaxkv stay."""
    if flags.FLAGS["verbosity"].using_default_value:
        absl_logging.set_verbosity(absl_logging.ERROR)
        logging.getLogger("jaxkv").setLevel(logging.WARNING)


def _help(program: str) -> str:
    """The script's docstring, then its own flags in the order of their definition."""
    width = min(shutil.get_terminal_size().columns, 110) - _HELP_COLUMN
    lines = [f"usage: python {program} [--flag=value ...]", "", (sys.modules["__main__"].__doc__ or "").strip(), ""]
    for flag in flags.FLAGS.get_key_flags_for_module(program):
        name, text = _describe(flag)
        wrapped = textwrap.wrap(text, width)
        if len(name) + 3 > _HELP_COLUMN:
            lines.append(f"  {name}")
            name = ""
        lines += [f"  {start:{_HELP_COLUMN - 2}}{line}" for start, line in zip([name, *[""] * len(wrapped)], wrapped, strict=False)]
    return "\n".join([*lines, "", "  --helpfull lists the flags of every library, too.", ""])


def _describe(flag) -> tuple[str, str]:
    """A flag as it is written, and what it does; absl puts values and repetition into its help, here they are in the first part."""
    value = ",".join(map(str, flag.default)) if isinstance(flag.default, list) else flag.default
    default = "" if value in (None, False, "") else f" (default: {value})"
    if flag.boolean:
        return f"--[no]{flag.name}", flag.help + default
    if isinstance(flag, flags.EnumFlag):
        return f"--{flag.name}={'|'.join(flag.parser.enum_values)}", flag.help.split(">: ", 1)[-1] + default
    kind = {"int": "N", "integers": "N,...", "float": "X"}.get(flag.flag_type(), "TEXT")
    return f"--{flag.name}={kind}" + (" ..." if isinstance(flag, flags.MultiFlag) else ""), flag.help.split(";\n")[0] + default
