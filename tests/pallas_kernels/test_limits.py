"""What fits: page tables in scalar memory, buffers in VMEM, pools in the offsets of a GPU. Quick by what a trace says, `aot` by the
real compilers."""

import math

import gpu_aot
import jax
import jax.numpy as jnp
import pytest
import tpu_aot
from jax.extend.core import jaxprs_in_params

from pallas_kernels import DEVICES, has_scales, paged_decode, paged_prefill, scales_shape, write_kv


def arguments(op, *, B, M, P, K=1, G=8, H=128, T=16, rows=64, pool="bfloat16", q="bfloat16"):
    """Abstract arguments of an op by name."""
    array = jax.ShapeDtypeStruct
    out = {"k_pages": array((rows, K, P, H), pool), "v_pages": array((rows, K, P, H), pool)}
    out |= {"page_table": array((B, M), jnp.int32), "lengths": array((B,), jnp.int32)}
    if has_scales(pool):
        out["kv_scales"] = array(scales_shape(rows, K, P), jnp.float32)
    if op is paged_decode:
        return out | {"q": array((B, K, G, H), q)}
    out |= {name: array((B, T, K, H), q) for name in ("k_new", "v_new")} | {"chunk_lengths": array((B,), jnp.int32)}
    return out if op is write_kv else out | {"q": array((B, T, K, G, H), q)}


def function(op, device):
    options = {} if op is write_kv else {"scale": 0.1}
    return lambda args: op(**args, **options, device=DEVICES[device])


def kernels(op, device, **shape):
    """The `pallas_call` equations of a call."""

    def inner(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                yield eqn
            else:
                for sub in jaxprs_in_params(eqn.params):
                    yield from inner(sub)

    return list(inner(jax.make_jaxpr(function(op, device))(arguments(op, **shape)).jaxpr))


@pytest.mark.parametrize(("B", "M"), [(32, 8192), (9, 25_000), (17, 13_500), (60_000, 3)])
@pytest.mark.parametrize("op", [paged_decode, paged_prefill, write_kv], ids=lambda op: op.__name__)
def test_tables_and_lengths_fit_scalar_memory(op, B, M):
    """Rows that fill up a grid step of decode count: 28 rows of 8,192 pages fit, and 32 do not."""
    found = kernels(op, "v5e", B=B, M=M, P=16, T=1 if op is write_kv else 16)
    for eqn in found:
        scalars = eqn.invars[: eqn.params["grid_mapping"].num_index_operands]
        taken = sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in scalars)
        assert taken <= DEVICES["v5e"].smem_bytes - 2**15, taken
    assert found


@pytest.mark.aot
@tpu_aot.needs_libtpu
@pytest.mark.parametrize(("B", "M"), [(32, 8192), (9, 25_000)])
@pytest.mark.parametrize("op", [paged_decode, paged_prefill, write_kv], ids=lambda op: op.__name__)
def test_long_tables_compile_for_tpu(op, B, M):
    tpu_aot.compile_for("v5e", function(op, "v5e"), arguments(op, B=B, M=M, P=16, T=1 if op is write_kv else 16))


@pytest.mark.aot
@tpu_aot.needs_libtpu
@pytest.mark.parametrize(
    ("device", "shape"),
    [
        ("v5p", {"K": 32, "G": 1, "H": 256, "pool": "int8"}),
        ("tpu7x", {"K": 32, "G": 1, "H": 128, "pool": "int8", "q": "float32"}),
        ("v5e", {"K": 64, "G": 1, "H": 128}),
    ],
    ids=str,
)
def test_chunks_of_many_heads_compile_for_tpu(device, shape):
    """Their tiles were ruled too large for VMEM, or are three quarters of it."""
    tpu_aot.compile_for(device, function(paged_prefill, device), arguments(paged_prefill, B=2, M=16, P=128, T=512, **shape))


# 3 GiB each, of two layers: more than 2^31 bytes and fewer elements than that once they are read as pairs.
LARGE = dict(B=8, M=64, P=16, K=8, G=4, rows=3 * 2**30 // (8 * 16 * 128), pool="int8")


@pytest.mark.parametrize("op", [paged_decode, paged_prefill], ids=lambda op: op.__name__)
@pytest.mark.parametrize("pool", ["int8", "float8_e4m3fn"])
def test_gpu_kernels_address_no_single_bytes(op, pool):
    """Triton counts the elements of an array of at most 4 GiB in 32 bits and a sign: with two bytes each that is enough."""
    found = kernels(op, "h200", **LARGE | {"pool": pool})
    assert found and all(x.aval.dtype.itemsize >= 2 for eqn in found for x in eqn.invars)
    assert max(math.prod(x.aval.shape) for x in found[0].invars) <= 2**31


@pytest.mark.aot
@pytest.mark.parametrize("op", [paged_decode, paged_prefill], ids=lambda op: op.__name__)
def test_an_8_bit_pool_past_2_gib_compiles_for_gpu(op):
    if reason := gpu_aot.missing():
        pytest.skip(reason)
    specs = jax.tree.map(lambda a: gpu_aot.spec("h200", a.shape, a.dtype), arguments(op, **LARGE))
    report = gpu_aot.compile_for("h200", function(op, "h200"), specs)
    kernel = report.kernel(op.__name__)
    assert kernel.spill_bytes == 0
    assert report.memory.temp_size_in_bytes < 2**28  # no copy of a pool
