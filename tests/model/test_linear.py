"""Products with a weight on CPU: right for any width and number of rows, and in one pass over the stored bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.model.linear import Linear
from jaxkv.steps import COMPILER_OPTIONS

N, GROUP = 64, 32


def weight(kind, columns):
    """(Linear, its numbers f64[N, D])."""
    numbers = np.random.default_rng(columns).standard_normal((N, columns)).astype(np.float32)
    if kind == "int8":
        stored = np.clip(np.round(numbers * 40), -127, 127).astype(np.int8)
        scale = np.random.default_rng(1).uniform(0.5, 2, (N, columns // GROUP)).astype(np.float32)
        return Linear(jnp.asarray(stored), jnp.asarray(scale)), stored * np.repeat(scale.astype(np.float64), GROUP, 1)
    stored = numbers.astype(kind)
    return Linear(jnp.asarray(stored)), stored.astype(np.float64)


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
@pytest.mark.parametrize("columns", [640, 4064, 4096, 8960, 14336])
def test_a_row_is_multiplied_in_one_pass(kind, columns):
    """XLA:CPU does not fuse a dot of 4,096 columns or more: it would write the weight out in f32."""
    linear, numbers = weight(kind, columns)
    for rows in (1, 2, 3):
        x = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
        compiled = jax.jit(lambda f, x: f(x, "float32"), compiler_options=COMPILER_OPTIONS["cpu"]).lower(linear, x).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < N * columns / 2
        expected = x.astype(np.float64) @ numbers.T
        np.testing.assert_allclose(compiled(linear, x), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
