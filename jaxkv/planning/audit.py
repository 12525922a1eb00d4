"""The planner's bytes against the compiler's: what differs is explained, or flagged.

weights, KV    exact: what differs beyond the padding of tiles is flagged
arguments      weights + KV against everything the step takes: page table, history and sampling options explain the rest
temporaries    an estimate: flagged where the step needs more than the plan sets aside
growth         from one context to the next what is not predicted must stay: what grows with the context reads or copies more
               than the pages it should reach, which is a fault of paging or batching. Compilers also choose differently from some
               context on: what grows is looked at again in the middle, and a fault grows on both sides
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxkv.planning import memory
from jaxkv.planning.compiled_steps import STEPS, CompiledStep, DoesNotFit
from jaxkv.planning.deployment import Deployment
from jaxkv.planning.shapes import first_layers, shape_of

# (sequences, context in tokens); the largest first, because it is the one that may not fit.
GRID = ((8, 8192), (8, 2048))
# A count of bytes may be off by this: alignment of small arrays.
_EXACT_FRACTION, _EXACT_BYTES = 1e-3, 1 << 16
_ARGUMENTS_FRACTION = 0.01
_TEMPORARIES_FACTOR = 1.1  # they are an estimate, and a plan leaves a tenth of the memory to the runtime
# What may grow for each token of each sequence: copies of the history and of what is counted over it (4 bytes each). It is told of what is
# alive at once, for what is set aside depends on what fits on a TPU's chip beside it, and on how it is packed.
GROWTH_BYTES = 64
_LOOKS = 2  # contexts that are compiled besides, where something grows


@dataclasses.dataclass(frozen=True)
class Line:
    """One figure of one step, predicted and found. `reasons` and `unexplained_bytes` add up to the difference."""

    shape: str  # of the step
    sequences: int
    context: int
    what: str
    predicted_bytes: int
    found_bytes: int
    reasons: dict[str, int]
    flag: str = ""  # what is wrong

    @property
    def unexplained_bytes(self) -> int:
        """What no reason accounts for."""
        return self.found_bytes - self.predicted_bytes - sum(self.reasons.values())

    @property
    def error_fraction(self) -> float:
        """How far the prediction is off, of what was found."""
        return self.predicted_bytes / self.found_bytes - 1 if self.found_bytes else 0.0


@dataclasses.dataclass(frozen=True)
class Growth:
    """How what is not predicted grows from the smallest to the largest context."""

    name: str
    shape: str
    sequences: int
    contexts: tuple[int, ...]
    argument_bytes_per_token: float  # of each sequence
    live_bytes_per_token: float  # temporaries and outputs alive at once
    alone: tuple[int, int] | None  # the contexts between which something grows, if it does between no two neighbours of theirs
    flag: str = ""


@dataclasses.dataclass(frozen=True)
class Audit:
    """All comparisons of one deployment."""

    deployment: Deployment  # of one device, with as many layers as were compiled
    num_layers: int  # of the model
    refused: str  # why not all of the layers were compiled, where they were not
    steps: tuple[CompiledStep, ...]
    lines: tuple[Line, ...]
    growth: tuple[Growth, ...]
    live: tuple[Line, ...] = ()
    not_live: str = ""  # why a real state was not compared

    @property
    def flags(self) -> list[str]:
        """Everything that is wrong, one line each."""
        lines = [
            f"{line.shape}, {line.sequences} x {line.context:,}: {line.flag}" for line in (*self.lines, *self.live) if line.flag
        ]
        return lines + [f"{growth.shape}, {growth.sequences} sequences: {growth.flag}" for growth in self.growth if growth.flag]


Compile = Callable[[Deployment, int, int], CompiledStep]


def run(
    d: Deployment,
    grid: Sequence[tuple[int, int]] = GRID,
    steps: dict[str, Compile] = STEPS,
    report: Callable[[str], None] = lambda doing: None,
) -> Audit:
    """Compiles the steps of one device for every point of the grid and compares.

    Where a step is refused because the device, or what a kernel can address, is too small, the model is halved: weights and KV are
    those of as many layers.

    Raises:
      ValueError: a model that jaxkv does not run, or one layer that does not fit.
      CompilerMissing: the compiler of that device is not installed.
    """
    one = one_device(d)
    layers, refused = one.model.num_layers, ""
    while True:
        try:
            points = [(name, *point) for point, name in itertools.product(grid, steps)]
            compiled = tuple(_compiled(one, points, steps, report))
            break
        except DoesNotFit as error:
            refused = refused or str(error)
            if one.model.num_layers == 1:
                raise
            one = cut(one, one.model.num_layers // 2)
    for _ in range(_LOOKS):
        between = [(g.name, g.sequences, sum(g.alone) // 2) for g in compare_growth(one, compiled) if g.alone]
        compiled += tuple(_compiled(one, between, steps, report))
    lines = tuple(itertools.chain.from_iterable(compare(one, step) for step in compiled))
    return Audit(one, layers, refused, compiled, lines, tuple(compare_growth(one, compiled)))


def _compiled(d: Deployment, points: Iterable[tuple[str, int, int]], steps, report) -> Iterator[CompiledStep]:
    for name, sequences, context in points:
        report(f"compiling {name} for {sequences} x {context:,} tokens, {d.model.num_layers} layers")
        yield steps[name](d, sequences, context)


def one_device(d: Deployment) -> Deployment:
    """Returns the deployment of one jax device that the engine's steps can be compiled for."""
    if d.model.config is None:
        raise ValueError(f"jaxkv does not run {d.model.name}: there is no step to compile")
    if d.tensor_parallel not in (None, 1) or (d.chips > 1 and d.tensor_parallel is None):
        raise ValueError(f"the audit compiles the steps of one device: leave out chips={d.chips} and tensor_parallel={d.tp}")
    return d.change(chips=1, tensor_parallel=1, shared_tokens=0, sharers=0, free_window_pages=False, activations_gib=None)


