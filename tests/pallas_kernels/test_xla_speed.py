"""What XLA:CPU makes of the same attention with other numbers of KV heads."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode

TOKENS, PAGE, QUERY_HEADS, HEAD_DIM = 4096, 16, 32, 128


def decode_of(num_kv_heads):
    """A jitted decode of one row of TOKENS with its arguments, compiled."""
    rng = np.random.default_rng(0)
    num_pages, group = TOKENS // PAGE + 1, QUERY_HEADS // num_kv_heads
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    pool = num_pages, num_kv_heads, PAGE, HEAD_DIM
    table = jnp.arange(1, num_pages, dtype=jnp.int32)[None]
    args = draw(1, num_kv_heads, group, HEAD_DIM), draw(*pool), draw(*pool), table, jnp.array([TOKENS], jnp.int32)
    run = jax.jit(lambda *args: paged_decode(*args, scale=0.1, implementation="xla"))
    jax.block_until_ready(run(*args))
    return lambda: jax.block_until_ready(run(*args))


@pytest.mark.slow
def test_a_byte_of_mha_costs_no_more_than_one_of_gqa():
    """One query head a KV head was 15 times as slow as four, with four times the bytes: a reduce over one operand is not vectorised."""
    if jax.default_backend() != "cpu":
        pytest.skip("times XLA:CPU")
    runs = {heads: decode_of(heads) for heads in (32, 8)}
    times = {heads: [] for heads in runs}
    for _ in range(15):
        for heads, run in runs.items():
            begin = time.perf_counter()
            run()
            times[heads].append(time.perf_counter() - begin)
    assert min(times[32]) < 2 * 4 * min(times[8])
