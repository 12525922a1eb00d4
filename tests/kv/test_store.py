"""Writes into the pools: compared whole with a numpy model, in place, and within int32."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.kv import pages as ownership
from jaxkv.kv.state import KV_DTYPES, empty_kv
from jaxkv.kv.store import copy_pages, write_tokens
from pallas_kernels import paged_decode

L, B, K, P, H, M, C = 3, 4, 2, 4, 8, 5, 27
DTYPES = ("float32", "float16", "bfloat16", "uint16")
# How the engine compiles on CPU (jaxkv/steps.py).
ENGINE_OPTIONS = {"xla_cpu_prefer_vector_width": 512, "xla_cpu_enable_fast_math": True}
OPTIONS = ENGINE_OPTIONS if jax.default_backend() == "cpu" else None
GARBAGE = np.asarray([-1, -7, 2**31 - 1, -(2**31), L * C, 0], np.int32)

write = jax.jit(write_tokens, compiler_options=OPTIONS)
copy = jax.jit(copy_pages, static_argnames="num_layers", compiler_options=OPTIONS)


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def stored_form(x, dtype):
    """f32 numbers as a pool of that dtype holds them; uint16 holds the bits of bfloat16."""
    return x.astype(jnp.bfloat16).view(np.uint16) if dtype == "uint16" else x.astype(dtype)


def written(pool, new, table, lengths, counts):
    """What write_tokens should return: one vector at a time into [layer, page, head, slot]."""
    layers, rows, _, heads, _ = new.shape
    out = pool.copy().reshape(layers, -1, *pool.shape[1:])
    page_size = pool.shape[2]
    for l, b, k in np.ndindex(layers, rows, heads):
        for t in range(counts[b]):
            page, slot = divmod(int(lengths[b]) + t, page_size)
            out[l, table[b, page], k, slot] = stored_form(new[l, b, t, k], pool.dtype.name)
    return out.reshape(pool.shape)


def make(seed, dtype, T, lengths, counts):
    """A pool of random numbers, and a chunk with NaN in every token that must not land."""
    rng = np.random.default_rng(seed)
    lengths, counts = np.asarray(lengths, np.int32), np.asarray(counts, np.int32)
    pool = stored_form(rng.standard_normal((L * C, K, P, H), np.float32), dtype)
    new = rng.standard_normal((L, B, T, K, H), np.float32)
    new[:, np.arange(T) >= counts[:, None]] = np.nan
    table = rng.permutation(np.arange(1, C, dtype=np.int32))[: B * M].reshape(B, M)
    owned = np.arange(M) < -(-(lengths + counts) // P)[:, None]
    return pool, new, np.where(owned, table, rng.choice(GARBAGE, table.shape)), lengths, counts


def assert_same_bits(got, want):
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    bits = f"u{want.itemsize}"
    np.testing.assert_array_equal(got.view(bits), want.view(bits))


@st.composite
def writes(draw, T):
    rows = []
    for _ in range(B):
        count = draw(st.sampled_from(sorted({0, 1, T - 1, T})))
        edges = [0, 1, P - 1, P, P + 1, M * P - count]
        rows.append((min(draw(st.sampled_from(edges)), M * P - count), count))
    return draw(st.integers(0, 999)), [r[0] for r in rows], [r[1] for r in rows]


@pytest.mark.parametrize("T", [1, 11])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_counted_token_lands_and_nothing_else_changes(dtype, T, data):
    seed, lengths, counts = data.draw(writes(T))
    case = make(seed, dtype, T, lengths, counts)
    with jax.numpy_dtype_promotion("strict"):
        assert_same_bits(write(*case), written(*case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropped_tokens_change_nothing_not_even_the_last_page(dtype):
    """Also where the last page is the row's own, and where the table is full and a dropped position has no column."""
    pool, new, table, lengths, counts = make(0, dtype, 11, [M * P, M * P - 1, 3, 0], [0, 0, 0, 0])
    assert_same_bits(write(pool, new, table, lengths, counts), pool)
    table = np.full((B, M), C - 1, np.int32)
    assert_same_bits(write(pool, new, table, lengths, counts), pool)


