"""The xla implementation against the oracle, and what neither may read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import paged_decode, paged_prefill, xla
from pallas_kernels.xla import _DECODE_BLOCK, _PREFILL_BLOCK

# How the engine compiles on CPU (jaxkv/steps.py): masks must not lean on arithmetic that fast math may drop.
ENGINE_OPTIONS = {"xla_cpu_prefer_vector_width": 512, "xla_cpu_enable_fast_math": True}
# Unoptimised code is the most literal, and compiles in a third of the time.
LITERAL_OPTIONS = {"xla_backend_optimization_level": 0}
LAYERS = 3
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="compiler options of XLA:CPU")


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static of one call. T None: paged_decode; own: the query's own key is not in the pages yet."""

    K: int
    G: int
    H: int
    P: int
    M: int
    T: int | None = None
    B: int = 4
    own: bool = True
    soft_cap: float | None = None
    dtype: str = "float32"
    pool: str = "float32"

    @property
    def C(self):
        return self.B * self.M + 7  # more pages than the table reaches

    @property
    def block(self):
        return _DECODE_BLOCK if (self.T or 1) == 1 else _PREFILL_BLOCK

    def __str__(self):
        T = "decode" if self.T is None else f"prefill{self.T}"
        own = "" if self.own else "-stored"
        cap = f"-cap{self.soft_cap}" if self.soft_cap else ""
        return f"{T}-K{self.K}G{self.G}H{self.H}P{self.P}{own}{cap}-{self.dtype}-{self.pool}"


def as_pool(x, dtype):
    """Floats in a pool's dtype; uint16 holds the bits of bfloat16."""
    return x.astype(jnp.bfloat16).view(np.uint16) if dtype == "uint16" else x.astype(dtype)


def make(shape: Shape, seed, lengths, chunk_lengths=None, layer=1, window=0):
    """The arrays of one call: N(0,1), a shuffled table, finite junk wherever nothing was written."""
    rng = np.random.default_rng(seed)
    B, K, H = shape.B, shape.K, shape.H
    normal = lambda *dims: rng.standard_normal(dims, np.float32)
    pages = rng.permutation(np.arange(1, shape.C, dtype=np.int32))
    pool = (LAYERS * shape.C, K, shape.P, H)
    token = (B,) if shape.T is None else (B, shape.T)
    case = {
        "q": normal(*token, K, shape.G, H).astype(shape.dtype),
        "k_pages": as_pool(normal(*pool), shape.pool),
        "v_pages": as_pool(normal(*pool), shape.pool),
        "page_table": pages[: B * shape.M].reshape(B, shape.M),
        "lengths": np.asarray(lengths, np.int32),
        "page_offset": np.int32(layer * shape.C),
        "window": np.int32(window),
    }
    if shape.own:
        case |= {"k_new": normal(*token, K, H), "v_new": normal(*token, K, H)}
    if shape.T is not None:
        case["chunk_lengths"] = np.asarray([shape.T] * B if chunk_lengths is None else chunk_lengths, np.int32)
    return case


def call(case, *, scale, soft_cap, implementation):
    op = paged_prefill if "chunk_lengths" in case else paged_decode
    return op(**case, scale=scale, soft_cap=soft_cap, return_lse=True, implementation=implementation)


_STATIC = ("scale", "soft_cap", "implementation")
_PLAIN = jax.jit(call, static_argnames=_STATIC, compiler_options=LITERAL_OPTIONS)
_ENGINE = jax.jit(call, static_argnames=_STATIC, compiler_options=ENGINE_OPTIONS)


def run(shape, case, implementation="xla", engine=False):
    """(o, lse) as numpy, window and page_offset traced."""
    out = (_ENGINE if engine else _PLAIN)(case, scale=shape.H**-0.5, soft_cap=shape.soft_cap, implementation=implementation)
    return jax.tree.map(np.asarray, out)


