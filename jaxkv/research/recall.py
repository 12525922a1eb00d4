"""Whether a model still finds facts in a long text: sentences planted at several depths, asked for behind the text.

    (verses) The secret number of Lisbon is 4711. (verses) The secret number of Oslo is 0815. (verses) The secret number of Lisbon is
                                                                                                                              ^ 4711?

All facts of a text are planted in it together, so each question has to tell its fact from the others. A trial is one text with other
places and numbers. The text is read once; every question is asked in a slot that forked it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.loading import Model
from jaxkv.progress import Report, silent
from jaxkv.research.plot import pyplot
from jaxkv.research.quality import scores
from jaxkv.state import init_state
from jaxkv.verbs import fork, prefill

# None of them is in the Bible.
_PLACES = (
    "Lisbon", "Oslo", "Quito", "Nairobi", "Prague", "Havana", "Dublin", "Lima", "Hanoi", "Vienna", "Toronto", "Chicago", "Sydney",
    "Madrid", "Berlin", "Tokyo",
)  # fmt: skip
_QUESTION_TOKENS = 48  # a question with its answer has fewer


@dataclasses.dataclass(frozen=True)
class Fact:
    """A sentence's tokens in two parts."""

    question: np.ndarray  # i32, up to "is"
    answer: np.ndarray  # i32, the number


@dataclasses.dataclass(frozen=True)
class Haystack:
    """Tokens of a text, i32, with facts in it from the first to the last."""

    tokens: np.ndarray
    facts: tuple[Fact, ...]
    most_tokens: int  # what was asked for: texts of one length differ by less than a line, and share their compiled steps


def make_haystack(model: Model, filler: str, num_tokens: int, depths: Sequence[float], trial: int) -> Haystack:
    """A text of about so many tokens (fewer by at most a line of the filler) with a fact at each depth, 0 to 1 of the text.

    Raises:
      ValueError: more depths than places, no tokenizer, or too short a filler or text.
    """
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer to read a text with")
    if not 0 < len(depths) <= len(_PLACES) or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"1 to {len(_PLACES)} depths from 0 to 1 are possible, got {list(depths)}")
    encode = lambda text: np.asarray(model.tokenizer.encode(text, add_special=False), np.int32)
    rng = np.random.default_rng((trial, num_tokens))
    names = rng.permutation(_PLACES)[: len(depths)]
    facts = tuple(Fact(encode(f"The secret number of {name} is"), encode(f" {rng.integers(1000, 10_000)}")) for name in names)
    planted = [np.concatenate([fact.question, fact.answer, encode(".\n")]) for fact in facts]
    lines = [encode(line) for line in filler.splitlines(keepends=True)]
    room = num_tokens - sum(map(len, planted)) - 1
    ends = np.cumsum([len(line) for line in lines])
    count = int(np.searchsorted(ends, room, "right"))
    if count == len(lines) or count < len(depths):
        raise ValueError(f"a text of {num_tokens} tokens with {len(depths)} facts needs a filler of more lines than {len(lines)}")
    starts = np.concatenate([[0], ends[:count]])
    before = {int(np.argmin(np.abs(starts - depth * starts[-1]))): i for i, depth in enumerate(sorted(depths))}
    if len(before) < len(depths):
        raise ValueError(f"{len(depths)} facts do not fit between the {count} lines of a text of {num_tokens} tokens")
    parts = [np.asarray(model.tokenizer.encode(""), np.int32)]  # what the model wants a text to begin with
    for i in range(count + 1):
        if i in before:
            parts.append(planted[before[i]])
        if i < count:
            parts.append(lines[i])
    return Haystack(np.concatenate(parts), facts, num_tokens)


