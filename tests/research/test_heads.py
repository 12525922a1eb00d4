"""Head conversion against its definition, and that what must not change does not."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.research.heads import convert_heads
from jaxkv.research.weights import byte_config, init_weights, mean_loss

SIZES = {"model_dim": 32, "num_layers": 2, "num_q_heads": 8, "mlp_dim": 48, "max_positions": 128}
H = 4


@pytest.fixture(scope="module")
def parent():
    config = byte_config(8, **SIZES)
    return config, init_weights(config, 0)


def grouped(array, heads):
    """[L, heads, H, D] of k or v [L, heads*H, D]."""
    return np.asarray(array).reshape(SIZES["num_layers"], heads, H, -1)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_mean_and_first_take_consecutive_heads(parent, num_kv_heads):
    config, weights = parent
    per_group = 8 // num_kv_heads
    for pooling in ("mean", "first"):
        converted, pooled = convert_heads(config, weights, num_kv_heads, pooling)
        assert converted == dataclasses.replace(config, num_kv_heads=num_kv_heads)
        for name in ("k", "v"):
            whole, got = grouped(weights[name], 8), grouped(pooled[name], num_kv_heads)
            for g in range(num_kv_heads):
                members = whole[:, g * per_group : (g + 1) * per_group]
                wanted = members.mean(1) if pooling == "mean" else members[:, 0]
                np.testing.assert_allclose(got[:, g], wanted, rtol=1e-6)
        assert all(pooled[name] is weights[name] for name in weights if name not in ("k", "v"))


def test_random_heads_know_nothing_of_the_old_ones(parent):
    config, weights = parent
    converted, first = convert_heads(config, weights, 2, "random", seed=1)
    _, again = convert_heads(config, weights, 2, "random", seed=1)
    _, other = convert_heads(config, weights, 2, "random", seed=2)
    np.testing.assert_array_equal(first["k"], again["k"])
    assert np.abs(np.asarray(first["k"] - other["k"])).max() > 0.1
    assert first["k"].shape == (2, converted.num_kv_heads * H, 32)
    assert abs(float(np.std(first["k"])) * 32**0.5 - 1) < 0.2  # as large as those of a new model


def test_random_heads_are_not_those_the_parent_began_with(parent):
    config, weights = parent  # of seed 0
    for num_kv_heads in (8, 2):
        _, fresh = convert_heads(config, weights, num_kv_heads, "random", seed=0)
        for name in ("k", "v"):
            new = np.asarray(fresh[name])
            began = np.asarray(weights[name])[:, : new.shape[1]]
            assert abs(np.corrcoef(new.ravel(), began.ravel())[0, 1]) < 0.1


def test_a_model_whose_heads_in_a_group_are_equal_does_not_change(parent):
    config, weights = parent
    equal = {name: jnp.asarray(np.repeat(grouped(weights[name], 8)[:, ::4], 4, 1).reshape(2, 32, 32)) for name in ("k", "v")}
    tokens = np.random.default_rng(0).integers(0, 256, (2, 65), np.int32)
    before = float(mean_loss(config, weights | equal, tokens, "float32"))
    for pooling in ("mean", "first"):
        converted, pooled = convert_heads(config, weights | equal, 2, pooling)
        assert abs(float(mean_loss(converted, pooled, tokens, "float32")) - before) < 1e-5


def test_grouped_heads_convert_further_and_biases_go_along(parent):
    config, weights = parent
    gqa, pooled = convert_heads(config, weights | {"k_bias": jnp.arange(64.0).reshape(2, 32)}, 4, "mean")
    assert pooled["k_bias"].shape == (2, 16)
    mqa, pooled = convert_heads(gqa, pooled, 1, "mean")
    assert mqa.num_kv_heads == 1
    np.testing.assert_allclose(pooled["k_bias"][0], np.arange(32.0).reshape(8, 4).mean(0))
    np.testing.assert_allclose(grouped(pooled["v"], 1)[:, 0], grouped(weights["v"], 8).mean(1), rtol=1e-5, atol=1e-7)


def test_what_cannot_be_converted(parent):
    config, weights = parent
    with pytest.raises(ValueError, match=r"num_kv_heads=3 must divide the model's 8 KV heads: give one of 1, 2, 4, 8"):
        convert_heads(config, weights, 3, "mean")
    with pytest.raises(ValueError, match="pooling='max' is not one of mean, first, random"):
        convert_heads(config, weights, 2, "max")
