"""Stop strings: found in text that arrives token by token, across token borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one sequence's text for stop strings.

    Call `feed` once a token with the text it completed ("" for half a character), and show what it returns: text that
    may yet turn into a stop string is held back. On a hit `stopped` turns True, nothing more is returned, and `num_tokens`
    says how many tokens lie wholly before the stop string: what to keep of the sequence. At the end of the text `flush`
    gives the rest.
    """

    def __init__(self, stop: Sequence[str]):
        if not stop or not all(stop):
            raise ValueError(f"stop strings must not be empty, got {list(stop)!r}")
        self._stop = tuple(stop)
        self._held = ""
        self._start = 0  # where the held text begins in the whole text
        self._ends: list[int] = []  # where each token's text ends in the whole text
        self.stopped = False
        self.num_tokens = 0

    def feed(self, text: str) -> str:
        """Returns the text now known to lie before any stop string. The stop string that begins first counts."""
        if self.stopped:
            return ""
        text = self._held + text
        self._ends.append(self._start + len(text))
        hits = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if hits:
            self.stopped = True
            self.num_tokens = self._tokens_before(self._start + min(hits))
            self._held = ""
            return text[: min(hits)]
        safe = len(text) - self._possible_prefix(text)
        self._held = text[safe:]
        self._start += safe
        self.num_tokens = len(self._ends)
        return text[:safe]

    def flush(self) -> str:
        """Returns what is still held back; the text has ended."""
        held, self._held = self._held, ""
        self._start += len(held)
        return held

    def _possible_prefix(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)

    def _tokens_before(self, position: int) -> int:
        """Tokens whose text ends by `position`. One that completed no text belongs to the character it began."""
        count, end = 0, 0
        for i, token_end in enumerate(self._ends):
            if end < token_end <= position:
                count = i + 1
            end = token_end
        return count
