"""Mixtures of experts against a plain loop in float64, for any number of rows, and what they may not do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import make_model, tiny_config

from jaxkv.model import layers
from jaxkv.model.linear import WEIGHT_KINDS

E, K, D, F = 8, 2, 64, 32
CONFIG = tiny_config(num_layers=2, moe_layers=(True, True), num_experts=E, experts_per_token=K, expert_mlp_dim=F)
OPTIONS = {"xla_cpu_prefer_vector_width": 512, "xla_cpu_enable_fast_math": True}  # as in jaxkv.steps


@pytest.fixture(scope="module")
def weights():
    """Makes the weights of layer 1 of a stack of two, in any storage."""

    def make(kind="float32"):
        (stack,) = make_model(CONFIG, kind).params["layers"]
        peeled = {"router": jax.tree.map(lambda a: a[1], stack["router"])}
        return peeled | {name: stack[name].of_layer(jnp.int32(1)) for name in ("experts_gate_up", "experts_down")}

    return make


def run(w, x, valid=None):
    valid = np.ones(x.shape[:2], bool) if valid is None else valid
    return np.asarray(
        jax.jit(lambda w, x, valid: layers.mixture(CONFIG, w, x, "float32", valid), compiler_options=OPTIONS)(w, x, valid)
    )


def naive(w, x):
    """Row by row, expert by expert."""
    router, gate_up, down = (
        np.asarray(a, np.float64) for a in (w["router"].weight, w["experts_gate_up"].weight[1], w["experts_down"].weight[1])
    )
    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:2]):
        row = x[at].astype(np.float64)
        scores = router @ row
        best = np.argsort(-scores)[:K]
        shares = np.exp(scores[best] - scores[best].max())
        for expert, share in zip(best, shares / shares.sum(), strict=True):
            gate, up = np.split(gate_up[expert] @ row, 2)
            out[at] += share * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("B, T", [(1, 1), (2, 1), (7, 1), (16, 1), (33, 1), (2, 16), (1, 40)])
def test_any_number_of_rows_gives_what_a_plain_loop_gives(weights, B, T):
    x = np.random.default_rng(B * T).standard_normal((B, T, D), np.float32)
    np.testing.assert_allclose(run(weights(), x), naive(weights(), x), atol=1e-5)


@pytest.mark.parametrize("kind", WEIGHT_KINDS[1:])
def test_small_weights_stay_near_float32(weights, kind):
    x = np.random.default_rng(0).standard_normal((3, 1, D), np.float32)
    expected = naive(weights(), x)
    error = np.linalg.norm(run(weights(kind), x) - expected) / np.linalg.norm(expected)
    assert 0 < error < {"bfloat16": 1e-3, "int8": 2e-2}[kind]


def test_an_accelerators_ragged_products_give_the_same(weights):
    x = np.random.default_rng(1).standard_normal((3, 5, D), np.float32)
    ragged = {
        name: dataclasses.replace(product, platform="gpu") if name != "router" else product for name, product in weights().items()
    }
    np.testing.assert_allclose(run(ragged, x), run(weights(), x), atol=1e-5)


def test_a_row_does_not_feel_what_another_chose(weights):
    """An expert that overflows spoils the rows that chose it, no other: nothing is multiplied by a share of 0."""
    x = np.random.default_rng(2).standard_normal((6, 1, D), np.float32)
    w = weights()
    clean = run(w, x)
    scores = x[:, 0] @ np.asarray(w["router"].weight).T
    chosen = np.argsort(-scores, 1)[:, :K]
    bad = chosen[0, 0]
    hit = (chosen == bad).any(1)
    assert 0 < hit.sum() < 6
    down = w["experts_down"]
    sick = run(w | {"experts_down": dataclasses.replace(down, weight=down.weight.at[1, bad].set(jnp.inf))}, x)
    np.testing.assert_array_equal(sick[~hit], clean[~hit])
    assert not np.isfinite(sick[hit]).all()


def test_rows_that_do_not_count_choose_nobody(weights):
    """Padding and idle slots cost no expert's weights: with the only expert they chose broken, they are 0 all the same."""
    x = np.random.default_rng(3).standard_normal((2, 4, D), np.float32)
    valid = np.array([[True, True, False, False], [True, False, False, False]])
    out, alone = run(weights(), x, valid), run(weights(), x)
    np.testing.assert_array_equal(out[valid], alone[valid])
    assert not out[~valid].any()
    sick = jax.tree.map(lambda a: a * jnp.nan if a.ndim == 4 else a, weights())
    assert not run(sick, x, np.zeros((2, 4), bool)).any()


@pytest.mark.parametrize("rows", [1, 8])
def test_experts_are_neither_copied_nor_upcast_as_a_whole(weights, rows):
    """Temporaries stay below one expert's weights in float32; a layer's would be 8 times that."""
    x = np.zeros((rows, 1, D), np.float32)
    step = jax.jit(lambda w, x: layers.mixture(CONFIG, w, x, "float32", x[..., 0] == 0), compiler_options=OPTIONS)
    memory = step.lower(weights("bfloat16"), x).compile().memory_analysis()
    if jax.default_backend() == "cpu":
        assert memory.temp_size_in_bytes < 3 * F * D * 4
