"""GGUF: malformed files fail at once with a ValueError, and converted models read back as what they were."""

import dataclasses
import math
import struct
import time
import tracemalloc

import gguf as gguf_py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import DATA, TINY, VOCABULARY, gguf, pair, small_gguf, tensor, text

from jaxkv.config import RopeConfig
from jaxkv.io.gguf_config import config_from_gguf
from jaxkv.io.gguf_reader import read_gguf
from jaxkv.io.gguf_source import open_gguf
from jaxkv.io.hf_source import open_hf_folder
from jaxkv.io.source import expected_shapes
from jaxkv.io.tokenizer import Tokenizer


def write(folder, data: bytes):
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def head(tensors=0, pairs=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, pairs)


HUGE = 1 << 62
MALFORMED = {
    "empty": (b"", "too few"),
    "short": (b"GGUF" + bytes(10), "too few"),
    "magic": (head(magic=b"GGML"), "not a GGUF"),
    "version 1": (head(version=1), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (head(tensors=HUGE), "cannot fit"),
    "pair count": (head(pairs=HUGE), "cannot fit"),
    "key length": (head(pairs=1) + struct.pack("<QIQ", HUGE, 4, 1), "are left"),
    "key not UTF-8": (head(pairs=1) + text(b"\xff\xfe") + struct.pack("<II", 4, 1), "not UTF-8"),
    "key empty": (head(pairs=1) + pair("", 1), "is empty"),
    "key twice": (head(pairs=2) + pair("a", 1) + pair("a", 2), "'a' appears twice"),
    "value type": (head(pairs=1) + text("a") + struct.pack("<II", 13, 1), "unknown value type 13"),
    "value cut": (head(pairs=1) + text("abcdef") + struct.pack("<IH", 10, 1), "ends inside"),
    "string length": (head(pairs=1) + text("a") + struct.pack("<IQ", 8, HUGE), "are left"),
    "array length": (head(pairs=1) + text("a") + struct.pack("<IIQ", 9, 6, HUGE), "entries"),
    "string array length": (head(pairs=1) + text("a") + struct.pack("<IIQ", 9, 8, HUGE), "entries"),
    "string in array": (head(pairs=1) + text("a") + struct.pack("<IIQQ", 9, 8, 1, HUGE), "entry 0 of 'a'"),
    "array of arrays": (head(pairs=1) + text("a") + struct.pack("<IIQ", 9, 9, 0), "unsupported value type 9"),
    "n_dims 0": (head(tensors=1) + text("t") + struct.pack("<IIQ", 0, 0, 0) + bytes(64), "0 dims"),
    "n_dims 5": (head(tensors=1) + tensor("t", (1, 1, 1, 1, 1), 0, 0) + bytes(64), "5 dims"),
    "n_dims huge": (head(tensors=1) + text("t") + struct.pack("<I", 1 << 31) + bytes(64), "dims"),
    "tensor type": (head(tensors=1) + tensor("t", (32,), 16, 0) + bytes(64), "type id 16"),
    "dim 0": (head(tensors=1) + tensor("t", (0,), 0, 0) + bytes(64), "positive dims"),
    "dims overflow": (head(tensors=1) + tensor("t", (HUGE, HUGE, HUGE), 0, 0) + bytes(64), "ends at"),
    "row not whole blocks": (head(tensors=1) + tensor("t", (33,), 8, 0) + bytes(64), "multiples of 32"),
    "offset outside": (head(tensors=1) + tensor("t", (4,), 0, 1 << 20) + bytes(64), "ends at"),
    "offset huge": (head(tensors=1) + tensor("t", (4,), 0, 1 << 63) + bytes(64), "ends at"),
    "offset unaligned": (head(tensors=1) + tensor("t", (4,), 0, 4) + bytes(96), "alignment 32"),
    "data cut": (head(tensors=1) + tensor("t", (64,), 0, 0) + bytes(64), "ends at"),
    "tensor twice": (head(tensors=2) + 2 * tensor("t", (4,), 0, 0) + bytes(96), "'t' appears twice"),
    "tensors overlap": (
        head(tensors=2) + tensor("t", (16,), 0, 0) + tensor("u", (4,), 0, 32) + bytes(160),
        "'t' and 'u' overlap",
    ),
    "alignment 0": (head(pairs=1) + pair("general.alignment", 0), "power of two, got 0"),
    "alignment 24": (head(pairs=1) + pair("general.alignment", 24), "power of two, got 24"),
    "alignment text": (head(pairs=1) + pair("general.alignment", "32"), "power of two"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_files_fail_at_once(tmp_path, kind):
    data, message = MALFORMED[kind]
    path = write(tmp_path, data)
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        read_gguf(path)
    assert time.perf_counter() - begin < 0.5
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def opens_or_value_error(path) -> None:
    """Everything that loading touches: anything but success or ValueError propagates."""
    try:
        source = open_gguf(path)
        Tokenizer.from_gguf(source.file).encode("ab c")
        source.read("q", 0)
    except ValueError:
        pass


def test_more_heads_than_dimensions_are_refused(tmp_path):
    raw = small_gguf()
    at = raw.index(b"attention.head_count") + len(b"attention.head_count") + 4  # behind the type
    path = write(tmp_path, raw[:at] + struct.pack("<I", 258) + raw[at + 4 :])
    with pytest.raises(ValueError, match="heads of no dimension: embedding_length=4, attention.head_count=258"):
        open_gguf(path)


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_damaged_files_never_raise_anything_else(tmp_path_factory, data):
    raw = bytearray(small_gguf())
    header = 6_000  # where the mutations bite
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header))
        if data.draw(st.booleans()):
            raw[at] = data.draw(st.integers(0, 255))
        else:
            word = data.draw(st.sampled_from([0, 1, 255, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1]))
            raw[at : at + 8] = struct.pack("<Q", word)
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    opens_or_value_error(write(tmp_path_factory.getbasetemp(), bytes(raw)))


def test_the_small_file_itself_is_fine(tmp_path):
    source = open_gguf(write(tmp_path, small_gguf()))
    assert source.config.num_kv_heads == 1
    assert source.config.tie_embeddings
    assert Tokenizer.from_gguf(source.file).encode("ab") == [1, 261, 262]


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q_norm.weight",
        "blk.1.attn_norm.weight",
        "blk.0.attn_v.bias",
        "blk.0.ffn_gate_shexp.weight",
        "cls.weight",
        "v.patch",
    ],
)
def test_tensors_that_no_weight_is_read_from_are_refused_by_name(tmp_path, name):
    with pytest.raises(ValueError, match=f"1 tensor .*'{name}'.*config"):
        open_gguf(write(tmp_path, small_gguf({name: np.ones(4)})))


