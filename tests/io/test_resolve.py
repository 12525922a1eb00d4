"""Names of models: paths first, then what packages carry, assembled once."""

import dataclasses
import hashlib
import os

import pytest

from jaxkv.io.resolve import KNOWN_MODELS, resolve


def test_resolve_paths_and_unknown_names(tmp_path):
    assert resolve(tmp_path) == tmp_path
    with pytest.raises(ValueError, match=r"(?s)'gemma-4' is neither an existing path.*gemma-3-270m: pip install"):
        resolve("gemma-4")


def test_resolve_assembles_once(tmp_path, monkeypatch):
    (tmp_path / "fake_model_part1").mkdir()
    for name, content in (("a", b"hello "), ("b", b"world")):
        (tmp_path / "fake_model_part1" / name).write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JAXKV_CACHE_DIR", str(tmp_path / "cache"))
    good = dataclasses.replace(
        KNOWN_MODELS["gemma-3-270m"], file_name="m.gguf", parts=(("fake_model_part1", "a"), ("fake_model_part1", "b")),
        num_bytes=11, sha256=hashlib.sha256(b"hello world").hexdigest(),
    )  # fmt: skip
    monkeypatch.setitem(KNOWN_MODELS, "fake", good)
    path = resolve("fake")
    assert path.read_bytes() == b"hello world"
    assert os.stat(tmp_path / "cache").st_mode & 0o777 == 0o700
    first = path.stat().st_mtime_ns
    assert resolve("fake").stat().st_mtime_ns == first
    path.write_bytes(b"hello")  # cut short: made again
    assert resolve("fake").read_bytes() == b"hello world"
    monkeypatch.setitem(KNOWN_MODELS, "fake", dataclasses.replace(good, file_name="n.gguf", sha256="0" * 64))
    with pytest.raises(ValueError, match="join to SHA-256"):
        resolve("fake")
    assert not (tmp_path / "cache" / "models" / "n.gguf").exists()
    assert sorted(p.name for p in path.parent.iterdir()) == ["m.gguf", "m.gguf.sha256"]
    monkeypatch.setitem(KNOWN_MODELS, "fake", dataclasses.replace(good, file_name="o.gguf", parts=(("no_such_module", "a"),)))
    with pytest.raises(ValueError, match="'fake' is not installed: no no_such_module/a; install it: pip"):
        resolve("fake")
