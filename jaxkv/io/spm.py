"""SentencePiece BPE from a vocabulary of pieces, scores and types: the tokenisation of Gemma and Llama 2.

The rule (Kudo and Richardson 2018, bpe_model.cc): start from characters; again and again join the adjacent pair whose
joined piece has the best score, the leftmost on ties; what is left without a piece becomes byte pieces. Merge tables
derived from the scores cannot express "leftmost on ties", so the rule itself runs here, word by word with a cache:
where no piece reaches over the start of a word, words are independent.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # stands for a space inside pieces
_SPACE_BYTES = SPACE.encode()
_CACHE_WORDS, _CACHE_WORD_CHARS = 1 << 16, 64


class SentencePieceBPE:
    """Encoder and decoder table over GGUF's `tokenizer.ggml.{tokens,scores,token_type}`.

    Control, unknown and user-defined tokens are found in the text first (leftmost, longest). `space_prefix` puts a
    space before the text and after each of them, as Llama 2 wants; white space behind the tokens of `strip_after` is
    dropped, as Phi 3 wants.
    """

    def __init__(
        self,
        pieces: list[bytes],
        scores: np.ndarray,
        types: np.ndarray,
        space_prefix: bool = False,
        strip_after: frozenset[int] = frozenset(),
        unknown_id: int | None = None,
    ):
        if not len(pieces) == len(scores) == len(types) > 0:
            raise ValueError(f"{len(pieces)} pieces, {len(scores)} scores and {len(types)} types must be the same number, not 0")
        texts = _as_text(pieces)
        kinds = types.tolist()
        self._pieces, self._kinds, self._unknown_id = pieces, kinds, unknown_id
        self.strip_first_space = space_prefix
        self._strip_after = strip_after
        self._scores = scores.tolist()
        self._vocab = {text: i for i, text in enumerate(texts) if kinds[i] == NORMAL}
        self._bytes = {_byte_of(pieces[i]): i for i in np.flatnonzero(types == BYTE).tolist()}
        if len(self._bytes) not in (0, 256):
            raise ValueError(f"the vocabulary has {len(self._bytes)} byte pieces; 0 or 256 are possible")
        special = np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL, USER_DEFINED))).tolist()
        self._trie, self._trie_start = _trie({texts[i].replace(" ", SPACE): i for i in special if texts[i]})
        self._words = _word_pattern(self._vocab)
        self._cache: dict[str, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS and EOS."""
        ids: list[int] = []
        after_special = True
        for part in self._split_special(text.replace(" ", SPACE)):
            if isinstance(part, int):
                ids.append(part)
            else:
                self._encode_part(SPACE + part if self.strip_first_space and after_special else part, ids)
            after_special = isinstance(part, int)
        return ids

    def _split_special(self, text: str) -> Iterator[int | str]:
        """Ids of special tokens and the text between them, in order."""
        pos, size = 0, len(text)
        at = self._trie_start.search(text, 0)
        while at:
            node, end, found, stop = self._trie, at.start(), None, 0
            while end < size and (child := node.get(text[end])) is not None:
                node, end = child, end + 1
                if (token := node.get("")) is not None:
                    found, stop = token, end
            if found is None:
                stop = at.start() + 1
            else:
                if at.start() > pos:
                    yield text[pos : at.start()]
                yield found
                if found in self._strip_after:
                    stop = size - len(text[stop:].lstrip(SPACE + " \t\n\r"))
                pos = stop
            at = self._trie_start.search(text, stop)
        if pos < size:
            yield text[pos:]

    def _encode_part(self, text: str, ids: list[int]) -> None:
        cache = self._cache
        for match in self._words.finditer(text):
            word = match.group()
            known = cache.get(word)
            if known is None:
                known = self._encode_word(word)
                if len(word) <= _CACHE_WORD_CHARS:
                    if len(cache) >= _CACHE_WORDS:
                        cache.clear()
                    cache[word] = known
            ids += known

    def _encode_word(self, word: str) -> list[int]:
        """Merges best score first, leftmost on ties: a heap of candidate pairs over a linked list of symbols."""
        symbols: list[str] = list(word)
        after = list(range(1, len(symbols) + 1))
        before = list(range(-1, len(symbols) - 1))
        heap: list[tuple[float, int, str]] = []
        vocab, scores, count = self._vocab, self._scores, len(symbols)

        def propose(left: int, right: int) -> None:
            joined = symbols[left] + symbols[right]
            if (token := vocab.get(joined)) is not None:
                heapq.heappush(heap, (-scores[token], left, joined))

        for left in range(count - 1):
            propose(left, left + 1)
        while heap:
            _, left, joined = heapq.heappop(heap)
            right = after[left]
            # A stale proposal: its left symbol was swallowed, or either side has grown since.
            if not symbols[left] or right >= count or symbols[left] + symbols[right] != joined:
                continue
            symbols[left], symbols[right] = joined, ""
            after[left] = following = after[right]
            if following < count:
                before[following] = left
                propose(left, following)
            if before[left] >= 0:
                propose(before[left], left)
        return [token for symbol in symbols if symbol for token in self._ids_of(symbol)]

    def _ids_of(self, symbol: str) -> list[int]:
        if (token := self._vocab.get(symbol)) is not None:
            return [token]
        if self._bytes:
            return [self._bytes[b] for b in symbol.encode()]
        if self._unknown_id is None:
            raise ValueError(f"{symbol!r} has no piece, and the vocabulary has neither byte pieces nor an unknown token")
        return [self._unknown_id]

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes a token stands for (perhaps a part of a character)."""
        if not 0 <= token < len(self._pieces):
            return b""
        if self._kinds[token] == BYTE:
            return bytes([_byte_of(self._pieces[token])])
        return self._pieces[token].replace(_SPACE_BYTES, b" ")

    def is_special(self, token: int) -> bool:
        """Whether the token is control or unknown: left out of decoded text by default."""
        return 0 <= token < len(self._kinds) and self._kinds[token] in (CONTROL, UNKNOWN)


def _as_text(pieces: list[bytes]) -> list[str]:
    try:
        texts = b"\xff".join(pieces).decode("utf-8", "surrogateescape").split("\udcff")  # one decode: 5 times faster
        if len(texts) == len(pieces):
            "".join(texts).encode()
            return texts
        return [piece.decode() for piece in pieces]
    except UnicodeError as error:
        raise ValueError(f"the vocabulary holds a piece that is not UTF-8: {error}") from None


def _word_pattern(pieces: Iterable[str]) -> re.Pattern[str]:
    """Cuts text before every space that no piece can reach over, so that merging each part alone is exact.

    Gemma has one piece with an inner space (">▁</"): there the space after ">" does not cut.
    """
    separator = "\udcff"  # a character that no text holds
    inner = set(re.findall(f"([^{SPACE}{separator}]){SPACE}", separator.join(pieces)))
    body = f"[^{SPACE}]" + (f"|(?<=[{''.join(map(re.escape, sorted(inner)))}]){SPACE}+" if inner else "")
    return re.compile(f"{SPACE}+(?:{body})*|(?:{body})+")


def _byte_of(piece: bytes) -> int:
    if not re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", piece):
        raise ValueError(f"byte piece {piece!r} is not of the form <0xAB>")
    return int(piece[3:5], 16)


def _trie(tokens: dict[str, int]) -> tuple[dict, re.Pattern[str]]:
    """Nested dicts by character ("" holds the id), and a pattern of the characters that can start a token."""
    root: dict = {}
    for text, token in tokens.items():
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = token
    first = "".join(re.escape(char) for char in root)
    return root, re.compile(f"[{first}]" if first else r"(?!)")
