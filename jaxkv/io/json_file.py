"""JSON files that come with models: errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in a file ({} for an absent one when `missing_ok`); ValueError when it is anything else."""
    if not path.exists():
        if missing_ok:
            return {}
        raise ValueError(f"{path.parent}: no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"{path}: not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value
