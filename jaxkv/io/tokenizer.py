"""Text to token ids and back, the same for every kind of vocabulary: `Tokenizer` over a backend.

Backends: `TokenizersBackend` (a `tokenizers` object: tokenizer.json, or byte-level BPE rebuilt from a GGUF file) and
`spm.SentencePieceBPE`. Builders: `Tokenizer.from_folder` (Hugging Face) and `Tokenizer.from_gguf`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers

from jaxkv.io import chat_template, detokenize
from jaxkv.io.spm import SPACE

if TYPE_CHECKING:
    from jaxkv.io.gguf_reader import GGUFFile

# The vocabulary of a GGUF file, saved as a GGUF file without tensors.
SAVED_VOCABULARY = "vocabulary.gguf"


class Backend(detokenize.Vocabulary, Protocol):
    """A vocabulary with its rule for splitting text."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...


class Tokenizer:
    """What the engine needs of a tokenizer.

    `special_tokens` maps names such as "bos_token" to their text, for chat templates. `prefix` and `suffix` are the ids
    that `encode` puts around a text when `add_special` (BOS, EOS).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        files: Mapping[str, Callable[[], bytes]] | None = None,
    ):
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self._prefix, self._suffix = list(prefix), list(suffix)
        self._files = dict(files or {})

    @functools.cached_property
    def revision(self) -> str:
        """SHA-256, as hex, of the files it was read from and of what `encode` puts around a text."""
        digest = hashlib.sha256(repr((self._prefix, self._suffix)).encode())
        for name in sorted(self._files):
            content = self._files[name]()
            digest.update(f"{name} {len(content)} ".encode() + content)
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Writes the files that `load` makes the same tokenizer of into an existing folder."""
        if not self._files:
            raise ValueError("this tokenizer was not read from files, so there is nothing to save it as")
        for name, content in self._files.items():
            (folder / name).write_bytes(content())

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer that `save` wrote."""
        from jaxkv.io.gguf_reader import read_gguf

        vocabulary = folder / SAVED_VOCABULARY
        return cls.from_gguf(read_gguf(vocabulary)) if vocabulary.exists() else cls.from_folder(folder)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder (tokenizer.json and what lies beside it)."""
        from jaxkv.io.tokenizer_files import from_folder

        return from_folder(Path(folder))

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """The tokenizer inside an open GGUF file."""
        from jaxkv.io.tokenizer_files import from_gguf

        return from_gguf(file)

    @property
    def vocab_size(self) -> int:
        return self.backend.vocab_size

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids; special tokens in the text count as such. `add_special` adds BOS and EOS as the model wants.

        Raises:
          TypeError: not a string.
          ValueError: the text holds a lone surrogate, which is no Unicode text.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: lone surrogate at position {error.start}") from None
        ids = self.backend.encode(text)
        return self._prefix + ids + self._suffix if add_special else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 show as U+FFFD; ids without a token show as nothing."""
        return detokenize.decode(self.backend, _ints(ids), skip_special)

    def stream(self, prompt_ids: Iterable[int] = (), skip_special: bool = True) -> detokenize.DecodeStream:
        """An incremental decoder whose text continues that of `prompt_ids`."""
        return detokenize.DecodeStream(self.backend, _ints(prompt_ids), skip_special)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for a conversation `[{"role": ..., "content": ...}, ...]`.

        The template writes the special tokens itself: encode its result with `add_special=False`, or call
        `encode_chat`.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template: it continues text; pass a prompt instead of messages")
        return chat_template.render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Token ids of `apply_chat_template`, with exactly one BOS where the model wants one."""
        ids = self.encode(self.apply_chat_template(messages, add_generation_prompt, **variables), add_special=False)
        bos = [self.bos_token_id] if self.bos_token_id is not None else []
        return bos + ids if bos and self._prefix[:1] == bos != ids[:1] else ids


def _ints(ids: Iterable[int]) -> list[int]:
    """Plain ints of a list, array or generator of ids."""
    return [int(i) for i in (ids.tolist() if hasattr(ids, "tolist") else ids)]


class TokenizersBackend:
    """A `tokenizers.Tokenizer` whose tokens are also known as bytes.

    `byte_level`: tokens are written in GPT-2's byte alphabet; else they are SentencePiece-like ("▁" for a space, <0xAB>
    bytes).
    """

    def __init__(self, inner: tokenizers.Tokenizer, byte_level: bool, strip_first_space: bool = False):
        self.inner = inner
        self.strip_first_space = strip_first_space
        self._byte_level = byte_level
        added = inner.get_added_tokens_decoder()
        self._added = {token: entry.content.encode() for token, entry in added.items()}
        self._special = {token for token, entry in added.items() if entry.special}

    @property
    def vocab_size(self) -> int:
        return self.inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def is_special(self, token: int) -> bool:
        return token in self._special

    def token_bytes(self, token: int) -> bytes:
        if (raw := self._added.get(token)) is not None:
            return raw
        text = self.inner.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        if self._byte_level:
            try:
                return bytes(map(_BYTE_OF_CHAR.__getitem__, text))
            except KeyError:
                return text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace(SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, other bytes for characters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
