"""Forms of heads in a pool: what is allocated, and that products in the pool's form are those of the model's."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import heads, pool_heads, scales_shape

FORMS = [  # K, H -> K', H' on a TPU
    (8, 128, (8, 128)),
    (1, 256, (1, 256)),
    (8, 64, (4, 128)),
    (1, 64, (1, 128)),
    (3, 64, (3, 128)),
    (4, 80, (4, 128)),
    (4, 96, (4, 128)),
    (2, 160, (2, 256)),
    (2, 16, (2, 128)),
]


@pytest.mark.parametrize(("K", "H", "form"), FORMS)
def test_a_tpu_holds_whole_lanes_and_others_hold_what_there_is(K, H, form):
    assert pool_heads(K, H, "tpu") == form
    assert pool_heads(K, H, "gpu") == pool_heads(K, H, "cpu") == (K, H)
    assert heads.heads_packed(K, H, *form) == (2 if form[0] < K else 1)


def test_a_page_of_scales_is_whole_lanes():
    assert scales_shape(10, 8, 128) == (10, 2, 8, 128)
    assert scales_shape(10, 8, 16) == (10, 2, 1, 128)
    assert scales_shape(7, 3, 48) == (7, 2, 2, 128)


@pytest.mark.parametrize("packed", [(2, 64, 2, 32), (2, 64, 1, 192), (4, 64, 3, 128), (4, 64, 2, 192), (1, 64, 2, 32)])
def test_what_does_not_hold_the_heads(packed):
    assert heads.heads_packed(*packed) == 0


@pytest.mark.parametrize(("K", "H", "form"), [*FORMS, (6, 16, (2, 48))])
def test_scores_and_outputs_are_those_of_the_plain_form(K, H, form):
    rng = np.random.default_rng(0)
    G, S = 3, 5
    q, k, w = rng.standard_normal((2, K, G, H)), rng.standard_normal((2, S, K, H)), rng.standard_normal((2, K, G, S))
    pool = np.zeros((1, form[0], 1, form[1]))
    pool_q, pool_k = heads.queries_to_pool(jnp.asarray(q), pool), heads.vectors_to_pool(jnp.asarray(k), pool)
    assert pool_q.shape[1:] == (form[0], K * G // form[0], form[1])
    scores = jnp.einsum("bkgh,bskh->bkgs", pool_q, pool_k)
    np.testing.assert_allclose(scores.reshape(2, K, G, S), np.einsum("bkgh,bskh->bkgs", q, k), rtol=1e-4, atol=1e-4)
    o = jnp.einsum("bkgs,bskh->bkgh", jnp.asarray(w).reshape(*scores.shape), pool_k)
    want = np.einsum("bkgs,bskh->bkgh", w, k)
    np.testing.assert_allclose(heads.outputs_from_pool(o, K, G, H), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(heads.vectors_from_pool(pool_k, K, H), jnp.asarray(k))


def test_nan_in_one_head_of_a_pair_stays_in_its_queries():
    q = np.ones((1, 2, 1, 64), np.float32)
    q[0, 1] = np.nan
    in_pool = np.asarray(heads.queries_to_pool(jnp.asarray(q), np.zeros((1, 1, 1, 128))))
    assert np.isfinite(in_pool[0, 0, 0]).all()
