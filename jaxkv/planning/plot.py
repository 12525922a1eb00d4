"""Concurrency against context as a picture. matplotlib is wanted only here, so it is imported late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxkv.planning.deployment import Deployment
from jaxkv.planning.memory import UNBOUNDED, max_sequences
from jaxkv.planning.shapes import KV_BYTES

_CONTEXTS = tuple(2**i for i in range(10, 21))


def draw(path: str | Path, deployments: Sequence[tuple[str, Deployment]]) -> bool:
    """Draws how many sequences fit at each context, for (what to call it, deployment), and what the models were made for.

    int8 KV is dashed, the context asked for marked. The first deployment is the title.

    Returns whether there was anything to draw; without, no file is written.

    Raises:
      ValueError: matplotlib is not there.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    colours: dict[Deployment, str] = {}
    for what, d in deployments:
        same = d.change(context=UNBOUNDED, sequences=None)  # deployments that differ by what is asked for share a curve
        if same not in colours:
            colours[same] = f"C{len(colours)}"
            dtypes = dict.fromkeys([d.kv_dtype, "int8" if KV_BYTES[d.kv_dtype] > 1 else d.kv_dtype])
            for kv_dtype, style in zip(dtypes, (".-", "--"), strict=False):
                if points := curve(d.change(kv_dtype=kv_dtype)):
                    axes.plot(*zip(*points, strict=True), style, color=colours[same], label=f"{what}, KV {kv_dtype}")
        if 0 < (n := max_sequences(d)) < UNBOUNDED:
            axes.plot(d.context, n, color=colours[same], marker="o", markersize=9, fillstyle="none")
    if not axes.lines:
        pyplot.close(figure)
        return False
    for positions in dict.fromkeys(d.model.max_positions for _, d in deployments):
        axes.axvline(positions, color="grey", linestyle=":", zorder=0)
        axes.annotate(
            f" made for {positions:,}", (positions, 0.02), xycoords=axes.get_xaxis_transform(), fontsize=7, rotation=90, ha="right"
        )
    _, first = deployments[0]
    axes.set_title(f"{first.model.name} on {first.chips} {first.chip.name}, KV {first.kv_dtype}")
    axes.set(xlabel="context (tokens)", ylabel="sequences that fit", xscale="log", yscale="log")
    axes.set_xticks(_CONTEXTS, [f"{x // 1024}K" for x in _CONTEXTS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def curve(d: Deployment) -> list[tuple[int, int]]:
    """The contexts longer than the shared prefix that memory limits, each with the sequences that fit."""
    points = [(tokens, max_sequences(d, tokens)) for tokens in _CONTEXTS if tokens > d.shared_tokens]
    return [(tokens, n) for tokens, n in points if 0 < n < UNBOUNDED]
