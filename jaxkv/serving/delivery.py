"""What comes out of an engine: events for `step` or an open stream, results to collect, receipts, and who is on hold."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import numpy as np

from jaxkv.output import TextEvent
from jaxkv.serving.receipt import Receipt
from jaxkv.serving.request import Event, Result
from jaxkv.serving.sequence import Sequence, SequenceGroup

# Of so many ended requests receipts are kept, and results that nobody has collected although all their events were told.
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
        self._told: collections.OrderedDict[int, None] = collections.OrderedDict()  # ended, not collected, every event told
        self._receipts: collections.OrderedDict[int, tuple[Receipt, int, dict[str, int]]] = collections.OrderedDict()
        self._held: dict[int, list[int]] = {}
        self._most_held = KEPT

    def expect(self, group: SequenceGroup) -> int:
        """A new request's sequences; returns its id."""
        id = group.first.id
        self._live[id] = list(group.sequences)
        return id

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
            if len(self._held) > self._most_held:  # some have run out, perhaps
                self._held = {id: owners for id, owners in self._held.items() if any(map(self._is_held, owners))}
                self._most_held = 2 * len(self._held) + KEPT
        if one.receipt and (one.index == 0 or one.id not in self._receipts):
            self._receipts[one.id] = one.receipt, one.prompt.size, one.cached
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
        for event in events:
            if event.finish_reason is not None:
                self._tell(event.id)
        return events

    def results(self) -> dict[int, list[Result]]:
        """All that was not collected yet."""
        self._events, self._told = [], collections.OrderedDict()
        results, self._results = self._results, {}
        return results

    def collect(self, id: int) -> list[Result]:
        """A request's results, once; KeyError: it has not ended, is not known, or was collected already."""
        if id in self._live:
            raise KeyError(f"request {id} has not ended")
        if id not in self._results:
            raise KeyError(f"request {id} is not known, or its results were collected already, or {KEPT} ended after it")
        self._told.pop(id, None)
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
            if not mine:
                self._tell(id)

    def receipt(self, id: int) -> dict:
        """Why so much was reused for a request and no more; KeyError: not admitted yet, or forgotten."""
        live = self._live.get(id)
        if live and live[0].receipt is not None:
            return live[0].receipt.to_json(live[0].prompt.size, live[0].cached)
        if id not in self._receipts:
            raise KeyError(f"request {id} has not started, is not known, or {KEPT} ended after it")
        receipt, num_tokens, cached = self._receipts[id]
        return receipt.to_json(num_tokens, cached)

    def take_held(self, id: int) -> list[int]:
        """Owners of the pages that a request has on hold, once."""
        return [owner for owner in self._held.pop(id, ()) if self._is_held(owner)]

    def _tell(self, id: int) -> None:
        """An event of a request that may have ended was the last one; the oldest results beyond those that are kept are forgotten."""
        if id in self._results and id not in self._live:
            self._told[id] = None
        while len(self._told) > KEPT:
            oldest, _ = self._told.popitem(last=False)
            del self._results[oldest]