def cut(d: Deployment, layers: int) -> Deployment:
    """Returns the deployment of the model's first layers alone."""
    config = d.model.config
    assert config is not None
    return d.change(model=shape_of(first_layers(config, layers), d.model.name))


def compare(d: Deployment, step: CompiledStep) -> Iterator[Line]:
    """Yields the lines of one step."""
    weights, kv = memory.weights_bytes(d), kv_bytes(d, step.sequences, step.context)
    for what, predicted, arrays in (("weights", weights, step.weights), ("KV", kv, step.kv)):
        padding = {"tile padding": arrays.laid_out_bytes - arrays.bytes}
        yield _exact(step, what, predicted, arrays.laid_out_bytes, padding)
    reasons = {
        "tile padding": sum(arrays.laid_out_bytes - arrays.bytes for arrays in (step.weights, step.kv)),
        "tables and options": step.other.laid_out_bytes,
        "not read by this step": -(step.weights.unused_bytes + step.kv.unused_bytes + step.other.unused_bytes),
    }
    line = _exact(step, "arguments", weights + kv, step.argument_bytes, reasons)
    off = abs(line.error_fraction) > _ARGUMENTS_FRACTION and not step.weights.unused_bytes
    if off and not line.flag:
        line = dataclasses.replace(line, flag=f"weights and KV are {line.error_fraction:+.1%} off the compiler's arguments")
    yield line
    aside = memory.step_bytes(d, step.rows, step.new_tokens)
    found = step.temporary_bytes + step.output_bytes
    flag = (
        f"temporaries and outputs take {found:,} bytes, the plan sets {aside:,} aside"
        if found > _TEMPORARIES_FACTOR * aside
        else ""
    )
    yield Line(step.shape, step.sequences, step.context, "temporaries", aside, found, {"estimate": found - aside}, flag)


def _exact(step: CompiledStep, what: str, predicted: int, found: int, reasons: dict[str, int]) -> Line:
    return checked(Line(step.shape, step.sequences, step.context, what, predicted, found, reasons))


def checked(line: Line) -> Line:
    """Returns the line, flagged if its reasons leave bytes unexplained."""
    if abs(line.unexplained_bytes) <= max(_EXACT_FRACTION * line.predicted_bytes, _EXACT_BYTES):
        return line
    return dataclasses.replace(line, flag=f"{line.what}: {line.unexplained_bytes:+,} bytes that nothing explains")


def kv_bytes(d: Deployment, sequences: int, context: int) -> int:
    """Returns what the pool of so many slots takes: their pages, and the null page."""
    return memory.pool_bytes(d, sequences, context) + memory.null_pages_bytes(d)


def kv_parts(d: Deployment, sequences: int, context: int) -> dict[str, int]:
    """Returns why the pool takes more than the formula, 2 * L * K * H * bytes a token: parts in bytes that add up to it."""
    tokens, stored = sequences * context, memory.stored_bytes_per_token(d)
    formula = tokens * d.model.kv_bytes_per_token(d.kv_dtype)
    pool = memory.pool_bytes(d, sequences, context)
    return {
        "formula": formula,
        "scales and lanes": round(tokens * stored) - formula,
        "page rounding": pool - round(tokens * stored),
        "null page": memory.null_pages_bytes(d),
    }


