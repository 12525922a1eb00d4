"""The names of a batch job's own files, which lie beside its output. Where that is a link, beside what it points at."""

from __future__ import annotations

from pathlib import Path


def job_file(output: Path) -> Path:
    """Says which job an output belongs to."""
    target = output.resolve()
    return target.with_name(f"{target.name}.job.json")


def temporary(path: Path) -> Path:
    """What becomes the file at `path` by a rename. One name, so that one left by a kill is overwritten by the next run."""
    return path.with_name(f".{path.name}.tmp")


def beside(output: Path, *others: Path) -> list[Path]:
    """Everything else that a job writes: its own file beside its output, and what becomes that, the output and other files."""
    job = job_file(output)
    return [job, *(temporary(path.resolve()) for path in (job, output, *others))]
