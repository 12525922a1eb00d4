"""Calls of the paged ops for tests: shapes, random arrays, poison, and how far a result is from the float64 oracle."""

import dataclasses

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import paged_decode, paged_prefill, scales_shape

# (implementation, interpret) that the shared suites run. A backend joins by a row here and, where it cannot run every shape, in
# `runs`. Interpreted kernels take seconds a case to compile: by default they run some, with -m slow all.
IMPLEMENTATIONS_UNDER_TEST = [("xla", False), ("pallas_tpu", True), ("pallas_gpu", True)]
REFERENCE = ("reference", False)
# How the engine compiles on CPU (jaxkv/steps.py): masks must not lean on arithmetic that fast math may drop.
ENGINE_OPTIONS = {"xla_cpu_prefer_vector_width": 512, "xla_cpu_enable_fast_math": True}
# Unoptimised code is the most literal, and compiles in a third of the time.
LITERAL_OPTIONS = {"xla_backend_optimization_level": 0}
LAYERS = 3
EIGHT_BIT = ("int8", "float8_e4m3fn", "uint8")
_TILE_ROWS = {4: 8, 2: 16, 1: 32}
_MEANT = {"uint16": ml_dtypes.bfloat16, "uint8": ml_dtypes.float8_e4m3fn, "bfloat16": ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static of one call. T None: paged_decode; own: the query's own key is not in the pages yet; n heads side by side
    in the pool, or heads padded to `lanes`."""

    K: int
    G: int
    H: int
    P: int
    M: int
    T: int | None = None
    B: int = 4
    own: bool = True
    soft_cap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    pool: str = "float32"
    packed: int = 1
    lanes: int = 0

    @property
    def C(self):
        return self.B * self.M + 7  # more pages than the table reaches

    @property
    def pool_shape(self):
        return LAYERS * self.C, self.K // self.packed, self.P, self.lanes or self.H * self.packed

    @property
    def tolerance(self):
        return 1e-5 if self.dtype == "float32" else 1e-2

    def __str__(self):
        T = "decode" if self.T is None else f"prefill{self.T}"
        own = "" if self.own else "-stored"
        cap = f"-cap{self.soft_cap}" if self.soft_cap else ""
        form = f"-packed{self.packed}" * (self.packed > 1) + f"-padded{self.lanes}" * bool(self.lanes)
        sinks = "-sinks" if self.sinks else ""
        return f"{T}-K{self.K}G{self.G}H{self.H}P{self.P}{own}{cap}{sinks}{form}-{self.dtype}-{self.pool}"


def runs(implementation, shape: Shape) -> bool:
    """Whether an implementation promises this shape."""
    name, _ = implementation
    itemsize = np.dtype(_MEANT.get(shape.pool, shape.pool)).itemsize
    if name == "pallas_tpu":
        return shape.P % _TILE_ROWS[itemsize] == 0
    if name == "pallas_gpu":
        return shape.P >= 8
    return True


def pairs(shapes, quick=(), rare=(), implementations=IMPLEMENTATIONS_UNDER_TEST):
    """Parameters (implementation, shape) of a shared test.

    An interpreted kernel gets a smaller pool: XLA:CPU converts the whole of a 16-bit or fp8 one at each of its steps.

    Args:
      quick: what interpreted kernels run by default; the rest is slow.
      rare: what is slow for all.
    """
    small = lambda s: dataclasses.replace(s, M=min(s.M, -(-320 // s.P)))
    slow = lambda i, s: s in rare or (i[1] and s not in quick)
    return [
        pytest.param(i, small(s) if i[1] else s, marks=pytest.mark.slow if slow(i, s) else ())
        for i in implementations
        for s in shapes
        if runs(i, s)
    ]


def each(quick=False, reference=False):
    """Parametrises a shared test by `implementation`; `quick`: by default interpreted kernels run it, too."""
    run_by = [REFERENCE] * reference + IMPLEMENTATIONS_UNDER_TEST
    marked = [pytest.param(i, marks=pytest.mark.slow if i[1] and not quick else ()) for i in run_by]
    return pytest.mark.parametrize("implementation", marked, ids=label)


def label(x):
    return x[0] if isinstance(x, tuple) else str(x)


def as_pool(x, dtype):
    """Floats in a pool's float dtype; uint16 holds the bits of bfloat16."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "uint16" else x.astype(_MEANT.get(dtype, dtype))


def _random_pool(rng, shape: Shape):
    """(pages, scales f32[L*C, K', P] or None) whose numbers are about N(0,1); lanes that pad heads are 0."""
    x = rng.standard_normal(shape.pool_shape, np.float32)
    if shape.lanes:
        x[..., shape.H :] = 0
    if shape.pool not in EIGHT_BIT:
        return as_pool(x, shape.pool), None
    return quantised(x, shape.pool)


def quantised(x, dtype):
    """(values, scale) of x f32[.., H] as an 8-bit pool stores them: the definition of `pallas_kernels.quantise`, in numpy."""
    most = np.float32(127 if dtype == "int8" else 448)
    scale = np.abs(x).max(-1) * np.float32(1 / most)
    scale = np.where(scale < np.float32(2**-126), np.float32(0), scale)
    inverse = np.where(scale > 0, np.float32(1) / np.where(scale > 0, scale, np.float32(1)), np.float32(0))
    y = np.clip(x * inverse[..., None], -most, most)
    if dtype == "int8":
        return np.rint(y).astype(np.int8), scale
    values = y.astype(ml_dtypes.float8_e4m3fn)
    return values.view(np.uint8) if dtype == "uint8" else values, scale


def scale_array(k_scale, v_scale):
    """f32[L*C, 2, R, 128] of two f32[L*C, K, P]; what belongs to no token is NaN."""
    out = np.full((rows := len(k_scale), 2, *scales_shape(*k_scale.shape)[2:]), np.nan, np.float32).reshape(rows, 2, -1)
    for kind, scale in enumerate((k_scale, v_scale)):
        flat = scale.reshape(rows, -1)
        out[:, kind, : flat.shape[1]] = flat
    return out.reshape(scales_shape(*k_scale.shape))


def make(shape: Shape, seed, lengths, chunk_lengths=None, layer=1, window=0):
    """The arrays of one call: N(0,1), a shuffled table, finite junk wherever nothing was written."""
    rng = np.random.default_rng(seed)
    B, K, H = shape.B, shape.K, shape.H
    normal = lambda *dims: rng.standard_normal(dims, np.float32)
    pages = rng.permutation(np.arange(1, shape.C, dtype=np.int32))
    token = (B,) if shape.T is None else (B, shape.T)
    (k_pages, k_scale), (v_pages, v_scale) = _random_pool(rng, shape), _random_pool(rng, shape)
    case = {
        "q": normal(*token, K, shape.G, H).astype(_MEANT.get(shape.dtype, shape.dtype)),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "page_table": pages[: B * shape.M].reshape(B, shape.M),
        "lengths": np.asarray(lengths, np.int32),
        "page_offset": np.int32(layer * shape.C),
        "window": np.int32(window),
    }
    if k_scale is not None:
        case["kv_scales"] = scale_array(k_scale, v_scale)
    if shape.own:
        case |= {"k_new": normal(*token, K, H), "v_new": normal(*token, K, H)}
    if shape.sinks:
        case["sinks"] = normal(K, shape.G)
    if shape.T is not None:
        case["chunk_lengths"] = np.asarray([shape.T] * B if chunk_lengths is None else chunk_lengths, np.int32)
    return case


def call(case, *, scale, soft_cap, implementation, interpret=False, block_sizes=None):
    op = paged_prefill if "chunk_lengths" in case else paged_decode
    options = dict(scale=scale, soft_cap=soft_cap, return_lse=True, implementation=implementation, interpret=interpret)
    return op(**case, **options, block_sizes=block_sizes)


_STATIC = ("scale", "soft_cap", "implementation", "interpret", "block_sizes")
LITERAL = jax.jit(call, static_argnames=_STATIC, compiler_options=LITERAL_OPTIONS)
ENGINE = jax.jit(call, static_argnames=_STATIC, compiler_options=ENGINE_OPTIONS)


def run(shape: Shape, case, implementation=("xla", False), engine=False, block_sizes=None):
    """(o, lse) as numpy, window and page_offset traced."""
    name, interpret = implementation
    options = dict(scale=shape.H**-0.5, soft_cap=shape.soft_cap, implementation=name, interpret=interpret)
    return jax.tree.map(np.asarray, (ENGINE if engine else LITERAL)(case, **options, block_sizes=block_sizes))


def real(shape: Shape, case):
    """Indices of the queries whose output means something."""
    if shape.T is None:
        return (slice(None),)
    return np.nonzero(np.arange(shape.T) < case["chunk_lengths"][:, None])


def assert_close(shape: Shape, case, got):
    """Against the oracle in float64 on the same numbers; relative to the length of each [H] vector."""
    exact = dict(case, q=case["q"].astype(np.float32))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        want_o, want_lse = run(shape, exact, REFERENCE)
    at = real(shape, case)
    o, lse, want_o, want_lse = got[0].astype(np.float64)[at], got[1].astype(np.float64)[at], want_o[at], want_lse[at]
    error = np.linalg.norm(o - want_o, axis=-1)
    assert (error <= shape.tolerance * np.linalg.norm(want_o, axis=-1)).all(), error.max()
    np.testing.assert_allclose(lse, want_lse, rtol=shape.tolerance, atol=shape.tolerance)


def same_bits(a, b):
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def first_seen(shape: Shape, case):
    """i32[B]: the first position that a row's first query sees."""
    position = case["lengths"] if shape.own else case["lengths"] - 1
    window = int(case["window"])
    return np.maximum(position - window + 1, 0) if window else np.zeros_like(position)


def needed_columns(shape: Shape, case):
    """bool[B, M]: the columns of the table whose pages hold a key that is seen."""
    column, first, lengths = np.arange(shape.M), first_seen(shape, case)[:, None], case["lengths"][:, None]
    return (column * shape.P < lengths) & ((column + 1) * shape.P > first) & (first < lengths)


def poison(shape: Shape, case, seed):
    """The same case with NaN and Inf wherever the row's tokens are not, and garbage ids where no page is needed."""
    rng = np.random.default_rng(seed)
    junk = np.asarray([np.nan, np.inf, -np.inf, 3e38, -np.nan], np.float32)
    needed = needed_columns(shape, case)
    ids = rng.choice(np.asarray([-1, -7, 2**31 - 1, -(2**31), LAYERS * shape.C, 0, 5], np.int32), needed.shape)
    written = np.zeros((LAYERS * shape.C, shape.P), bool)
    for b, j in zip(*np.nonzero(needed), strict=True):
        written[int(case["page_offset"]) + case["page_table"][b, j], : min(shape.P, case["lengths"][b] - j * shape.P)] = True
    dirty = dict(case, page_table=np.where(needed, case["page_table"], ids))
    for name in ("k_pages", "v_pages"):
        clean = case[name]
        if shape.pool in EIGHT_BIT:
            noise = rng.choice(np.asarray([0x7F, 0xFF, 0x80, 1], np.uint8), clean.shape).view(clean.dtype)
        else:
            noise = as_pool(rng.choice(junk, clean.shape), shape.pool)
        dirty[name] = np.where(written[:, None, :, None], clean, noise)
    if "kv_scales" in case:
        heads = shape.pool_shape[1]
        mine = np.broadcast_to(written[:, None], (len(written), heads, shape.P)).reshape(len(written), -1)
        flat = case["kv_scales"].reshape(len(written), 2, -1)
        keep = np.zeros(flat.shape, bool)
        keep[..., : mine.shape[1]] = mine[:, None]
        dirty["kv_scales"] = np.where(keep, flat, rng.choice(junk, flat.shape)).reshape(case["kv_scales"].shape)
    if shape.T is not None:
        padding = np.arange(shape.T) >= case["chunk_lengths"][:, None]
        for name in ("k_new", "v_new"):
            dirty[name] = np.where(padding[..., None, None], np.nan, case[name]).astype(np.float32)
    return dirty


class Opaque:
    """Keeps hypothesis from printing arrays; shows what the draw chose."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return str({k: v.tolist() for k, v in self.value.items() if k in ("lengths", "chunk_lengths", "window", "page_offset")})


@st.composite
def cases(draw, shape: Shape, block: int):
    """Cases whose lengths and windows lie on the edges of pages and of blocks of `block` tokens, or anywhere."""
    P, S, T = shape.P, shape.M * shape.P, shape.T or 1
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


def bfloat16_bits(case):
    """The same case with its bfloat16 pools held as bits."""
    return {k: jnp.asarray(v).view(jnp.uint16) if k.endswith("pages") else v for k, v in case.items()}
