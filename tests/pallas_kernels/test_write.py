"""write_kv: pools and scales compared whole and exactly with a numpy model, in place, and within int32."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import (
    EIGHT_BIT,
    ENGINE_OPTIONS,
    IMPLEMENTATIONS_UNDER_TEST,
    LITERAL_OPTIONS,
    REFERENCE,
    as_pool,
    each,
    label,
    quantised,
    scale_array,
)

from pallas_kernels import paged_decode, paged_prefill, scales_shape, write_kv

CPU = jax.default_backend() == "cpu"
ENGINE, LITERAL = (ENGINE_OPTIONS, LITERAL_OPTIONS) if CPU else (None, None)
XLA = ("xla", False)
L, B, M, C = 3, 4, 4, 23
GARBAGE = np.asarray([-1, -7, 2**31 - 1, -(2**31), L * C, 0], np.int32)


@dataclasses.dataclass(frozen=True)
class Pool:
    """Form of a pool; P fits a TPU's tiles."""

    dtype: str
    P: int
    K: int = 2
    H: int = 128
    packed: int = 1
    lanes: int = 0

    @property
    def shape(self):
        return L * C, self.K // self.packed, self.P, self.lanes or self.H * self.packed

    def __str__(self):
        return (
            f"{self.dtype}-P{self.P}K{self.K}H{self.H}" + f"-packed{self.packed}" * (self.packed > 1) + "-padded" * bool(self.lanes)
        )


POOLS = [
    Pool("float32", 8),
    Pool("float16", 16, K=3, H=256),
    Pool("bfloat16", 16),
    Pool("uint16", 16, K=4, H=64, packed=2),
    Pool("int8", 32, K=3),
    Pool("int8", 32, K=4, H=64, packed=2),
    Pool("float8_e4m3fn", 64, K=2, H=80, lanes=128),
    Pool("uint8", 32, K=5),
]
implementations = each(reference=True)
# What the oracle and xla run by default where each pool is a compilation more; interpreted kernels run the first or the third.
USUAL = FLOATS, _, SCALED, _ = [POOLS[0], POOLS[3], POOLS[4], POOLS[6]]


def implementations_and_pools(usual=POOLS, quick=()):
    """Parameters of a test that runs each pool through each implementation."""
    run_by = [REFERENCE, *IMPLEMENTATIONS_UNDER_TEST]
    marks = lambda i, pool: () if pool in (quick if i[1] else usual) else pytest.mark.slow
    cases = [pytest.param(i, pool, marks=marks(i, pool)) for i in run_by for pool in POOLS]
    return pytest.mark.parametrize(("implementation", "pool"), cases, ids=label)


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def call(case, implementation):
    name, interpret = implementation
    return write_kv(**case, implementation=name, interpret=interpret)


_STATIC = dict(static_argnames="implementation")
_COMPILED = {
    True: jax.jit(call, compiler_options=ENGINE, **_STATIC),
    False: jax.jit(call, compiler_options=LITERAL, **_STATIC),
}


def write(case, implementation):
    """(k_pages, v_pages, kv_scales) as numpy."""
    arrays = {name: x for name, x in case.items() if x is not None}
    return tuple(None if x is None else np.asarray(x) for x in _COMPILED[implementation == XLA](arrays, implementation))


def stored_form(x, pool: Pool):
    """(values [.., K', H'], scales f32[.., K'] or None) of x f32[.., K, H]."""
    x = x.reshape(*x.shape[:-2], pool.shape[1], -1)
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pool.shape[3] - x.shape[-1])])
    return quantised(x, pool.dtype) if pool.dtype in EIGHT_BIT else (as_pool(x, pool.dtype), None)


