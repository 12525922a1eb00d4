"""Parts of a layer that have properties of their own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.model.layers import spread


@settings(max_examples=30, deadline=None)
@given(head_dim=st.sampled_from([1, 6, 64, 80, 96, 128, 256]), seed=st.integers(0, 99))
def test_spread_keeps_products_and_is_its_own_inverse(head_dim, seed):
    q, k = np.random.default_rng(seed).standard_normal((2, 5, head_dim)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(spread(q)) @ np.asarray(spread(k)).T, q @ k.T, atol=2e-5 * head_dim)
    np.testing.assert_allclose(spread(spread(q)), q, atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_spread_leaves_no_channel_much_larger_than_the_rest(head_dim):
    k = np.random.default_rng(0).standard_normal((50, head_dim)).astype(np.float32)
    k[:, 3] *= 30
    peak = lambda x: np.max(np.abs(x)) / np.sqrt(np.mean(np.square(x)))
    assert peak(k) > 10 and peak(np.asarray(spread(k))) < 5
