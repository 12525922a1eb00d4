"""Head layouts side by side: what a decode step of each reads and takes, over page sizes, KV dtypes, rows and contexts.

Every round runs every layout of every case, in changing order, and measures how fast the machine reads; figures are medians of rounds,
ratios to the first layout medians of the rounds' own ratios, so that what slows the machine for a while slows both.

Slots are filled by claiming their pages: keys are zeros then. No step's time depends on the numbers it reads, and a prompt of 4,096
tokens a row would take most of a run.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from jaxkv.generate import generate
from jaxkv.kv import pages
from jaxkv.loading import Model
from jaxkv.progress import Report, silent
from jaxkv.research.quality import bits_per_byte
from jaxkv.research.traffic import kv_bytes, stored_kv_bytes_per_token, weight_bytes
from jaxkv.sampling import Sampling
from jaxkv.state import State, init_state, truncate

# A case of a round is repeated for so long at least: a step of a small model lasts a millisecond, and one such is chance.
_ROUND_S = 0.2
# A step is bound by bandwidth if reading its bytes, at the rate measured beside it, is at least this part of its time: at a half, reading
# takes as long as all else together. Bytes that are saved then save at least half of their share of the time, whatever the rest does as
# long as it does not grow; below, more than half of the time is of something that fewer bytes need not shorten.
BOUND_FRACTION = 0.5


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """One model of those compared. They differ in num_kv_heads, and whatever else the caller knows."""

    name: str
    model: Model


@dataclasses.dataclass(frozen=True)
class Case:
    """What a step is run with; `context` tokens are what the longest history of a row has. None: as the backend would."""

    page_size: int | None
    kv_dtype: str | None
    batch: int
    context: int


@dataclasses.dataclass(frozen=True)
class Figure:
    """The median of the rounds, and the least and the largest of them."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(rounds: Sequence[float]) -> Figure:
        """Of what each round gave."""
        return Figure(median(rounds), min(rounds), max(rounds))


def cases_of(page_sizes: Sequence, kv_dtypes: Sequence, batches: Sequence[int], contexts: Sequence[int]) -> list[Case]:
    """Every combination; an empty list of page sizes or dtypes means the backend's."""
    return [Case(*choice) for choice in itertools.product(page_sizes or [None], kv_dtypes or [None], batches, contexts)]


def measure(
    layouts: Sequence[Layout], cases: Sequence[Case], read_gb_s: Callable[[], float],
    *, repeats: int = 7, new_tokens: int = 32, report: Report = silent,
) -> dict[str, Any]:  # fmt: skip
    """{"read_gb_s": .., "rows": [..]}: a row for each case and layout, layouts of a case one behind the other, units in the keys.

    Args:
      read_gb_s: measures how fast the machine reads, in 1e9 bytes a second; called once a round.
      repeats: rounds that count; one before them compiles.
      new_tokens: tokens a call of `generate` emits, the first of them from its prompt.

    Raises:
      ValueError: a context too short for the steps, or longer than a model's positions.
    """
    if short := [case.context for case in cases if case.context <= new_tokens + 1]:
        raise ValueError(f"a context of {min(short)} tokens has no room for {new_tokens=}: give longer ones or fewer new tokens")
    known = on_paper(layouts, cases)  # raises what is wrong before anything is compiled
    rounds = [_round(layouts, cases, read_gb_s, new_tokens, i) for i in _counted(repeats, report)][1:]
    pairs = [(case, layout) for case in cases for layout in layouts]
    rows = [row | _timed(layout, layouts[0], case, rounds, new_tokens) for row, (case, layout) in zip(known, pairs, strict=True)]
    rates = [r["read_gb_s"] for r in rounds]
    return {"read_gb_s": dataclasses.asdict(Figure.of(rates)), "repeats": repeats, "new_tokens": new_tokens, "rows": rows}


