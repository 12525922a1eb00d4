"""`load_model`: a name, a Hugging Face folder, a .gguf file or a jaxkv checkpoint becomes a `Model`."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import shutil
from pathlib import Path

import jax

from jaxkv.config import ModelConfig
from jaxkv.io import checkpoint
from jaxkv.io.cache import cache_dir
from jaxkv.io.generation import GenerationDefaults, generation_from_folder, generation_from_gguf
from jaxkv.io.gguf_source import open_gguf
from jaxkv.io.hf_source import open_hf_folder
from jaxkv.io.resolve import resolve
from jaxkv.io.tokenizer import Tokenizer
from jaxkv.model.params import CONVERSION, Storage, build_params
from jaxkv.progress import Report, silent
from jaxkv.sampling import Sampling


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A decoder ready to run: what it is, its weights, and how text becomes tokens."""

    config: ModelConfig
    params: dict
    storage: Storage
    tokenizer: Tokenizer | None = None
    generation: GenerationDefaults = GenerationDefaults()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence: the generation config's and the tokenizer's."""
        from_tokenizer = self.tokenizer.eos_token_ids if self.tokenizer else ()
        return tuple(dict.fromkeys((*self.generation.eos_token_ids, *from_tokenizer)))

    @property
    def sampling(self) -> Sampling:
        """What its makers recommend (generation_config.json); greedy where they recommend nothing."""
        given = self.generation
        if given.do_sample is False:
            return Sampling()
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        chosen = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
        if given.do_sample and "temperature" not in chosen:
            chosen["temperature"] = 1.0
        return Sampling(**chosen)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, in every form kept."""
        return sum(a.nbytes for a in jax.tree.leaves(self.params))


def load_model(name_or_path: str | Path, dtype: str | None = None, weights: str | None = None, *, report: Report = silent) -> Model:
    """Returns the model of a name ("gemma-3-270m"), a Hugging Face folder, a .gguf file or a jaxkv checkpoint folder.

    Args:
      name_or_path: an existing path wins over a known name.
      dtype: "float32", "bfloat16" or (not on CPU) "float16", of the operands of products over many rows; None: as `weights` wants.
      weights: "float32", "bfloat16" (16 bits) or "int8": how weights are stored; None: bfloat16. On CPU the last two keep a bf16
        copy for products over many rows beside the form for few: 4 and 3.1 bytes a weight in all.
      report: called with (what, fraction done in 0..1, or None) as slow work goes on.

    Raises:
      ValueError: an unknown name, a malformed file, tensors that the config does not call for, an architecture or option that is not
        supported; names it.
    """
    storage = choose_storage(dtype, weights)
    report(f"finding {name_or_path}", None)
    path = resolve(name_or_path)
    if path.is_file():
        return _load_gguf(path, storage, report)
    if checkpoint.is_checkpoint(path):
        return _load_checkpoint(path, dtype, weights, report)
    report(f"loading {path.name}", None)
    source = open_hf_folder(path)
    tokenizer = Tokenizer.from_folder(path) if (path / "tokenizer.json").exists() else None
    params = build_params(source, storage, lambda done: report(f"loading {path.name}", done))
    return Model(source.config, params, storage, tokenizer, generation_from_folder(path))


def choose_storage(dtype: str | None, weights: str | None, platform: str | None = None) -> Storage:
    """The storage that unset options mean on a backend; the measurements behind them are in docs/performance.md."""
    platform = platform or jax.default_backend()
    weights = weights or "bfloat16"
    dtype = dtype or ("float32" if weights == "float32" else "bfloat16")
    allowed = ("float32",) if weights == "float32" else ("float32", "bfloat16")
    if platform == "cpu" and dtype not in allowed:
        raise ValueError(f"{dtype=} with {weights=}: on CPU large products of such weights run in {' or '.join(allowed)}")
    return Storage(weights=weights, dtype=dtype, platform=platform)


def save_checkpoint(model: Model, path: str | Path) -> None:
    """Writes the model as a checkpoint folder that `load_model` reads without converting anything.

    The folder appears whole, by a rename. It holds the weights in the forms of the backend they were converted for.

    Args:
      model: from `load_model`.
      path: the folder to make; nothing may be there.

    Raises:
      ValueError: something is at `path` already.
    """
    checkpoint.write(Path(path), model.config, model.storage, model.generation, model.params, model.tokenizer)


def _load_checkpoint(path: Path, dtype: str | None, weights: str | None, report: Report) -> Model:
    report(f"loading {path.name}", None)
    tokenizer = Tokenizer.load(path / "tokenizer") if (path / "tokenizer").is_dir() else None
    if (portable := checkpoint.open_portable(path)) is not None:
        source, generation = portable
        storage = choose_storage(dtype, weights)
        params = build_params(source, storage, lambda done: report(f"loading {path.name}", done))
        return Model(source.config, params, storage, tokenizer, generation)
    config, storage, generation, params = checkpoint.read(path)
    if storage.platform != jax.default_backend():
        raise ValueError(
            f"{path} was converted for {storage.platform!r} and this process runs on {jax.default_backend()!r}, which keeps weights"
            " in other forms: convert the original here"
        )
    if weights not in (None, storage.weights) or dtype not in (None, storage.dtype):
        raise ValueError(
            f"{path} holds weights={storage.weights!r} for dtype={storage.dtype!r}, not weights={weights!r}, dtype={dtype!r}:"
            " load it without these arguments, or convert the original again"
        )
    return Model(config, params, storage, tokenizer, generation)


def _load_gguf(path: Path, storage: Storage, report: Report) -> Model:
    """Converts once: params of a GGUF file are kept as a checkpoint under the cache folder, by the file's digest and form."""
    report(f"reading {path.name}", None)
    source = open_gguf(path)
    tokenizer, generation = Tokenizer.from_gguf(source.file), generation_from_gguf(source.file)
    kept = cache_dir("converted") / f"{_digest(path)[:32]}-{storage.name}-{checkpoint.FORMAT}.{CONVERSION}"
    params = _read_kept(kept, source.config, storage)
    if params is None:
        report(f"converting {path.name} to {storage.weights}", 0.0)
        params = build_params(source, storage, lambda done: report(f"converting {path.name} to {storage.weights}", done))
        report(f"keeping the converted weights in {kept}", None)
        _keep(kept, source.config, storage, generation, params)
    return Model(source.config, params, storage, tokenizer, generation)


def _read_kept(kept: Path, config: ModelConfig, storage: Storage) -> dict | None:
    """Converted params from the cache, or None: whatever is wrong there is converted again."""
    if not checkpoint.is_checkpoint(kept):
        return None
    try:
        kept_config, kept_storage, _, params = checkpoint.read(kept)
    except (ValueError, OSError):
        kept_config = None
    if kept_config != config or kept_storage != storage:
        shutil.rmtree(kept, ignore_errors=True)
        return None
    return params


def _keep(kept: Path, config: ModelConfig, storage: Storage, generation: GenerationDefaults, params: dict) -> None:
    """Adds to the cache; a full disk or another process that was first costs nothing but the time of the next load."""
    try:
        checkpoint.write(kept, config, storage, generation, params)
    except (OSError, ValueError) as error:
        logging.getLogger(__name__).warning("could not keep converted weights in %s: %s", kept, error)


def _digest(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
