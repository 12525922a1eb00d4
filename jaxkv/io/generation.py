"""What a model's makers say about generating with it: stop ids and sampling defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.io.gguf_reader import GGUFFile
from jaxkv.io.json_file import read_object
from jaxkv.io.spm import CONTROL

# Texts that end a turn whatever the metadata names; llama.cpp's list without its fill-in-the-middle tokens.
_END_TEXTS = {
    b"<|eot_id|>",
    b"<|im_end|>",
    b"<|end|>",
    b"<end_of_turn>",
    b"<|endoftext|>",
    b"<|eom_id|>",
    b"< EOT >",
    b"_<EOT>",
}


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Stop ids and, where the makers give any, sampling settings (None: not given)."""

    eos_token_ids: tuple[int, ...] = ()
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def generation_from_folder(folder: Path) -> GenerationDefaults:
    """From generation_config.json; the stop ids from config.json (also inside text_config) where that names none."""
    path = folder / "generation_config.json"
    given = read_object(path, missing_ok=True)
    eos = given.get("eos_token_id")
    if eos is None:
        config = read_object(folder / "config.json", missing_ok=True)
        text = config.get("text_config")
        eos = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
    ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if any(type(i) is not int or i < 0 for i in ids):
        raise ValueError(f"{folder}: eos_token_id must be an id or a list of ids, got {eos!r}")
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(GenerationDefaults)[1:]:
        value = given.get(field.name)
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"{path}: {field.name} must be a number, got {value!r}")
        settings[field.name] = value
    return GenerationDefaults(tuple(dict.fromkeys(ids)), **settings)


def generation_from_gguf(file: GGUFFile) -> GenerationDefaults:
    """Stop ids: the file's eos, eot and eom tokens, and control tokens known to end a turn."""
    ids = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, types = file.metadata.get("tokenizer.ggml.tokens", []), file.metadata.get("tokenizer.ggml.token_type", [])
    if len(tokens) == len(types):
        ids += [i for i in np.flatnonzero(np.asarray(types) == CONTROL).tolist() if tokens[i] in _END_TEXTS]
    return GenerationDefaults(tuple(dict.fromkeys(i for i in ids if isinstance(i, int))))
