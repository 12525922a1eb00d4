"""The TPU write kernel in both interpreters: pools equal to what writing token by token gives, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sizes import WriteBlocks
from pallas_kernels.devices import DEVICES
from pallas_kernels.quantise import quantise
from pallas_kernels.tpu import write as write_module
from pallas_kernels.tpu.write import write

BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
OFFSET = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: its static side, the rows' lengths, and how many tokens each row gets."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    L: int = 2
    T: int = 1
    K: int = 2
    H: int = 128
    P: int = 16
    pool: type = np.float32
    new: type = np.float32
    stages: int = 4
    device: str = "v5e"
    from_hbm: bool = False  # the chunk does not fit VMEM


ONE = dict(lengths=(0, 1, 15, 16, 40, 7, 31), counts=(1, 0, 1, 1, 0, 1, 1))  # first and last slots, idle rows
CHUNK = dict(lengths=(0, 5, 16, 3, 31), counts=(40, 40, 0, 7, 33), T=40)  # whole pages, ragged ends, ends in one tile
CASES = {
    "one": Case(**ONE),
    "one_two_cores": Case(**ONE, L=3, K=8, P=32, pool=BF16, new=BF16, stages=2, device="v5p"),
    "one_int8": Case(**ONE, K=3, P=64, pool=np.int8, new=BF16),
    "one_fp8": Case(**ONE, P=32, pool=FP8),
    "chunk": Case(**CHUNK, H=64, device="v5p"),
    "chunk_from_hbm": Case(**CHUNK, K=3, P=32, L=1, pool=BF16, new=BF16, from_hbm=True),
    "chunk_shorter_than_a_page": Case((0, 5, 63, 30), (12, 12, 11, 0), T=12, K=1, P=64, pool=BF16, from_hbm=True),
    "chunk_int8": Case((0, 5, 16, 31), (70, 33, 0, 68), T=70, K=3, P=32, L=1, pool=np.int8),
    "chunk_int8_from_hbm": Case((0, 5, 128), (140, 33, 130), T=140, P=128, L=1, pool=np.int8, new=BF16, from_hbm=True, stages=2),
    "chunk_fp8": Case((0, 63, 16), (70, 33, 0), T=70, P=64, L=1, pool=FP8, new=np.float16),
    "float16": Case(**CHUNK, P=32, pool=np.float16, new=np.float16),
    "nobody": Case((0, 5), (0, 0)),
}
INTERPRETERS = {"hlo": True, "tpu": pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)}
QUICK = {"one-hlo", "one_two_cores-tpu", "one_int8-tpu", "chunk-tpu", "chunk_from_hbm-tpu", "chunk_int8-tpu", "nobody-tpu"}
RUNS = [
    pytest.param(name, mode, id=f"{name}-{mode}", marks=() if f"{name}-{mode}" in QUICK else pytest.mark.slow)
    for name in CASES
    for mode in INTERPRETERS
]


def make(case: Case, seed=0):
    """Arguments of write: old contents everywhere, nonsense in the table where nothing is written."""
    rng = np.random.default_rng(seed)
    lengths, counts = np.asarray(case.lengths, np.int32), np.asarray(case.counts, np.int32)
    pages = np.where(counts > 0, -(-(lengths + counts) // case.P), 0)
    B, M, C = len(lengths), int(pages.max()) + 1, int(pages.sum()) + 3
    ids = rng.permutation(np.arange(1, C, dtype=np.int32))
    table = rng.integers(-(2**31), 2**31, (B, M), dtype=np.int64).astype(np.int32)
    for b, n in enumerate(pages):
        first = lengths[b] // case.P if n else 0
        table[b, first:n], ids = ids[: n - first], ids[n - first :]
    shape = (case.L * C, case.K, case.P, case.H)
    old = lambda: (rng.integers(-128, 128, shape) if case.pool == np.int8 else rng.standard_normal(shape)).astype(case.pool)
    R = -(-case.K * case.P // 128)
    scales = rng.standard_normal((shape[0], 2, R, 128)).astype(np.float32) if np.dtype(case.pool).itemsize == 1 else None
    new = (3 * rng.standard_normal((2, case.L, B, case.T, case.K, case.H))).astype(case.new)
    new[:, 0, 0, 0, 0] = 0  # a vector whose scale is 0
    return old(), old(), scales, *new, table, lengths, counts, np.int32(OFFSET)


def expected(case: Case, args):
    k_pages, v_pages, scales, k_new, v_new, table, lengths, counts, _ = args
    pools = [k_pages.copy(), v_pages.copy()]
    scales = None if scales is None else scales.copy()
    C = len(k_pages) // case.L
    for which, new in enumerate((k_new, v_new)):
        values, scale = new.astype(case.pool), None
        if scales is not None:
            values, scale = (np.asarray(x) for x in quantise(jnp.asarray(new, jnp.float32), case.pool))
        for layer, b in np.ndindex(case.L, len(lengths)):
            for t in range(counts[b]):
                position = lengths[b] + t
                page, slot = table[b, position // case.P] + layer * C, position % case.P
                pools[which][page, :, slot] = values[layer, b, t]
                if scales is not None:
                    scales[page, which].reshape(-1)[np.arange(case.K) * case.P + slot] = scale[layer, b, t]
    return *pools, scales


def run(case: Case, args, interpret, **changes):
    options = dict(interpret=interpret, block_sizes=WriteBlocks(num_stages=case.stages), device=DEVICES[case.device]) | changes
    # Compiling takes longer than running: leave out what makes it worse.
    f = jax.jit(functools.partial(write, **options), compiler_options={"xla_backend_optimization_level": 0})
    return jax.tree.map(np.asarray, f(*jax.tree.map(jnp.asarray, args)))


def assert_same_bits(got, want):
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            assert g.dtype == w.dtype
            np.testing.assert_array_equal(g.view(np.uint8), w.view(np.uint8))


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_equals_writing_token_by_token(name, mode, monkeypatch):
    case = CASES[name]
    if case.from_hbm:
        monkeypatch.setattr(write_module, "RESIDENT_BYTES", 0)
    args = make(case)
    assert_same_bits(run(case, args, INTERPRETERS[mode]), expected(case, args))
    if mode == "tpu":
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call

        assert not interpret_pallas_call.races.races_found


def test_a_table_longer_than_scalar_memory_goes_in_pieces(monkeypatch):
    case = CASES["one"]
    args = make(case)
    monkeypatch.setattr(write_module, "TABLE_BYTES", 4 * 3 * args[5].shape[1])  # three rows at a time
    assert_same_bits(run(case, args, True), expected(case, args))
    monkeypatch.setattr(write_module, "TABLE_BYTES", 4)
    with pytest.raises(ValueError, match="larger pages"):
        run(case, args, True)