def test_an_idle_row_shares_the_null_page_with_others():
    case = make(1, "float32", 1, [0, 6, 0, 19], [0, 1, 0, 1])
    case[2][[0, 2]] = 0
    assert_same_bits(write(*case), written(*case))


def test_rounding_is_to_nearest_even_and_subnormals_survive():
    pool, new, table, lengths, counts = make(0, "uint16", 1, [0] * B, [1] * B)
    new.reshape(-1)[:5] = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 65536.0, 3e38]
    assert_same_bits(write(pool, new, table, lengths, counts), written(pool, new, table, lengths, counts))
    pool, new, *rest = make(0, "float16", 1, [0] * B, [1] * B)
    new.reshape(-1)[:4] = [1 + 2**-11, 1 + 3 * 2**-11, 2**-20, -(2**-24)]
    assert_same_bits(write(pool, new, *rest), written(pool, new, *rest))


@pytest.mark.parametrize("T", [1, 40])
def test_positions_past_int16(T):
    columns, page_size, num_pages = 2600, 16, 9
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((2 * num_pages, 1, page_size, 4), np.float32)
    new = rng.standard_normal((2, 2, T, 1, 4), np.float32)
    lengths = np.asarray([32_750, 41_560], np.int32)
    table = np.zeros((2, columns), np.int32)
    table[0, 2046:2050], table[1, 2597:] = [5, 2, 7, 3], [1, 8, 4]
    case = (pool, new, table, lengths, np.asarray([T, T - 1], np.int32))
    assert_same_bits(write(*case), written(*case))


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


@pytest.mark.parametrize(("dtype", "heads"), [("float32", 2), ("float32", 1), ("uint16", 2)])
def test_writes_are_in_place(dtype, heads):
    layers, pages, page_size, dim, slots = 8, 512 // heads, 16, 64, 4
    array = jax.ShapeDtypeStruct
    pool = array((layers * pages, heads, page_size, dim), dtype)
    pool_bytes = pool.size * pool.dtype.itemsize
    ids, table = array((slots,), np.int32), array((slots, 64), np.int32)
    loop = lambda pages, *args: jax.lax.fori_loop(0, args[-1][0], lambda i, pages: write_tokens(pages, *args), pages)
    for T in (1, 64):
        new = array((layers, slots, T, heads, dim), np.float32)
        for function in (write_tokens, loop):  # as one step, and as the loop of several steps carries it
            alias, temp = memory(function, pool, new, table, ids, ids)
            assert alias == pool_bytes
            assert temp < pool_bytes // layers, T
    alias, temp = memory(functools.partial(copy_pages, num_layers=layers), pool, ids, ids)
    assert alias == pool_bytes
    assert temp < pool_bytes // layers


def config(num_layers=32, num_kv_heads=8, head_dim=2):
    return ModelConfig(
        architecture="llama", vocab_size=8, model_dim=8, num_layers=num_layers, num_q_heads=num_kv_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, mlp_dim=8, max_positions=2**20, query_scale=1.0,
        layer_windows=(0,) * num_layers, layer_ropes=(0,) * num_layers, ropes=(RopeConfig(theta=1e4, rotary_dim=2),),
    )  # fmt: skip


def test_an_empty_pool_has_the_shape_and_dtype_asked_for():
    for dtype, platform in itertools.product(KV_DTYPES, ("cpu", "tpu")):
        kv = empty_kv(config(3, 2, 4), 2, pages_per_slot=5, page_size=8, num_pages=7, dtype=dtype, platform=platform)
        assert kv.k_pages.shape == kv.v_pages.shape == (21, 2, 8, 4)
        bits = dtype == "bfloat16" and platform == "cpu"
        assert kv.k_pages.dtype == kv.v_pages.dtype == ("uint16" if bits else dtype)
        assert not kv.k_pages.any()
        assert (kv.page_table.shape, kv.lengths.shape, kv.refcounts.shape) == ((2, 5), (2,), (7,))
        assert kv.nbytes == 2 * kv.k_pages.nbytes
    with pytest.raises(ValueError, match="kv_dtype='int8' is not one of float32, bfloat16, float16"):
        empty_kv(config(), 1, 1, 16, 4, "int8", "cpu")


