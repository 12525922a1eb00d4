"""Balanced queries and keys: the same model to the last bit, and smaller errors where keys are in 8 bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_source import ArraySource

import jaxkv
from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.io.source import expected_shapes
from jaxkv.loading import Model
from jaxkv.model import params as params_module
from jaxkv.model.key_balance import Balanced
from jaxkv.model.layers import rope_tables, rotate, spread
from jaxkv.model.params import Storage, build_params
from pallas_kernels import dequantise, quantise

BASE = ModelConfig(
    architecture="llama", vocab_size=64, num_layers=2, model_dim=32, num_q_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=32,
    norm_eps=1e-6, max_positions=256, ropes=(RopeConfig(theta=1e4),), layer_ropes=(0, 0), layer_windows=(0, 0), query_scale=0.25,
)  # fmt: skip
ROPES = {
    "default": RopeConfig(theta=1e4),
    "partial": RopeConfig(theta=1e4, rotary_dim=8),
    "linear": RopeConfig(theta=1e4, kind="linear", factor=4.0),
    "llama3": RopeConfig(theta=1e4, kind="llama3", factor=8.0, original_max_positions=64),
    "yarn": RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_positions=64),
}
FAMILIES = {
    "no norms": {},
    "biases": {"qkv_bias": True},
    "norms of heads": {"qk_norm": "head"},
    "norms of projections": {"qk_norm": "projection", "norm_placement": "post"},
    "MHA": {"num_kv_heads": 4, "qk_norm": "projection"},
    "MQA": {"num_kv_heads": 1},
}


def outlier_source(config: ModelConfig, seed=0) -> ArraySource:
    """Weights whose queries and keys have a few channels much larger than the rest, not the same ones."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for (name, layer), shape in expected_shapes(config).items():
        if name.endswith("norm"):
            array = 1 + rng.normal(0, 0.2, shape)
        else:
            array = rng.standard_normal(shape) / np.sqrt(shape[-1])
        uneven = ("q_norm", "k_norm") if config.qk_norm != "none" else ("q", "k", "q_bias", "k_bias")
        if name in uneven:
            rows = np.exp(rng.normal(0, 1, shape[0]))
            rows[rng.integers(0, shape[0], 2)] *= 12
            array = (array.T * rows).T
        arrays[name if layer is None else (name, layer)] = array.astype(np.float32)
    return ArraySource(config, arrays)


def model_of(source, storage, monkeypatch, balances=True):
    with monkeypatch.context() as patch:
        if not balances:
            patch.setattr(params_module, "Balanced", lambda source, statistics: source)
        return Model(source.config, build_params(source, storage), storage)


def config_of(family: str, rope: str = "default") -> ModelConfig:
    return dataclasses.replace(BASE, ropes=(ROPES[rope],), **FAMILIES[family])


@pytest.mark.parametrize(
    "family,rope,weights,kv_dtype",
    [
        ("norms of heads", "default", "float32", "float32"),
        ("norms of heads", "partial", "float32", "bfloat16"),
        ("norms of projections", "yarn", "float32", "float32"),
        ("biases", "partial", "int8", "float32"),
    ],
)
def test_balancing_changes_no_bit_of_the_logits(monkeypatch, family, rope, weights, kv_dtype):
    source = outlier_source(config_of(family, rope))
    storage = Storage(weights, "float32", jax.default_backend())
    tokens = np.random.default_rng(1).integers(0, BASE.vocab_size, 40)
    plain, balanced = (model_of(source, storage, monkeypatch, on) for on in (False, True))
    differ = [
        not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(balanced.params), strict=True)
    ]
    assert any(differ)
    outputs = []
    for model in (plain, balanced):
        state = jaxkv.init_state(model, num_slots=1, max_tokens_per_slot=64, kv_dtype=kv_dtype)
        state, first = jaxkv.prefill(state, [tokens[:-1]], all_logits=True)
        state, last = jaxkv.decode(state, tokens[-1:])
        outputs.append((np.asarray(first), np.asarray(last)))
    np.testing.assert_array_equal(outputs[0][0], outputs[1][0])
    np.testing.assert_array_equal(outputs[0][1], outputs[1][1])


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_balancing_changes_no_bit_of_a_product(family, rope):
    config = config_of(family, rope)
    source = outlier_source(config)
    q, k = queries_and_keys(config, source, 0)
    balanced_q, balanced_k = queries_and_keys(config, Balanced(source, statistics=source), 0)
    assert not np.array_equal(k, balanced_k)
    np.testing.assert_array_equal(balanced_q * balanced_k[:, :, None], q * k[:, :, None])


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_are_powers_of_two_and_equal_within_a_rope_pair(family):
    config = config_of(family, "partial")
    ones = outlier_source(config)
    balanced = Balanced(ones, statistics=ones)
    name = "k_norm" if config.qk_norm != "none" else "k"
    rows = lambda source: np.asarray(source.read(name, 1)).reshape(ones.shape(name, 1)[0], -1)[:, 0]
    exponents = np.log2(rows(balanced) / rows(ones)).reshape(-1, config.head_dim)
    np.testing.assert_array_equal(exponents, np.rint(exponents))
    half = config.ropes[0].rotary_dim // 2
    np.testing.assert_array_equal(exponents[:, :half], exponents[:, half : 2 * half])
    assert np.ptp(exponents) >= 2


