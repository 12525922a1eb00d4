"""What the real CUDA compiler makes of the Triton kernels: registers, spills, shared memory and asynchronous copies per target."""

import functools

import gpu_aot
import jax.numpy as jnp
import pytest

from pallas_kernels.block_sizes import gpu_decode_blocks, gpu_decode_items, gpu_prefill_blocks
from pallas_kernels.devices import DEVICES
from pallas_kernels.gpu import triton_decode, triton_prefill

pytestmark = [pytest.mark.aot, pytest.mark.skipif(gpu_aot.missing() is not None, reason=str(gpu_aot.missing()))]
bf16, f16, f32, int8, fp8 = "bfloat16", "float16", "float32", "int8", "float8_e4m3fn"
SCALED = (int8, fp8)


def specs(target, pool, *, K, G, H, P, q, B, M, T=None, pages=None):
    """The abstract arguments that decode and prefill share, by name."""
    of = functools.partial(gpu_aot.spec, target)
    pages = pages or B * M + 1
    scales = of((pages, 2, -(-K * P // 128), 128), f32) if pool in SCALED else None
    return {
        "q": of((B, *((T,) if T else ()), K, G, H), q), "k_pages": of((pages, K, P, H), pool), "v_pages": of((pages, K, P, H), pool),
        "kv_scales": scales, "page_table": of((B, M), jnp.int32), "lengths": of((B,), jnp.int32), "page_offset": of((), jnp.int32),
    }  # fmt: skip


@functools.cache
def compile_decode(target, pool, *, q=bf16, soft_cap=None, K=8, G=4, H=128, P=16, B=32, tokens=4096, pages=None):
    arguments = specs(target, pool, K=K, G=G, H=H, P=P, q=q, B=B, M=tokens // P, pages=pages)
    arguments["starts"] = gpu_aot.spec(target, (B,), jnp.int32)
    static = dict(scale=H**-0.5, soft_cap=soft_cap, interpret=False, block_sizes=None, device=DEVICES[target])
    return gpu_aot.compile_for(target, lambda a: triton_decode.decode(**a, **static), arguments)


def compile_prefill(target, pool, *, q=bf16, soft_cap=None, K=8, G=4, H=128, P=16, B=4, T=512, tokens=4096):
    arguments = specs(target, pool, K=K, G=G, H=H, P=P, q=q, B=B, M=tokens // P, T=T)
    of = functools.partial(gpu_aot.spec, target)
    arguments |= {"chunk_lengths": of((B,), jnp.int32), "window": of((), jnp.int32)}
    arguments |= {name: of((B, T, K, H), f32 if pool in SCALED else pool) for name in ("k_new", "v_new")}
    static = dict(scale=H**-0.5, soft_cap=soft_cap, interpret=False, block_sizes=None, device=DEVICES[target])
    return gpu_aot.compile_for(target, lambda a: triton_prefill.prefill(**a, **static), arguments)


def check(target, report, name, tile_bytes, temp_bytes):
    """No spills, two steps of keys and values in shared memory, copies in flight across a wait, and no copy of a pool."""
    kernel = report.kernel(name)
    assert all(k.spill_bytes == 0 for k in report.kernels), report.kernels
    assert 2 * tile_bytes <= kernel.shared_bytes <= DEVICES[target].smem_bytes, kernel
    assert max(kernel.waits, default=0) > 0, kernel
    assert report.memory.temp_size_in_bytes <= temp_bytes + 2**20


def size(dtype):
    return jnp.dtype(dtype).itemsize


def decode_case(target, pool, q=bf16, **shape):
    marks = () if shape.pop("fast", False) else (pytest.mark.slow,)
    return pytest.param(target, pool, q, shape, marks=marks, id="-".join([target, pool, q, *(f"{k}{v}" for k, v in shape.items())]))


TARGETS = tuple(gpu_aot.TARGETS)
DECODE = [decode_case("h200", pool, fast=True) for pool in (bf16, int8, fp8)]
DECODE += [decode_case("a100", bf16, H=80, fast=True), decode_case("a100", fp8, P=128, fast=True)]
DECODE += [decode_case(t, pool) for t in TARGETS for pool in (f16, int8) if (t, pool) != ("h200", int8)]
DECODE += [decode_case(t, bf16, P=P) for t in ("a100", "h200") for P in (8, 32, 64, 256)]
DECODE += [
    decode_case("h200", pool, G=G, H=H) for pool in (bf16, fp8) for G, H in ((1, 64), (6, 96), (8, 256), (32, 128), (64, 256))
]
DECODE += [decode_case("a100", pool, G=64, H=128) for pool in (bf16, int8)]
DECODE += [decode_case("h200", pool, q=f32) for pool in (f32, bf16, int8, fp8)] + [decode_case("h100", f32, soft_cap=30.0)]


@pytest.mark.parametrize(("target", "pool", "q", "shape"), DECODE)
def test_decode_compiles_without_spills_and_copies_ahead(target, pool, q, shape):
    report = compile_decode(target, pool, q=q, **shape)
    G, H, B, K = shape.get("G", 4), shape.get("H", 128), 32, 8
    blocks = gpu_decode_blocks(G, H, size(pool), f32 if f32 in (q, pool) else bf16)
    items = B + gpu_decode_items(DEVICES[target], B, K, 4096 // blocks.tokens_per_block)
    partials, converted_q = items * K * G * (H + 1) * 4, B * K * G * H * 4
    check(target, report, "paged_decode", 2 * blocks.tokens_per_block * H * size(pool), partials + converted_q)
    kernels = {k.name for k in report.kernels} - {"wrapped_convert"}
    assert kernels == {"paged_decode", "paged_decode_combine"}, "the work list takes no kernel of its own"


PREFILL = [decode_case("h200", bf16, fast=True), decode_case("a100", int8, H=64, T=16, fast=True)]
PREFILL += [decode_case(t, pool, H=H) for t in ("a100", "h200") for pool in (bf16, fp8) for H in (64, 128, 256)]
PREFILL += [
    decode_case("h200", pool, **shape) for pool in (bf16, int8) for shape in ({"H": 80, "G": 3}, {"P": 128}, {"G": 64, "T": 4})
]
PREFILL += [decode_case("h100", f32, q=f32), decode_case("h200", f16, q=f16, soft_cap=50.0)]


@pytest.mark.parametrize(("target", "pool", "q", "shape"), PREFILL)
def test_prefill_compiles_without_spills_and_copies_ahead(target, pool, q, shape):
    report = compile_prefill(target, pool, q=q, **shape)
    G, H, T = shape.get("G", 4), shape.get("H", 128), shape.get("T", 512)
    blocks = gpu_prefill_blocks(T * G, H, size(pool), f32 if q == f32 else bf16)
    own_parts = 2 * 4 * T * 8 * H * size(q) if pool in SCALED else 0  # k_new and v_new with their columns dealt out
    check(target, report, "paged_prefill", 2 * blocks.keys_per_block * H * size(pool), own_parts)
    if target != "a100" and q != f32 and blocks.queries_per_block >= 64:
        assert "wgmma" in report.kernel("paged_prefill").ptx


def test_hopper_holds_three_decode_programs_a_core():
    for pool in (bf16, int8, fp8):
        kernel = compile_decode("h200", pool).kernel("paged_decode")
        per_core = gpu_aot.TARGETS["h200"].shared_per_core
        assert 3 * (kernel.shared_bytes + 1024) <= per_core  # each block has 1 KiB for the system
        assert 3 * 128 * kernel.registers <= 65536


def test_a_pool_of_more_than_4_gib_gets_64_bit_offsets():
    # 2^32 elements: page * stride overflows 32 bits.
    ptx = compile_decode("h200", bf16, pages=2**32 // (8 * 16 * 128), tokens=256).kernel("paged_decode").ptx
    assert "shl.b64" in ptx


def test_a_row_that_cannot_be_split_takes_one_kernel():
    assert [k.name for k in compile_decode("h200", bf16, tokens=64).kernels] == ["paged_decode"]


def test_targets_are_the_devices():
    for name, target in gpu_aot.TARGETS.items():
        spec = DEVICES[name]
        assert (target.capability, target.cores, target.shared_per_block) == (
            spec.compute_capability,
            spec.num_cores,
            spec.smem_bytes,
        )
        assert target.bandwidth == spec.hbm_gbps * 10**9
