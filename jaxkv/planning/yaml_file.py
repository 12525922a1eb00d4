"""YAML mappings in and out. PyYAML is wanted only by those who use such files, so it is imported here and late."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Returns the mapping a YAML file holds.

    Raises:
      ValueError: there is no such file, or it is no YAML mapping, or gives a key twice.
    """
    yaml = _yaml()
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        text = Path(path).read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_keys(node, str(path))
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{path}: must hold a mapping of names to values, got {type(value).__name__}")
    return value


def write_mapping(path: str | Path, value: Mapping[str, Any], comment: str) -> None:
    """Writes a mapping in its own order, below a comment of one or more lines."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    Path(path).write_text(head + _yaml().safe_dump(dict(value), sort_keys=False), encoding="utf-8")


def _check_keys(node, where: str) -> None:
    """PyYAML lets the last of two equal keys win; a plan must not."""
    if node is None or not hasattr(node, "value") or not isinstance(node.value, list):
        return
    seen = set()
    for item in node.value:
        pair = isinstance(item, tuple)
        if pair and item[0].value in seen:
            raise ValueError(f"{where}: {item[0].value!r} is given twice")
        if pair and isinstance(item[0].value, str):
            seen.add(item[0].value)
        _check_keys(item[1] if pair else item, where)


def _yaml() -> ModuleType:
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError:
        raise ValueError("YAML files need PyYAML: pip install 'jaxkv[plan]' or pip install pyyaml") from None
    return yaml