def ask(model: Model, haystack: Haystack, kv_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability of each answer in nats, f64[facts]; whether greedy decoding would give it, bool[facts])."""
    n, held = len(haystack.facts), haystack.most_tokens
    state = init_state(model, 1, 1, kv_dtype=kv_dtype)
    pages = -(-held // state.kv.page_size) + n * (1 + -(-_QUESTION_TOKENS // state.kv.page_size)) + 2
    state = init_state(model, n + 1, held + _QUESTION_TOKENS, num_pages=pages, kv_dtype=kv_dtype)
    state, _ = prefill(state, [haystack.tokens])
    state = fork(state, [0] * n, list(range(1, n + 1)))
    rows = [np.concatenate([fact.question, fact.answer[:-1]]) for fact in haystack.facts]
    _, logits = prefill(state, rows, rows=list(range(1, n + 1)), all_logits=True)
    found = []
    for fact, row, given in zip(haystack.facts, rows, np.asarray(logits), strict=True):
        loss, is_best = scores(given[len(fact.question) - 1 : len(row)], fact.answer)
        found.append((-loss.sum(), is_best.all()))
    logprob, exact = zip(*found, strict=True)
    return np.array(logprob), np.array(exact)


def measure(
    model: Model, filler: str, kv_dtypes: Sequence[str], contexts: Sequence[int], depths: Sequence[float], trials: int,
    report: Report = silent,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each context, KV dtype and depth: means over the trials, every dtype with the same texts.

    Raises:
      ValueError: what `make_haystack` raises, or a context longer than the model's positions; before anything is asked.
    """
    if max(contexts) + _QUESTION_TOKENS > model.config.max_positions:
        raise ValueError(
            f"a context of {max(contexts)} tokens and a question of up to {_QUESTION_TOKENS} are more than the model's"
            f" max_positions={model.config.max_positions}"
        )
    for context in contexts:
        make_haystack(model, filler, context, depths, 0)
    rows, total = [], len(contexts) * trials * len(kv_dtypes)
    for c, context in enumerate(contexts):
        found: dict[str, list] = {kv_dtype: [] for kv_dtype in kv_dtypes}
        for trial in range(trials):
            haystack = make_haystack(model, filler, context, depths, trial)
            for i, kv_dtype in enumerate(kv_dtypes):
                report(f"asking in {context:,} tokens", ((c * trials + trial) * len(kv_dtypes) + i) / total)
                found[kv_dtype].append(ask(model, haystack, kv_dtype))
        for kv_dtype, outcomes in found.items():
            logprob, exact = (np.stack(part) for part in zip(*outcomes, strict=True))  # [trials, depths]
            rows += [
                {
                    "context_tokens": context, "kv_dtype": kv_dtype, "depth": depth, "trials": trials,
                    "answer_logprob_nats": float(logprob[:, i].mean()), "exact_fraction": float(exact[:, i].mean()),
                }
                for i, depth in enumerate(sorted(depths))
            ]  # fmt: skip
    return rows


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """Two Markdown tables: by context over all depths, and by depth over all contexts."""
    asked = {kv_dtype: sum(r["trials"] for r in rows if r["kv_dtype"] == kv_dtype) for kv_dtype in _dtypes(rows)}
    told = f"{next(iter(asked.values()))} questions a KV dtype: log-probability of the right answer in nats, and answered by greedy decoding"
    by_context = _by(rows, "context_tokens", "context", lambda value: f"{value:,}")
    return "\n\n".join([told, by_context, _by(rows, "depth", "depth", lambda value: f"{value:.0%}")])


def _dtypes(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["kv_dtype"] for row in rows))


def _mean(rows: Sequence[dict[str, Any]], key: str, **where: Any) -> float:
    """Of the rows with these values; each has as many trials."""
    return float(np.mean([row[key] for row in rows if all(row[k] == v for k, v in where.items())]))


def _by(rows: Sequence[dict[str, Any]], axis: str, title: str, name) -> str:
    lines = ["| " + " | ".join([title, *_dtypes(rows)]) + " |", "|---" * (1 + len(_dtypes(rows))) + "|"]
    for value in sorted({row[axis] for row in rows}):
        cells = [name(value)]
        for kv_dtype in _dtypes(rows):
            where = {axis: value, "kv_dtype": kv_dtype}
            nats, exact = (_mean(rows, key, **where) for key in ("answer_logprob_nats", "exact_fraction"))
            cells.append(f"{nats:.3f}, {exact:.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(path: str | Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draws the answers' mean log-probability over the depth, a panel for each context.

    Raises:
      ValueError: matplotlib is not there.
    """
    plt, contexts = pyplot("--plot"), sorted({row["context_tokens"] for row in rows})
    figure, panels = plt.subplots(
        1, len(contexts), figsize=(3 * len(contexts), 3), sharey=True, layout="constrained", squeeze=False
    )
    for axes, context in zip(panels[0], contexts, strict=True):
        for kv_dtype, marker in zip(_dtypes(rows), "os^Dv", strict=False):
            here = [row for row in rows if row["context_tokens"] == context and row["kv_dtype"] == kv_dtype]
            x, y = [100 * row["depth"] for row in here], [row["answer_logprob_nats"] for row in here]
            axes.plot(x, y, marker=marker, label=kv_dtype)
        axes.set(title=f"{context:,} tokens", xlabel="depth (%)")
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("log-probability of the answer (nats)")
    panels[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
