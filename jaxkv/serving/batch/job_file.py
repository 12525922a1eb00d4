"""Which job an output belongs to: a small JSON file beside it, so that a rerun goes on and another job does not mix its answers in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.serving.batch.names import job_file
from jaxkv.serving.batch.output_file import replace

_FORMAT = 1


def claim(output: Path, job: Mapping[str, Any], *, has_records: bool) -> None:
    """Notes beside an empty output that it is `job`'s, or checks that a filled one is.

    Args:
      job: what decides the answers, by name; values that JSON keeps.
      has_records: whether the output holds anything to lose.

    Raises:
      ValueError: the output is another job's; says in what they differ and the ways out.
    """
    path, output = job_file(output), output.resolve()
    now = json.loads(json.dumps({"format": _FORMAT, **job}))
    if not has_records:
        return replace(path, lambda file: file.write(json.dumps(now, indent=1).encode() + b"\n"))
    way_out = f"give another output, or delete {output.name} and {path.name} to start anew"
    try:
        before = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{output} holds something, and no {path.name} beside it says that this job wrote it: {way_out}") from None
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise ValueError(f"{path} cannot be read, so nothing says that {output.name} is this job's: {way_out}")
    differ = [
        f"{name} was {_shown(before, name)} and is {_shown(now, name)}"
        for name in {**now, **before}
        if before.get(name) != now.get(name)
    ]
    if differ:
        raise ValueError(f"{output} is another job's: {'; '.join(differ)}. To go on give what it was; else {way_out}")


def _shown(job: Mapping[str, Any], name: str) -> str:
    text = json.dumps(job[name]) if name in job else "not given"
    return text if len(text) <= 40 else f"{text[:37]}..."
