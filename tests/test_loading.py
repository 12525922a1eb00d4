"""Checkpoints: saved and loaded they are the same bits; damaged they are refused. Weights of few bits stay near float32."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_source import ArraySource
from engine import HF_TINY, MOE, V, make_model, new_state, oracle, prompt, tiny_config

import jaxkv
from jaxkv.io.generation import GenerationDefaults
from jaxkv.io.hf_source import open_hf_folder
from jaxkv.io.source import expected_shapes
from jaxkv.model.linear import WEIGHT_KINDS
from jaxkv.model.params import Storage, build_params, check_params

MIXED = tiny_config(**MOE, qkv_bias=True, qk_norm="head", norm_placement="both")


def assert_same_params(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, path
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


# Saved and loaded


@pytest.mark.parametrize("weights", WEIGHT_KINDS)
def test_a_checkpoint_holds_the_same_bits(tmp_path, weights):
    """A dense layer, a layer of experts, biases, norms of every place and both tables, in every kind of storage."""
    model = dataclasses.replace(make_model(MIXED, weights), generation=GenerationDefaults((3, 5), True, temperature=0.6, top_k=64))
    jaxkv.save_checkpoint(model, tmp_path / "deeper" / "saved")
    loaded = jaxkv.load_model(tmp_path / "deeper" / "saved")
    assert loaded.config == model.config and loaded.storage == model.storage
    assert loaded.generation == model.generation and loaded.eos_token_ids == (3, 5)
    assert loaded.tokenizer is None and loaded.nbytes == model.nbytes
    assert_same_params(loaded.params, model.params)
    text = prompt(20)
    np.testing.assert_array_equal(oracle(loaded, text), oracle(model, text))
    assert [f.name for f in (tmp_path / "deeper").iterdir()] == ["saved"]


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_a_checkpoint_of_a_hugging_face_folder_gives_its_logits(tmp_path, name):
    original = jaxkv.load_model(HF_TINY / name, weights="float32")
    jaxkv.save_checkpoint(original, tmp_path / "saved")
    loaded = jaxkv.load_model(str(tmp_path / "saved"))
    assert_same_params(loaded.params, original.params)
    assert loaded.generation == original.generation
    expected = np.load(HF_TINY / name / "expected.npz")
    logits = np.asarray(jaxkv.score(loaded, expected["tokens"]))[:, expected["positions"]]
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-4, rtol=0)


def test_a_loaded_model_generates_without_a_new_trace(model, tmp_path):
    jaxkv.save_checkpoint(model, tmp_path / "saved")
    loaded = jaxkv.load_model(tmp_path / "saved")
    _, expected = jaxkv.generate(new_state(model), [prompt(9)], max_new_tokens=3)
    before = jaxkv.trace_counts()
    _, output = jaxkv.generate(new_state(loaded), [prompt(9)], max_new_tokens=3)
    assert output.tokens[0].tolist() == expected.tokens[0].tolist()
    assert jaxkv.trace_counts() == before


@pytest.mark.parametrize("there", ["file", "folder", "checkpoint"])
def test_saving_over_something_is_refused_and_leaves_it(model, tmp_path, there):
    path = tmp_path / "saved"
    if there == "file":
        path.write_text("mine")
    elif there == "folder":
        path.mkdir()
        (path / "note").write_text("mine")
    else:
        jaxkv.save_checkpoint(model, path)
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    with pytest.raises(ValueError, match="saved exists already"):
        jaxkv.save_checkpoint(make_model(seed=1), path)
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before


def test_a_save_that_fails_leaves_nothing(model, tmp_path):
    class Unsaved:
        def save(self, folder):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        jaxkv.save_checkpoint(dataclasses.replace(model, tokenizer=Unsaved()), tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


# Damaged


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "saved"
    jaxkv.save_checkpoint(make_model(weights="bfloat16"), path)
    return path


def edit(**changes):
    """Rewrites the description: a value replaces one, a dict changes what is inside, ... takes it away."""

    def damage(folder):
        description = json.loads((folder / "jaxkv.json").read_text())
        for name, value in changes.items():
            if value is ...:
                del description[name]
            elif isinstance(value, dict):
                description[name] |= value
            else:
                description[name] = value
        (folder / "jaxkv.json").write_text(json.dumps(description))

    return damage


def text(content):
    return lambda folder: (folder / "jaxkv.json").write_bytes(content)


def largest(folder):
    return max((f for f in (folder / "params").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


DAMAGES = {
    "no params": lambda folder: shutil.rmtree(folder / "params"),
    "empty params": lambda folder: (shutil.rmtree(folder / "params"), (folder / "params").mkdir()),
    "no metadata": lambda folder: (folder / "params" / "_METADATA").unlink(),
    "metadata of junk": lambda folder: (folder / "params" / "_METADATA").write_bytes(b"junk"),
    "half an array file": lambda folder: largest(folder).write_bytes(
        largest(folder).read_bytes()[: largest(folder).stat().st_size // 2]
    ),
    "an empty array file": lambda folder: largest(folder).write_bytes(b""),
    "no array file": lambda folder: largest(folder).unlink(),
    "no json": text(b"{"),
    "not utf-8": text(b"\xff\xfe"),
    "json of a list": text(b"[]"),
    "empty json": text(b""),
    "another format": edit(format=99),
    "no format": edit(format=...),
    "no config": edit(config=...),
    "no storage": edit(storage=...),
    "no generation": edit(generation=...),
    "config of a list": edit(config=[]),
    "a field nobody knows": edit(config={"colour": "red"}),
    "unknown weights": edit(storage={"weights": "int3"}),
    "other weights": edit(storage={"weights": "float32"}),
    "another architecture": edit(config={"architecture": "mamba"}),
    "more layers": edit(config=dict(num_layers=3, layer_windows=[0, 0, 0], layer_ropes=[0, 0, 0])),
    "other heads": edit(config={"num_kv_heads": 4}),
    "another vocabulary": edit(config={"vocab_size": V + 1}),
    "experts there are none of": edit(config=MOE | {"moe_layers": [True, True]}),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(saved, tmp_path, damage):
    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    DAMAGES[damage](folder)
    with pytest.raises(ValueError) as caught:
        jaxkv.load_model(folder)
    assert str(caught.value)


# Every kind of array of the tree below, whose layer 0 is dense and layer 1 a mixture: its place in the tree, as messages name it.
CHECKED = [
    "embed.weight", "embed.scale", "embed.wide", "head.weight", "head.scale", "head.wide", "final_norm",
    *(f"layers.0.{group}.{form}" for group in ("qkv", "o", "gate_up", "down") for form in ("weight", "scale", "wide")),
    *(f"layers.1.{group}.{form}" for group in ("experts_gate_up", "experts_down") for form in ("weight", "scale")),
    "layers.0.qkv.bias", "layers.1.router.weight", "layers.0.attn_norm", "layers.1.q_norm",
]  # fmt: skip


@pytest.fixture(scope="module")
def eight_bits():
    return make_model(MIXED, "int8")


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("damage", ["missing", "short", "dtype"])
def test_every_array_of_a_params_tree_is_checked_and_named(eight_bits, name, damage):
    def spoilt(node, path):
        if path:
            key, *rest = path
            if isinstance(node, tuple):
                return tuple(spoilt(child, rest) if i == int(key) else child for i, child in enumerate(node))
            if isinstance(node, dict):
                return {**node, key: spoilt(node[key], rest)}
            return dataclasses.replace(node, **{key: spoilt(getattr(node, key), rest)})
        other = node[..., :-1] if damage == "short" else node.astype(jnp.float16)
        return None if damage == "missing" else other

    check_params(eight_bits.params, eight_bits.config, eight_bits.storage, "here")
    with pytest.raises(ValueError, match=rf"here: {name} is .*expected"):
        check_params(spoilt(eight_bits.params, name.split(".")), eight_bits.config, eight_bits.storage, "here")


def test_an_array_that_does_not_belong_is_named(model):
    head = model.params["head"]
    spoilt = {**model.params, "head": dataclasses.replace(head, bias=jnp.zeros(V))}
    with pytest.raises(ValueError, match="head.bias is float32.*expected none"):
        check_params(spoilt, model.config, model.storage, "here")


def test_each_named_weight_is_where_the_model_reads_it():
    """Fused products hold their parts in order, layer by layer; gate before up; norms and biases as they are."""
    source = open_hf_folder(HF_TINY / "qwen2")
    keys = expected_shapes(source.config)
    arrays = {(name if layer is None else (name, layer)): np.asarray(source.read(name, layer)) for name, layer in keys}
    params = build_params(ArraySource(source.config, arrays), Storage("float32", "float32", jax.default_backend()))
    (layers,) = params["layers"]
    for layer in range(source.config.num_layers):
        at = lambda *names, layer=layer: np.concatenate([arrays[name, layer] for name in names])
        np.testing.assert_array_equal(layers["qkv"].weight[layer], at("q", "k", "v"))
        np.testing.assert_array_equal(layers["qkv"].bias[layer], at("q_bias", "k_bias", "v_bias"))
        np.testing.assert_array_equal(layers["gate_up"].weight[layer], at("gate", "up"))
        np.testing.assert_array_equal(layers["o"].weight[layer], at("o"))
        np.testing.assert_array_equal(layers["mlp_norm"][layer], at("mlp_norm"))
    np.testing.assert_array_equal(params["embed"].weight, arrays["embed"])


def test_a_checkpoint_is_of_one_kind(saved):
    for options in (dict(weights="int8"), dict(weights="float32"), dict(dtype="float32")):
        with pytest.raises(ValueError, match="bfloat16.*load it without"):
            jaxkv.load_model(saved, **options)
    assert jaxkv.load_model(saved, weights="bfloat16").storage.weights == "bfloat16"


@pytest.mark.parametrize("options, message", [(dict(weights="int4"), "int4.*int8"), (dict(dtype="float64"), "float64.*float16")])
def test_unknown_kinds_are_named_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.load_model("no-such-model", **options)


@pytest.mark.parametrize("name", ["no-such-model", "./no/such/folder"])
def test_unknown_names_are_named(name):
    with pytest.raises(ValueError, match=name.split("/")[-1]):
        jaxkv.load_model(name)


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path.name)):
        jaxkv.load_model(tmp_path)


# Few bits


def relative_error(got, expected):
    """Of a row's norm: the largest over the rows."""
    error = np.linalg.norm(np.asarray(got, np.float64) - expected, axis=-1)
    return (error / np.linalg.norm(expected, axis=-1)).max()