def test_channels_that_nobody_uses_keep_their_weights():
    config = config_of("norms of heads")
    source = outlier_source(config)
    arrays = {(name, layer): source.read(name, layer).copy() for name in ("q_norm", "k_norm") for layer in range(2)}
    arrays["q_norm", 0][[2, 10]] = 0
    arrays["k_norm", 0][[3, 11]] = 0
    source = ArraySource(config, source._arrays | arrays)
    balanced = Balanced(source, statistics=source)
    for name in ("q_norm", "k_norm"):
        np.testing.assert_array_equal(balanced.read(name, 0)[[2, 10, 3, 11]], source.read(name, 0)[[2, 10, 3, 11]])
        assert np.all(np.isfinite(balanced.read(name, 0)))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("family", ["no norms", "norms of heads", "norms of projections", "MQA"])
def test_scores_of_8_bit_keys_err_less(family, dtype):
    config = dataclasses.replace(config_of(family), head_dim=64, model_dim=128)
    spreads = dtype == "int8" or config.qk_norm != "none"  # as the decoder has it
    transform = spread if spreads else lambda x: x
    ratios = []
    for seed in range(12):
        source = outlier_source(config, seed)
        exact = queries_and_keys(config, source, seed)
        balanced = queries_and_keys(config, Balanced(source, statistics=source), seed)
        before = score_error(*exact, *exact, spread if dtype == "int8" else lambda x: x, dtype)
        ratios.append(score_error(*exact, *balanced, transform, dtype) / before)
    if spreads:
        assert max(ratios) < 1 and np.mean(ratios) < 0.8
    else:  # what fp8 loses is relative: factors only move channels out of its subnormals, or into them
        assert max(ratios) < 1.2 and np.mean(ratios) < 1


def queries_and_keys(config, source, seed):
    """q [T, K, G, H] and k [T, K, H] of random inputs, as a layer makes them."""
    T, K, H = 200, config.num_kv_heads, config.head_dim
    x = np.random.default_rng((seed, 1)).standard_normal((T, config.model_dim)).astype(np.float32)
    x = x * (source.read("attn_norm", 0) if source.has("attn_norm", 0) else 1)
    cos, sin = (a[0, 0] for a in rope_tables(config, jnp.arange(T)[None]))
    out = []
    for part in ("q", "k"):
        y = x @ source.read(part, 0).T
        normal = lambda y: y / np.sqrt(np.mean(y * y, -1, keepdims=True))
        if config.qk_norm == "projection":
            y = normal(y) * source.read(f"{part}_norm", 0)
        y = y.reshape(T, -1, H)
        if config.qk_norm == "head":
            y = normal(y) * source.read(f"{part}_norm", 0)
        if source.has(f"{part}_bias", 0):
            y = y + source.read(f"{part}_bias", 0).reshape(-1, H)
        out.append(np.asarray(rotate(y, cos, sin)))
    return out[0].reshape(T, K, -1, H), out[1]


def score_error(q_exact, k_exact, q, k, transform, dtype):
    """Root mean square error of all scores when keys are stored in 8 bits."""
    scores = lambda q, k: np.einsum("tkgh,skh->kgts", np.asarray(q), np.asarray(k))
    stored = dequantise(*quantise(transform(k), jnp.dtype(dtype)))
    return np.sqrt(np.mean(np.square(scores(transform(q), stored) - scores(q_exact, k_exact))))
