"""Token ids back to text, at once or as they come. A token is bytes; only whole UTF-8 characters are ever shown."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class Vocabulary(Protocol):
    """What decoding needs of a tokenizer backend."""

    strip_first_space: bool  # the encoder put a space before the text

    def token_bytes(self, token: int) -> bytes: ...
    def is_special(self, token: int) -> bool: ...


class DecodeStream:
    """Text deltas of a growing sequence: `feed` ids as they come, `finish` at the end.

    The deltas of `feed` and `finish` together are what decoding all ids at once gives. With `prompt_ids` the text
    continues that prompt: nothing of it is shown again, but a character it left half-written is, once complete.
    """

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Iterable[int] = (), skip_special: bool = True):
        self._vocabulary, self._skip_special = vocabulary, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self.feed(prompt_ids)

    def feed(self, ids: int | Iterable[int]) -> str:
        """The text these ids complete, perhaps ""."""
        vocabulary = self._vocabulary
        raw = b"".join(
            vocabulary.token_bytes(token)
            for token in ([ids] if isinstance(ids, int) else ids)
            if not (self._skip_special and vocabulary.is_special(token))
        )
        return self._decode(raw, final=False)

    def finish(self) -> str:
        """What is left: U+FFFD for bytes that never became a character. The stream then starts afresh."""
        text = self._decode(b"", final=True)
        self._utf8.reset()
        self._at_start = True
        return text

    def _decode(self, raw: bytes, final: bool) -> str:
        if self._at_start and raw:
            self._at_start = False
            if self._vocabulary.strip_first_space and raw.startswith(b" "):
                raw = raw[1:]
        return self._utf8.decode(raw, final)


def decode(vocabulary: Vocabulary, ids: Iterable[int], skip_special: bool = True) -> str:
    """The text of `ids`; bytes that are no UTF-8 show as U+FFFD."""
    stream = DecodeStream(vocabulary, (), skip_special)
    return stream.feed(ids) + stream.finish()
