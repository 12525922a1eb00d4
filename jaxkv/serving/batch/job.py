"""The loop of a batch job: lines become requests as fast as the engine takes them, answers become records as they end."""

from __future__ import annotations

import collections
import dataclasses
import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxkv.serving.batch.lines import BadLine, Task, short
from jaxkv.serving.batch.output_file import OutputFile, Scan
from jaxkv.serving.batch.records import Records, total_usage
from jaxkv.serving.batch.source import Source
from jaxkv.serving.request import Event, Request, RequestRefused, Result

_MAX_WAITING = 64  # requests queued in the engine: enough to choose from and to find shared prefixes; the rest stays in the file
_FEED_LINES = 64  # lines read a turn at most, so that a run of bad lines does not keep the device waiting


class Engine(Protocol):
    """What a job needs of `jaxkv.Engine`."""

    @property
    def num_waiting(self) -> int: ...
    def submit(self, request: Request) -> int: ...
    def step(self) -> Sequence[Event]: ...
    def collect(self, id: int) -> list[Result]: ...


@dataclasses.dataclass
class Tally:
    """How far a job is. Tokens and seconds are this run's, lines are of all runs."""

    lines: int  # of the shard
    done_before: int = 0
    failed_before: int = 0
    succeeded: int = 0
    failed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by the error's code
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    elapsed_s: float = 0.0
    first_error: str | None = None  # of this run

    @property
    def done_now(self) -> int:
        """Lines that this run brought to a record."""
        return self.succeeded + self.failed.total()

    @property
    def done(self) -> int:
        """Lines with a record."""
        return self.done_before + self.done_now

    @property
    def all_failed(self) -> int:
        """Records with an error."""
        return self.failed_before + self.failed.total()

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated a second."""
        return self.completion_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to go if lines end as fast as they did; None before the first has."""
        return self.elapsed_s / self.done_now * (self.lines - self.done) if self.done_now else None

    def progress(self) -> str:
        """How far it is, in a few words."""
        left = "" if self.eta_s is None else f", ETA {datetime.timedelta(seconds=round(self.eta_s))}"
        return f"{self.done:,}/{self.lines:,} lines, {self.tokens_per_s:,.0f} tok/s{left}"

    def summary(self) -> dict:
        """Figures that JSON keeps."""
        return {
            "lines": self.lines,
            "done": self.done,
            "succeeded": self.done - self.all_failed,
            "failed": self.all_failed,
            "done_before_this_run": self.done_before,
            "errors_of_this_run": dict(self.failed),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "elapsed_s": round(self.elapsed_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 3),
        }


def what_is_left(source: Source, scan: Scan) -> tuple[Tally, np.ndarray]:
    """The tally before a run, and the lines i64 of a source that an output has no records of. Others' records are read over.

    Raises:
      ValueError: two records of one line.
    """
    mine = source.holds(scan.lines, scan.ids)
    answered = np.sort(scan.lines[mine])
    if (again := np.diff(answered) == 0).any():
        raise ValueError(
            f"the output answers line {answered[np.argmax(again)]} of its input twice: give another output, or delete one of the two"
        )
    done = np.isin(source.lines, answered)
    return Tally(len(source.lines), int(done.sum()), int(scan.failed[mine].sum())), source.lines[~done]


@dataclasses.dataclass
class _Running:
    """A line in the engine."""

    task: Task
    samples: int  # that have not ended
    told_tokens: int = 0  # more than its answer has where a stop string is found too late to hold tokens back


class Job:
    """What is left of a source's lines, run through an engine into an output.

    Args:
      read: makes a task of a line's number and bytes.
      todo: the lines to run.
      tally: what to count on.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        source: Source,
        output: OutputFile,
        read: Callable[[int, bytes | None], Task | BadLine],
        records: Records,
        *,
        todo: Iterable[int],
        tally: Tally,
        clock: Callable[[], float],
    ):
        self._engine, self._source, self._output = engine, source, output
        self._read, self._records, self._clock = read, records, clock
        self._todo = map(int, todo)
        self._held: Task | None = None  # refused until there is less pressure
        self._exhausted = False
        self._running: dict[int, _Running] = {}  # by the engine's id
        self.tally = tally
        self.stopping = False  # set it to end after the step under way; the next run goes on from there

    def run(self, report: Callable[[Tally], None] = lambda tally: None) -> bool:
        """Runs to the end; whether it was reached. `report` is called after each step."""
        start = self._clock()
        while not self.stopping:
            self._feed()
            if self._exhausted and not self._running:
                break
            for event in self._engine.step():
                self._take(event)
            self.tally.elapsed_s = self._clock() - start
            report(self.tally)
        self.tally.elapsed_s = self._clock() - start
        return not self.stopping

    def _feed(self) -> None:
        """Submits lines until enough wait, or some were read."""
        for _ in range(_FEED_LINES):
            if self._exhausted or self._engine.num_waiting >= _MAX_WAITING:
                return
            task = self._held or self._next()
            self._held = None
            if task is None:
                self._exhausted = True
            elif isinstance(task, BadLine):
                self._fail(task)
            elif not self._submit(task):
                self._held = task
                return

    def _next(self) -> Task | BadLine | None:
        number = next(self._todo, None)
        if number is None:
            return None
        task = self._read(number, self._source.read(number))
        first = self._source.first_with_id_of(number)
        if first != number:
            return task.bad(
                "duplicate_custom_id", f"line {first} has the custom_id {short(task.custom_id)} too, and is the one that counts"
            )
        return task

    def _submit(self, task: Task) -> bool:
        """Whether that is settled, with a request or a record: a refusal under pressure is not while something else can end."""
        try:
            id = self._engine.submit(task.request)
        except RequestRefused as refused:
            if refused.reason == "draining":
                raise
            if refused.reason == "ladder" and self._running:
                return False
            self._fail(task.bad(refused.reason, str(refused)))
            return True
        self._running[id] = _Running(task, task.request.sampling.n)
        return True

    def _take(self, event: Event) -> None:
        one = self._running[event.id]
        one.told_tokens += len(event.tokens)
        self.tally.completion_tokens += len(event.tokens)
        one.samples -= event.finish_reason is not None
        if not one.samples:
            del self._running[event.id]
            self._finish(one, self._engine.collect(event.id))

    def _finish(self, one: _Running, results: list[Result]) -> None:
        task, usage, reasons = one.task, total_usage(results), {result.finish_reason for result in results}
        self.tally.completion_tokens += usage.completion_tokens - one.told_tokens
        self.tally.prompt_tokens += usage.prompt_tokens
        self.tally.cached_tokens += usage.cached_tokens
        if reasons <= {"stop", "length"}:
            self._output.append(self._records.answer(task, results))
            self.tally.succeeded += 1
        elif "error" in reasons:
            self._fail(task.bad("model_error", "the model's logits are NaN or infinite"))
        else:
            self._fail(task.bad("aborted", "the engine ended it before its answer was whole"))

    def _fail(self, bad: BadLine) -> None:
        self._output.append(self._records.error(bad))
        self.tally.failed[bad.code] += 1
        self.tally.first_error = self.tally.first_error or bad.message