def test_ropes_own_tensors_are_left_unread(tmp_path):
    extra = {"blk.0.attn_rot_embd.weight": np.ones(1), "rope_freqs.weight": np.ones(1)}
    assert open_gguf(write(tmp_path, small_gguf(extra))).config.ropes == (RopeConfig(),)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 32, 64])
def test_versions_alignments_and_values(tmp_path, version, alignment):
    metadata = {
        "general.alignment": alignment,
        "t": "text",
        "f": 0.5,
        "b": True,
        "s": ["x", ""],
        "n": np.arange(3, dtype="u4"),
    }
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    file = read_gguf(write(tmp_path, gguf(metadata, {"w": array, "v": array[0]}, version, alignment)))
    assert {key: file.metadata[key] for key in "tfb"} == {"t": "text", "f": 0.5, "b": True}
    assert file.metadata["s"] == [b"x", b""]
    assert file.metadata["n"].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(file.read("w"), array)
    np.testing.assert_array_equal(file.read("w", 1, 2), array[1:2])
    with pytest.raises(ValueError, match=r"rows \[2, 4\) are outside"):
        file.read("w", 2, 4)


def _convert(source, arch: str, metadata: dict, **extra: np.ndarray) -> bytes:
    """llama.cpp's conversion of a tiny folder, tensor names by gguf-py's own table."""
    c = source.config
    names = gguf_py.get_tensor_name_map(getattr(gguf_py.MODEL_ARCH, arch.upper()), c.num_layers)
    tensors: dict[str, np.ndarray] = {}
    for name in source.files.tensors:
        array = source.files.read(name).astype(np.float32)
        if name.endswith("norm.weight") and c.architecture.startswith("gemma"):
            array = array + 1
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            array = array.reshape(-1, 2, c.head_dim // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if ".experts." in name:
            continue
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    for layer in range(c.num_layers if c.num_experts else 0):
        for ours, theirs in (("gate", "ffn_gate_exps"), ("up", "ffn_up_exps"), ("down", "ffn_down_exps")):
            tensors[f"blk.{layer}.{theirs}.weight"] = source.read(f"experts_{ours}", layer)
    base = {
        "block_count": c.num_layers, "context_length": c.max_positions, "embedding_length": c.model_dim,
        "feed_forward_length": c.mlp_dim, "attention.head_count": c.num_q_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.layer_norm_rms_epsilon": c.norm_eps, "rope.freq_base": c.ropes[0].theta,
        "attention.key_length": c.head_dim, "attention.value_length": c.head_dim,
    }  # fmt: skip
    prefixed = {f"{arch}.{key}": value for key, value in (base | metadata).items()}
    return gguf({"general.architecture": arch} | prefixed | VOCABULARY, tensors | extra)


def _llama3_divisors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """The converter's loop over frequencies."""
    out = []
    for i in range(0, head_dim, 2):
        wavelen = 2 * math.pi * rope.theta ** (i / head_dim)
        low, high = (
            rope.original_max_positions / rope.low_freq_factor,
            rope.original_max_positions / rope.high_freq_factor,
        )
        if wavelen < high:
            out.append(1.0)
        elif wavelen > low:
            out.append(rope.factor)
        else:
            smooth = (rope.original_max_positions / wavelen - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            out.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(out, np.float32)


ARCH = {
    "gemma2": (
        "gemma2",
        {"attention.sliding_window": 12, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": ("gemma3", {"attention.sliding_window": 10}),
    "llama_gqa_llama3rope": ("llama", {"rope.scaling.original_context_length": 64}),
    "llama_mha": ("llama", {}),
    "llama_mqa": ("llama", {}),
    "llama_yarn": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
    ),
    "mistral_swa": ("llama", {"attention.sliding_window": 24}),
    "mixtral": ("llama", {"expert_count": 4, "expert_used_count": 2}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3moe", {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 48}),
}


@pytest.mark.parametrize("tiny", TINY)
def test_a_converted_folder_reads_back_as_the_folder(tmp_path, tiny):
    want = open_hf_folder(DATA / "hf_tiny" / tiny)
    arch, metadata = ARCH[tiny]
    extra = {}
    if tiny == "llama_gqa_llama3rope":
        extra["rope_freqs.weight"] = _llama3_divisors(want.config.ropes[0], want.config.head_dim)
    got = open_gguf(write(tmp_path, _convert(want, arch, metadata, **extra)))
    for (name, layer), shape in expected_shapes(want.config).items():
        array = got.read(name, layer)
        np.testing.assert_array_equal(array, want.read(name, layer).astype(np.float32), err_msg=f"{name} {layer}")
        np.testing.assert_array_equal(got.read_rows(name, layer, 1, shape[0] - 1), array[1:-1])
    assert _comparable(got.config, tiny) == _comparable(want.config, tiny)


def _comparable(config, tiny: str):
    """What GGUF can say: mistral is llama there, eps and yarn's factor are float32, Gemma's query scale is implied."""
    ropes = tuple(dataclasses.replace(r, attention_factor=round(r.attention_factor or 1.0, 6)) for r in config.ropes)
    changes = {"norm_eps": round(config.norm_eps, 9), "ropes": ropes}
    if tiny == "mistral_swa":
        changes["architecture"] = "llama"
    if tiny.startswith("gemma"):
        changes["query_scale"] = 1.0
    return dataclasses.replace(config, **changes)


def test_old_mixtral_files_with_one_tensor_an_expert(tmp_path):
    want = open_hf_folder(DATA / "hf_tiny" / "mixtral")
    data = _convert(want, *ARCH["mixtral"])
    file = read_gguf(write(tmp_path, data))
    tensors = {}
    for name in file.tensors:
        array = file.read(name)
        if "_exps" in name:
            tensors |= {name.replace("_exps.", f".{e}."): array[e] for e in range(4)}
        else:
            tensors[name] = array
    metadata = {k: v for k, v in file.metadata.items() if not k.startswith("tokenizer")}
    got = open_gguf(write(tmp_path, gguf(metadata, {k: np.array(v) for k, v in tensors.items()})))
    np.testing.assert_array_equal(got.read("experts_down", 1), want.read("experts_down", 1))
    np.testing.assert_array_equal(got.read_rows("experts_up", 2, 1, 3), want.read("experts_up", 2)[1:3])


def _refuse(tmp_path, tiny: str, changes: dict, extra: dict, message: str) -> None:
    source = open_hf_folder(DATA / "hf_tiny" / tiny)
    arch, metadata = ARCH[tiny]
    path = write(tmp_path, _convert(source, arch, metadata | changes, **extra))
    with pytest.raises(ValueError, match=message):
        open_gguf(path)


def test_what_is_not_supported_is_named(tmp_path):
    tokens = np.zeros((4, 4), np.float32)
    file = read_gguf(write(tmp_path, gguf({"general.architecture": "mamba"}, {"token_embd.weight": tokens})))
    with pytest.raises(ValueError, match=r"'mamba' is not supported; supported: llama, qwen2"):
        config_from_gguf(file)
    long = {"rope_factors_long.weight": np.ones(4, np.float32)}
    _refuse(tmp_path, "phi3", {}, long, "'longrope' is not supported")
    _refuse(tmp_path, "llama_mha", {"rope.scaling.type": "ntk"}, {}, "'ntk' is not supported")
    _refuse(tmp_path, "llama_mha", {}, {"rope_freqs.weight": np.array([1, 2, 3, 9.0])}, "not a llama3 scaling")
    _refuse(tmp_path, "llama_mha", {"attention.head_count": 5}, {}, "multiple of num_kv_heads")
    _refuse(tmp_path, "llama_mha", {"feed_forward_length": 64}, {}, r"'gate' of layer 0 has shape \(48, 32\)")
    _refuse(tmp_path, "llama_mha", {"block_count": 4}, {}, "layer 3 .*is missing")
    _refuse(tmp_path, "mixtral", {"expert_used_count": 5}, {}, "experts_per_token=5")
    _refuse(tmp_path, "phi3", {"feed_forward_length": 47}, {}, "has 96 rows, the config needs 94")


def test_llama3_scaling_is_recognised_at_its_usual_size(tmp_path):
    """Llama 3.2: factor 32 over 8,192 positions, theta 500,000, head_dim 64."""
    rope = RopeConfig("llama3", 500_000.0, factor=32.0, original_max_positions=8192)
    metadata = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 131_072,
        "llama.embedding_length": 128, "llama.feed_forward_length": 8, "llama.attention.head_count": 2,
        "llama.rope.freq_base": 500_000.0, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    tensors = {"token_embd.weight": np.zeros((4, 128)), "rope_freqs.weight": _llama3_divisors(rope, 64)}
    assert config_from_gguf(read_gguf(write(tmp_path, gguf(metadata, tensors)))).ropes == (rope,)
