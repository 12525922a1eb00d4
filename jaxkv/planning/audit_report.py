"""An audit as text: a table of predicted and found bytes, then why they differ, what grows, and what is wrong."""

from __future__ import annotations

import textwrap

from jaxkv.planning.audit import Audit, Line, kv_parts
from jaxkv.planning.units import MIB, both, gib

_SHOWN_BYTES = 0.005 * MIB  # smaller reasons round to nothing


def describe(audit: Audit, compiler: str) -> str:
    """Returns the report; `compiler` names who found the bytes."""
    parts = [_title(audit, compiler), _table(audit), _pool(audit), _growth(audit), _live(audit), _verdict(audit)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _title(audit: Audit, compiler: str) -> list[str]:
    d = audit.deployment
    lines = [
        f"{d.model.name} on one jax device of {d.chip.name}, by {compiler}: weights {d.weights}, KV {d.kv_dtype} in pages of {d.P}"
    ]
    if d.model.num_layers < audit.num_layers:
        lines += [
            f"Audited with {d.model.num_layers} of its {audit.num_layers} layers, because all of them were refused:",
            *textwrap.wrap(audit.refused, 126, initial_indent="  ", subsequent_indent="  "),
        ]
    return lines


def _table(audit: Audit) -> list[str]:
    lines = [f"{'GiB':51}{'predicted':>10}{'compiled':>10}{'off by':>9}"]
    for i, line in enumerate(audit.lines):
        first = i == 0 or _key(audit.lines[i - 1]) != _key(line)
        where = f"{line.shape}, {line.sequences} x {line.context:,} tokens" if first else ""
        lines.append(f"  {where:36}{line.what:13}{_sizes(line)}")
    return lines


def _key(line: Line) -> tuple:
    return line.shape, line.sequences, line.context


def _sizes(line: Line) -> str:
    sizes = f"{gib(line.predicted_bytes):10.3f}{gib(line.found_bytes):10.3f}{line.error_fraction:+9.2%}"
    reasons = {"estimate": 0} if "estimate" in line.reasons else line.reasons
    shown = [f"{name} {size / MIB:,.2f} MiB" for name, size in reasons.items() if abs(size) >= _SHOWN_BYTES]
    if "estimate" in line.reasons:
        shown = ["an estimate"]
    return f"{sizes}   {'FLAGGED' if line.flag else ', '.join(shown)}".rstrip()


def _pool(audit: Audit) -> list[str]:
    d, points = audit.deployment, dict.fromkeys((step.sequences, step.context) for step in audit.steps)
    lines = ["KV as predicted"]
    for sequences, context in points:
        parts = [f"{name} {both(size)}" for name, size in kv_parts(d, sequences, context).items() if size]
        lines.append(f"  {sequences} x {context:,} tokens: {', '.join(parts)}")
    return lines


def _growth(audit: Audit) -> list[str]:
    lines = ["Growth with the context, of what is not predicted (bytes for each token of each sequence)"] if audit.growth else []
    for g in audit.growth:
        once = "once, between {:,} and {:,}: compiled differently from there on".format(*g.alone) if g.alone else ""
        fine = once or "copies of the history at most"
        lines.append(
            f"  {g.shape}, {g.sequences} sequences, {g.contexts[0]:,} to {g.contexts[-1]:,}: arguments"
            f" {g.argument_bytes_per_token:+.2f}, alive at once {g.live_bytes_per_token:+.2f}: {'FLAGGED' if g.flag else fine}"
        )
    return lines


def _live(audit: Audit) -> list[str]:
    if audit.not_live:
        return [f"Not compared with live memory: {audit.not_live}."]
    if not audit.live:
        return []
    one = audit.live[0]
    lines = [f"{f'Live arrays of a real state, {one.sequences} sequences of {one.context:,}':51}{'predicted':>10}{'live':>10}"]
    return lines + [f"  {line.what:49}{_sizes(line)}" for line in audit.live]


def _verdict(audit: Audit) -> list[str]:
    if audit.flags:
        return ["Flagged", *(f"  {flag}" for flag in audit.flags)]
    worst = max((abs(line.error_fraction) for line in audit.lines if line.what == "arguments"), default=0.0)
    return [
        f"Nothing flagged: weights and KV are within {worst:.2%} of the compiler's arguments, and every byte of them has a reason."
    ]