def written(case, pool: Pool):
    """What write_kv should return: one token of one layer at a time."""
    k_new, v_new = case["k_new"], case["v_new"]
    out = [case["k_pages"].copy(), case["v_pages"].copy(), None]
    if case["kv_scales"] is not None:
        out[2] = case["kv_scales"].copy().reshape(len(out[0]), 2, -1)
    for l, b in np.ndindex(*k_new.shape[:2]):
        for t in range(case["chunk_lengths"][b]):
            column, slot = divmod(int(case["lengths"][b]) + t, pool.P)
            page = int(case["page_offset"]) + l * (len(out[0]) // len(k_new)) + case["page_table"][b, column]
            for kind, new in enumerate((k_new, v_new)):
                values, scale = stored_form(new[l, b, t], pool)
                out[kind][page, :, slot] = values
                if scale is not None:
                    out[2][page, kind, slot : pool.P * pool.shape[1] : pool.P] = scale
    return out[0], out[1], None if out[2] is None else out[2].reshape(case["kv_scales"].shape)


def make(pool: Pool, seed, T, lengths, counts):
    """Pools and scales of random bits, NaN among them, and a chunk with NaN in every token that must not land."""
    rng = np.random.default_rng(seed)
    lengths, counts = np.asarray(lengths, np.int32), np.asarray(counts, np.int32)
    normal = lambda *dims: rng.standard_normal(dims, np.float32)
    if pool.dtype in EIGHT_BIT:
        pages = [rng.integers(0, 256, pool.shape, np.uint8).view(jnp.dtype(pool.dtype)) for _ in range(2)]
        scales = scale_array(normal(*pool.shape[:3]), normal(*pool.shape[:3]))
    else:
        pages, scales = [as_pool(np.where(x > 2, np.nan, x), pool.dtype) for x in (normal(*pool.shape), normal(*pool.shape))], None
    new = [normal(L, B, T, pool.K, pool.H) for _ in range(2)]
    for x in new:
        x[:, np.arange(T) >= counts[:, None]] = np.nan
    table = rng.permutation(np.arange(1, C, dtype=np.int32))[: B * M].reshape(B, M)
    owned = np.arange(M) < -(-(lengths + counts) // pool.P)[:, None]
    return {
        "k_pages": pages[0],
        "v_pages": pages[1],
        "k_new": new[0],
        "v_new": new[1],
        "page_table": np.where(owned, table, rng.choice(GARBAGE, table.shape)),
        "lengths": lengths,
        "chunk_lengths": counts,
        "kv_scales": scales,
        "page_offset": np.int32(0),
    }


def assert_same_bits(got, want):
    for name, a, b in zip(("k_pages", "v_pages", "kv_scales"), got, want, strict=True):
        assert (a is None) == (b is None), name
        if b is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            bits = f"u{b.dtype.itemsize}"
            np.testing.assert_array_equal(a.view(bits), b.view(bits), err_msg=name)


@st.composite
def rows(draw, pool, T):
    """(seed, lengths, counts) on the edges of pages and of the table."""
    most = M * pool.P
    out = []
    for _ in range(B):
        count = draw(st.sampled_from(sorted({0, 1, T - 1, T})))
        out.append((min(draw(st.sampled_from([0, 1, pool.P - 1, pool.P, pool.P + 1, most - count])), most - count), count))
    return draw(st.integers(0, 999)), [length for length, _ in out], [count for _, count in out]


def lands(implementation, pool, T, data):
    seed, lengths, counts = data.draw(rows(pool, T))
    case = make(pool, seed, T, lengths, counts)
    with jax.numpy_dtype_promotion("strict"):
        assert_same_bits(write(case, implementation), written(case, pool))


@implementations_and_pools(quick=[SCALED])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_every_counted_token_lands_and_nothing_else_changes(implementation, pool, data):
    lands(implementation, pool, 21, data)


@implementations_and_pools(USUAL, quick=[FLOATS])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_one_token_a_row_lands_and_nothing_else_changes(implementation, pool, data):
    lands(implementation, pool, 1, data)


@implementations_and_pools(quick=[SCALED])
def test_dropped_tokens_change_nothing_not_even_the_last_page(implementation, pool):
    """CASES 17. Also where the last page is the row's own, and where the table is full and a dropped position has no column."""
    most = M * pool.P
    case = make(pool, 0, 21, [most, most - 1, 3, 0], [0, 0, 0, 0])
    before = case["k_pages"], case["v_pages"], case["kv_scales"]
    assert_same_bits(write(case, implementation), before)
    assert_same_bits(write(case | {"page_table": np.full((B, M), C - 1, np.int32)}, implementation), before)


@implementations_and_pools(quick=[SCALED])
def test_positions_past_the_table_are_dropped(implementation, pool):
    """A row that claims more tokens than its table holds stores what fits, and keeps its old ones: nothing wraps."""
    most = M * pool.P
    case = make(pool, 0, 21, [most - 2, most, 3, most - 21], [21, 5, 21, 21])
    fits = case | {"chunk_lengths": np.asarray([2, 0, 21, 21], np.int32)}
    assert_same_bits(write(case, implementation), written(fits, pool))


@implementations
def test_an_idle_row_shares_the_null_page_with_others(implementation):
    pool = POOLS[0]
    case = make(pool, 1, 1, [0, 6, 0, 19], [0, 1, 0, 1])
    case["page_table"][[0, 2]] = 0
    assert_same_bits(write(case, implementation), written(case, pool))


@implementations
def test_rounding_is_to_nearest_even_and_subnormals_survive(implementation):
    for pool, numbers in (
        (POOLS[2], [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 65536.0, 3e38]),
        (POOLS[1], [1 + 2**-11, 1 + 3 * 2**-11, 2**-20, -(2**-24)]),
        (POOLS[4], [127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]),
    ):
        case = make(pool, 0, 1, [0] * B, [1] * B)
        case["k_new"].reshape(-1)[: len(numbers)] = numbers
        case["v_new"][:] = 0  # all of a vector zero: scale 0, no NaN
        assert_same_bits(write(case, implementation), written(case, pool))


@implementations
def test_a_long_windowed_prompt_is_stored_whole(implementation):
    """CASES 7: 393 tokens under a window of 128; what the mask skipped is there for a reader without it."""
    T, P, K, H, window = 393, 16, 2, 128, 128
    rng = np.random.default_rng(0)
    normal = lambda *dims: rng.standard_normal(dims, np.float32)
    pages = np.full((40, K, P, H), np.nan, np.float32)
    table = np.asarray([rng.permutation(np.arange(1, 40))[: -(-T // P)]], np.int32)
    empty, counts = np.zeros(1, np.int32), np.full(1, T, np.int32)
    q, k_new, v_new = normal(1, T, K, 2, H), normal(1, T, K, H), normal(1, T, K, H)
    name, interpret = implementation
    jit = lambda op, **options: jax.jit(functools.partial(op, implementation=name, interpret=interpret, **options))
    prefill, decode = jit(paged_prefill, scale=H**-0.5), jit(paged_decode, scale=H**-0.5)
    o = prefill(q, pages, pages, table, empty, counts, k_new=k_new, v_new=v_new, window=window)
    assert np.isfinite(o).all()
    k_pages, v_pages, _ = jit(write_kv)(pages, pages, k_new, v_new, table, empty, counts)
    flat = np.asarray(k_pages)[table[0]].transpose(0, 2, 1, 3).reshape(-1, K, H)
    np.testing.assert_array_equal(flat[:T], k_new[0])
    last = decode(q[:, -1], k_pages, v_pages, table, counts, window=window)
    np.testing.assert_allclose(last, o[:, -1], rtol=1e-5, atol=1e-5)
    everything = decode(q[:, -1], k_pages, v_pages, table, counts, window=0)
    scores = np.einsum("kgh,tkh->kgt", q[0, -1], k_new[0]) * H**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("kgt,tkh->kgh", weights / weights.sum(-1, keepdims=True), v_new[0])
    np.testing.assert_allclose(everything[0], want, rtol=1e-4, atol=1e-5)


@implementations_and_pools(USUAL)
def test_layers_one_by_one_are_all_at_once(implementation, pool):
    """A call for one layer, at a traced first row, as a scan over layers makes it."""
    case = make(pool, 2, 5, [0, pool.P - 2, 2 * pool.P, 7], [5, 5, 0, 3])
    want = written(case, pool)
    got = {name: case[name] for name in ("k_pages", "v_pages", "kv_scales")}
    for layer in range(L):
        new = {name: case[name][layer] for name in ("k_new", "v_new")}
        step = case | got | new | {"page_offset": np.int32(layer * C)}
        got = dict(zip(got, write(step, implementation), strict=True))
    assert_same_bits(tuple(got.values()), want)


@pytest.mark.parametrize("T", [1, 40])
@implementations
def test_positions_past_int16(implementation, T):
    columns, P, num_pages = 2600, 16, 9
    rng = np.random.default_rng(0)
    table = np.zeros((2, columns), np.int32)
    table[0, 2046:2050], table[1, 2597:] = [5, 2, 7, 3], [1, 8, 4]
    pool = Pool("float32", P, K=1)
    pages = rng.standard_normal((2, 2 * num_pages, 1, P, 128), np.float32)
    new = rng.standard_normal((2, 2, 2, T, 1, 128), np.float32)
    case = dict(
        k_pages=pages[0], v_pages=pages[1], k_new=new[0], v_new=new[1], page_table=table, kv_scales=None, page_offset=np.int32(0),
        lengths=np.asarray([32_750, 41_560], np.int32), chunk_lengths=np.asarray([T, T - 1], np.int32),
    )  # fmt: skip
    assert_same_bits(write(case, implementation), written(case, pool))


@pytest.mark.skipif(not CPU, reason="compiler options of XLA:CPU")
@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        ("float32", 1),
        ("uint16", 2),
        ("int8", 2),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("float32", 2), ("int8", 1), ("uint8", 2))),
    ],
)
def test_xla_writes_in_place(dtype, heads):
    """CASES of copies that alias bytes do not show: temporaries. As one step, and as the loop of several steps carries it."""
    layers, pages, P, H, slots = 8, 512 // heads, 16, 64, 4
    array = jax.ShapeDtypeStruct
    pool = array((layers * pages, heads, P, H), dtype)
    scales = array(scales_shape(layers * pages, heads, P), np.float32) if dtype in EIGHT_BIT else None
    donated = [pool, pool] + ([scales] if scales else [])
    pool_bytes = sum(x.size * x.dtype.itemsize for x in donated)
    ids, table = array((slots,), np.int32), array((slots, 64), np.int32)

    def step(pools, new, table, lengths, counts):
        k, v, s = write_kv(
            *pools[:2], new, new, table, lengths, counts, kv_scales=pools[2] if scales else None, implementation="xla"
        )
        return (k, v, s) if scales else (k, v)

    loop = lambda pools, *args: jax.lax.fori_loop(0, args[-1][0], lambda i, pools: step(pools, *args), pools)
    for T, function in itertools.product((1, 64), (step, loop)):
        new = array((layers, slots, T, heads, H), np.float32)
        compiled = (
            jax.jit(function, donate_argnums=0, compiler_options=ENGINE).lower(tuple(donated), new, table, ids, ids).compile()
        )
        stats = compiled.memory_analysis()
        assert stats.alias_size_in_bytes == pool_bytes
        new_bytes = 2 * new.size * 4  # the chunk itself, quantised, and its indices
        assert stats.temp_size_in_bytes < pool_bytes // layers // 2 + (new_bytes if T > 1 else 0), (T, stats.temp_size_in_bytes)


@pytest.mark.slow
def test_pools_past_2_31_elements_are_written_and_read_right():
    """2 GiB and a little each, of fp8 in bytes, in pages on both sides of element 2^31."""
    P, H = 64, 128
    pages = 2**17 + 8
    pools = [jnp.zeros((2 * pages, 1, P, H), np.uint8) for _ in range(2)]
    scales = jnp.zeros(scales_shape(2 * pages, 1, P), np.float32)
    assert (2 * pages - 17) * P * H < 2**31 < pools[0].size
    table = np.asarray([[pages - 1, pages - 17], [1, 2]], np.int32)
    lengths, counts = np.asarray([60, 3], np.int32), np.asarray([8, 0], np.int32)
    new = np.random.default_rng(0).standard_normal((2, 2, 8, 1, H), np.float32)
    store = jax.jit(functools.partial(write_kv, implementation="xla"), donate_argnums=(0, 1), compiler_options=ENGINE)
    k_pages, v_pages, scales = store(*pools, new, new, table, lengths, counts, kv_scales=scales)
    want, want_scale = quantised(new[:, 0, :, 0], "uint8")  # [L, T, H]
    for layer in range(2):
        last = np.asarray(k_pages[layer * pages + pages - 17 : (layer + 1) * pages])
        np.testing.assert_array_equal(last[16, 0, 60:], want[layer, :4])
        np.testing.assert_array_equal(last[0, 0, :4], want[layer, 4:])
    assert int(jnp.count_nonzero(v_pages)) == np.count_nonzero(want)
    q = np.ones((2, 1, 1, H), np.float32)
    read = jax.jit(functools.partial(paged_decode, scale=0.1, implementation="xla"), compiler_options=ENGINE)
    o = read(q, k_pages, v_pages, table, np.asarray([68, 0], np.int32), kv_scales=scales, page_offset=np.int32(pages))
    values = np.concatenate([np.zeros((60, H)), want[1].view(jnp.float8_e4m3fn).astype(np.float64) * want_scale[1][:, None]])
    weights = np.exp(0.1 * values.sum(1))
    np.testing.assert_allclose(o[0, 0, 0], weights @ values / weights.sum(), rtol=1e-4, atol=1e-5)
    assert not o[1].any()
