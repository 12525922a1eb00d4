"""The TPU decode kernel in both interpreters against attention in float64, what it may not read, and how many bytes it copies."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sizes import DecodeBlocks, tpu_decode_blocks
from pallas_kernels.devices import DEVICES
from pallas_kernels.quantise import quantise
from pallas_kernels.tpu import common, decode_copies
from pallas_kernels.tpu import decode as decode_module
from pallas_kernels.tpu.decode import decode

BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
OFFSET = 3  # page_offset of every case
SCALE = 0.09


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: its static side, and the rows' lengths and first positions."""

    lengths: tuple[int, ...]
    window: int = 0
    K: int = 2
    G: int = 3
    H: int = 128
    P: int = 16
    pool: type = np.float32
    q: type | None = None  # None: as the pool
    pages: int | None = 2
    stages: int | None = 2
    soft_cap: float | None = None
    device: str = "v5e"

    @property
    def q_dtype(self):
        return np.dtype(self.q or self.pool)

    @property
    def starts(self):
        lengths = np.asarray(self.lengths, np.int32)
        return np.maximum(lengths - self.window, 0) if self.window else np.zeros_like(lengths)


EDGES = (0, 1, 15, 16, 17, 0, 0, 47, 33, 0)  # around pages of 16 and blocks of 32, idle rows first, last and in a run
CASES = {
    "edges": Case(EDGES),
    "three_stages_two_cores": Case(EDGES, stages=3, pages=3, device="v5p"),
    "window": Case((70, 3, 0, 17, 40, 16), window=17, K=1, G=5, stages=4),
    "window_of_one": Case((33, 1, 32, 0), window=1, P=8, G=2, pages=1),
    "heads_in_bundles": Case((50, 0, 20), K=8, G=1, P=32, pool=BF16, pages=1),
    "rule": Case((300, 0, 9), K=4, G=2, P=16, pages=None, stages=None),
    "many_queries": Case((40, 0, 17), K=1, G=64, H=64),
    "soft_cap": Case((31, 0, 65), K=3, G=4, H=80, soft_cap=2.0, pool=BF16),
    "wide_heads": Case((31, 16), K=1, G=8, H=256, pool=BF16, q=np.float32),
    "float16": Case((31, 16), H=96, pool=np.float16, q=np.float16),
    "int8": Case((64, 0, 1, 33, 95), K=5, G=2, P=32, pool=np.int8, q=BF16),
    "int8_float32": Case((130, 0, 127), K=2, G=4, P=128, pages=1, pool=np.int8, q=np.float32, window=100),
    "fp8": Case((64, 0, 190), K=8, G=4, P=64, pool=FP8, q=BF16, pages=3),
    "fp8_wide_pages": Case((300, 255), K=2, G=1, P=256, pool=FP8, q=np.float32, pages=1, soft_cap=3.0),
}
INTERPRETERS = {"hlo": True, "tpu": pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)}
QUICK = {
    "edges-hlo",
    "edges-tpu",
    "three_stages_two_cores-tpu",
    "window-tpu",
    "window_of_one-hlo",
    "heads_in_bundles-tpu",
    "int8-tpu",
}
RUNS = [
    pytest.param(name, mode, id=f"{name}-{mode}", marks=() if f"{name}-{mode}" in QUICK else pytest.mark.slow)
    for name in CASES
    for mode in INTERPRETERS
]


