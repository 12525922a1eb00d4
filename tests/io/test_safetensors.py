"""safetensors: strict headers, sharded folders, and Hugging Face's tensor names mapped to ours."""

import json
import shutil
import struct
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import DATA, TINY

from jaxkv.io.hf_source import open_hf_folder
from jaxkv.io.safetensors_reader import open_folder, open_safetensors
from jaxkv.io.source import WeightSource, expected_shapes


def encode(header: dict | str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **extra):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **extra}


MALFORMED = {
    "empty": (b"", "too few"),
    "seven bytes": (bytes(7), "too few"),
    "header beyond the file": (encode({}, length=1 << 40), r"header says it has 1099511627776 bytes"),
    "header huge": (encode({}, length=(1 << 64) - 1), "header says"),
    "not UTF-8": (encode(b"\xff{}"), "not valid JSON"),
    "not JSON": (encode("{"), "not valid JSON"),
    "deep": (encode("[" * 100_000), "not valid JSON"),
    "not an object": (encode("[]"), "must be a JSON object"),
    "duplicate tensor": (encode('{"a":%s,"a":%s}' % ((json.dumps(entry()),) * 2), bytes(8)), "'a' appears twice"),
    "duplicate field": (encode('{"a":{"dtype":"F32","dtype":"F16","shape":[],"data_offsets":[0,4]}}'), "appears twice"),
    "unknown dtype": (encode({"a": entry("F33")}, bytes(8)), "unknown dtype 'F33'"),
    "dtype no text": (encode({"a": entry(["F32"])}, bytes(8)), "unknown dtype"),
    "missing field": (encode({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "must have exactly"),
    "extra field": (encode({"a": entry(strides=[1])}, bytes(8)), "must have exactly"),
    "entry no object": (encode({"a": 3}), "must have exactly"),
    "negative dim": (encode({"a": entry(shape=(-2,))}, bytes(8)), "impossible shape"),
    "float dim": (encode({"a": entry(shape=(2.0,))}, bytes(8)), "impossible shape"),
    "bool dim": (encode({"a": entry(shape=(True, 2))}, bytes(8)), "impossible shape"),
    "huge dims": (encode({"a": entry(shape=(1 << 62,) * 8)}, bytes(8)), "8 bytes, but F32"),
    "offsets reversed": (encode({"a": entry(offsets=(8, 0))}, bytes(8)), "impossible data_offsets"),
    "offsets negative": (encode({"a": entry(offsets=(-8, 0))}, bytes(8)), "impossible data_offsets"),
    "three offsets": (encode({"a": entry(offsets=(0, 4, 8))}, bytes(8)), "impossible data_offsets"),
    "shape and range differ": (encode({"a": entry(shape=(3,))}, bytes(8)), "takes 12"),
    "gap at the start": (encode({"a": entry(offsets=(4, 12))}, bytes(12)), "gap of 4 bytes after the header"),
    "gap": (encode({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)), "'b' .* gap of 4 bytes after 'a'"),
    "overlap": (encode({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "'b' .* overlaps 'a'"),
    "data cut": (encode({"a": entry()}, bytes(4)), "the file has"),
    "data left over": (encode({"a": entry()}, bytes(12)), "the file has"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_files_fail_at_once(tmp_path, kind):
    data, message = MALFORMED[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=message) as error:
        open_safetensors(path)
    assert str(path) in str(error.value)
    assert time.perf_counter() - begin < 0.5
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_files_never_raise_anything_else(tmp_path_factory, data):
    raw = bytearray((DATA / "hf_tiny" / "llama_mqa" / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 4500))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(bytes(raw))
    try:
        files = open_safetensors(path)
        for name in files.tensors:
            files.read(name)
    except ValueError:
        pass


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes_read_as_stored(tmp_path, dtype):
    arrays = {"odd": np.arange(3, dtype=np.float16).astype(dtype), "w": np.arange(6).reshape(2, 3).astype(dtype)}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = open_safetensors(tmp_path / "model.safetensors")
    for name, array in arrays.items():
        assert files.read(name).dtype == dtype
        np.testing.assert_array_equal(files.read(name), array)


def test_unaligned_and_integer_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    header = {"i": entry("I8", (1,), (0, 1)), "a": entry("F32", (2,), (1, 9)), "none": entry("F32", (0, 3), (9, 9))}
    path.write_bytes(encode(header, b"\x05" + np.array([1.5, -2], np.float32).tobytes()))
    files = open_safetensors(path)
    assert files.read("a").tolist() == [1.5, -2]
    assert files.read("none").shape == (0, 3)
    with pytest.raises(ValueError, match="dtype I8 of tensor 'i' is not supported"):
        files.read("i")


def shard(folder, source, count: int = 3, **rename) -> dict:
    """Splits a tiny folder's single file into shards with an index."""
    shutil.copy(source / "config.json", folder)
    arrays = safetensors.numpy.load_file(source / "model.safetensors")
    weight_map = {}
    for part in range(count):
        name = f"model-{part + 1:05d}-of-{count:05d}.safetensors"
        own = {key: arrays[key] for i, key in enumerate(sorted(arrays)) if i % count == part}
        safetensors.numpy.save_file(own, folder / name)
        weight_map |= dict.fromkeys(own, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map | rename}))
    return weight_map


def test_shards_read_like_one_file(tmp_path):
    source = DATA / "hf_tiny" / "qwen3"
    shard(tmp_path, source)
    one, many = open_hf_folder(source), open_hf_folder(tmp_path)
    for name, layer in expected_shapes(one.config):
        np.testing.assert_array_equal(one.read(name, layer), many.read(name, layer))


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/../../b", "sub/x.safetensors", "", "a\\b", "\0"])
def test_index_entries_stay_in_the_folder(tmp_path, file):
    shard(tmp_path, DATA / "hf_tiny" / "qwen3", **{"model.norm.weight": file})
    with pytest.raises(ValueError, match="leaves the folder"):
        open_folder(tmp_path)


def test_index_errors(tmp_path):
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        open_folder(tmp_path)
    weight_map = shard(tmp_path, DATA / "hf_tiny" / "qwen3")
    index = tmp_path / "model.safetensors.index.json"
    wrong = weight_map | {"model.norm.weight": weight_map["lm_head.weight"]}
    index.write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' should be in 'model-0000"):
        open_folder(tmp_path)
    for content, message in (
        ({"weight_map": {}}, "weight_map must"),
        ({"weight_map": {"a": 3}}, "no file name"),
        ({"weight_map": {"a": "b.safetensors"}}, "'b.safetensors' is missing"),
        ([], "must be a JSON object"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            open_folder(tmp_path)


@pytest.mark.parametrize("tiny", TINY)
def test_every_stored_value_is_read_exactly_once(tiny):
    """Names, splits and the +1 of Gemma's norms: what is read is, as a multiset, what the file holds."""
    source = open_hf_folder(DATA / "hf_tiny" / tiny)
    assert isinstance(source, WeightSource)
    gemma = tiny.startswith("gemma")
    read = []
    for (name, layer), shape in expected_shapes(source.config).items():
        array = source.read(name, layer)
        assert array.shape == source.shape(name, layer) == shape
        np.testing.assert_array_equal(source.read_rows(name, layer, 1, 3), array[1:3])
        read.append(array.reshape(-1) - np.float32(1) if gemma and name.endswith("norm") else array.reshape(-1))
    stored = [source.files.read(name).reshape(-1) for name in source.files.tensors]
    order = np.sort(np.concatenate(read)), np.sort(np.concatenate(stored))
    np.testing.assert_allclose(*order, atol=2e-7 if gemma else 0)
    assert not source.has("head") or not source.config.tie_embeddings
    assert not source.has("nonsense")
    assert not source.has("nonsense", 0)
    with pytest.raises(KeyError, match="no weight 'q' in layer 99"):
        source.read("q", 99)


def test_names_go_where_they_should():
    pre = open_hf_folder(DATA / "hf_tiny" / "llama_mqa")
    raw = pre.files.read
    np.testing.assert_array_equal(pre.read("mlp_norm", 1), raw("model.layers.1.post_attention_layernorm.weight"))
    np.testing.assert_array_equal(pre.read("o_bias", 2), raw("model.layers.2.self_attn.o_proj.bias"))
    both = open_hf_folder(DATA / "hf_tiny" / "gemma3")
    raw = both.files.read
    for ours, theirs in {
        "attn_norm": "input_layernorm", "post_attn_norm": "post_attention_layernorm", "k_norm": "self_attn.k_norm",
        "mlp_norm": "pre_feedforward_layernorm", "post_mlp_norm": "post_feedforward_layernorm",
    }.items():  # fmt: skip
        np.testing.assert_array_equal(both.read(ours, 3), 1 + raw(f"model.layers.3.{theirs}.weight"))
    fused = open_hf_folder(DATA / "hf_tiny" / "phi3")
    qkv, mlp = (fused.files.read(f"model.layers.0.{n}.weight") for n in ("self_attn.qkv_proj", "mlp.gate_up_proj"))
    for name, rows in {"q": qkv[:32], "k": qkv[32:48], "v": qkv[48:], "gate": mlp[:48], "up": mlp[48:]}.items():
        np.testing.assert_array_equal(fused.read(name, 0), rows)
    experts = open_hf_folder(DATA / "hf_tiny" / "mixtral")
    for name, theirs in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        one = experts.files.read(f"model.layers.1.block_sparse_moe.experts.2.{theirs}.weight")
        np.testing.assert_array_equal(experts.read(f"experts_{name}", 1)[2], one)


def rewrite(folder, tiny: str, change, config: dict | None = None) -> None:
    """A tiny folder with its tensors changed."""
    source = DATA / "hf_tiny" / tiny
    given = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | (config or {})))
    arrays = safetensors.numpy.load_file(source / "model.safetensors")
    safetensors.numpy.save_file(change(arrays), folder / "model.safetensors")


@pytest.mark.parametrize("tiny", ["mixtral", "qwen3_moe"])
def test_experts_fused_into_one_tensor(tmp_path, tiny):
    want = open_hf_folder(DATA / "hf_tiny" / tiny)

    def fuse(arrays):
        out = {key: value for key, value in arrays.items() if ".experts." not in key}
        out = {key.replace("block_sparse_moe.gate", "mlp.gate"): value for key, value in out.items()}
        for layer in range(3):
            base = f"model.layers.{layer}.mlp.experts."
            parts = [want.read(f"experts_{name}", layer) for name in ("gate", "up", "down")]
            out[base + "gate_up_proj"], out[base + "down_proj"] = np.concatenate(parts[:2], axis=1), parts[2]
        return out

    rewrite(tmp_path, tiny, fuse)
    got = open_hf_folder(tmp_path)
    for name, layer in expected_shapes(want.config):
        np.testing.assert_array_equal(got.read(name, layer), want.read(name, layer))
        np.testing.assert_array_equal(got.read_rows(name, layer, 1, 3), want.read(name, layer)[1:3])


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_inside_a_multimodal_file(tmp_path, prefix):
    want = open_hf_folder(DATA / "hf_tiny" / "gemma3")
    text = json.loads((DATA / "hf_tiny" / "gemma3" / "config.json").read_text())
    wrap = {"model_type": "gemma3", "text_config": text, "vision_config": {}}

    def nest(arrays):
        return {key.replace("model.", prefix, 1): value for key, value in arrays.items()} | {"vision_tower.x": np.zeros(3)}

    rewrite(tmp_path, "gemma3", nest)
    (tmp_path / "config.json").write_text(json.dumps(wrap))
    got = open_hf_folder(tmp_path)
    assert got.config == want.config
    np.testing.assert_array_equal(got.read("q", 4), want.read("q", 4))
    np.testing.assert_array_equal(got.read("final_norm"), want.read("final_norm"))


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    def without(name):
        return lambda arrays: {key: value for key, value in arrays.items() if key != name}

    rewrite(tmp_path, "llama_mha", without("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"weight 'up' of layer 1 \(shape \(48, 32\)\) is missing"):
        open_hf_folder(tmp_path)
    rewrite(tmp_path, "llama_mha", without("lm_head.weight"))
    with pytest.raises(ValueError, match="'head'"):
        open_hf_folder(tmp_path)
    rewrite(tmp_path, "llama_mha", without("lm_head.weight"), {"tie_word_embeddings": True})
    assert not open_hf_folder(tmp_path).has("head")
    rewrite(tmp_path, "llama_mha", lambda arrays: arrays, {"num_key_value_heads": 2})
    with pytest.raises(ValueError, match=r"'k' of layer 0 has shape \(32, 32\), but the config needs \(16, 32\)"):
        open_hf_folder(tmp_path)
    rewrite(tmp_path, "phi3", lambda arrays: arrays, {"intermediate_size": 40})
    with pytest.raises(ValueError, match=r"gate_up_proj.weight' has shape \(96, 32\), the config needs 80 rows"):
        open_hf_folder(tmp_path)
    rewrite(tmp_path, "mixtral", without("model.layers.2.block_sparse_moe.experts.3.w2.weight"))
    with pytest.raises(ValueError, match=r"experts.3.w2.weight' is missing"):
        open_hf_folder(tmp_path)


# What the engine does not know (CASES 37): tensors that no weight is read from


def stored_beside(folder, name, extra, changes=None):
    """A tiny folder whose file also holds tensors of these names."""
    rewrite(folder, name, lambda arrays: arrays | {tensor: np.ones(4, np.float32) for tensor in extra}, changes)


UNKNOWN = {
    "a bias without its flag": ("llama_mha", ["model.layers.0.self_attn.q_proj.bias"]),
    "a layer past the last": ("qwen3", ["model.layers.99.input_layernorm.weight"]),
    "a norm of another family": ("llama_mha", ["model.layers.1.self_attn.q_norm.weight"]),
    "an adapter": ("qwen2", ["model.layers.0.self_attn.q_proj.lora_A.weight"]),
    "a branch": ("mistral_swa", ["model.layers.0.mlp.shared_expert.up_proj.weight"]),
    "a head that is not declared tied": ("llama_mha", ["score.weight"]),
    "an expert too many": ("mixtral", ["model.layers.0.block_sparse_moe.experts.8.w1.weight"]),
    "an image encoder in a text model": ("gemma3", ["vision_tower.patch.weight"]),
    "a quantised weight's scale": ("phi3", ["model.layers.0.self_attn.qkv_proj.weight_scale"]),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_tensors_that_the_config_does_not_call_for_are_refused_by_name(tmp_path, kind):
    name, extra = UNKNOWN[kind]
    stored_beside(tmp_path, name, extra)
    with pytest.raises(ValueError, match=rf"{tmp_path.name}: 1 tensor .*'{extra[0]}'.*config"):
        open_hf_folder(tmp_path)


def test_of_many_unknown_tensors_the_first_few_are_named(tmp_path):
    stored_beside(tmp_path, "llama_mha", [f"model.layers.{i}.self_attn.v_proj.bias" for i in range(9)])
    with pytest.raises(ValueError, match=r"9 tensors .*layers\.0.*layers\.4.*, \.\.\.") as caught:
        open_hf_folder(tmp_path)
    assert "layers.5" not in str(caught.value)


@pytest.mark.parametrize(
    "name, extra",
    [
        ("llama_mha", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]),
        ("llama_gqa_llama3rope", ["lm_head.weight"]),  # tied by declaration
    ],
)
def test_tensors_that_are_known_to_be_harmless_are_left_unread(tmp_path, name, extra):
    stored_beside(tmp_path, name, extra)
    source = open_hf_folder(tmp_path)
    assert source.has("q", 0)


@pytest.mark.parametrize(
    "prefix, outer, head",
    [("language_model.model.", "", "language_model.lm_head.weight"), ("model.language_model.", "model.", "lm_head.weight")],
)
def test_the_text_of_a_multimodal_gemma3_loads_without_its_image_encoder(tmp_path, prefix, outer, head):
    inner = json.loads((DATA / "hf_tiny" / "gemma3" / "config.json").read_text()) | {"model_type": "gemma3_text"}
    images = [f"{outer}vision_tower.encoder.layers.0.norm.weight", f"{outer}multi_modal_projector.mm_soft_emb_norm.weight"]

    def renamed(arrays):
        text = {key.replace("model.", prefix, 1): value for key, value in arrays.items()}
        return text | {tensor: np.ones(4, np.float32) for tensor in [*images, head]}

    rewrite(tmp_path, "gemma3", renamed, {"model_type": "gemma3", "text_config": inner, "tie_word_embeddings": True})
    source, plain = open_hf_folder(tmp_path), open_hf_folder(DATA / "hf_tiny" / "gemma3")
    assert isinstance(source, WeightSource)
    np.testing.assert_array_equal(source.read("q", 1), plain.read("q", 1))
