"""Every implementation against the oracle, and what none may read: the shared suite of paged_decode and paged_prefill."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import (
    EIGHT_BIT,
    ENGINE,
    ENGINE_OPTIONS,
    IMPLEMENTATIONS_UNDER_TEST,
    LAYERS,
    LITERAL_OPTIONS,
    REFERENCE,
    Opaque,
    Shape,
    assert_close,
    bfloat16_bits,
    call,
    cases,
    each,
    label,
    make,
    needed_columns,
    pairs,
    poison,
    real,
    run,
    runs,
    same_bits,
)

from pallas_kernels import DecodeBlocks, paged_decode, write_kv, xla

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="compiler options of XLA:CPU")
XLA = ("xla", False)


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def block_tokens(shape):
    """Tokens of a loop step of the xla implementation; what other kernels choose is of the same size."""
    return xla.DECODE_BLOCK if (shape.T or 1) == 1 else xla.PREFILL_BLOCK


# Groups and head sizes of CASES 5 in decode and in chunks, every pool dtype and form, stored and own keys, soft caps, sinks. P fits
# a TPU's tiles (8 rows of f32, 16 of 16 bits, 32 of 8 bits); K is never P.
DECODE = [
    Shape(K=2, G=1, H=64, P=8, M=36, own=False),
    Shape(K=1, G=3, H=128, P=8, M=36, sinks=True),
    Shape(K=2, G=4, H=80, P=8, M=36, lanes=128, soft_cap=2.0),
    Shape(K=3, G=5, H=96, P=128, M=3, own=False, soft_cap=0.7, sinks=True),
    Shape(K=2, G=6, H=256, P=16, M=17, B=2, pool="float16"),
    Shape(K=2, G=7, H=64, P=16, M=19, dtype="bfloat16", pool="bfloat16", packed=2),
    Shape(K=2, G=16, H=64, P=16, M=19, pool="uint16", soft_cap=3.0),
    Shape(K=1, G=64, H=128, P=16, M=18, B=2, dtype="bfloat16", pool="bfloat16", own=False),
    Shape(K=4, G=2, H=64, P=32, M=9, pool="int8", packed=2, sinks=True),
    Shape(K=3, G=8, H=128, P=32, M=9, pool="uint8", own=False),
    Shape(K=1, G=32, H=80, P=32, M=9, dtype="bfloat16", pool="int8", soft_cap=1.5),
    Shape(K=2, G=3, H=96, P=64, M=5, dtype="bfloat16", pool="float8_e4m3fn", lanes=128),
]
PREFILL = [
    Shape(K=2, G=3, H=64, P=8, M=140, T=6, soft_cap=1.3),
    Shape(K=1, G=8, H=80, P=8, M=70, T=6, sinks=True, lanes=128),
    Shape(K=2, G=2, H=64, P=16, M=70, T=6, dtype="bfloat16", pool="uint16"),
    Shape(K=3, G=1, H=96, P=16, M=40, T=7, B=3, dtype="bfloat16", pool="bfloat16", sinks=True),
    Shape(K=2, G=4, H=64, P=32, M=20, T=33, B=2, pool="int8", packed=2),
    Shape(K=1, G=5, H=128, P=32, M=20, T=17, B=2, dtype="bfloat16", pool="uint8"),
    Shape(K=2, G=7, H=256, P=128, M=5, T=5, B=2, dtype="bfloat16", pool="int8"),
    Shape(K=1, G=2, H=128, P=8, M=70, T=520, B=2),
]
# What only xla promises: pages of any size, heads of any size, float16 all through.
XLA_ONLY = [
    Shape(K=2, G=6, H=128, P=1, M=270),
    Shape(K=2, G=3, H=10, P=4, M=70, own=False),
    Shape(K=1, G=4, H=16, P=4, M=280, T=1),
    Shape(K=3, G=2, H=80, P=1, M=540, T=7, B=3, dtype="float16", pool="float16"),
    Shape(K=1, G=2, H=16, P=12, M=40, T=9, B=3, dtype="float16", pool="int8"),
    Shape(K=1, G=1, H=8, P=16, M=4, T=1024, B=1),
]
STORED, SINKS, BITS, INT8, FP8 = DECODE[0], DECODE[1], DECODE[6], DECODE[8], DECODE[9]
CHUNK, CHUNK_BITS, CHUNK_INT8, LONG = PREFILL[0], PREFILL[2], PREFILL[4], PREFILL[7]
# What nobody runs by default: seconds each to compile, and each of its kinds is in another shape, too.
RARE = [DECODE[7], DECODE[10], DECODE[11], PREFILL[3], PREFILL[6], *XLA_ONLY[1:3], XLA_ONLY[4]]
# What interpreted kernels run by default: one of each op, 8-bit pages and sinks, f32 and a soft cap.
QUICK = [INT8, CHUNK]
ALL = [*pairs(DECODE + PREFILL, QUICK, RARE), *pairs(XLA_ONLY, (), RARE, [XLA])]


def agrees(implementation, shape, data):
    case = data.draw(cases(shape, block_tokens(shape)).map(Opaque)).value
    with jax.numpy_dtype_promotion("strict"):
        assert_close(shape, case, run(shape, case, implementation, engine=implementation == XLA))


@pytest.mark.parametrize(("implementation", "shape"), ALL, ids=label)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_agrees_with_the_oracle(implementation, shape, data):
    agrees(implementation, shape, data)


def _sweep():
    """Every G and H of CASES 5; pool dtypes, ops, forms and P take turns."""
    pools = ["float32", "bfloat16", "int8", "uint8", "uint16", "float16"]
    for i, (G, H) in enumerate(itertools.product((1, 3, 4, 5, 6, 7, 8, 16, 32, 64), (64, 80, 96, 128, 256))):
        pool = pools[i % len(pools)]
        dtype = "bfloat16" if pool != "float32" and i % 2 else "float32"
        P = (32, 64, 128)[i % 3]
        yield Shape(
            K=1 + i % 3, G=G, H=H, P=P, M=640 // P, T=(None, 5)[i // 2 % 2], B=3, own=True, soft_cap=(None, 2.0)[i % 5 == 0],
            sinks=i % 4 == 1, dtype=dtype, pool=pool,
        )  # fmt: skip


def _diagonals(*offsets):
    """Each G and each H of the sweep, each G with as many H as there are offsets."""
    return [shape for i, shape in enumerate(_sweep()) if (i - i // 5) % 5 in offsets]


# All 50 pairs say no more: G and H are plain dims of a product, and what compiles takes 4 s each.
@pytest.mark.slow
@pytest.mark.parametrize("shape", _diagonals(0, 2), ids=str)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_group_with_two_head_sizes(shape, data):
    agrees(XLA, shape, data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "shape"), pairs(_diagonals(0), implementations=IMPLEMENTATIONS_UNDER_TEST[1:]), ids=label
)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_every_group_and_every_head_size(implementation, shape, data):
    agrees(implementation, shape, data)


@each()
def test_positions_past_int16(implementation):
    shape = Shape(K=1, G=2, H=16, P=32, M=1300, B=2)
    for window in (0, 40_000, 17):
        case = make(shape, window, [41_599, 32_768], window=window)
        assert_close(shape, case, run(shape, case, implementation))


@pytest.mark.parametrize("T", [None, 9])
@each()
def test_bits_of_bfloat16_are_bfloat16(implementation, T):
    shape = Shape(K=2, G=3, H=128, P=16, M=10, T=T, pool="bfloat16")
    case = make(shape, 0, [0, 3, 130, 160], window=50)
    assert same_bits(run(shape, case, implementation), run(shape, bfloat16_bits(case), implementation))


# XLA:CPU converts a whole fp8 pool at every step of an interpreted kernel: a small one.
POISONED = [STORED, DECODE[2], BITS, INT8, dataclasses.replace(FP8, B=2, M=5), CHUNK, CHUNK_BITS, CHUNK_INT8, LONG]


@pytest.mark.parametrize(("implementation", "shape"), pairs(POISONED, [STORED]), ids=label)
def test_what_a_row_does_not_hold_is_never_seen(implementation, shape):
    """CASES 1, 3, 4 and 6: bit for bit, NaN behind the length, behind the window, in unused pages and stale columns."""
    P, S, T, block = shape.P, shape.M * shape.P, shape.T or 1, block_tokens(shape)
    windows = (0, 1, P - 1, P, P + 1, 2 * P + 1, block + 3, 2 * block - 1, 2 * block, 2 * block + 1)
    lengths = ([0, 1, P, S], [P - 1, P + 1, block, S - 1], [3 * P, block + P + 1, 2 * block, 2 * P - 1], [0, 0, 0, 0])
    engine = implementation == XLA
    for seed, window in enumerate(windows if engine else windows[::3]):
        for rows in (lengths[seed % 4], lengths[(seed + 1) % 4]) if window else lengths[:3]:
            case = make(shape, seed, np.minimum(rows, S)[: shape.B], [T, max(T - 2, 0), 1, 0][: shape.B], window=window)
            clean, dirty = (run(shape, c, implementation, engine) for c in (case, poison(shape, case, seed)))
            assert np.isfinite(clean[0].astype(np.float32)).all()
            assert same_bits(clean, dirty), (rows, window)
    assert_close(shape, case, clean)


@pytest.mark.parametrize("shape", [STORED, INT8, CHUNK], ids=str)
def test_literal_code_is_deaf_to_poison_too(shape):
    """Without optimisation, and the oracle itself."""
    for implementation in (XLA, REFERENCE):
        for window in (0, 1, 5, 70):
            case = make(shape, window, [0, 9, 64, 230], [6, 0, 3, 6], window=window)
            at = real(shape, case)
            clean, dirty = (run(shape, c, implementation) for c in (case, poison(shape, case, 0)))
            assert same_bits([x[at] for x in clean], [x[at] for x in dirty])


@each(quick=True, reference=True)
def test_empty_rows_are_zero_with_lse_minus_infinity(implementation):
    """CASES 2, with neighbours and without."""
    engine = implementation == XLA
    case = poison(STORED, make(STORED, 0, [0, 9, 0, 70]), 0)
    o, lse = run(STORED, case, implementation, engine)
    assert not o[[0, 2]].any()
    assert np.isneginf(lse[[0, 2]]).all()
    assert np.isfinite(lse[[1, 3]]).all()
    for window in (0, 1, 7):  # no row holds anything
        o, lse = run(STORED, make(STORED, 0, [0] * 4, window=window), implementation, engine)
        assert not o.any()
        assert np.isneginf(lse).all()


SEEN = [Shape(K=2, G=1, H=64, P=8, M=12, B=2, own=False), Shape(K=1, G=1, H=128, P=8, M=12, B=2, T=6)]


@pytest.mark.parametrize(
    ("implementation", "shape"),
    pairs([*SEEN, SINKS, INT8, FP8, CHUNK_INT8], SEEN, [FP8], implementations=[REFERENCE, *IMPLEMENTATIONS_UNDER_TEST]),
    ids=label,
)
def test_a_nan_that_a_row_sees_comes_out(implementation, shape):
    """A row whose keys are lost must not look like an empty one. Also as the engine compiles: fast math keeps NaN."""
    case = make(shape, 0, [70, 9, 70, 0][: shape.B])
    where = int(case["page_offset"]) + int(case["page_table"][0, 0])
    for engine in (False, True) if implementation == XLA else (False,):
        clean = run(shape, case, implementation, engine)
        for kind, name in enumerate(("k_pages", "v_pages")):
            dirty = dict(case, **{name: case[name].copy()})
            if shape.pool in EIGHT_BIT:  # what a NaN becomes there
                dirty["kv_scales"] = case["kv_scales"].copy()
                dirty["kv_scales"][where, kind].reshape(-1)[0 : shape.pool_shape[1] * shape.P : shape.P] = np.nan
            else:
                dirty[name][where, :, 0] = np.nan
            o, lse = run(shape, dirty, implementation, engine)
            assert np.isnan(o[0]).all(), (name, engine)
            assert np.isnan(lse[0]).all() == (name == "k_pages"), (name, engine)
            assert same_bits((o[1:], lse[1:]), [x[1:] for x in clean])


@each(reference=True)
def test_a_sink_of_minus_infinity_is_none(implementation):
    """Also where the row sees nothing: there is no score at all, and no NaN."""
    stored = dataclasses.replace(SINKS, own=False)
    case = make(stored, 0, [0, 1, 40, 288])
    for engine in (False, True) if implementation == XLA else (False,):
        o, lse = run(stored, dict(case, sinks=np.full_like(case["sinks"], -np.inf)), implementation, engine)
        assert not o[0].any() and np.isneginf(lse[0]).all()
        assert_close(dataclasses.replace(stored, sinks=False), {k: v for k, v in case.items() if k != "sinks"}, (o, lse))


@each()
def test_a_sink_is_a_score_without_a_value(implementation):
    stored = dataclasses.replace(SINKS, own=False)
    case = make(stored, 0, [0, 1, 40, 288])
    o, lse = run(stored, case, implementation)
    assert not o[0].any()
    np.testing.assert_allclose(lse[0], case["sinks"], rtol=1e-6)
    plain = dataclasses.replace(stored, sinks=False)
    without, _ = run(plain, {k: v for k, v in case.items() if k != "sinks"}, implementation)
    nothing, _ = run(stored, dict(case, sinks=np.full_like(case["sinks"], -1e4)), implementation)
    np.testing.assert_allclose(nothing, without, rtol=1e-6, atol=1e-7)
    everything, _ = run(stored, dict(case, sinks=np.full_like(case["sinks"], 1e4)), implementation)
    assert not everything.any()


@each()
def test_a_full_last_page_ends_the_row_though_the_next_is_reserved(implementation):
    """CASES 3: length k*P attends k*P keys; the page behind is owned, and holds tokens of someone before."""
    case = make(STORED, 0, [STORED.P, 2 * STORED.P, 5 * STORED.P, 0])
    loud = dict(case, k_pages=case["k_pages"].copy())
    for b in range(3):
        column = case["lengths"][b] // STORED.P
        loud["k_pages"][case["page_offset"] + case["page_table"][b, column]] = 1e4
    assert same_bits(run(STORED, case, implementation), run(STORED, loud, implementation))


@each()
def test_splits_and_blocks_of_any_size_say_the_same(implementation):
    """CASES 8."""
    for shape in (STORED, INT8):
        case = make(shape, 3, [0, 1, shape.P * 3 + 1, shape.M * shape.P], window=0)
        want = run(shape, case, implementation)
        for pages, splits in ((1, 3), (4, 7)):
            gpu = DecodeBlocks(tokens_per_block=16 * pages, num_splits=splits)
            blocks = gpu if implementation[0] == "pallas_gpu" else DecodeBlocks(pages_per_block=pages)
            got = run(shape, case, implementation, block_sizes=blocks)
            assert_close(shape, case, got)
            np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)


@each()
def test_a_soft_cap_comes_after_the_scale(implementation):
    """CASES 9: one key of score 4, whose cap is 2 * tanh(2): lse says which came first."""
    H, P = 128, 8
    q, k = np.zeros((1, 1, 1, H), np.float32), np.zeros((4, 1, P, H), np.float32)
    q[..., 0], k[2, 0, 0, 0] = 8.0, 1.0
    name, interpret = implementation
    _, lse = paged_decode(
        q, k, k, np.asarray([[2]], np.int32), np.asarray([1], np.int32), scale=0.5, soft_cap=2.0, return_lse=True,
        implementation=name, interpret=interpret,
    )  # fmt: skip
    np.testing.assert_allclose(lse, 2 * np.tanh(2.0), rtol=1e-6)


@pytest.mark.parametrize(("implementation", "shape"), pairs([STORED, DECODE[2], INT8, CHUNK]), ids=label)
def test_a_row_does_not_feel_its_neighbours(implementation, shape):
    """Bit for bit, whatever they hold: the loop runs as far as the longest of them. A GPU splits rows by the work of all of them, so
    that the order of its sums follows the neighbours: there to float32's rounding."""
    engine = implementation == XLA
    for window in (0, 9, 150):
        base = make(shape, 1, [0, 77, 4, 0], window=window)
        alone = run(shape, base, implementation, engine)
        for neighbours in ([0, 77, 0, 0], [280, 77, 1, 130], [1, 77, 140, 280]):
            others = make(shape, 2, neighbours, window=window)
            mixed = {name: np.array(others[name]) for name in base}
            row = base["page_offset"] + base["page_table"][1]
            for name in base:
                if name.endswith(("pages", "scales")):
                    mixed[name][row] = base[name][row]
                elif name == "sinks":
                    mixed[name] = base[name]
                elif base[name].ndim:
                    mixed[name][1] = base[name][1]
            together = run(shape, mixed, implementation, engine)
            if implementation[0] == "pallas_gpu":
                for x, y in zip(alone, together, strict=True):
                    np.testing.assert_allclose(x[1], y[1], rtol=1e-5, atol=1e-6)
            else:
                assert same_bits([x[1] for x in alone], [x[1] for x in together])