def real(shape, case):
    """Indices of the queries whose output means something."""
    if shape.T is None:
        return (slice(None),)
    return np.nonzero(np.arange(shape.T) < case["chunk_lengths"][:, None])


def assert_close(shape, case, got):
    """Against the oracle in float64 on the same numbers; relative to the length of each [H] vector."""
    exact = dict(case, q=case["q"].astype(np.float32))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        want_o, want_lse = run(shape, exact, "reference")
    at = real(shape, case)
    o, lse, want_o, want_lse = got[0].astype(np.float64)[at], got[1].astype(np.float64)[at], want_o[at], want_lse[at]
    tolerance = 1e-5 if shape.dtype == shape.pool == "float32" else 1e-2
    error = np.linalg.norm(o - want_o, axis=-1)
    assert (error <= tolerance * np.linalg.norm(want_o, axis=-1)).all(), error.max()
    np.testing.assert_allclose(lse, want_lse, rtol=tolerance, atol=tolerance)


def same_bits(a, b):
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


SWEEP = [  # every G, H and P of CASES 5 and 11, stored and own keys, each dtype, each way a chunk is blocked
    Shape(K=2, G=3, H=16, P=4, M=70, own=False),
    Shape(K=2, G=16, H=64, P=16, M=19, pool="uint16", soft_cap=3.0),
    Shape(K=2, G=1, H=80, P=8, M=36),
    Shape(K=1, G=5, H=96, P=8, M=36, soft_cap=2.0, own=False),
    Shape(K=2, G=6, H=128, P=1, M=270),
    Shape(K=3, G=7, H=10, P=128, M=3, own=False, soft_cap=0.7),
    Shape(K=2, G=8, H=256, P=16, M=17, B=2),
    Shape(K=1, G=32, H=16, P=4, M=70, pool="float16"),
    Shape(K=2, G=3, H=64, P=16, M=19, dtype="bfloat16", pool="bfloat16"),
    Shape(K=1, G=4, H=16, P=4, M=280, T=1),
    Shape(K=2, G=3, H=16, P=8, M=140, T=6, soft_cap=1.3),
    Shape(K=2, G=2, H=64, P=8, M=70, T=6, dtype="bfloat16", pool="uint16"),
    Shape(K=3, G=2, H=80, P=1, M=540, T=7, B=3, dtype="float16", pool="float16"),
    Shape(K=2, G=7, H=12, P=128, M=9, T=33, B=2),
    Shape(K=1, G=2, H=8, P=4, M=140, T=520, B=2),
    Shape(K=1, G=1, H=8, P=16, M=4, T=1024, B=1),
]
STORED, BITS, PREFILL, LONG = SWEEP[0], SWEEP[1], SWEEP[10], SWEEP[14]


