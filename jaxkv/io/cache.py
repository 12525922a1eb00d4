"""Where jaxkv keeps what it can rebuild: assembled downloads, converted checkpoints, tokenizer tables."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def cache_dir(*parts: str) -> Path:
    """The cache folder (or a folder below it), created with mode 0700.

    `$JAXKV_CACHE_DIR`, else `$XDG_CACHE_HOME/jaxkv`, else `~/.cache/jaxkv`.
    """
    if own := os.environ.get("JAXKV_CACHE_DIR"):
        root = Path(own).expanduser()
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        root = Path(xdg).expanduser() / "jaxkv"
    else:
        root = Path.home() / ".cache" / "jaxkv"
    folder = root
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for part in parts:
        folder = folder / part
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file object whose content appears at `path` whole or not at all: temp file, fsync, rename."""
    handle, temp = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def use_compilation_cache() -> None:
    """Keeps compiled steps below the cache folder, so that the next process does not compile them again.

    Where JAX_COMPILATION_CACHE_DIR names a folder already, that is it.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_dir("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
