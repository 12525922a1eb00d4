"""jaxkv's own checkpoints: the params tree in Orbax form, and beside it what the model is, as JSON.

    folder/
      jaxkv.json     format, config, storage, generation defaults
      params/        Orbax, uncompressed: weights hardly compress, and reading is then the disk's speed
      tokenizer/     the files the tokenizer was read from

A folder appears whole or not at all: it is written beside its place and renamed. It belongs to the backend it was made on, unless it is
portable: `storage` is then null, and `params` holds weights under the names of `io.source`, those of layers stacked `[L, ..]`, from which
every backend makes its own forms. What training keeps is such a folder of arrays, too, with a description of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.io.generation import GenerationDefaults
from jaxkv.io.json_file import read_object
from jaxkv.io.source import WeightSource, check_complete, check_no_others, expected_shapes
from jaxkv.model.linear import Experts, Linear
from jaxkv.model.params import Storage, adopt, aligned_empty, check_params

FORMAT = 3
_DESCRIPTION = "jaxkv.json"
_PART_BYTES = 64 << 20  # a load's peak is the weights and a part; glibc gives blocks over 32 MiB back when they are freed


def is_checkpoint(path: Path) -> bool:
    """Whether the folder is one of ours."""
    return (path / _DESCRIPTION).is_file()


def write(path: Path, config: ModelConfig, storage: Storage, generation: GenerationDefaults, params, tokenizer=None) -> None:
    """Writes a checkpoint folder; an existing one at `path` is an error.

    Raises:
      ValueError: something is at `path` already.
    """
    description = {
        "format": FORMAT,
        "config": dataclasses.asdict(config),
        "storage": dataclasses.asdict(storage),
        "generation": dataclasses.asdict(generation),
    }
    write_arrays(path, _DESCRIPTION, description, _nested(params), tokenizer)


def write_portable(path: Path, config: ModelConfig, generation: GenerationDefaults, weights: Mapping, tokenizer=None) -> None:
    """Writes weights, {name of `io.source`: array, those of layers stacked}, as a checkpoint that every backend loads.

    Raises:
      ValueError: something is at `path` already, or the weights are not those that config calls for.
    """
    check_complete(_StackedSource(config, weights), str(path))
    description = {
        "format": FORMAT,
        "config": dataclasses.asdict(config),
        "storage": None,
        "generation": dataclasses.asdict(generation),
    }
    write_arrays(path, _DESCRIPTION, description, dict(weights), tokenizer)


def open_portable(path: Path) -> tuple[WeightSource, GenerationDefaults] | None:
    """(weights, generation) of a portable checkpoint; None if its weights are in the forms of one backend.

    Raises:
      ValueError: not a checkpoint of this format, or weights that do not fit its config.
    """
    description = _description(path)
    if description.get("storage", "") is not None:
        return None
    try:
        config, generation = _config(description["config"]), _tuples(GenerationDefaults, description["generation"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / _DESCRIPTION}: not a description of a model: {error}") from None
    source = _StackedSource(config, _restore(path / "params"))
    check_complete(source, str(path))
    check_no_others(source.arrays, {name for name, _ in expected_shapes(config)}, {}, str(path))
    return source, generation


def write_arrays(path: Path, name: str, description: dict, arrays: dict, tokenizer=None) -> None:
    """Writes a folder that appears whole: the file `name` with `description` as JSON, and nested dicts of arrays in Orbax form.

    Raises:
      ValueError: something is at `path` already.
    """
    if path.exists():
        raise ValueError(f"{path} exists already: remove it or save elsewhere")
    with _appearing(path) as folder:
        (folder / name).write_text(json.dumps(description, indent=1))
        if tokenizer is not None:
            (folder / "tokenizer").mkdir()
            tokenizer.save(folder / "tokenizer")
        with _checkpointer() as checkpointer:
            import orbax.checkpoint as ocp

            checkpointer.save((folder / "params").absolute(), args=ocp.args.PyTreeSave(arrays))


def read_arrays(path: Path, name: str) -> tuple[dict, dict]:
    """(description, arrays) of a folder that `write_arrays` made; ValueError where it is damaged."""
    return read_object(path / name), _restore(path / "params")


def read(path: Path) -> tuple[ModelConfig, Storage, GenerationDefaults, dict]:
    """(config, storage, generation, params) of a checkpoint folder.

    Raises:
      ValueError: not a checkpoint of this format, or weights that do not fit its config.
    """
    description = _description(path)
    try:
        config = _config(description["config"])
        storage = Storage(**description["storage"])
        generation = _tuples(GenerationDefaults, description["generation"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / _DESCRIPTION}: not a description of a model: {error}") from None
    nested = _restore(path / "params")
    try:
        params = _tree(nested, storage)
        check_params(params, config, storage, str(path))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: its weights are not those of its description: {error!r}") from error
    return config, storage, generation, params


def _description(path: Path) -> dict:
    description = read_object(path / _DESCRIPTION)
    if description.get("format") != FORMAT:
        raise ValueError(f"{path}: checkpoint format {description.get('format')!r}, this jaxkv reads {FORMAT}")
    return description


class _StackedSource:
    """A WeightSource over arrays in memory, those of layers stacked."""

    def __init__(self, config: ModelConfig, arrays: Mapping):
        self.config, self.arrays = config, arrays

    def has(self, name, layer=None):
        return name in self.arrays and (layer is None or layer < self.config.num_layers == self.arrays[name].shape[0])

    def shape(self, name, layer=None):
        return tuple(self.arrays[name].shape[0 if layer is None else 1 :])

    def read(self, name, layer=None):
        return self.arrays[name] if layer is None else self.arrays[name][layer]

    def read_rows(self, name, layer, start, stop):
        return self.read(name, layer)[start:stop]


def _restore(path: Path) -> dict:
    """The tree as nested dicts of numpy arrays, read one by one: the peak is the weights and one array."""
    import orbax.checkpoint as ocp

    path = path.absolute()  # Orbax finds nothing at a relative one
    if not path.is_dir():
        raise ValueError(f"{path} is missing: the checkpoint is incomplete")
    with _checkpointer() as checkpointer:

        def read(keys):
            wanted, options = 0, ocp.RestoreArgs(restore_type=np.ndarray)
            for key in reversed(keys):
                wanted, options = {key: wanted}, {key: options}
            args = ocp.args.PyTreeRestore(item=wanted, restore_args=options, partial_restore=True)
            tree = checkpointer.restore(path, args=args)
            for key in keys:
                tree = tree[key]
            return tree

        def visit(node, keys):
            if not isinstance(node, dict):
                return read(keys)
            parts = [key for key in sorted(node) if key.startswith("part")]
            if parts:
                return _joined([node[part].shape for part in parts], (read((*keys, part)) for part in parts))
            return {key: visit(child, (*keys, key)) for key, child in node.items()}

        try:
            found = checkpointer.metadata(path).item_metadata
            if found is None:
                raise ValueError(f"{path}: Orbax finds no checkpoint in it")
            return visit(found.tree, ())
        except (KeyError, TypeError, OSError) as error:
            raise ValueError(f"{path}: Orbax cannot read it: {error}") from error


@contextlib.contextmanager
def _checkpointer():
    # Orbax takes most of a second to import: only those who read or write a checkpoint pay.
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        yield checkpointer


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A folder to fill that becomes `path` at the end, in one rename; on an error nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield temp
        os.replace(temp, path)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise


def _nested(params) -> dict:
    """The params tree as nested dicts of arrays, absent forms left out, large arrays in parts of their first axis."""

    def plain(node):
        if isinstance(node, Linear | Experts):
            arrays = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
            return {k: plain(v) for k, v in arrays.items() if isinstance(v, jax.Array)}
        if isinstance(node, tuple):
            return {str(i): plain(x) for i, x in enumerate(node)}
        return {k: plain(v) for k, v in node.items()} if isinstance(node, dict) else _parts(node)

    return plain(params)


def _parts(array: jax.Array):
    """The array, or a dict of its parts: reading one by one, a load never holds a large array twice."""
    if array.nbytes <= _PART_BYTES:
        return array
    row_bytes = array.nbytes // array.shape[0]
    step = 64 // math.gcd(64, row_bytes)  # parts stay aligned, so that jax takes them as they are: Orbax copies numpy arrays
    rows = max(_PART_BYTES // row_bytes // step, 1) * step
    view = np.asarray(array)  # on CPU no copy
    return {f"part{i:05d}": adopt(view[start : start + rows]) for i, start in enumerate(range(0, view.shape[0], rows))}


def _joined(shapes, parts) -> np.ndarray:
    """The array of `_parts`, from the shapes of its parts and an iterator that reads them."""
    first = next(parts)
    whole = aligned_empty((sum(shape[0] for shape in shapes), *first.shape[1:]), first.dtype)
    start = 0
    for part in itertools.chain([first], parts):
        whole[start : start + part.shape[0]] = part
        start += part.shape[0]
    return whole


def _tree(nested: dict, storage: Storage):
    """The inverse of `_nested`, which it empties: dicts with a "weight" become the products they were."""

    def build(name, node):
        if not isinstance(node, dict):
            return adopt(node)
        arrays = {k: build(k, node.pop(k)) for k in list(node)}
        if "weight" not in arrays:
            return arrays
        if name.startswith("experts"):
            return Experts(**arrays, dtype=storage.expert_dtype, platform=storage.platform)
        return Linear(**arrays, platform=storage.platform)

    tree = build("", nested)
    layers = tree.get("layers", {})
    tree["layers"] = tuple(layers[str(i)] for i in range(len(layers)))
    return tree


def _config(given: dict) -> ModelConfig:
    ropes = tuple(RopeConfig(**rope) for rope in given["ropes"])
    return _tuples(ModelConfig, {**given, "ropes": ropes})


def _tuples(kind, given: dict):
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