def compare_growth(d: Deployment, steps: Sequence[CompiledStep]) -> Iterator[Growth]:
    """Yields, for each step and number of sequences, what grows from one context to the next and is not predicted."""
    key = lambda step: (step.name, step.sequences, step.rows, step.new_tokens)
    for _, group in itertools.groupby(sorted(steps, key=lambda step: (key(step), step.context)), key):
        if len(same := list(group)) > 1:
            yield _growth(d, same)


def _growth(d: Deployment, steps: Sequence[CompiledStep]) -> Growth:
    """Of one step with contexts in order."""

    def slope(low: CompiledStep, high: CompiledStep, size: Callable[[CompiledStep], int]) -> float:
        return (size(high) - size(low)) / ((high.context - low.context) * high.sequences)

    def beyond(step: CompiledStep) -> int:
        predicted = kv_bytes(d, step.sequences, step.context) + memory.weights_bytes(d)
        return step.argument_bytes - step.other.laid_out_bytes - predicted

    alive = operator.attrgetter("live_bytes")
    layer = d.model.kv_bytes_per_token(d.kv_dtype) / d.model.num_layers
    pairs = list(itertools.pairwise(steps))
    alone, flags = None, []
    for what, size in (("arguments beyond the prediction grow", beyond), ("what is alive at once grows", alive)):
        grows = [slope(*pair, size) > GROWTH_BYTES for pair in pairs]
        steadily = any(a and b for a, b in itertools.pairwise(grows))
        if any(grows) and not steadily:
            low, high = pairs[grows.index(True)]
            alone = (low.context, high.context)
        if steadily or grows == [True]:
            whole = slope(steps[0], steps[-1], size)
            flags.append(
                f"{what} by {whole:,.0f} bytes for each token of each sequence ({whole / layer:.1f} layers of KV): a fault of paging or batching"
            )
    return Growth(
        steps[0].name,
        steps[0].shape,
        steps[0].sequences,
        tuple(step.context for step in steps),
        argument_bytes_per_token=slope(steps[0], steps[-1], beyond),
        live_bytes_per_token=slope(steps[0], steps[-1], alive),
        alone=alone,
        flag="; ".join(flags),
    )


def figures(audit: Audit) -> dict[str, Any]:
    """Returns every figure by a name that ends in its unit."""
    d = audit.deployment
    return {
        "model": d.model.name,
        "device": d.chip.name,
        "weights_dtype": d.weights,
        "kv_dtype": d.kv_dtype,
        "page_size_tokens": d.P,
        "model_layers": audit.num_layers,
        "audited_layers": d.model.num_layers,
        "refused": audit.refused or None,
        "steps": [_step_figures(d, step, [line for line in audit.lines if _of(line, step)]) for step in audit.steps],
        "growth": [
            {
                "step": g.shape,
                "sequences": g.sequences,
                "contexts_tokens": list(g.contexts),
                "arguments_beyond_prediction_bytes_per_token": g.argument_bytes_per_token,
                "live_bytes_per_token": g.live_bytes_per_token,
            }
            for g in audit.growth
        ],
        "live": [_line_figures(line) for line in audit.live],
        "not_live": audit.not_live or None,
        "flags": audit.flags,
    }


def _of(line: Line, step: CompiledStep) -> bool:
    return (line.shape, line.sequences, line.context) == (step.shape, step.sequences, step.context)


def _step_figures(d: Deployment, step: CompiledStep, lines: list[Line]) -> dict[str, Any]:
    return {
        "step": step.shape,
        "sequences": step.sequences,
        "context_tokens": step.context,
        "temporary_bytes": step.temporary_bytes,
        "output_bytes": step.output_bytes,
        "live_bytes": step.live_bytes,
        "code_bytes": step.code_bytes,
        "compile_s": step.compile_s,
        "kv_parts_bytes": kv_parts(d, step.sequences, step.context),
        "comparisons": [_line_figures(line) for line in lines],
    }


def _line_figures(line: Line) -> dict[str, Any]:
    return {
        "what": line.what,
        "predicted_bytes": line.predicted_bytes,
        "found_bytes": line.found_bytes,
        "error_fraction": line.error_fraction,
        "reasons_bytes": line.reasons,
        "unexplained_bytes": line.unexplained_bytes,
        "flag": line.flag or None,
    }
