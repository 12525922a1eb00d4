"""Page copies, compared whole with a numpy model and in place; and the pools that a state starts with."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.buckets import most_written_tokens
from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.kv import pages as ownership
from jaxkv.kv.state import KV_DTYPES, empty_kv
from jaxkv.kv.store import copy_pages

L, K, P, H, C = 3, 2, 4, 8, 27
DTYPES = ("float32", "float16", "bfloat16", "uint16", "int8")
# How the engine compiles on CPU (jaxkv/steps.py).
ENGINE_OPTIONS = {"xla_cpu_prefer_vector_width": 512, "xla_cpu_enable_fast_math": True}
OPTIONS = ENGINE_OPTIONS if jax.default_backend() == "cpu" else None

copy = jax.jit(copy_pages, static_argnames="num_layers", compiler_options=OPTIONS)


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def stored_form(x, dtype):
    """f32 numbers as a pool of that dtype holds them; uint16 holds the bits of bfloat16."""
    return x.astype(jnp.bfloat16).view(np.uint16) if dtype == "uint16" else x.astype(dtype)


def assert_same_bits(got, want):
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    bits = f"u{want.itemsize}"
    np.testing.assert_array_equal(got.view(bits), want.view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_reach_every_layer_and_drop_destinations_past_the_end(dtype):
    rng = np.random.default_rng(0)
    pool = stored_form(rng.standard_normal((L * C, K, P, H), np.float32), dtype)
    layers = pool.reshape(L, C, K, P, H)
    for src, dst in (
        ([3, 9, 1, 0], [4, 20, 2, C]),
        ([5, 5, 0, 0], [6, C - 1, C, C]),  # one page twice; several dropped
        ([7, 8, 9, 2], [8, 9, 2, 1]),  # a source that is also a destination: what it held before
        ([1, 2, 3, 4], [C, C + 1, 2**31 - 1, L * C]),  # C + 1 is a page of the next layer: still dropped
    ):
        src, dst = np.asarray(src, np.int32), np.asarray(dst, np.int32)
        want = layers.copy()
        for s, d in zip(src, dst, strict=True):
            if d < C:
                want[:, d] = layers[:, s]
        assert_same_bits(copy(pool, src, dst, num_layers=L), want.reshape(pool.shape))


def memory(function, *args):
    """(alias bytes, temp bytes) of `function` with its first argument donated, compiled as the engine does."""
    compiled = jax.jit(function, donate_argnums=0, compiler_options=OPTIONS).lower(*args).compile()
    stats = compiled.memory_analysis()
    return stats.alias_size_in_bytes, stats.temp_size_in_bytes


@pytest.mark.parametrize(("dtype", "heads"), [("float32", 2), ("float32", 1), ("uint16", 2), ("uint8", 1)])
def test_copies_are_in_place(dtype, heads):
    layers, pages, page_size, dim, slots = 8, 512 // heads, 16, 64, 4
    pool, ids = jax.ShapeDtypeStruct((layers * pages, heads, page_size, dim), dtype), jax.ShapeDtypeStruct((slots,), np.int32)
    alias, temp = memory(functools.partial(copy_pages, num_layers=layers), pool, ids, ids)
    assert alias == pool.size * pool.dtype.itemsize
    assert temp < alias // layers


def config(num_layers=32, num_kv_heads=8, head_dim=2):
    return ModelConfig(
        architecture="llama", vocab_size=8, model_dim=8, num_layers=num_layers, num_q_heads=num_kv_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, mlp_dim=8, max_positions=2**20, query_scale=1.0,
        layer_windows=(0,) * num_layers, layer_ropes=(0,) * num_layers, ropes=(RopeConfig(theta=1e4, rotary_dim=2),),
    )  # fmt: skip


HELD = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}  # on CPU, as their bits


@pytest.mark.parametrize(("dtype", "platform"), [*itertools.product(KV_DTYPES, ("cpu", "gpu", "tpu"))])
def test_an_empty_pool_has_the_shape_and_dtype_asked_for(dtype, platform):
    kv = empty_kv(config(3, 2, 4), 2, pages_per_slot=5, page_size=8, num_pages=7, dtype=dtype, platform=platform)
    lanes = 128 if platform == "tpu" else 4  # heads are padded where 128 lanes move at once
    assert kv.k_pages.shape == kv.v_pages.shape == (21, 2, 8, lanes)
    assert kv.k_pages.dtype == kv.v_pages.dtype == (HELD.get(dtype, dtype) if platform == "cpu" else dtype)
    assert not kv.k_pages.view(np.uint8).any() if platform == "cpu" else True
    assert (kv.page_table.shape, kv.lengths.shape, kv.refcounts.shape) == ((2, 5), (2,), (7,))
    eight_bits = kv.k_pages.dtype.itemsize == 1
    assert (kv.kv_scales is not None) == eight_bits
    assert kv.nbytes == 2 * kv.k_pages.nbytes + (21 * 2 * 128 * 4 if eight_bits else 0)


def test_an_unknown_dtype_is_refused_by_name():
    with pytest.raises(ValueError, match="kv_dtype='int4' is not one of float32, bfloat16, float16, int8, float8_e4m3fn"):
        empty_kv(config(), 1, 1, 16, 4, "int4", "cpu")


@pytest.mark.parametrize(
    ("num_slots", "pages_per_slot", "page_size", "layers", "heads"),
    [(4, 64, 128, 32, 8), (100_000, 4, 128, 32, 8), (4, 64, 1, 1, 1)],
    ids=["long", "wide", "smallest_pages"],
)
def test_a_pool_is_refused_from_the_first_size_that_int32_cannot_index(num_slots, pages_per_slot, page_size, layers, heads):
    """The largest accepted one leaves room for the indices of what the largest write drops."""
    shape = config(layers, heads)
    most = (2**31 - layers * most_written_tokens(num_slots, pages_per_slot * page_size)) // (layers * heads * page_size)
    make = lambda n: empty_kv(shape, num_slots, pages_per_slot, page_size, n, "bfloat16", "cpu")
    with pytest.MonkeyPatch.context() as patch:  # up to 8 GiB of reference counts
        patch.setattr(ownership, "empty", lambda *sizes: None)
        kv = jax.eval_shape(lambda: make(most))
    assert kv.k_pages.shape == (layers * most, heads, page_size, shape.head_dim)
    with pytest.raises(ValueError, match=rf"num_pages={most + 1} \* num_kv_heads={heads} .*int32: .* of at most 2,147,483,648"):
        make(most + 1)
