"""What comes out of an engine: events for `step` or an open stream, results to collect, receipts, and who is on hold."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import numpy as np

from jaxkv.output import TextEvent
from jaxkv.serving.request import Event, Result
from jaxkv.serving.sequence import Sequence, SequenceGroup

# Receipts of so many ended requests are kept, and results that nobody has collected where the caller steps by itself.
KEPT = 1024


class Delivery:
    """Everything that callers have not taken yet. An event is told once: to the open stream of its request, else to `events`.

    Args:
      is_held: whether the pages of a sequence, by owner, are still on hold.
      with_text: the model has a tokenizer.
    """

    def __init__(self, is_held: Callable[[int], bool], with_text: bool):
        self._is_held, self._with_text = is_held, with_text
        self._live: dict[int, list[Sequence]] = {}
        self._events: list[Event] = []  # for `events`, or for a stream that is not open yet
        self._streams: dict[int, collections.deque[Event]] = {}
        self._results: dict[int, list[Result]] = {}
        self._receipts: collections.OrderedDict[int, dict] = collections.OrderedDict()
        self._held: dict[int, list[int]] = {}

    def expect(self, group: SequenceGroup) -> int:
        """A new request's sequences; returns its id."""
        id = group.first.id
        self._live[id] = list(group.sequences)
        return id

    def is_live(self, id: int) -> bool:
        """Whether a request has not ended."""
        return id in self._live

    def live_ids(self) -> list[int]:
        """Requests that have not ended."""
        return list(self._live)

    def live(self) -> list[Sequence]:
        """Sequences that have not ended."""
        return [one for sequences in self._live.values() for one in sequences]

    def take(self, one: Sequence, event: TextEvent) -> None:
        """What became known of a sequence."""
        reason = event.finish_reason
        waiting = self._streams.get(one.id, self._events)
        waiting.append(Event(one.id, one.index, event.tokens, event.text, reason, None if reason is None else one.usage))
        if reason is None:
            return
        track = one.track
        text, tokens = track.text if self._with_text else None, np.asarray(track.tokens, np.int32)
        logprobs = track.logprobs if track.wants_logprobs else None
        self._results.setdefault(one.id, []).append(Result(one.id, one.index, tokens, text, reason, one.usage, logprobs))
        if self._is_held(one.owner):
            self._held.setdefault(one.id, []).append(one.owner)
            for id in [id for id, owners in self._held.items() if not any(map(self._is_held, owners))]:
                del self._held[id]  # ran out
        if one.receipt:
            self._receipts[one.id] = _receipt(one)
            while len(self._receipts) > KEPT:
                self._receipts.popitem(last=False)
        live = self._live[one.id]
        live.remove(one)
        if not live:
            del self._live[one.id]
            self._results[one.id].sort(key=lambda result: result.index)

    def events(self) -> list[Event]:
        """What is new of all requests without an open stream."""
        events, self._events = self._events, []
        return events

    def results(self) -> dict[int, list[Result]]:
        """All that was not collected yet."""
        results, self._results = self._results, {}
        return results

    def collect(self, id: int) -> list[Result]:
        """A request's results, once; KeyError: it has not ended, is not known, or was collected already."""
        if id in self._live:
            raise KeyError(f"request {id} has not ended")
        return self._results.pop(id)

    def stream(self, id: int, advance: Callable[[], None]) -> Iterator[Event]:
        """A request's events as they come; `advance` brings more."""
        if id in self._streams:
            raise ValueError(f"request {id} has an open stream: close() it first")
        if id not in self._live and not any(event.id == id for event in self._events):
            raise KeyError(f"request {id} is not known, or its events were collected already")
        mine = self._streams[id] = collections.deque(event for event in self._events if event.id == id)
        self._events = [event for event in self._events if event.id != id]
        try:
            while True:
                while mine:
                    yield mine.popleft()
                if id not in self._live:
                    return
                advance()
        finally:
            self._events += mine
            self._streams.pop(id, None)

    def receipt(self, id: int) -> dict:
        """Why so much was reused for a request and no more; KeyError: not admitted yet, or forgotten."""
        live = self._live.get(id)
        if live and live[0].receipt is not None:
            return _receipt(live[0])
        return self._receipts[id]

    def take_held(self, id: int) -> list[int]:
        """Owners of the pages that a request has on hold, once."""
        return [owner for owner in self._held.pop(id, ()) if self._is_held(owner)]

    def trim(self) -> None:
        """Forgets the oldest results beyond those that are kept for `collect`."""
        old = set([id for id in self._results if id not in self._live][:-KEPT])
        if old:
            self._results = {id: results for id, results in self._results.items() if id not in old}
            self._events = [event for event in self._events if event.id not in old]


def _receipt(one: Sequence) -> dict:
    assert one.receipt is not None
    cached = sum(one.cached.values())
    tiers = {"cached_tokens": dict(one.cached), "reusable_tokens": cached, "suffix_tokens": one.prompt.size - cached}
    return one.receipt.to_json() | tiers
