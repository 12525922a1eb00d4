"""What the TPU compiler makes of the prefill kernel: its schedule on v5e, and whether it compiles for every target."""

import jax
import jax.numpy as jnp
import pytest
import tpu_aot

from pallas_kernels.devices import DEVICES
from pallas_kernels.tpu.prefill import prefill
from pallas_kernels.tpu.prefill_block import TURN_ROWS
from pallas_kernels.tpu.prefill_sizes import sizes

pytestmark = [pytest.mark.aot, tpu_aot.needs_libtpu]

# v5e has four matrix units of 128 x 128, each of which takes a row a cycle: its schedules place a product of 16 rows every 16
# bundles on each. At the 1.5 GHz of its data sheet that is its 197 TFLOP/s.
V5E_FLOPS_PER_CYCLE = 4 * 128 * 128 * 2


def _compile(device, *, B=2, T=512, K=8, G=4, H=128, P=128, dtype=jnp.bfloat16, pool=None, soft_cap=None):
    C, M, i32, pool = 512, 64, jnp.int32, jnp.dtype(pool or dtype)
    scales = ((C, 2, -(-K * P // 128), 128), jnp.float32) if pool.itemsize == 1 else None
    pages, new = ((C, K, P, H), pool), ((B, T, K, H), dtype)

    def run(*arguments):
        settings = {"interpret": False, "block_sizes": None, "device": DEVICES[device]}
        return prefill(*arguments, scale=H**-0.5, soft_cap=soft_cap, **settings)

    rows = ((B,), i32)
    return tpu_aot.compile_for(
        device, run, ((B, T, K, G, H), dtype), pages, pages, scales, ((B, M), i32), rows, rows, new, new, ((), i32), ((), i32)
    )


@tpu_aot.needs_schedules
def test_the_loop_keeps_v5e_matrix_units_busy_without_spills():
    _compile("v5e", K=8, G=4, H=128, P=128)
    q, pages = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 512, 8, 4, 128), (64, 8, 128, 128)))
    z = sizes(q, pages, 64, scale=1.0, soft_cap=None, block_sizes=None, device=DEVICES["v5e"])
    assert z.queries * 4 <= TURN_ROWS
    flops = 4 * TURN_ROWS * z.keys * 128  # q.k and p.v
    cost = tpu_aot.static_cost("paged_prefill")
    assert len(cost.loops) == 2  # with and without a mask
    for loop in cost.loops:
        assert loop.spills == 0
        cycles = loop.bundles + loop.waits
        assert flops / (cycles * V5E_FLOPS_PER_CYCLE) >= 0.6, cycles


SHAPES = [
    {"K": 2, "G": 3, "P": 16, "T": 100},
    {"K": 4, "G": 2, "P": 32, "pool": jnp.int8},
    {"K": 1, "G": 8, "P": 256, "H": 256, "soft_cap": 50.0},
    {"K": 2, "G": 1, "P": 16, "dtype": jnp.float32},
    {"K": 8, "G": 4, "P": 128, "pool": jnp.float8_e4m3fn},
    {"K": 1, "G": 64, "P": 64, "T": 16, "pool": jnp.int8},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "shapes"), [(d, s) for d in tpu_aot.TOPOLOGIES for s in (SHAPES if d == "v5e" else SHAPES[:2])], ids=str
)
def test_compiles(device, shapes):
    """Beside the compile matrix, which has the usual ones."""
    assert _compile(device, **shapes).memory_analysis().output_size_in_bytes > 0
