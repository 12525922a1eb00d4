"""How slow work tells a caller what it does; printing is the scripts' business."""

from __future__ import annotations

from typing import Protocol


class Report(Protocol):
    """Called as work goes on."""

    def __call__(self, what: str, fraction: float | None) -> None:
        """`what` in a few words; `fraction` done in 0..1, None where the end is not known."""
        ...


def silent(what: str, fraction: float | None) -> None:
    """Tells nobody."""
    del what, fraction
