"""What the real TPU compilers make of the decode and write kernels, without a TPU: that they compile, in place, and how long a block is."""

import functools
import math

import jax.numpy as jnp
import pytest
import tpu_aot

from pallas_kernels.block_sizes import DecodeBlocks
from pallas_kernels.devices import DEVICES
from pallas_kernels.tpu.decode import decode
from pallas_kernels.tpu.write import write

pytestmark = [pytest.mark.aot, tpu_aot.needs_libtpu]
BF16, F32, INT8, FP8, I32 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn, jnp.int32
L, B, M, C = 4, 32, 64, 256
TARGETS = tuple(tpu_aot.TOPOLOGIES)


def pools_of(K, H, P, dtype):
    pool = ((L * C, K, P, H), dtype)
    scales = ((L * C, 2, -(-K * P // 128), 128), F32) if jnp.dtype(dtype).itemsize == 1 else None
    return pool, pool, scales


def nbytes(specs):
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in filter(None, specs))


def compile_decode(target, K=8, G=4, H=128, P=128, dtype=BF16, q=BF16, blocks=None, soft_cap=None):
    f = functools.partial(
        decode, scale=0.1, soft_cap=soft_cap, interpret=False, block_sizes=blocks, device=DEVICES[target]
    )  # fmt: skip
    rows = ((B,), I32)
    compiled = tpu_aot.compile_for(target, f, ((B, K, G, H), q), *pools_of(K, H, P, dtype), ((B, M), I32), rows, rows, ((), I32))
    return compiled.memory_analysis()


def compile_write(target, T=1, K=8, H=128, P=128, dtype=BF16, new=BF16):
    pools, rows = pools_of(K, H, P, dtype), ((B,), I32)
    new = ((L, B, T, K, H), new)
    f = functools.partial(write, interpret=False, block_sizes=None, device=DEVICES[target])
    compiled = tpu_aot.compile_for(target, f, *pools, new, new, ((B, M), I32), rows, rows, ((), I32), donate=(0, 1, 2))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(pools)
    return memory


# Bundles of a block of 256 tokens, K 8, G 4, H 128, with bf16 and with int8 pages of 128 and bf16 pages of 16 (whose copies are
# started in a loop of its own, not counted here): what the schedules of libtpu 0.0.42 have, and a little more.
BUNDLES = {"v5e": (450, 590, 420), "v5p": (460, 590, 425), "v6e": (390, 385, 360), "tpu7x": (400, 425, 340)}
WAITS = {"v5e": 335, "v5p": 325, "v6e": 560, "tpu7x": 595}  # of the first two, at most: latencies at the ends of a block


@pytest.mark.parametrize("target", ["v5e", *(pytest.param(t, marks=pytest.mark.slow) for t in TARGETS[1:])])
@tpu_aot.needs_schedules
def test_bundles_of_a_decode_block(target):
    block = lambda P: DecodeBlocks(pages_per_block=256 // P, num_stages=2)
    bf16, int8, small = BUNDLES[target]
    for most, options in (
        (min(bf16, 460), dict(P=128)),
        (int8, dict(P=128, dtype=INT8)),
        (small, dict(P=16)),
    ):
        memory, cost = compile_decode(target, blocks=block(options["P"]), **options), tpu_aot.static_cost("paged_decode")
        assert cost.loop <= most, (target, options, cost)
        assert cost.spills == 0, (target, options, cost)
        assert options["P"] != 128 or cost.loops[0].waits <= WAITS[target], (target, options, cost)
        assert memory.temp_size_in_bytes < 2 * 2**20  # queries in bundles, never pages


@tpu_aot.needs_schedules
def test_the_rule_spills_nothing_for_bfloat16():
    for target in TARGETS[::3]:
        compile_decode(target)
        assert tpu_aot.static_cost("paged_decode").spills == 0


@pytest.mark.parametrize(("T", "dtype", "most"), [(1, BF16, 800), (1, INT8, 1050), (512, BF16, 850)])
@tpu_aot.needs_schedules
def test_write_is_in_place_and_short(T, dtype, most):
    memory, cost = compile_write("v5e", T=T, dtype=dtype), tpu_aot.static_cost("write_kv")
    assert memory.temp_size_in_bytes == 0
    assert cost.spills == 0
    assert cost.total <= most, cost


DECODES = {
    **{f"G{G}": dict(G=G) for G in (1, 3, 8, 16, 64)},
    **{f"K{K}G{G}": dict(K=K, G=G) for K, G in ((1, 4), (1, 16), (32, 1), (5, 3), (2, 64))},
    "H256": dict(H=256),
    "H256P16": dict(K=1, G=8, H=256, P=16),
    "P256": dict(K=1, G=4, H=256, P=256),
    "f32": dict(dtype=F32, q=F32, P=8, soft_cap=20.0),
    "f32q": dict(q=F32, P=32),
    **{f"{d.__name__}-K{K}P{P}": dict(dtype=d, K=K, P=P) for d in (INT8, FP8) for K, P in ((8, 32), (2, 64), (8, 128), (1, 256))},
    "int8-f32q": dict(dtype=INT8, q=F32),
}
WRITES = {
    f"{d.__name__}-T{T}K{K}P{P}H{H}": dict(dtype=d, T=T, K=K, P=P, H=H, new=new)
    for T in (1, 300)
    for d, K, P, H, new in (
        (BF16, 8, 16, 128, BF16),
        (BF16, 1, 256, 256, BF16),
        (F32, 2, 8, 128, F32),
        (INT8, 8, 128, 128, BF16),
        (INT8, 1, 32, 128, F32),
        (FP8, 4, 64, 128, BF16),
    )
}


def on_targets(names, usual):
    """Parameters (target, name): everything on the oldest target, the usual ones on all."""
    return [(target, name) for target in TARGETS for name in names if target == TARGETS[0] or name in usual]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "name"), on_targets(DECODES, ("G3", "H256P16", "f32", "int8-K8P32", "float8_e4m3fn-K1P256")))
def test_decode_compiles(target, name):
    assert compile_decode(target, **DECODES[name]).temp_size_in_bytes < 16 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name"), on_targets(WRITES, ("bfloat16-T1K8P16H128", "float32-T300K2P8H128", "int8-T300K1P32H128"))
)
def test_write_compiles_in_place(target, name):
    options = WRITES[name]
    # Few heads may cost a copy of the chunk into the kernel's layout, padded to 8 heads; never of a pool.
    chunk = 2 * L * B * options["T"] * 8 * options["H"] * 4
    assert compile_write(target, **options).temp_size_in_bytes <= chunk
