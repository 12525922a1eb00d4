"""What `layouts` measured, in Markdown and as a picture, and whether two runs agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxkv.research.layouts import BOUND_FRACTION
from jaxkv.research.plot import pyplot

_STEP_COLUMNS = (
    "layout", "KV heads", "page", "KV dtype", "B", "T", "KV B/token", "x", "stored B/token", "pool use", "ms/step (rounds)",
    "x (rounds)", "step's bytes x", "tok/s", "GB/s", "of read", "bound by",
)  # fmt: skip
# What makes a row of two runs the same row.
_IDENTITY = ("layout", "page_size_tokens", "kv_dtype", "batch", "context_tokens")
# What two runs are compared by, and its column.
_COMPARED = {"step_ms": "ms/step", "step_over_base": "x"}


def describe(result: dict[str, Any]) -> str:
    """The whole result of a study in Markdown: what was measured, steps, which of them are bound by bandwidth, quality, another run."""
    rows = result["rows"]
    parts = [_heading(result), _table(_STEP_COLUMNS, [_step_cells(row) for row in rows]), _verdict(rows)]
    if result.get("quality"):
        parts.append(_quality(result["quality"], result["text"]))
    if result.get("against"):
        parts.append(_agreement(result["against"]))
    return "\n\n".join(parts)


def _heading(result: dict[str, Any]) -> str:
    base, rate = result["rows"][0]["layout"], result["read_gb_s"]
    told = (
        f"Decode steps on {result['backend']}; weights {result['weights']}. Medians of {result['repeats']} rounds, which ran all rows"
        f" in turn; in brackets the least and the largest round. x is against {base} in the same rounds. The machine read"
        f" {rate['median']:.1f} GB/s ({rate['low']:.1f}-{rate['high']:.1f})."
    )
    if (whole := result.get("whole_layers")) and whole != result["num_layers"]:
        told += (
            f"\n\nOnly the first {result['num_layers']} of {whole} layers: KV bytes are theirs alone, and a step's weights are those of"
            f" so many layers beside a whole vocabulary, so that KV is a smaller part of a step than in the model."
        )
    return told


def _step_cells(row: dict[str, Any]) -> list[str]:
    fraction = row["fraction_of_read"]["median"]
    bound = f"bandwidth{' (of a cache)' if fraction > 1 else ''}" if row["bandwidth_bound"] else "other work"
    return [
        row["layout"], str(row["num_kv_heads"]), str(row["page_size_tokens"]), row["kv_dtype"], str(row["batch"]),
        f"{row['context_tokens']:,}", f"{row['kv_bytes_per_token']:,}", _ratio(row["kv_bytes_over_base"]),
        f"{row['kv_bytes_per_token_stored']:,.0f}", f"{row['pool_use_fraction']:.1%}", _rounds(row["step_ms"]),
        _rounds(row["step_over_base"]), _ratio(row["step_bytes_over_base"]), f"{row['tok_s']:,.1f}", f"{row['gb_s']:.2f}",
        f"{fraction:.0%}", bound,
    ]  # fmt: skip


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Which rows are bound by bandwidth, by how much the others are not, and what follows for each."""
    bound = [row for row in rows if row["bandwidth_bound"]]
    others = [row for row in rows if not row["bandwidth_bound"]]
    told = f"**Bound by bandwidth** (reading a step's bytes at the measured rate takes {BOUND_FRACTION:.0%} of its time or more): "
    told += "; ".join(map(_called, bound)) or "none of these rows"
    if others:
        told += ".\n\n**Not**: "
        told += "; ".join(f"{_called(row)} ({row['fraction_of_read']['median']:.0%})" for row in others)
        told += (
            ". Most of their time goes to other work: arithmetic, softmax and starting operations, which are not told apart. Bytes do not"
            " say how much less of it a layout with fewer KV heads has; x (rounds) beside step's bytes x does"
        )
    if any(row["fraction_of_read"]["median"] > 1 for row in rows):
        told += ".\n\nOver 100 % of the rate of memory means that a cache holds part of what is read"
    return told + "."


def _quality(rows: Sequence[dict[str, Any]], text: str) -> str:
    base = rows[0]["layout"]
    cells = [
        [row["layout"], row["kv_dtype"], f"{row['kv_bytes_per_token']:,}", f"{row['bits_per_byte']:.4f}",
         f"{row['bits_per_byte_over_base']:+.2%}"]
        for row in rows
    ]  # fmt: skip
    header = ("layout", "KV dtype", "KV B/token", "bits per byte", f"over {base}")
    return f"Bits per byte of {text}, read through the cache:\n\n{_table(header, cells)}"


def _called(row: dict[str, Any]) -> str:
    return f"{row['layout']} {row['kv_dtype']} B {row['batch']} T {row['context_tokens']:,} P {row['page_size_tokens']}"


def _ratio(value: float) -> str:
    """Exactly, as far as four decimals go: 1, 0.25, 0.0312."""
    return f"{value:.4f}".rstrip("0").rstrip(".")