@pytest.mark.parametrize(
    ("implementation", "shape"),
    pairs([Shape(K=4, G=3, H=64, P=32, M=5, pool=pool, packed=2) for pool in ("float32", "uint16", "int8", "float8_e4m3fn")]),
    ids=label,
)
def test_a_token_counts_the_same_beside_the_pages_and_in_them(implementation, shape):
    """k_new is rounded to what the pool stores, also in the pool's form of heads, where two heads share a scale."""
    store = jax.jit(functools.partial(write_kv, implementation="xla"), compiler_options=LITERAL_OPTIONS)
    for window in (0, 1, 40):
        case = make(shape, 1, [0, 31, 32, 100], window=window)
        beside = run(shape, case, implementation)
        new = case["k_new"][:, None], case["v_new"][:, None]
        k_pages, v_pages, kv_scales = store(
            case["k_pages"], case["v_pages"], *new, case["page_table"], case["lengths"], np.ones(4, np.int32),
            kv_scales=case.get("kv_scales"), page_offset=case["page_offset"],
        )  # fmt: skip
        stored = {k: v for k, v in case.items() if k not in ("k_new", "v_new")}
        stored |= {"k_pages": k_pages, "v_pages": v_pages, "lengths": case["lengths"] + 1}
        stored |= {"kv_scales": kv_scales} if "kv_scales" in case else {}
        for a, b in zip(beside, run(dataclasses.replace(shape, own=False), stored, implementation), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("T", [None, 5])
@each()
def test_new_numbers_trace_nothing_anew(implementation, T):
    """CASES 10: lengths, windows, layers, scales and sinks are arrays."""
    shape, name = Shape(K=1, G=2, H=128, P=32, M=3, T=T, pool="int8", sinks=True), implementation[0]
    traced = []

    def counted(case):
        traced.append(case)
        return call(case, scale=1.0, soft_cap=None, implementation=name, interpret=implementation[1])

    counted = jax.jit(counted, compiler_options=LITERAL_OPTIONS)
    for seed in range(3):
        counted(make(shape, seed, [seed] * 4, layer=seed, window=seed))
    assert len(traced) == 1


@each()
def test_a_window_is_the_same_static_and_traced(implementation):
    shape, (name, interpret) = Shape(K=1, G=2, H=128, P=8, M=5), implementation
    case = make(shape, 0, [3, 40, 16, 0], layer=2, window=5)
    for window in (5, 0):
        traced = run(shape, dict(case, window=np.int32(window)), implementation)[0]
        for same in (window,) if window else (0, None):
            plain = dict(case, window=same, page_offset=2 * shape.C)
            static = jax.jit(lambda plain=plain: paged_decode(**plain, scale=128**-0.5, implementation=name, interpret=interpret))()
            np.testing.assert_allclose(traced, static, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("T", [None, 6])
def test_only_pages_with_visible_tokens_are_read(T, monkeypatch):
    """Besides the null page: ids of other columns are not even looked up."""
    shape, read = Shape(K=1, G=1, H=2, P=4, M=300, T=T, own=T is not None), []
    gather = xla._gather

    def spy(pages, ids):
        jax.debug.callback(lambda ids: read.append(np.asarray(ids).ravel()), ids)
        return gather(pages, ids)

    monkeypatch.setattr(xla, "_gather", spy)
    spied = jax.jit(lambda case: call(case, scale=1.0, soft_cap=None, implementation="xla"), compiler_options=LITERAL_OPTIONS)
    for window in (0, 1, 4, 5, 600):
        case = make(shape, 0, [0, 4, 700, 1199], window=window)
        read.clear()
        spied(case)
        jax.effects_barrier()
        ids = set(np.concatenate([[], *read]).astype(int).tolist())
        offset = int(case["page_offset"])
        assert ids - {offset} == set((case["page_table"][needed_columns(shape, case)] + offset).tolist()), window


@pytest.mark.parametrize(
    ("T", "pool"),
    [
        *((None, pool) for pool in ("float32", "uint16", "int8", "uint8")),
        (64, "uint16"),
        *(pytest.param(64, pool, marks=pytest.mark.slow) for pool in ("float32", "int8", "uint8")),
    ],
)
def test_neither_table_nor_pool_is_gathered_whole(T, pool):
    """XLA:CPU converts a whole bf16 or fp8 pool where it gathers from it: that is why they are held as bits."""
    shape = Shape(K=2, G=2, H=64, P=16, M=1024, T=T, pool=pool)
    array = lambda like, *dims: jax.ShapeDtypeStruct(dims, like.dtype)
    case = make(dataclasses.replace(shape, M=2), 0, [1] * shape.B)
    case["page_table"] = array(case["page_table"], shape.B, shape.M)
    for name in ("k_pages", "v_pages", "kv_scales"):
        if name in case:
            case[name] = array(case[name], LAYERS * 4096, *case[name].shape[1:])
    memory = ENGINE.lower(case, scale=1.0, soft_cap=None, implementation="xla").compile().memory_analysis()
    block_bytes = shape.B * block_tokens(shape) * shape.K * shape.H * 4
    scores_bytes = shape.B * (T or 1) * shape.K * shape.G * block_tokens(shape) * 4
    assert memory.temp_size_in_bytes < 6 * (block_bytes + scores_bytes) < shape.B * shape.M * shape.P * shape.K * shape.H * 4


def test_the_suite_covers_what_it_says():
    """Each implementation under test runs most shapes; xla runs all."""
    for implementation in IMPLEMENTATIONS_UNDER_TEST:
        assert sum(runs(implementation, shape) for shape in DECODE + PREFILL) >= 15
    assert all(runs(XLA, shape) for shape in DECODE + PREFILL)
    assert ENGINE_OPTIONS["xla_cpu_enable_fast_math"]