@st.composite
def cases(draw, shape):
    P, S, T, block = shape.P, shape.M * shape.P, shape.T or 1, shape.block
    edges = [0, 1, P - 1, P, P + 1, 2 * P, block - 1, block, block + 1, S - P, S - 1, S]
    length = st.one_of(st.sampled_from([x for x in edges if 0 <= x <= S]), st.integers(0, S))
    windows = [0, 1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1, 2 * block - 1, 2 * block + 1, T, T + 1, S]
    return make(
        shape,
        draw(st.integers(0, 999)),
        draw(st.lists(length, min_size=shape.B, max_size=shape.B)),
        draw(st.lists(st.sampled_from([0, 1, T // 2, T - 1, T, T]), min_size=shape.B, max_size=shape.B)),
        draw(st.integers(0, LAYERS - 1)),
        draw(st.sampled_from(windows)),
    )


@pytest.mark.parametrize("shape", SWEEP, ids=str)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_xla_agrees_with_the_oracle(shape, data):
    case = data.draw(cases(shape).map(Opaque)).value
    with jax.numpy_dtype_promotion("strict"):
        assert_close(shape, case, run(shape, case, engine=True))


class Opaque:
    """Keeps hypothesis from printing arrays; shows what the draw chose."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return str({k: v.tolist() for k, v in self.value.items() if k in ("lengths", "chunk_lengths", "window", "page_offset")})


def test_positions_past_int16():
    shape = Shape(K=1, G=2, H=8, P=16, M=2600, B=2, own=True)
    for window in (0, 40_000, 17):
        case = make(shape, window, [41_599, 32_768], window=window)
        assert_close(shape, case, run(shape, case))


@pytest.mark.parametrize("T", [None, 9])
def test_bits_of_bfloat16_are_bfloat16(T):
    shape = Shape(K=2, G=3, H=16, P=4, M=40, T=T, pool="bfloat16")
    case = make(shape, 0, [0, 3, 130, 160], window=50)
    bits = {k: v.view(np.uint16) if k.endswith("pages") else v for k, v in case.items()}
    assert same_bits(run(shape, case), run(shape, bits))


# Shapes of the sweep again: what is compiled once serves both.
POISONED = [*((shape, True) for shape in (STORED, SWEEP[2], BITS, PREFILL, SWEEP[11], LONG)), (STORED, False), (PREFILL, False)]


def poison(shape, case, seed):
    """The same case with NaN and Inf wherever the row's tokens are not, and garbage ids where no page is needed."""
    rng = np.random.default_rng(seed)
    junk = np.asarray([np.nan, np.inf, -np.inf, 3e38, -np.nan], np.float32)
    L, M, P = case["lengths"], shape.M, shape.P
    window, offset = int(case["window"]), int(case["page_offset"])
    first = L if shape.own else L - 1
    start = np.maximum(first - window + 1, 0) if window else np.zeros_like(L)
    column = np.arange(M)
    needed = (column * P < L[:, None]) & ((column + 1) * P > start[:, None])  # [B, M]
    ids = rng.choice(np.asarray([-1, -7, 2**31 - 1, -(2**31), LAYERS * shape.C, 0, 5], np.int32), needed.shape)
    dirty = dict(case, page_table=np.where(needed, case["page_table"], ids))
    for name in ("k_pages", "v_pages"):
        pages = as_pool(rng.choice(junk, case[name].shape), shape.pool)
        for b, j in zip(*np.nonzero(needed), strict=True):
            row, slots = offset + case["page_table"][b, j], min(P, L[b] - j * P)
            pages[row, :, :slots] = case[name][row, :, :slots]
        dirty[name] = pages
    if shape.T is not None:
        padding = np.arange(shape.T) >= case["chunk_lengths"][:, None]
        for name in ("k_new", "v_new"):
            dirty[name] = np.where(padding[..., None, None], np.nan, case[name]).astype(np.float32)
    return dirty


@pytest.mark.parametrize(("shape", "engine"), POISONED, ids=str)
def test_what_a_row_does_not_hold_is_never_seen(shape, engine):
    P, S, T, block = shape.P, shape.M * shape.P, shape.T or 1, shape.block
    windows = (0, 1, P - 1, P, P + 1, 2 * P + 1, block + 3, 2 * block - 1, 2 * block, 2 * block + 1)
    lengths = ([0, 1, P, S], [P - 1, P + 1, block, S - 1], [3 * P, block + P + 1, 2 * block, 2 * P - 1], [0, 0, 0, 0])
    for seed, window in enumerate(windows):
        for rows in lengths if window else lengths[:3]:
            case = make(shape, seed, np.minimum(rows, S)[: shape.B], [T, max(T - 2, 0), 1, 0][: shape.B], window=window)
            clean, dirty = run(shape, case, engine=engine), run(shape, poison(shape, case, seed), engine=engine)
            assert np.isfinite(clean[0]).all()
            assert same_bits(clean, dirty), (rows, window)
    assert_close(shape, case, clean)


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
    lengths = np.asarray([0, 4, 700, 1199])
    for window in (0, 1, 4, 5, 600):
        case = make(shape, 0, lengths, window=window)
        first = np.maximum(lengths + (0 if shape.own else -1) - window + 1, 0) if window else np.zeros_like(lengths)
        column = np.arange(shape.M)
        needed = (column * 4 < lengths[:, None]) & ((column + 1) * 4 > first[:, None])
        read.clear()
        spied(case)
        jax.effects_barrier()
        ids = set(np.concatenate(read).tolist())
        offset = int(case["page_offset"])
        assert ids - {offset} == set((case["page_table"][needed] + offset).tolist()), window


def test_the_oracle_is_deaf_to_poison_too():
    for shape in (STORED, PREFILL):
        for window in (0, 1, 5, 70):
            case = make(shape, window, [0, 9, 64, 230], [6, 0, 3, 6], window=window)
            at = real(shape, case)
            clean, dirty = (run(shape, c, "reference") for c in (case, poison(shape, case, 0)))
            assert same_bits([x[at] for x in clean], [x[at] for x in dirty])


@pytest.mark.parametrize("engine", [False, True], ids=["plain", "engine"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_empty_rows_are_zero_with_lse_minus_infinity(implementation, engine):
    shape = STORED
    case = poison(shape, make(shape, 0, [0, 9, 0, 70]), 0)
    o, lse = run(shape, case, implementation, engine)
    assert not o[[0, 2]].any()
    assert np.isneginf(lse[[0, 2]]).all()
    assert np.isfinite(lse[[1, 3]]).all()
    for window in (0, 1, 7):  # no row holds anything
        o, lse = run(shape, make(shape, 0, [0] * 4, window=window), implementation, engine)
        assert not o.any()
        assert np.isneginf(lse).all()


@pytest.mark.parametrize("shape", [STORED, SWEEP[2], PREFILL], ids=str)
def test_a_row_does_not_feel_its_neighbours(shape):
    """Bit for bit, whatever they hold: the loop runs as far as the longest of them."""
    for window in (0, 9, 150):
        base = make(shape, 1, [0, 77, 4, 0], window=window)
        alone = run(shape, base, engine=True)
        for neighbours in ([0, 77, 0, 0], [280, 77, 1, 130], [1, 77, 140, 280]):
            others = make(shape, 2, neighbours, window=window)
            mixed = {name: np.array(others[name]) for name in base}
            row = base["page_offset"] + base["page_table"][1]
            for name in base:
                if name.endswith("pages"):
                    mixed[name][row] = base[name][row]
                elif base[name].ndim:
                    mixed[name][1] = base[name][1]
            together = run(shape, mixed, engine=True)
            assert same_bits([x[1] for x in alone], [x[1] for x in together])


def test_a_window_is_the_same_static_and_traced():
    shape = Shape(K=1, G=2, H=8, P=4, M=5)
    case = make(shape, 0, [3, 20, 8, 0], layer=2, window=5)
    static = jax.jit(lambda: paged_decode(**dict(case, window=5, page_offset=2 * shape.C), scale=8**-0.5))()
    np.testing.assert_allclose(run(shape, case)[0], static, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("T", [None, 64])
def test_the_whole_table_is_never_gathered(T):
    shape = Shape(K=2, G=2, H=64, P=16, M=1024, T=T)
    array = lambda *dims, dtype=np.float32: jax.ShapeDtypeStruct(dims, dtype)
    small = make(dataclasses.replace(shape, M=2), 0, [1] * shape.B)
    pool = array(LAYERS * 4096, shape.K, shape.P, shape.H)
    case = small | {"k_pages": pool, "v_pages": pool, "page_table": array(shape.B, shape.M, dtype=np.int32)}
    memory = _ENGINE.lower(case, scale=1.0, soft_cap=None, implementation="xla").compile().memory_analysis()
    block_bytes = shape.B * shape.block * shape.K * shape.H * 4
    scores_bytes = shape.B * (T or 1) * shape.K * shape.G * shape.block * 4
    assert memory.temp_size_in_bytes < 6 * (block_bytes + scores_bytes) < shape.B * shape.M * shape.P * shape.K * shape.H * 4