def on_paper(layouts: Sequence[Layout], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What of the rows of `measure` no clock decides: which row it is, and bytes.

    Raises:
      ValueError: a page size, KV dtype or context that one of the models cannot have.
    """
    return [_bytes(layout.model, layouts[0].model, case) | {"layout": layout.name} for case in cases for layout in layouts]


def quality(layouts: Sequence[Layout], kv_dtypes: Sequence, text: str, report: Report = silent) -> list[dict[str, Any]]:
    """Bits per byte of a text for each KV dtype and layout, and how much more than the first layout's with that dtype."""
    rows = []
    for kv_dtype in kv_dtypes or [None]:
        base = None
        for layout in layouts:
            report(f"bits per byte of {layout.name}", None)
            bits = bits_per_byte(layout.model, text, kv_dtype)
            base = bits if base is None else base
            per_token = kv_bytes(layout.model, 1, 1, kv_dtype)
            row = {"layout": layout.name, "kv_dtype": stored_dtype(layout.model, kv_dtype), "kv_bytes_per_token": per_token}
            rows.append(row | {"bits_per_byte": bits, "bits_per_byte_over_base": bits / base - 1})
    return rows


def holding(model: Model, case: Case, tokens: int) -> State:
    """A state whose every slot holds so many tokens, none of which was ever run, with room for `case.context`."""
    state = init_state(model, case.batch, case.context, page_size=case.page_size, kv_dtype=case.kv_dtype)
    own, _, shortfall = pages.append(state.kv.own, np.full(case.batch, tokens, np.int32))
    assert not shortfall
    return dataclasses.replace(state, kv=dataclasses.replace(state.kv, own=own))


def stored_dtype(model: Model, kv_dtype: str | None) -> str:
    """The KV dtype by name: what `init_state` chooses where None is given."""
    return kv_dtype or ("float32" if model.storage.platform == "cpu" else model.storage.dtype)


def _counted(repeats: int, report: Report) -> Iterator[int]:
    """Numbers the rounds, the one that does not count first, and says how far they are."""
    report("compiling, and a round that does not count", None)
    yield 0
    for i in range(repeats):
        report("measuring", i / repeats)
        yield i + 1


def _round(layouts: Sequence[Layout], cases: Sequence[Case], read_gb_s, new_tokens: int, index: int) -> dict:
    """Seconds a step of each (case, layout); who goes first changes."""
    out: dict = {"read_gb_s": read_gb_s()}
    for case in cases:
        for layout in layouts if index % 2 else reversed(layouts):
            out[case, layout.name] = _step_seconds(layout.model, case, new_tokens, 0 if index == 0 else _ROUND_S)
    return out


def _step_seconds(model: Model, case: Case, new_tokens: int, at_least_s: float) -> float:
    """The median time of a step over calls that begin with the same tokens stored, again and again for a while."""
    # Behind the last step a row holds what it began with, a token of prompt and those that came.
    held = case.context - 1 - new_tokens
    state = holding(model, case, held)
    # Rows that begin alike go on alike, and would choose the same experts of a mixture.
    first = [[row * model.config.vocab_size // case.batch] for row in range(case.batch)]
    times: list[float] = []
    started = time.perf_counter()
    while not times or time.perf_counter() - started < at_least_s:
        state, output = generate(state, first, max_new_tokens=new_tokens, sampling=Sampling(ignore_eos=True))
        times.append(output.timings.tpot_s)
        state = truncate(state, range(case.batch), [held] * case.batch)
    return median(times)


def _bytes(model: Model, base: Model, case: Case) -> dict[str, Any]:
    pool, per_token = holding(model, case, case.context).kv, kv_bytes(model, 1, 1, case.kv_dtype)
    return {
        "num_q_heads": model.config.num_q_heads,
        "num_kv_heads": model.config.num_kv_heads,
        "page_size_tokens": pool.page_size,
        "kv_dtype": stored_dtype(model, case.kv_dtype),
        "batch": case.batch,
        "context_tokens": case.context,
        "kv_bytes_per_token": per_token,
        "kv_bytes_per_token_stored": stored_kv_bytes_per_token(pool),
        "kv_bytes_over_base": per_token / kv_bytes(base, 1, 1, case.kv_dtype),
        "pool_bytes": pool.nbytes,
        "pool_use_fraction": case.batch * case.context / (pool.refcounts.shape[0] * pool.page_size),
    }


def _timed(layout: Layout, base: Layout, case: Case, rounds: list[dict], new_tokens: int) -> dict[str, Any]:
    seconds = [r[case, layout.name] for r in rounds]
    # The last step of a call reads all of the context, the first as many tokens less as there are steps.
    read = lambda m: kv_bytes(m, case.batch, case.context - new_tokens / 2, case.kv_dtype)
    weights, kv = weight_bytes(layout.model, case.batch), read(layout.model)
    total = weights + kv
    fraction = Figure.of([total / r[case, layout.name] / 1e9 / r["read_gb_s"] for r in rounds])
    return {
        "step_ms": _scaled(Figure.of(seconds), 1e3),
        "step_over_base": dataclasses.asdict(Figure.of([r[case, layout.name] / r[case, base.name] for r in rounds])),
        "tok_s": case.batch / median(seconds),
        "step_weight_bytes": weights,
        "step_kv_bytes": kv,
        "step_bytes_over_base": total / (weight_bytes(base.model, case.batch) + read(base.model)),
        "gb_s": total / median(seconds) / 1e9,
        "fraction_of_read": dataclasses.asdict(fraction),
        "bandwidth_bound": fraction.median >= BOUND_FRACTION,
    }


def _scaled(figure: Figure, factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in dataclasses.asdict(figure).items()}
