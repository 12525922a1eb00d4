"""Small model files for tests: a GGUF writer that can also write nonsense, and llama.cpp's conversion of a folder."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from jaxkv.io.spm import SentencePieceBPE

DATA = Path(__file__).parent.parent / "data"
TINY = sorted(path.name for path in (DATA / "hf_tiny").iterdir())


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, value, kind: int | None = None) -> bytes:
    """One metadata pair; the type follows from the Python value unless given."""
    if isinstance(value, bool):
        return text(key) + struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4 if kind is None else kind, value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, np.ndarray):
        kind = {"f4": 6, "i4": 5, "u4": 4, "b1": 7}[value.dtype.str[1:]]
        return text(key) + struct.pack("<IIQ", 9, kind, value.size) + value.tobytes()
    return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """One tensor description; dims in the file's order, innermost first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(metadata: dict, tensors: dict[str, np.ndarray], version: int = 3, alignment: int = 32) -> bytes:
    """A whole GGUF file of F32 tensors."""
    table, data = b"", b""
    for name, array in tensors.items():
        array = np.ascontiguousarray(array, np.float32)
        table += tensor(name, array.shape[::-1], 0, len(data))
        data += array.tobytes() + bytes(-array.nbytes % alignment)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(pair(key, value) for key, value in metadata.items()) + table
    return head + bytes(-len(head) % alignment) + data


VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "a", "b", "\u2581", "ab"],
    "tokenizer.ggml.scores": np.arange(0, -263, -1, np.float32),
    "tokenizer.ggml.token_type": np.array([2, 3, 3, *[6] * 256, 1, 1, 1, 1], np.int32),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def small_gguf(extra: dict[str, np.ndarray] | None = None) -> bytes:
    """A complete one-layer llama file of 3 kB with a vocabulary, and with these tensors beside its own."""
    metadata = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64,
        "llama.embedding_length": 4, "llama.feed_forward_length": 8, "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1, "llama.attention.layer_norm_rms_epsilon": 1e-6,
    } | VOCABULARY  # fmt: skip
    shapes = {
        "token_embd": (263, 4), "output_norm": (4,), "blk.0.attn_norm": (4,), "blk.0.ffn_norm": (4,),
        "blk.0.attn_q": (4, 4), "blk.0.attn_k": (2, 4), "blk.0.attn_v": (2, 4), "blk.0.attn_output": (4, 4),
        "blk.0.ffn_gate": (8, 4), "blk.0.ffn_up": (8, 4), "blk.0.ffn_down": (4, 8),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.standard_normal(shape) for name, shape in shapes.items()}
    return gguf(metadata, tensors | (extra or {}))


CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HELLO = [{"role": "user", "content": " hello "}]


def spm(pieces: dict[str, float], **options) -> SentencePieceBPE:
    """A SentencePiece vocabulary of these pieces and scores, behind <unk>, <s> and all bytes."""
    names = [b"<unk>", b"<s>", *(f"<0x{b:02X}>".encode() for b in range(256)), *(p.encode() for p in pieces)]
    types = np.array([2, 3, *[6] * 256, *[1] * len(pieces)], np.int32)
    scores = np.array([0.0] * 258 + list(pieces.values()), np.float32)
    return SentencePieceBPE(names, scores, types, **options)
