"""Values that no caller should give, which cannot be refused when traced: every implementation takes them alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import IMPLEMENTATIONS, paged_decode, paged_prefill, write_kv

B, T, K, G, H, P, M, PAGES = 2, 4, 2, 2, 128, 32, 3, 9
TABLE = np.array([[1, 2, 3], [4, 5, 6]], np.int32)


def options(implementation):
    return {"implementation": implementation, "interpret": implementation.startswith("pallas")}


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


POOLS = normal(PAGES, K, P, H), normal(PAGES, K, P, H)[::-1].copy()


def decode(implementation, table=TABLE, lengths=(50, 20), window=0):
    run = functools.partial(paged_decode, scale=0.1, **options(implementation))
    return jax.jit(lambda *a, window: run(*a, window=window))(
        normal(B, K, G, H), *POOLS, table, np.array(lengths, np.int32), window=np.int32(window)
    )


def prefill(implementation, table=TABLE, lengths=(50, 20), window=0, chunk_lengths=(4, 3)):
    run = functools.partial(paged_prefill, scale=0.1, **options(implementation))
    new = {"k_new": normal(B, T, K, H), "v_new": normal(B, T, K, H)}
    o = jax.jit(lambda *a, window: run(*a, window=window, **new))(
        normal(B, T, K, G, H),
        *POOLS,
        table,
        np.array(lengths, np.int32),
        np.array(chunk_lengths, np.int32),
        window=np.int32(window),
    )
    return o[0], o[1, :3]


def write(implementation, table=TABLE, lengths=(50, 20), chunk_lengths=(4, 3)):
    pools = tuple(map(jnp.asarray, POOLS))
    new = normal(B, T, K, H), normal(B, T, K, H)
    pools = write_kv(*pools, *new, table, np.array(lengths, np.int32), np.array(chunk_lengths, np.int32), **options(implementation))
    return tuple(pool[1:] for pool in pools[:2])  # the null page holds anything


def same(op, implementation, strange, plain):
    for got, want in zip(op(implementation, **strange), op(implementation, **plain), strict=True):
        np.testing.assert_array_equal(got, want)


NO_PAGE, NULL_PAGE = np.where(TABLE == 2, -1, TABLE), np.where(TABLE == 2, 0, TABLE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", [decode, prefill], ids=lambda op: op.__name__)
def test_attention_takes_the_nearest(op, implementation):
    same(op, implementation, {"lengths": (200, -7)}, {"lengths": (M * P, 0)})
    same(op, implementation, {"table": NO_PAGE}, {"table": NULL_PAGE})
    same(op, implementation, {"window": -1}, {"window": 0})
    if op is prefill:
        same(op, implementation, {"chunk_lengths": (9, 3)}, {"chunk_lengths": (4, 3)})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_writes_stay_where_they_belong(implementation):
    same(write, implementation, {"chunk_lengths": (9, -2)}, {"chunk_lengths": (4, 0)})
    same(write, implementation, {"lengths": (50, -3)}, {"chunk_lengths": (4, 0)})
    same(write, implementation, {"lengths": (200, 20)}, {"chunk_lengths": (0, 3)})
    same(write, implementation, {"table": NO_PAGE}, {"table": NULL_PAGE})


@pytest.mark.parametrize("name", ["window", "page_offset"])
@pytest.mark.parametrize("value", [2**31, np.int64(2**32 + 5), -(2**40)])
def test_whole_numbers_that_int32_would_change_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be in the range of int32, got {value}"):
        paged_decode(normal(B, K, G, H), *POOLS, TABLE, np.array([50, 20], np.int32), scale=0.1, **{name: value})
