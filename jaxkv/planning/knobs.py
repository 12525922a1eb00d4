"""What could be changed to hold more sequences, least risk first, and what each change alone would gain."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxkv.planning.deployment import Deployment, can_split
from jaxkv.planning.memory import max_sequences, unpadded_page
from jaxkv.planning.shapes import KV_BYTES
from jaxkv.planning.units import count

_RAISED_FRACTION = 0.95
_MOST_DEVICES = 256


@dataclasses.dataclass(frozen=True)
class Knob:
    """A change, what it means, and how many sequences fit with it (`gained` more than without)."""

    name: str
    what: str
    sequences: int
    gained: int


def knobs(d: Deployment) -> list[Knob]:
    """Returns every knob that applies, in the order in which to reach for them."""
    now = max_sequences(d)
    out = []
    for name, what, changed in _changes(d):
        sequences = max_sequences(changed)
        out.append(Knob(name, what, sequences, sequences - now))
    return out


def _changes(d: Deployment) -> Iterator[tuple[str, str, Deployment]]:
    half = max(1, d.context // 2)
    used = d.change(context=half, shared_tokens=min(d.shared_tokens, half - 1)) if half > 1 else d
    yield "use", f"watch use and preemptions: if requests average {half:,} tokens, overcommit", used
    if d.memory_fraction < _RAISED_FRACTION:
        yield "memory_fraction", f"memory_fraction {_RAISED_FRACTION}", d.change(memory_fraction=_RAISED_FRACTION)
    if half > 1:
        yield "context", f"limit the context to {half:,} tokens, a queue for longer requests", used
    quarter = d.context // 4
    if not d.shared_tokens and quarter >= d.P:
        yield "shared_tokens", f"share prefixes: if all begin with the same {quarter:,} tokens", d.change(shared_tokens=quarter)
    if any(d.model.layer_windows) and not d.free_window_pages:
        yield "free_window_pages", "free the pages behind windows (jaxkv keeps them today)", d.change(free_window_pages=True)
    if KV_BYTES[d.kv_dtype] > 1:
        changed = _larger_page(d.change(kv_dtype="int8"))
        pages = f" with page_size {changed.P}" if changed.P != d.P else ""
        yield "kv_dtype", f"8-bit KV{pages}, for long contexts (quality: measure it)", changed
    elif (changed := _larger_page(d)) != d:
        yield "page_size", f"page_size {changed.P}: scales without padding", changed
    if d.weights != "int8":
        yield "weights", "int8 weights (quality: measure it)", d.change(weights="int8")
    if (heads := fewer_kv_heads(d)) is not None:
        yield (
            "num_kv_heads",
            f"another architecture: {count(heads, 'KV head')}, retrained",
            d.change(model=d.model.with_kv_heads(heads)),
        )
    if max_sequences(d) or (fewest := chips_for(d, 1)) is None:
        tp = 2 * d.tp if can_split(d.model, 2 * d.tp) else d.tp
        yield "chips", f"twice the chips: {2 * d.chips}, tensor_parallel {tp}", d.change(chips=2 * d.chips, tensor_parallel=tp)
    else:
        chips, tp = fewest
        yield "chips", f"chips that hold one sequence: {chips}, tensor_parallel {tp}", d.change(chips=chips, tensor_parallel=tp)


def _larger_page(d: Deployment) -> Deployment:
    """Returns an 8-bit deployment in pages whose scales need no padding, where that holds more."""
    unit = unpadded_page(d)
    larger = d.change(page_size=-(-d.P // unit) * unit)
    return larger if larger.P > d.P and max_sequences(larger) > max_sequences(d) else d


def fewer_kv_heads(d: Deployment) -> int | None:
    """Returns the next step from MHA to groups of 8, or half the heads; None where that cannot be."""
    K, N = d.model.num_kv_heads, d.model.num_q_heads
    heads = N // 8 if K == N and N % 8 == 0 and N > 8 else K // 2
    if d.model.config is None or K % 2 or not heads or N % heads or not can_split(d.model.with_kv_heads(heads), d.tp):
        return None
    return heads


def chips_for(d: Deployment, sequences: int) -> tuple[int, int] | None:
    """Returns (chips, tensor_parallel): the fewest chips, and of equal ones the least tensor_parallel, that hold so many sequences.

    None where up to 256 devices a replica do not hold one.
    """
    per_chip = d.chip.devices_per_chip
    best = None
    for tp in range(1, _MOST_DEVICES + 1):
        if not can_split(d.model, tp) or (tp % per_chip and per_chip % tp):
            continue
        unit = max(1, tp // per_chip)  # chips of the smallest group that holds whole replicas
        each = max_sequences(d.change(chips=unit, tensor_parallel=tp))
        if each:
            chips = unit * -(-sequences // each)
            best = min(best or (chips, tp), (chips, tp))
    return best