@pytest.mark.parametrize(
    ("num_slots", "pages_per_slot", "page_size", "layers", "heads"),
    [(4, 64, 128, 32, 8), (100_000, 4, 128, 32, 8), (4, 64, 1, 1, 1)],
    ids=["long", "wide", "smallest_pages"],
)
def test_a_pool_is_refused_from_the_first_size_that_int32_cannot_index(num_slots, pages_per_slot, page_size, layers, heads):
    """The largest accepted one leaves room for the indices of what the longest write drops."""
    shape = config(layers, heads)
    longest = 2 * pages_per_slot * page_size  # a slot's whole history in a bucket of up to twice its size
    most = (2**31 - layers * max(num_slots, longest)) // (layers * heads * page_size)
    make = lambda n: empty_kv(shape, num_slots, pages_per_slot, page_size, n, "bfloat16", "cpu")
    with pytest.MonkeyPatch.context() as patch:  # up to 8 GiB of reference counts
        patch.setattr(ownership, "empty", lambda *sizes: None)
        kv = jax.eval_shape(lambda: make(most))
    assert kv.k_pages.shape == (layers * most, heads, page_size, shape.head_dim)
    with pytest.raises(ValueError, match=rf"num_pages={most + 1} \* num_kv_heads={heads} .*int32: .* of at most 2,147,483,648"):
        make(most + 1)
    for rows, T in ((num_slots, 1), (1, longest)):
        assert layers * most + layers * rows * T <= 2**31  # page indices, those of dropped tokens too
        new = jax.ShapeDtypeStruct((layers, rows, T, heads, shape.head_dim), np.float32)
        ids, table = (jax.ShapeDtypeStruct(dims, np.int32) for dims in ((rows,), (rows, pages_per_slot)))
        assert jax.eval_shape(write_tokens, kv.k_pages, new, table, ids, ids).shape == kv.k_pages.shape


@pytest.mark.slow
def test_a_pool_past_2_31_elements_is_written_and_read_right():
    """4 GiB of uint16, in pages on both sides of element 2^31."""
    pages, page_size = 2**23 + 8, 64
    pool = jnp.zeros((2 * pages, 1, page_size, 2), np.uint16)
    assert (2 * pages - 17) * page_size * 2 < 2**31 < pool.size
    table = np.asarray([[pages - 1, pages - 17], [1, 2]], np.int32)
    lengths, counts = np.asarray([60, 3], np.int32), np.asarray([8, 0], np.int32)
    new = np.random.default_rng(0).standard_normal((2, 2, 8, 1, 2), np.float32)
    pool = jax.jit(write_tokens, donate_argnums=0, compiler_options=OPTIONS)(pool, new, table, lengths, counts)
    want = stored_form(new, "uint16")[:, 0, :, 0]  # [L, T, H]
    for layer in range(2):
        last = np.asarray(pool[layer * pages + pages - 17 : (layer + 1) * pages])
        np.testing.assert_array_equal(last[16, 0, 60:], want[layer, :4])
        np.testing.assert_array_equal(last[0, 0, :4], want[layer, 4:])
        assert np.count_nonzero(last) == 16
    assert int(jnp.count_nonzero(pool)) == 32
    q = np.ones((2, 1, 1, 2), np.float32)
    read = jax.jit(functools.partial(paged_decode, scale=1.0), compiler_options=OPTIONS)
    o = read(q, pool, pool, table, np.asarray([68, 0], np.int32), page_offset=np.int32(pages))
    values = np.concatenate([np.zeros((60, 2)), want[1].view(jnp.bfloat16).astype(np.float64)])
    weights = np.exp(values.sum(1))
    np.testing.assert_allclose(o[0, 0, 0], weights @ values / weights.sum(), rtol=1e-5, atol=1e-6)
    assert not o[1].any()
