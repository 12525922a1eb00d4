"""The TPU prefill kernel in both interpreters, against attention in float64 as its definition says."""

import dataclasses
import functools
import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sizes import PrefillBlocks
from pallas_kernels.devices import DEVICES
from pallas_kernels.tpu import prefill_sizes
from pallas_kernels.tpu.prefill import prefill

BF16, F16, FP8 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compiled once: shapes, dtypes and blocks. Every case has three rows and pages of two layers, of which one is used."""

    K: int = 2
    G: int = 2
    H: int = 128
    P: int = 16
    T: int = 40
    M: int = 7
    dtype: type = np.float32
    pool: type | None = None  # dtype; None: the same
    queries: int | None = 16
    pages: int | None = 2
    soft_cap: float | None = None
    device: str = "v5e"

    @property
    def pool_dtype(self) -> np.dtype:
        return np.dtype(self.pool or self.dtype)

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype == np.float32 else 1e-2


CASES = {
    "plain": Case(),
    "odd_group": Case(K=3, G=3, H=80, P=8, pages=4),
    "one_head": Case(K=1, G=1, H=64, P=24, T=25, M=5),
    "many_queries_a_head": Case(K=1, G=7, T=130, P=16, queries=None, pages=None, M=3),
    "wide_group": Case(K=1, G=64, H=64, T=20, queries=None, pages=8),
    "wide_head": Case(K=2, G=5, H=256, P=32, M=4, dtype=BF16),
    "rules": Case(K=4, G=3, P=8, T=33, M=20, queries=None, pages=None, dtype=BF16),
    "soft_cap": Case(H=96, soft_cap=3.0, P=8),
    "float16": Case(dtype=F16),
    "bf16_pool": Case(pool=BF16),
    "f32_pool": Case(dtype=BF16, pool=np.float32),
    "int8": Case(K=3, P=32, M=4, pool=np.int8, soft_cap=20.0),
    "int8_bf16": Case(K=2, P=128, M=2, dtype=BF16, pool=np.int8, queries=None, pages=None),
    "fp8": Case(K=5, G=1, P=32, M=4, T=18, pool=FP8, dtype=BF16),
    "two_cores": Case(device="v5p", T=30),
}


@functools.cache
def _compiled(case: Case, interpret, scale: float):
    def run(q, k_pages, v_pages, scales, table, lengths, chunk_lengths, k_new, v_new, window, page_offset):
        return prefill(
            q, k_pages, v_pages, scales, table, lengths, chunk_lengths, k_new, v_new, window, page_offset, scale=scale,
            soft_cap=case.soft_cap, interpret=interpret, block_sizes=PrefillBlocks(case.queries, case.pages), device=DEVICES[case.device],
        )  # fmt: skip

    # Compiling takes 20 times as long as running: leave out what makes it worse.
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True})


def _flat_scales(scales):  # [C, 2, K, P] -> [C, 2, R, 128]
    C, _, K, P = scales.shape
    R = -(-K * P // 128)
    return np.pad(scales.reshape(C, 2, K * P), ((0, 0), (0, 0), (0, R * 128 - K * P))).reshape(C, 2, R, 128)


@dataclasses.dataclass
class Inputs:
    """The kernel's arguments, and the keys and values of each row as numbers."""

    arguments: tuple
    keys: list  # of [K, tokens, H] in float64
    values: list


