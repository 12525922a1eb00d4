"""A vocabulary of the 256 bytes, token = byte, as a tokenizer.json that every reader of those understands."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxkv.io.tokenizer import Tokenizer, TokenizersBackend


def byte_tokenizer() -> Tokenizer:
    """The tokenizer; it has no special tokens, so no text ends by itself."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(TokenizersBackend(inner, byte_level=True), files={"tokenizer.json": lambda: inner.to_str().encode()})


def _vocabulary() -> dict[str, int]:
    """Byte-level BPE writes a printable Latin-1 byte as itself, the others as the characters from U+0100 on (GPT-2)."""
    others = (chr(c) for c in range(256, 512))
    printable = lambda b: 33 <= b <= 126 or 161 <= b <= 255 and b != 173
    return {chr(b) if printable(b) else next(others): b for b in range(256)}
