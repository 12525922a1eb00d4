"""Tokenizers as they come with models: a Hugging Face folder's tokenizer.json, or the vocabulary inside a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxkv.io import spm
from jaxkv.io.generation import generation_from_folder, generation_from_gguf
from jaxkv.io.gguf_reader import GGUFFile
from jaxkv.io.json_file import read_object
from jaxkv.io.tokenizer import SAVED_VOCABULARY, Tokenizer, TokenizersBackend

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Splitting patterns by tokenizer.ggml.pre. GPT-2's is the paper's; the second is cl100k's with up to 3 digits a word
# (Llama 3).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _CL100K.replace("{DIGITS}", "{1,3}"), _CL100K.replace("{DIGITS}", "")
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    _GPT2.removesuffix(r"|\s+"),
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)  # llama.cpp's own default
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")  # a word that is a token stays one, whatever the merges say


def from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer in a GGUF file; ValueError names an unsupported vocabulary kind."""
    meta = _GGUFVocabulary(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if kind == "llama":
        backend: Any = _sentencepiece(meta)
    elif kind == "gpt2":
        backend = _byte_level_bpe(meta, pre)
    else:
        raise ValueError(
            f"{file.path}: tokenizer model {kind!r} is not supported; supported: llama (SentencePiece), gpt2 (byte BPE)"
        )
    bos, eos = meta.special_id("bos"), meta.special_id("eos")
    add_bos = meta.flag("add_bos_token", kind == "llama" or pre in _WHOLE_WORDS_FIRST)
    add_eos = meta.flag("add_eos_token", False)
    for wanted, token, name in ((add_bos, bos, "bos"), (add_eos, eos, "eos")):
        if wanted and token is None:
            raise ValueError(f"{file.path}: tokenizer.ggml.add_{name}_token is set, but there is no {name}_token_id")
    names = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": meta.special_id("unknown"),
        "pad_token": meta.special_id("padding"),
    }
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=generation_from_gguf(file).eos_token_ids,
        prefix=[bos] if add_bos and bos is not None else [],
        suffix=[eos] if add_eos and eos is not None else [],
        chat_template=template if isinstance(template, str) else None,
        special_tokens={name: meta.text(token) for name, token in names.items() if token is not None},
        files={SAVED_VOCABULARY: file.header},
    )