def _rounds(figure: dict[str, float]) -> str:
    return f"{figure['median']:.2f} ({figure['low']:.2f}-{figure['high']:.2f})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown with aligned columns; all but names and dtypes to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    left = [name in ("layout", "KV dtype", "bound by") for name in header]
    cell = lambda text, i: text.ljust(widths[i]) if left[i] else text.rjust(widths[i])
    line = lambda cells: "| " + " | ".join(cell(text, i) for i, text in enumerate(cells)) + " |"
    rule = "|" + "|".join("-" * (w + 1) + ("-" if is_left else ":") for w, is_left in zip(widths, left, strict=True)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def read_run(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a layouts.json.

    Raises:
      ValueError: it is none.
      OSError: it cannot be read.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
        compare_runs(rows, rows)  # needs all that comparing with another would
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is no layouts.json of a run of compare_layouts.py: its rows are missing or incomplete") from None
    return rows


def in_common(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of what is the same row in two runs; `rows` may be those of `layouts.on_paper`.

    Raises:
      ValueError: they have none in common.
    """
    there = {_key(row): row for row in others}
    pairs = [(row, there[_key(row)]) for row in rows if _key(row) in there]
    if not pairs:
        raise ValueError("the two runs have no row in common: give both the same layouts, page sizes, dtypes, rows and contexts")
    return pairs


def compare_runs(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether two runs agree within their stated spread: how many rows they have in common, and for each figure those that do not.

    Of a figure they do where the median of one lies between the least and the largest round of the other.

    Raises:
      ValueError: they have no row in common.
    """
    pairs = in_common(rows, others)
    apart = lambda name: [
        {key: a[key] for key in _IDENTITY} | {"here": a[name], "there": b[name]} for a, b in pairs if not _agree(a[name], b[name])
    ]
    return {"rows": len(pairs)} | {f"{name}_apart": apart(name) for name in _COMPARED}


def _agreement(found: dict[str, Any]) -> str:
    """`compare_runs` in words, with the `file` that was compared with."""
    lines = [f"Against {found['file']}:", ""]
    for name, what in _COMPARED.items():
        apart = found[f"{name}_apart"]
        lines.append(f"* {what}: {found['rows'] - len(apart)} of {found['rows']} rows agree within their rounds")
        lines += [f"  * {_called(row)}: {_rounds(row['here'])} here, {_rounds(row['there'])} there" for row in apart]
    return "\n".join(lines)


def _key(row: dict[str, Any]) -> tuple:
    return tuple(row[key] for key in _IDENTITY)


def _agree(a: dict[str, float], b: dict[str, float]) -> bool:
    return a["low"] <= b["median"] <= a["high"] or b["low"] <= a["median"] <= b["high"]


def draw(path: str | Path, result: dict[str, Any]) -> None:
    """Draws milliseconds a step over the context, and what the bytes of a token buy in bits per byte where that was measured.

    Raises:
      ValueError: matplotlib is not there.
    """
    plt, rows, quality = pyplot("--plot"), result["rows"], result.get("quality")
    figure, panels = plt.subplots(1, 2 if quality else 1, figsize=(12 if quality else 7, 5), layout="constrained", squeeze=False)
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    colours = {name: f"C{i}" for i, name in enumerate(layouts)}
    _draw_steps(panels[0, 0], rows, colours)
    if quality:
        axes = panels[0, 1]
        for dtype, marker in zip(dict.fromkeys(row["kv_dtype"] for row in quality), "os^Dv", strict=False):
            here = [row for row in quality if row["kv_dtype"] == dtype]
            x, y = [row["kv_bytes_per_token"] for row in here], [row["bits_per_byte"] for row in here]
            axes.plot(x, y, color="0.7", zorder=0)
            axes.scatter(x, y, c=[colours[row["layout"]] for row in here], marker=marker, label=f"KV {dtype}")
        axes.set(xlabel="KV bytes a token", ylabel="bits per byte", xscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_steps(axes, rows: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    """A line for each layout, dtype, page size and number of rows, with bars from the least to the largest round."""
    kinds = list(dict.fromkeys((row["kv_dtype"], row["page_size_tokens"], row["batch"]) for row in rows))
    styles = [(line, marker) for marker in "os^Dv" for line in ("-", "--", ":")]
    for layout, colour in colours.items():
        for kind, (line, marker) in zip(kinds, styles * len(kinds), strict=False):
            here = [r for r in rows if r["layout"] == layout and (r["kv_dtype"], r["page_size_tokens"], r["batch"]) == kind]
            here.sort(key=lambda row: row["context_tokens"])
            ms = [row["step_ms"] for row in here]
            bars = [[m["median"] - m["low"] for m in ms], [m["high"] - m["median"] for m in ms]]
            label = f"{layout}, KV {kind[0]}, P {kind[1]}, B {kind[2]}"
            x, y = [row["context_tokens"] for row in here], [m["median"] for m in ms]
            axes.errorbar(x, y, bars, color=colour, ls=line, marker=marker, capsize=3, label=label)
    axes.set(xlabel="context (tokens)", ylabel="decode ms/step", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
