"""One sample of one request, from the queue to its last token."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxkv.sampling import SamplingArrays
from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.match import Match
from jaxkv.serving.receipt import Receipt
from jaxkv.serving.request import Request, Usage
from jaxkv.stream import Track


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """What the scheduler knows of a sequence. `owner` names it in the page cache."""

    owner: int
    id: int  # of the request
    request: Request
    prompt: np.ndarray  # i32
    fingerprint: Fingerprint
    track: Track  # its tokens, text and end
    seed: int
    arrived_at: float  # seconds, of the scheduler's clock
    order: float  # of its group in the queue
    hurry: float = math.inf  # the order of the most urgent group that waits for pages that it is storing
    pages: list[int] = dataclasses.field(default_factory=list)  # logical order
    promised: int = 0  # pages reserved beside these
    goal: np.ndarray | None = None  # i32, tokens to store before it samples; None: it samples already
    keys: tuple[bytes, ...] = ()  # of full pages of the goal, under its fingerprint
    stored: int = 0  # tokens whose keys and values are in pages, or will be by what is dispatched
    dispatched: int = 0  # tokens it was or will be given by what is dispatched
    cached: dict[str, int] = dataclasses.field(default_factory=dict)  # tokens found, by tier, at its first admission
    receipt: Receipt | None = None  # of its first admission
    started_at: float | None = None  # when its first chunk was first dispatched
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def index(self) -> int:
        """Which sample of the request."""
        return self.track.index

    @property
    def row(self) -> int:
        """Its slot; -1: none."""
        return self.track.row

    @row.setter
    def row(self, row: int) -> None:
        self.track.row = row

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.track.finish_reason is not None

    @property
    def history(self) -> np.ndarray:
        """i32: the prompt and every token so far."""
        return np.concatenate([self.prompt, np.asarray(self.track.tokens, np.int32)])

    @property
    def usage(self) -> Usage:
        """Its tokens so far."""
        return Usage(self.prompt.size, len(self.track.tokens), sum(self.cached.values()))

    def options(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> SamplingArrays:
        """Its sampling options as arrays of one row."""
        sampling, n = self.request.sampling, self.request.sampling.n
        arrays = sampling.arrays(
            num_slots=n,
            rows=range(n),
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            seeds=[self.seed] * n,
            prompt_lengths=[self.prompt.size] * n,
            max_tokens=[self.prompt.size + self.track.limit] * n,
        )
        fields = {f.name: getattr(arrays, f.name)[self.index : self.index + 1] for f in dataclasses.fields(arrays)}
        return SamplingArrays(**fields)


@dataclasses.dataclass(eq=False, slots=True)
class SequenceGroup:
    """What waits for slots together: the samples of a new request, or what is left of one that was preempted."""

    sequences: list[Sequence]
    order: float  # lower goes first: seconds of the clock, its arrival moved by its priority
    match: Match | None = None  # when it was last looked up; its keys hold as long as the fingerprint
    goal: np.ndarray = dataclasses.field(init=False)  # i32, what is stored before it samples

    def __post_init__(self) -> None:
        self.goal = self.first.history

    @property
    def first(self) -> Sequence:
        """The one whose prompt is stored; the others share its pages."""
        return self.sequences[0]