class _GGUFVocabulary:
    """Checked access to tokenizer.ggml.*."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.tokens: list[bytes] = self._array("tokens", list)
        types = self._array("token_type", np.ndarray, required=False)
        self.types = np.full(len(self.tokens), spm.NORMAL) if types is None else types
        if len(self.types) != len(self.tokens) or not self.tokens:
            raise ValueError(f"{file.path}: {len(self.tokens)} tokens but {len(self.types)} token types")

    def _array(self, key: str, kind: type, required: bool = True) -> Any:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, kind) and (required or value is not None):
            raise ValueError(f"{self.file.path}: metadata 'tokenizer.ggml.{key}' is missing or of the wrong type")
        return value

    def scores(self) -> np.ndarray:
        return self._array("scores", np.ndarray)

    def merges(self) -> list[bytes]:
        return self._array("merges", list)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.file.metadata.get(f"tokenizer.ggml.{key}", default))

    def special_id(self, kind: str) -> int | None:
        token = self.file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if token is not None and not (isinstance(token, int) and 0 <= token < len(self.tokens)):
            raise ValueError(f"{self.file.path}: tokenizer.ggml.{kind}_token_id={token} is outside of {len(self.tokens)} tokens")
        return token

    def text(self, token: int) -> str:
        return self.tokens[token].decode("utf-8", "replace")


def _sentencepiece(meta: _GGUFVocabulary) -> spm.SentencePieceBPE:
    strip_after: frozenset[int] = frozenset()
    if meta.file.metadata.get("general.architecture") == "phi3":
        keep = (b"<unk>", b"<s>", b"<|endoftext|>")
        special = np.flatnonzero(meta.types == spm.CONTROL).tolist()
        strip_after = frozenset(i for i in special if meta.tokens[i] not in keep)
    try:
        return spm.SentencePieceBPE(
            meta.tokens,
            meta.scores(),
            meta.types,
            meta.flag("add_space_prefix", True),
            strip_after,
            meta.special_id("unknown"),
        )
    except ValueError as error:
        raise ValueError(f"{meta.file.path}: {error}") from None


def _byte_level_bpe(meta: _GGUFVocabulary, pre: str) -> TokenizersBackend:
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"{meta.file.path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}")
    try:
        texts = [token.decode() for token in meta.tokens]
        pairs = [merge.decode() for merge in meta.merges()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{meta.file.path}: a token or merge is not UTF-8: {error}") from None
    merges = [(pair[:cut], pair[cut + 1 :]) for pair in pairs if (cut := pair.find(" ", 1)) > 0]
    if len(merges) != len(pairs):
        raise ValueError(f"{meta.file.path}: {len(pairs) - len(merges)} merges are not two parts with a space between")
    vocab = {text: i for i, text in enumerate(texts)}
    try:
        inner = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    except Exception as error:  # the library raises bare Exception, as for a merge whose parts are no tokens
        raise ValueError(f"{meta.file.path}: the vocabulary and its merges do not fit together: {error}") from None
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PRE_TOKENIZERS[pre]]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    inner.decoder = decoders.ByteLevel()
    if _PRE_TOKENIZERS[pre] == (_QWEN2,):
        inner.normalizer = normalizers.NFC()  # as Qwen's tokenizer.json has it
    special = np.flatnonzero(np.isin(meta.types, (spm.UNKNOWN, spm.CONTROL, spm.USER_DEFINED))).tolist()
    inner.add_tokens([AddedToken(texts[i], normalized=False, special=meta.types[i] != spm.USER_DEFINED) for i in special])
    return TokenizersBackend(inner, byte_level=True)


def from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{folder}: no tokenizer.json; convert the tokenizer with transformers' save_pretrained first")
    description = read_object(path)
    try:
        inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # bare Exception from the library
        raise ValueError(f"{path}: not a tokenizer the tokenizers library reads: {error}") from None
    inner.no_truncation()
    inner.no_padding()
    byte_level, strip = _decoder_kind(path, description.get("decoder"))
    config = read_object(folder / "tokenizer_config.json", missing_ok=True)
    special = {name: text for name in _SPECIAL_NAMES if (text := _content(config.get(name))) is not None}
    prefix, suffix = _frame(inner)
    bos, eos = (inner.token_to_id(special[n]) if n in special else None for n in ("bos_token", "eos_token"))
    prefix = _with_flag(prefix, bos, config.get("add_bos_token"), front=True)
    suffix = _with_flag(suffix, eos, config.get("add_eos_token"), front=False)
    stops = generation_from_folder(folder).eos_token_ids or (() if eos is None else (eos,))
    return Tokenizer(
        TokenizersBackend(inner, byte_level, strip),
        bos_token_id=bos,
        eos_token_ids=stops,
        prefix=prefix,
        suffix=suffix,
        chat_template=_chat_template(folder, config),
        special_tokens=special,
        files={name: (folder / name).read_bytes for name in _FILES if (folder / name).exists()},
    )


def _decoder_kind(path: Path, decoder: Any) -> tuple[bool, bool]:
    """(byte-level alphabet, whether decoding drops the first space) of a tokenizer.json's decoder."""
    if decoder is None:
        raise ValueError(
            f"{path}: no decoder; supported: ByteLevel, SentencePiece's (Replace, ByteFallback, Fuse, Strip), Metaspace"
        )
    steps = decoder.get("decoders", []) if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return True, False
    unknown = set(kinds) - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown or not kinds:
        raise ValueError(f"{path}: decoder {', '.join(sorted(unknown)) or 'without steps'} is not supported")
    strip = any(step["type"] == "Strip" and step.get("start", 0) > 0 for step in steps)
    return False, strip or any(s["type"] == "Metaspace" and s.get("prepend_scheme", "always") != "never" for s in steps)


def _frame(inner: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text."""
    bare, framed = inner.encode("a", add_special_tokens=False).ids, inner.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []


def _with_flag(frame: list[int], token: int | None, flag: Any, front: bool) -> list[int]:
    """tokenizer_config.json's add_bos_token / add_eos_token, where given, overrule the post-processor."""
    if flag is None or token is None or flag == (token in frame):
        return frame
    if not flag:
        return [i for i in frame if i != token]
    return [token, *frame] if front else [*frame, token]


def _content(value: Any) -> str | None:
    """A special token's text: given as such or as an AddedToken object."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """From chat_template.jinja, chat_template.json or tokenizer_config.json (a text, or several of which "default")."""
    if (path := folder / "chat_template.jinja").exists():
        return path.read_text(encoding="utf-8")
    template = read_object(folder / "chat_template.json", missing_ok=True).get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: the chat template must be text, got {json.dumps(template)[:80]}")
    return template