def make(case: Case, seed=0):
    """(arguments of decode, keys, values): poison wherever the rows' tokens are not; keys and values f64 as the pool means them."""
    rng = np.random.default_rng(seed)
    lengths, starts, K, P = np.asarray(case.lengths, np.int32), case.starts, case.K, case.P
    used = -(-lengths // P)
    B, M, C = len(lengths), int(used.max()) + 2, int(used.sum()) + 5
    ids = rng.permutation(np.arange(1, C, dtype=np.int32))
    table = rng.integers(-(2**31), 2**31, (B, M), dtype=np.int64).astype(np.int32)  # nonsense where no page is needed
    alive = np.zeros((C + OFFSET, P), bool)
    for b, n in enumerate(used):
        first = starts[b] // P
        table[b, first:n], ids = ids[: n - first], ids[n - first :]
        for t in range(starts[b], lengths[b]):
            alive[table[b, t // P] + OFFSET, t % P] = True
    floats = rng.standard_normal((2, C + OFFSET, K, P, case.H)).astype(np.float32)
    q = rng.standard_normal((B, K, case.G, case.H)).astype(case.q_dtype)
    pools, meant, scales = [], [], None
    if np.dtype(case.pool).itemsize == 1:
        pairs = [tuple(np.asarray(x) for x in quantise(jnp.asarray(x), case.pool)) for x in floats]
        pools, meant = [x for x, _ in pairs], [x.astype(np.float64) * scale[..., None] for x, scale in pairs]
        flat = np.where(alive[:, None, None], np.stack([scale for _, scale in pairs], 1), np.nan).reshape(C + OFFSET, 2, K * P)
        R = -(-K * P // 128)
        padded = np.full((C + OFFSET, 2, R * 128), np.nan, np.float32)
        padded[..., : K * P] = flat
        scales = padded.reshape(C + OFFSET, 2, R, 128)
    else:
        pools = [x.astype(case.pool) for x in floats]
        meant = [x.astype(np.float64) for x in pools]
    if case.pool != np.int8:  # which has no NaN
        pools = [np.where(alive[:, None, :, None], x, np.array(np.nan, x.dtype)) for x in pools]
    at = lambda x, b: [x[table[b, t // P] + OFFSET, :, t % P] for t in range(starts[b], lengths[b])]
    keys, values = ([at(x, b) for b in range(B)] for x in meant)
    return (q, *pools, scales, table, lengths, starts, np.int32(OFFSET)), keys, values


def oracle(q, keys, values, soft_cap):
    """Attention of each row's one query as its definition says, in float64; 0 and -inf where there is no key."""
    o, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b in range(len(q)):
        if not keys[b]:
            continue
        s = np.einsum("kgh,tkh->kgt", q[b].astype(np.float64), np.stack(keys[b])) * SCALE
        s = s if soft_cap is None else soft_cap * np.tanh(s / soft_cap)
        top = s.max(-1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(-1, keepdims=True)
        o[b] = np.einsum("kgt,tkh->kgh", p / total, np.stack(values[b]))
        lse[b] = (top + np.log(total))[..., 0]
    return o, lse


def run(case: Case, args, interpret, **changes):
    blocks = DecodeBlocks(pages_per_block=case.pages, num_stages=case.stages)
    options = dict(scale=SCALE, soft_cap=case.soft_cap, interpret=interpret, block_sizes=blocks, device=DEVICES[case.device])
    options |= changes
    # Compiling takes longer than running: leave out what makes it worse.
    f = jax.jit(functools.partial(decode, **options), compiler_options={"xla_backend_optimization_level": 0})
    return tuple(np.asarray(x) for x in f(*jax.tree.map(jnp.asarray, args)))


def races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.races.races_found)


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_agrees_with_float64_and_reads_nothing_dead(name, mode):
    case = CASES[name]
    args, keys, values = make(case)
    o, lse = run(case, args, INTERPRETERS[mode])
    want_o, want_lse = oracle(args[0], keys, values, case.soft_cap)
    tolerance = 1e-5 if case.q_dtype == np.float32 else 1e-2
    np.testing.assert_array_less(np.linalg.norm(o - want_o, axis=-1), tolerance * np.linalg.norm(want_o, axis=-1) + 1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=tolerance, atol=tolerance)
    assert o.dtype == lse.dtype == np.float32
    assert not o[np.asarray(case.lengths) == 0].any()
    assert mode == "hlo" or not races_found()


def test_a_table_longer_than_scalar_memory_goes_in_pieces(monkeypatch):
    case = Case(EDGES, P=8, pages=2)
    args, _, _ = make(case)
    want = run(case, args, True)
    monkeypatch.setattr(decode_module, "TABLE_BYTES", 4 * 4 * args[4].shape[1])  # four rows at a time
    for got, whole in zip(run(case, args, True), want, strict=True):
        np.testing.assert_array_equal(got, whole)
    monkeypatch.setattr(decode_module, "TABLE_BYTES", 4)
    with pytest.raises(ValueError, match="larger pages"):
        run(case, args, True)


def test_nan_in_one_row_stays_there():
    """A row's live NaN is in VMEM where the next row finds too few pages to overwrite it."""
    case = Case((64, 5, 3, 17), G=2)
    args, _, _ = make(case)
    clean = run(case, args, True)
    v_pages = args[2].copy()
    v_pages[args[4][0, :4] + OFFSET] = np.nan
    dirty = run(case, (*args[:2], v_pages, *args[3:]), True)
    assert np.isnan(dirty[0][0]).all()
    np.testing.assert_array_equal(dirty[0][1:], clean[0][1:])


MIXES = {
    "ragged": ((1, 500, 0, 16, 130, 17, 255, 0), 0),
    "short": ((3, 1, 9, 15, 2, 7), 0),
    "windows": ((500, 40, 0, 130, 64, 1), 48),
}


@pytest.mark.parametrize("mix", ["ragged", "windows", pytest.param("short", marks=pytest.mark.slow)])
def test_copies_the_pages_in_use_and_no_more(mix, monkeypatch):
    """Every copy of a page passes `start_copy`; each is counted as it runs."""
    lengths, window = MIXES[mix]
    case = Case(lengths, window=window, G=1, pages=4, stages=3)
    args, _, _ = make(case)
    moved = []

    def counted(source, destination, semaphore):
        jax.debug.callback(moved.append, math.prod(source.shape) * source.dtype.itemsize)
        common.start_copy(source, destination, semaphore)

    monkeypatch.setattr(decode_copies, "start_copy", counted)
    run(case, args, True)
    jax.effects_barrier()
    pages = sum(-(-n // case.P) - s // case.P for n, s in zip(case.lengths, case.starts, strict=True) if n > s)
    in_use = pages * 2 * case.K * case.P * case.H * 4
    assert in_use <= sum(int(x) for x in moved) <= 1.03 * in_use


def test_refuses_what_cannot_be():
    case, small = Case((5,), H=256, P=256), dataclasses.replace(DEVICES["v5e"], vmem_bytes=2**20)
    with pytest.raises(ValueError, match="VMEM"):
        run(case, make(case)[0], False, device=small)


def test_rule():
    rule = functools.partial(tpu_decode_blocks, M=1000)
    v5e, v7 = DEVICES["v5e"], DEVICES["tpu7x"]
    assert rule(8, 4, 128, 128, itemsize=2, device=v5e) == DecodeBlocks(pages_per_block=2, num_stages=4)
    assert rule(8, 4, 128, 16, itemsize=2, device=v5e).pages_per_block == 16
    assert rule(8, 4, 128, 128, itemsize=2, device=v7).pages_per_block == 8
    assert rule(64, 1, 256, 256, itemsize=4, device=v5e) == DecodeBlocks(pages_per_block=1, num_stages=2)
    assert rule(1, 64, 128, 128, itemsize=2, device=v7).pages_per_block == 4
    assert tpu_decode_blocks(8, 4, 128, 128, 1, 2, v7).pages_per_block == 1  # no more than the table has
