"""Pictures: matplotlib, imported late because nothing else wants it, and a run's losses."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

_WINDOW = 50  # steps of the running mean: single batches differ by more than the model gains in many steps


def pyplot(what: str, or_else: str = ""):
    """matplotlib's pyplot, which draws into files and shows nothing.

    Raises:
      ValueError: it is not there; says that `what` needs it.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError(f"{what} needs matplotlib: pip install matplotlib{or_else}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_losses(path: str | Path, losses: np.ndarray, held_out: dict[int, float], title: str) -> None:
    """Draws losses f32[steps] (nats a byte) in bits per byte, their running mean, and held-out bits per byte at some steps.

    Raises:
      ValueError: matplotlib is not there.
    """
    plt = pyplot("the loss plot", ", or give --noplot")
    bits = np.asarray(losses) / math.log(2)
    window = min(_WINDOW, len(bits))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(1, len(bits) + 1), bits, color="C0", alpha=0.3, linewidth=0.7, label="a step's bytes")
    if window:
        mean = np.convolve(bits, np.full(window, 1 / window), "valid")
        axes.plot(np.arange(window, len(bits) + 1), mean, color="C0", label=f"mean of {window} steps")
    axes.plot(list(held_out), list(held_out.values()), "o", color="C1", label="held out")
    axes.set(xlabel="steps", ylabel="bits per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)
