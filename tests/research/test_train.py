"""Training learns, trains the very decoder that serves, and a stopped run ends with the bits of one that was not."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

import jaxkv
from jaxkv.io import checkpoint
from jaxkv.io.generation import GenerationDefaults
from jaxkv.research import text as texts
from jaxkv.research import train as training
from jaxkv.research import weights as trained
from jaxkv.research.byte_tokenizer import byte_tokenizer
from jaxkv.research.text import batch, rows_of, split_text
from jaxkv.research.train import Recipe, begin, evaluate, latest, train
from jaxkv.research.weights import byte_config, for_storage, hidden_states, init_weights, mean_loss, read_weights

DATA = (Path(__file__).parents[1] / "data" / "kjv_genesis.txt").read_bytes()
SIZES = {"model_dim": 32, "num_layers": 2, "num_q_heads": 4, "mlp_dim": 48, "max_positions": 128}
RECIPE = Recipe(steps=30, batch_tokens=512, context=64, learning_rate=1e-2, warmup=5)


@pytest.fixture(scope="module")
def text():
    return split_text(DATA)


@pytest.fixture(scope="module")
def gqa():
    config = byte_config(2, **SIZES)
    return config, init_weights(config, 0)


@pytest.fixture(scope="module")
def whole(gqa, text):
    """A run that is never stopped."""
    config, weights = gqa
    return train(config, RECIPE, text, begin(RECIPE, weights))


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_it_learns_and_leaves_the_weights_it_was_given(whole, gqa, text):
    config, weights = gqa
    before = evaluate(config, weights, text, 64)
    assert abs(before - 8) < 0.3  # nothing is known: a byte's 8 bits
    assert evaluate(config, whole.weights, text, 64) < 5
    assert whole.step == RECIPE.steps and np.all(np.isfinite(whole.losses))


def test_a_stopped_run_ends_with_the_same_bits(whole, gqa, text, tmp_path):
    config, weights = gqa
    part = train(config, RECIPE, text, begin(RECIPE, weights), folder=tmp_path, save_every=4, stop=lambda step: step == 9)
    assert part.step == 9 and [p.name for p in tmp_path.iterdir()] == ["step-00000009"]
    part = latest(tmp_path, config, RECIPE, text)
    assert part.step == 9
    # As if killed while it wrote a later one.
    (tmp_path / ".step-00000012.x.tmp").mkdir()
    (tmp_path / "step-00000013").mkdir()
    end = train(config, RECIPE, text, latest(tmp_path, config, RECIPE, text), folder=tmp_path, save_every=10)
    assert same(end.weights, whole.weights) and same(end.optimizer, whole.optimizer)
    np.testing.assert_array_equal(end.losses, whole.losses)
    assert same(latest(tmp_path, config, RECIPE, text).weights, whole.weights)


def test_a_checkpoint_of_another_run_is_refused(gqa, text, tmp_path):
    config, weights = gqa
    assert latest(tmp_path, config, RECIPE, text) is None
    training.save(tmp_path, config, RECIPE, text, begin(RECIPE, weights))
    assert latest(tmp_path, config, RECIPE, text).step == 0
    with pytest.raises(ValueError, match=r"of another run \(seed=0 there, 1 here\)"):
        latest(tmp_path, config, dataclasses.replace(RECIPE, seed=1), text)
    with pytest.raises(ValueError, match=r"another text_sha256"):
        latest(tmp_path, config, RECIPE, split_text(DATA[1:]))
    with pytest.raises(ValueError, match=r"num_kv_heads=2 there, 4 here"):
        latest(tmp_path, byte_config(4, **SIZES), RECIPE, text)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_what_is_trained_is_what_is_served(num_kv_heads, tmp_path):
    config = byte_config(num_kv_heads, **SIZES)
    weights = init_weights(config, 3)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 101), np.int32)  # no multiple of a block
    checkpoint.write_portable(tmp_path / "m", config, GenerationDefaults(), weights, byte_tokenizer())
    model = jaxkv.load_model(tmp_path / "m", weights="float32")
    assert model.config == config
    logits = np.asarray(jaxkv.score(model, tokens), np.float64)[:, :-1]
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    assert abs(float(mean_loss(config, weights, tokens, "float32")) - nll.mean()) < 2e-5
    assert abs(float(mean_loss(config, weights, tokens, "bfloat16")) - nll.mean()) < 2e-2


def test_windows_and_soft_caps_change_what_they_should():
    config = dataclasses.replace(byte_config(2, **SIZES), layer_windows=(8, 8))
    weights = init_weights(config, 0)
    tokens = np.random.default_rng(1).integers(0, 256, (1, 100), np.int32)
    changed = np.concatenate([(tokens[:, :50] + 1) % 256, tokens[:, 50:]], 1)
    hidden = jax.jit(lambda config, t: hidden_states(config, weights, t, "float32")[0, 64:], static_argnums=0)
    np.testing.assert_allclose(hidden(config, tokens), hidden(config, changed), atol=1e-6)  # two layers see 14 tokens back
    open_end = dataclasses.replace(config, layer_windows=(0, 0))
    assert np.abs(hidden(open_end, tokens) - hidden(open_end, changed)).max() > 1e-3
    capped = dataclasses.replace(open_end, attn_soft_cap=0.1)
    assert np.abs(hidden(open_end, tokens) - hidden(capped, tokens)).max() > 1e-4


def test_long_rows_compute_the_same_in_less_memory(gqa, monkeypatch):
    config, weights = gqa
    tokens = np.random.default_rng(1).integers(0, 256, (1, 100), np.int32)

    def gradient():
        return jax.jit(jax.grad(lambda w: mean_loss(config, w, tokens, "float32"))).lower(weights).compile()

    kept = gradient()
    monkeypatch.setattr(trained, "_LONG", 100)
    monkeypatch.setattr(trained, "_BLOCK", 16)
    anew = gradient()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), kept(weights), anew(weights))
    assert anew.memory_analysis().temp_size_in_bytes < kept.memory_analysis().temp_size_in_bytes


def test_a_portable_checkpoint_is_what_was_stored_on_every_kind_of_weights(gqa, tmp_path):
    config, weights = gqa
    path = tmp_path / "m"
    checkpoint.write_portable(
        path, config, GenerationDefaults(do_sample=True, temperature=0.7), for_storage(weights), byte_tokenizer()
    )
    again, read = read_weights(path)
    assert again == config
    for name, array in weights.items():
        np.testing.assert_array_equal(read[name], np.asarray(array, np.float16).astype(np.float32))
    for kind in ("float32", "bfloat16", "int8"):
        model = jaxkv.load_model(path, weights=kind)
        assert model.storage.weights == kind and model.sampling.temperature == 0.7
    assert model.tokenizer.encode("Ça va?\n") == list("Ça va?\n".encode())
    assert model.tokenizer.decode(list("Ça va?\n".encode())) == "Ça va?\n"
    jaxkv.save_checkpoint(model, tmp_path / "own")  # in this backend's form: no longer a start for training
    with pytest.raises(ValueError, match="in the forms of one backend"):
        read_weights(tmp_path / "own")
    with pytest.raises(ValueError, match="neither a jaxkv checkpoint"):
        read_weights(tmp_path)
    with pytest.raises(ValueError, match="weight 'k' of layer 0 has shape"):
        checkpoint.write_portable(tmp_path / "n", config, GenerationDefaults(), weights | {"k": weights["q"]})
    with pytest.raises(ValueError, match="weight 'v' of layer 0 .* is missing"):
        checkpoint.write_portable(tmp_path / "n", config, GenerationDefaults(), {k: v for k, v in weights.items() if k != "v"})


def test_a_hugging_face_folder_over_bytes_can_be_trained_on(tmp_path):
    folder = Path(__file__).parents[1] / "data" / "hf_tiny" / "llama_mha"
    with pytest.raises(ValueError, match="256 bytes, and the model has vocab_size=130: start from model/"):
        read_weights(folder)
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        arrays[name] = np.resize(arrays[name], (256, arrays[name].shape[1]))
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 256}))
    read, weights = read_weights(tmp_path)
    assert read.num_kv_heads == 4 and weights["k"].shape == (3, 32, 32)
    tokens = np.frombuffer(DATA[:66], np.uint8).reshape(2, 33).astype(np.int32)
    assert abs(float(mean_loss(read, weights, tokens, "float32")) - math.log(256)) < 1


def test_texts_and_batches(text):
    assert len(text.train) + text.held_out.size == len(DATA)
    assert bytes(text.held_out[0]) in DATA and bytes(text.held_out[0]) not in bytes(text.train)
    a, b = batch(text, 0, 5, 4, 33), batch(text, 0, 6, 4, 33)
    assert a.shape == (4, 33) and a.dtype == np.int32
    np.testing.assert_array_equal(a, batch(text, 0, 5, 4, 33))
    assert not np.array_equal(a, b) and not np.array_equal(a, batch(text, 1, 5, 4, 33))
    assert rows_of(np.zeros((3, 100), np.uint8), 40).shape == (6, 40) and rows_of(np.zeros((3, 100), np.uint8), 400).shape == (
        3,
        100,
    )
    with pytest.raises(ValueError, match="the text has 3000 bytes: give one of at least 3,200"):
        split_text(DATA[:3000])
    with pytest.raises(ValueError, match="fewer than a row of 20001"):
        batch(text, 0, 0, 1, 20001)
    assert texts._SPAN == 4096


def test_recipes():
    recipe = Recipe(steps=10, batch_tokens=512, context=64, long_context=1024, long_every=4)
    assert [recipe.shape(i) for i in (0, 2, 3, 7)] == [(8, 64), (8, 64), (1, 1024), (1, 1024)]
    for wrong in ({"steps": 0}, {"context": 0}, {"long_context": 64}, {"long_every": 2}):
        with pytest.raises(ValueError, match="must be positive|go together"):
            Recipe(**{"steps": 10} | wrong)
    with pytest.raises(ValueError, match="multiple of 2"):
        byte_config(1, **SIZES | {"num_q_heads": 5})


def test_a_loss_that_is_not_finite_ends_the_run(gqa, text):
    config, weights = gqa
    broken = weights | {"final_norm": weights["final_norm"] * math.inf}
    with pytest.raises(ValueError, match="the loss of step 1 is"):
        train(config, RECIPE, text, begin(RECIPE, broken))
