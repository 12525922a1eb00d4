"""A replay over time as a picture. matplotlib is wanted only here, so it is imported late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
      ValueError: matplotlib is not there.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(path: str | Path, results: Sequence[dict[str, Any]]) -> None:
    """Draws running and waiting requests, and pages by state, over time: a column for each result of `replay`.

    Raises:
      ValueError: as `pyplot`.
    """
    plt = pyplot()
    figure, axes = plt.subplots(2, len(results), figsize=(5 * len(results), 6), layout="constrained", squeeze=False, sharex=True)
    for column, result in enumerate(results):
        times = [point["time_s"] for point in result["series"]]
        above, below = axes[0][column], axes[1][column]
        for name in ("running", "waiting"):
            above.plot(times, [point[name] for point in result["series"]], label=name)
        active = [point["active_share"] for point in result["series"]]
        reusable = [point["reusable_share"] for point in result["series"]]
        below.stackplot(times, active, reusable, labels=("active", "reusable"))
        above.set(title=f"{result['pool_pages']:,} pages, {result['policy']}", ylabel="requests")
        below.set(xlabel="time (s)", ylabel="share of the pool", ylim=(0, 1))
        above.legend()
        below.legend()
    figure.savefig(path, dpi=80)
    plt.close(figure)
