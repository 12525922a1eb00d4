"""`context=131072,kv_dtype=int8`: changes of a deployment as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv.planning.deployment import Deployment
from jaxkv.planning.devices import CHIPS, Chip, chip
from jaxkv.planning.presets import model_shape


def tokens(text: str) -> int:
    """Returns a count written as 131072, 131_072, 128K (x 1,024) or 1M (x 1,048,576)."""
    match = re.fullmatch(r"(\d+(?:_\d+)*)([kKmM]?)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is no count of tokens: write 131072 or 128K")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def _number(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a {'whole ' if kind is int else ''}number") from None

    return read


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


_READERS: Mapping[str, Callable[[str], Any]] = {
    "context": tokens, "sequences": _number(int), "chips": _number(int), "tensor_parallel": _number(int), "kv_dtype": str, "weights": str, "page_size": _number(int),
    "memory_fraction": _number(float), "activations_gib": _number(float), "step_tokens": tokens, "low_watermark_gib": _number(float), "shared_tokens": tokens,
    "sharers": _number(int), "free_window_pages": _flag,
}  # fmt: skip
KEYS = ("model", "device", "num_kv_heads", *_READERS)


def apply(d: Deployment, text: str, chips: Mapping[str, Chip] = CHIPS) -> Deployment:
    """Returns the deployment with the changes that `text` names, all at once.

    Raises:
      ValueError: no such key, or a value that does not fit it.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key not in KEYS:
            raise ValueError(f"--what_if={text}: {part.strip()!r} is no change; write KEY=VALUE with a KEY of {', '.join(KEYS)}")
        if key in given:
            raise ValueError(f"--what_if={text}: {key} is given twice")
        given[key] = value
    try:
        changes: dict[str, Any] = {key: _READERS[key](value) for key, value in given.items() if key in _READERS}
        model = model_shape(given["model"]) if "model" in given else d.model
        changes["model"] = model.with_kv_heads(_number(int)(given["num_kv_heads"])) if "num_kv_heads" in given else model
        changes["chip"] = chip(given["device"], chips) if "device" in given else d.chip
        return d.change(**changes)
    except ValueError as error:
        raise ValueError(f"--what_if={text}: {error}") from None