# What rounding does to a product of N(0, 1) vectors, as a share of its norm. 16 bits on CPU: float16's 11 for few rows and for exact
# products, 2**-12 at most of each weight; bf16's 8 for both operands of large ones (2.6e-3). int8: steps of the largest of 32
# weights (2 sigma) / 127, errors of step / sqrt(12): 0.005 (6.0e-3 with bf16 operands).
def product_bound(weights, exact):
    return {"float32": 1e-6, "bfloat16": 3e-4 if exact else 4e-3, "int8": 8e-3}[weights]


@pytest.fixture(scope="module")
def tables():
    """Makes heads of the same random weights [9001, 64] in every storage: more rows than one block of a product."""
    made = {}

    def make(weights):
        if weights not in made:
            made[weights] = make_model(tiny_config(vocab_size=9001), weights).params["head"]
        return made[weights]

    return make


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 15, 16, 33])
@pytest.mark.parametrize("weights", WEIGHT_KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_stay_near_float64_for_any_number_of_rows(tables, weights, rows, dtype):
    linear, exact = tables(weights), np.asarray(tables("float32").weight, np.float64)
    x = np.random.default_rng(rows).standard_normal((rows, exact.shape[1]), np.float32)
    options = {"xla_cpu_prefer_vector_width": 512, "xla_cpu_enable_fast_math": True}  # as in jaxkv.steps
    y = jax.jit(lambda linear, x: linear(x, dtype), compiler_options=options)(linear, x)
    bound = product_bound(weights, exact=dtype == "float32" or rows < 16)
    assert y.shape == (rows, exact.shape[0]) and y.dtype == jnp.float32
    assert relative_error(y, x @ exact.T) < bound
    ids = [0, 9000, 3, 4096]
    assert relative_error(linear.take(jnp.array(ids)), exact[ids]) < product_bound(weights, exact=True)


# Through two layers the errors of some ten products and of attention add up like random ones; measured at most 1.7e-2 and 3.4e-2.
@pytest.mark.parametrize("weights, bound", [("bfloat16", 3e-2), ("int8", 6e-2)])
def test_logits_stay_near_float32(model, weights, bound):
    small = make_model(weights=weights)
    text = prompt(40)
    expected = oracle(model, text).astype(np.float64)
    assert 0 < relative_error(oracle(small, text), expected) < bound
    state, logits = jaxkv.prefill(new_state(small), [text[:30]])  # products of many rows
    assert relative_error(logits, expected[29:30]) < bound
    for at in range(30, 34):  # and of few
        state, logits = jaxkv.decode(state, [text[at]], rows=[0])
        assert relative_error(logits, expected[at : at + 1]) < bound


def test_storage_names_what_it_does_not_know():
    for options in (dict(weights="int4"), dict(dtype="int8")):
        with pytest.raises(ValueError, match="is not one of"):
            Storage(**(dict(weights="float32", dtype="float32", platform="cpu") | options))