def _inputs(case: Case, lengths, chunk_lengths, window: int, seed: int, poison: float) -> Inputs:
    """Returns N(0, 1) inputs with shuffled pages; what no row owns or has written holds `poison`."""
    r = np.random.default_rng(seed)
    K, G, H, P, T, M, B = case.K, case.G, case.H, case.P, case.T, case.M, len(lengths)
    C = B * M + 2
    used = [-(-n // P) for n in lengths]
    table = r.integers(-(2**31), 2**31 - 1, (B, M), dtype=np.int32)
    if poison == 0:
        table[:] = 0
    pages = r.permutation(np.arange(1, C))
    live = np.zeros((2 * C, P), bool)
    for b, n in enumerate(lengths):
        table[b, : used[b]], pages = pages[: used[b]], pages[used[b] :]
        for j in range(used[b]):
            live[C + table[b, j], : n - j * P] = True
    normal = lambda *shape: r.standard_normal(shape)
    is_8_bit = case.pool_dtype.itemsize == 1
    factors = (
        np.exp(0.3 * normal(2 * C, 2, K, P)).astype(np.float32) * (0.02 if case.pool == np.int8 else 1.0) if is_8_bit else None
    )
    stored = [normal(2 * C, K, P, H) for _ in range(2)]
    if case.pool == np.int8:
        stored = [np.clip(np.rint(x * 40), -127, 127) for x in stored]
    stored = [x.astype(case.pool_dtype) for x in stored]
    numbers = [x.astype(np.float64) * (factors[:, i, :, :, None] if is_8_bit else 1) for i, x in enumerate(stored)]
    q = normal(B, T, K, G, H).astype(case.dtype)
    # As the ops hand them over: rounded to what the pool stores, here to numbers that every dtype holds.
    new_dtype = case.dtype if is_8_bit or case.dtype == np.float32 else case.pool_dtype
    new = [normal(B, T, K, H).astype(BF16).astype(new_dtype) for _ in range(2)]
    rows = [
        [
            np.concatenate(
                [x[C + table[b, : used[b]]].swapaxes(0, 1).reshape(K, -1, H)[:, :n], y[b].astype(np.float64).swapaxes(0, 1)], 1
            )
            for b, n in enumerate(lengths)
        ]
        for x, y in zip(numbers, new, strict=True)
    ]
    dead = poison if case.pool != np.int8 else 77
    stored = [np.where(live[:, None, :, None], x, np.array(dead).astype(x.dtype)) for x in stored]
    past = np.arange(T)[None] >= np.array(chunk_lengths)[:, None]
    new = [np.where(past[..., None, None], np.array(poison, x.dtype), x) for x in new]
    scales = _flat_scales(np.where(live[:, None, None], factors, np.float32(poison))) if is_8_bit else None
    i32 = lambda x: np.array(x, np.int32)
    return Inputs((q, *stored, scales, table, i32(lengths), i32(chunk_lengths), *new, i32(window), i32(C)), *rows)


def _oracle(case: Case, inputs: Inputs, b: int, window: int, scale: float):
    """Returns o [T, K, G, H] and lse [T, K, G] of row b's chunk, in float64."""
    q = inputs.arguments[0][b, : inputs.arguments[6][b]].astype(np.float64)
    position = inputs.arguments[5][b] + np.arange(len(q))
    keys, values = (x[b][:, : position[-1] + 1] for x in (inputs.keys, inputs.values))
    distance = position[:, None] - np.arange(keys.shape[1])
    scores = np.einsum("tkgh,ksh->tkgs", q, keys) * scale
    if case.soft_cap:
        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
    seen = (distance >= 0) & ((window == 0) | (distance < window))
    scores = np.where(seen[:, None, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("tkgs,ksh->tkgh", weights / total, values), (top + np.log(total))[..., 0]


def check(case: Case, lengths, chunk_lengths, window=0, seed=0, interpret=True, scale=None):
    """Asserts that the kernel equals the oracle, and that what nobody may read changes no bit."""
    scale = case.H**-0.5 if scale is None else scale
    poisoned = _inputs(case, lengths, chunk_lengths, window, seed, np.nan)
    o, lse = (np.asarray(x) for x in _compiled(case, interpret, scale)(*poisoned.arguments))
    assert o.shape == poisoned.arguments[0].shape and o.dtype == case.dtype and lse.dtype == np.float32
    assert np.isfinite(o.astype(np.float32)).all() and np.isfinite(lse).all()
    for b in np.flatnonzero(chunk_lengths):
        for got, want in zip((o, lse), _oracle(case, poisoned, b, window, scale), strict=True):
            got = got[b, : len(want)].astype(np.float64)
            np.testing.assert_allclose(got, want, rtol=case.tolerance, atol=case.tolerance, err_msg=f"row {b}")
    clean = _inputs(case, lengths, chunk_lengths, window, seed, 0.0)
    for got, want in zip((o, lse), _compiled(case, interpret, scale)(*clean.arguments), strict=True):
        assert got.tobytes() == np.asarray(want).tobytes()


def _corner(case: Case):
    """Returns the lengths, chunk lengths and windows where tiles, pages and blocks begin and end."""
    P, T = case.P, case.T
    most = (case.M * P) // 2 * 2
    lengths = st.sampled_from([0, 1, P - 1, P, P + 1, most]) | st.integers(0, most)
    chunks = st.sampled_from([0, 1, T // 2, T]) | st.integers(0, T)
    windows = st.sampled_from([0, 1, P - 1, P, P + 1, 2 * P + 1]) | st.integers(0, most + T)
    return st.tuples(st.tuples(lengths, lengths, lengths), st.tuples(chunks, chunks, chunks), windows, st.integers(0, 99))


def names(*quick: str) -> list:
    """Returns all cases, slow but for the `quick` ones."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", names("plain", "odd_group", "int8"))
def test_equals_the_oracle_whatever_the_lengths(name):
    case = CASES[name]

    # The rule's blocks are wide, and their copies page by page take the interpreter 5 s an example.
    @settings(max_examples=4 if name == "rules" else 12, deadline=None, derandomize=True)
    @given(_corner(case))
    def run(drawn):
        lengths, chunk_lengths, window, seed = drawn
        check(case, lengths, chunk_lengths, window, seed)

    run()


@pytest.mark.parametrize("name", names("plain", "odd_group", "int8", "many_queries_a_head"))
def test_equals_the_oracle(name):
    case = CASES[name]
    check(case, (case.P + 1, 0, min(3 * case.P - 1, case.M * case.P)), (case.T, case.T - 5, 1), window=0)


@pytest.mark.parametrize("window", [0, 5, 33])
@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in ("int8", "soft_cap", "fp8", "wide_head", "two_cores"))]
)
def test_is_free_of_races_and_of_unset_memory(name, window):
    case = dataclasses.replace(CASES[name], T=20, M=5)
    interpret = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    check(case, (2 * case.P + 3, 0, case.P), (20, 17, 0), window, interpret=interpret)
    assert not _races()


def _races() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races.races_found


@pytest.mark.parametrize("scale", [-0.3, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_scale_may_be_negative_or_zero(scale):
    check(dataclasses.replace(CASES["plain"], T=16, M=3), (20, 3, 0), (16, 16, 2), scale=scale)


def test_one_tile_follows_another_after_rows_without_work():
    check(CASES["plain"], (30, 40, 30), (0, 40, 3))
    check(CASES["plain"], (0, 0, 0), (0, 0, 0))


def test_rows_whose_tables_do_not_fit_together_go_in_several_calls(monkeypatch):
    monkeypatch.setattr("pallas_kernels.tpu.prefill.TABLE_BYTES", 2 * 4 * 9)
    case = dataclasses.replace(CASES["plain"], M=9)  # a shape of its own: nothing compiled before is used
    check(case, (17, 33, 8), (40, 3, 16))
    with pytest.raises(ValueError, match="a page table of 19 columns"):
        check(dataclasses.replace(case, M=19), (17, 33, 8), (40, 3, 16))


def sizes_by_rule(T, K, G, H, P, dtype, device, pool=None):
    array = jax.ShapeDtypeStruct
    q, pages = array((1, T, K, G, H), dtype), array((64, K, P, H), pool or dtype)
    return prefill_sizes.sizes(q, pages, 64, scale=1.0, soft_cap=None, block_sizes=None, device=DEVICES[device])


@pytest.mark.parametrize("device", ["v5e", "v5p", "tpu7x"])
def test_the_rule_counts_every_buffer(device):
    """What the kernel asks for, also where 8-bit pages and the chunk's own are converted before use, and f32 queries."""
    for K, G, H, pool, dtype in itertools.product(
        (1, 8, 32, 64), (1, 4), (128, 256), (BF16, np.int8, np.float32), (BF16, np.float32)
    ):
        if K * G <= 64:
            z = sizes_by_rule(512, K, G, H, 32, dtype, device, pool)
            assert prefill_sizes.vmem(z, np.dtype(dtype), np.dtype(pool)) <= DEVICES[device].vmem_bytes * 3 // 4, z
    for K, G, H, dtype in ((32, 1, 256, BF16), (32, 1, 128, np.float32)):  # asked for 69 and 71 of 64 MiB
        assert sizes_by_rule(512, K, G, H, 128, dtype, device, np.int8).queries == (256 if device == "v5e" else 128)


def test_queries_of_a_block_fill_groups():
    for queries in (192, 8, 130):
        with pytest.raises(ValueError, match=f"queries_per_block={queries} must be a multiple of 16 up to 128, or of 128"):
            check(dataclasses.replace(CASES["plain"], queries=queries), (17, 33, 8), (40, 3, 16))


@pytest.mark.parametrize("device", ["v5e", "tpu7x"])
def test_block_sizes_fill_registers_and_fit_vmem(device):
    for K, G, H, P, itemsize in [
        (8, 4, 128, 128, 2),
        (32, 1, 128, 16, 2),
        (1, 64, 128, 256, 2),
        (8, 16, 256, 64, 4),
        (8, 3, 128, 24, 2),
    ]:
        z = sizes_by_rule(512, K, G, H, P, {2: BF16, 4: np.float32}[itemsize], device)
        assert z.queries % 16 == 0 and (z.queries * G >= 256 or K > 8)
        assert z.keys <= 512 and z.keys % 128 == 0
    assert sizes_by_rule(1, 8, 4, 128, 128, BF16, device).queries == 16
