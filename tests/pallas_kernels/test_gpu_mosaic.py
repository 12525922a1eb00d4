"""The Mosaic GPU decode kernel: in jax's GPU interpreter against attention in float64, and by the real compilers."""

import dataclasses
import functools
import re

import gpu_aot
import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_cases import Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_sizes import DecodeBlocks
from pallas_kernels.devices import DEVICES
from pallas_kernels.gpu import mosaic_decode

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="interpret mode"),
    pytest.mark.skipif(mosaic_decode.available() is not None, reason=str(mosaic_decode.available())),
]
bf16, f16 = "bfloat16", "float16"
# The interpreter compiles the kernel anew for every program of every call, seconds each: one program that takes all jobs.
ONE_CORE = dataclasses.replace(DEVICES["h200"], num_cores=1)


@functools.partial(jax.jit, static_argnames=("soft_cap", "blocks", "device", "interpret"))
def _decode(arguments, starts, *, soft_cap, blocks, device, interpret):
    scale = arguments["q"].shape[-1] ** -0.5
    return mosaic_decode.decode(
        **arguments, starts=starts, scale=scale, soft_cap=soft_cap, interpret=interpret, block_sizes=blocks, device=device
    )


def decode(shape, arguments, starts, blocks, **options):
    options = {"device": ONE_CORE, "interpret": True} | options
    with jax.numpy_dtype_promotion("strict"):
        out = _decode(arguments, np.asarray(starts, np.int32), soft_cap=shape.soft_cap, blocks=blocks, **options)
    return jax.tree.map(np.asarray, out)


def check(shape, blocks, seed, lengths, starts, **options):
    shape = dataclasses.replace(shape, B=len(lengths))
    arguments, keys, values = gpu_cases.make(shape, seed, lengths, starts)
    o, lse = decode(shape, arguments, starts, blocks, **options)
    assert o.dtype == lse.dtype == np.float32
    at = np.arange(keys.shape[1])
    want_o, want_lse = np.zeros(o.shape), np.zeros(lse.shape)
    for b, k in np.ndindex(shape.B, shape.K):
        visible = (at >= starts[b]) & (at < lengths[b])
        q = arguments["q"][b, k][None]
        out = gpu_cases.attend(q, keys[b, :, k], values[b, :, k], visible[None], shape.H**-0.5, shape.soft_cap)
        want_o[b, k], want_lse[b, k] = out[0][0], out[1][0]
    gpu_cases.assert_close(shape, o, lse, want_o, want_lse)


def test_rows_of_every_kind_and_programs_that_share_them():
    shape = Shape(K=2, G=3, H=64, P=16, M=10, q=bf16, pool=bf16)
    lengths, starts = [0, 1, 15, 16, 17, 160], [0, 0, 3, 0, 16, 63]
    check(shape, DecodeBlocks(tokens_per_block=64, num_splits=2), 0, lengths, starts, device=DEVICES["h200"])


def test_no_copy_lands_in_a_tile_that_is_still_read():
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    interpreter = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")
    shape = Shape(K=1, G=2, H=64, P=64, M=3, q=bf16, pool=bf16)
    interpret = params.InterpretGPUParams(detect_races=True)
    check(shape, DecodeBlocks(tokens_per_block=64, num_stages=2, num_splits=1), 0, [192, 100], [0, 10], interpret=interpret)
    assert not interpreter.get_races().races_found


BLOCKS = DecodeBlocks(tokens_per_block=64, num_stages=2)
QUICK = (Shape(K=1, G=8, H=128, P=24, M=6, B=2, q=f16, pool=f16, soft_cap=3.0), BLOCKS)  # chunks smaller than a page
CASES = [
    (Shape(K=3, G=8, H=128, P=24, M=6, q=f16, pool=f16, soft_cap=3.0), BLOCKS),
    (Shape(K=1, G=64, H=64, P=128, M=2, q=bf16, pool=bf16), BLOCKS),  # tiles smaller than a page
    (Shape(K=2, G=5, H=256, P=64, M=3, q=bf16, pool=bf16), None),
    (Shape(K=2, G=1, H=128, P=8, M=20, q=bf16, pool=bf16), DecodeBlocks(tokens_per_block=128, num_stages=1, num_splits=3)),
    (Shape(K=3, G=7, H=64, P=16, M=17, q=f16, pool=f16), DecodeBlocks(num_splits=1)),
    (Shape(K=1, G=16, H=64, P=256, M=2, q=bf16, pool=bf16, soft_cap=5.0), None),
]


def rows(shape):
    """Lengths and starts around every edge of a page and of the table."""
    S, P = shape.M * shape.P, shape.P
    edges = st.sampled_from([0, 1, P - 1, P, P + 1, S - 1, S]) | st.integers(0, S)
    row = edges.flatmap(lambda n: st.tuples(st.just(n), st.just(0) | st.integers(0, max(n - 1, 0)) | st.just(n)))
    return st.lists(row, min_size=shape.B, max_size=shape.B)


def check_drawn(shape, blocks, data):
    lengths, starts = (list(x) for x in zip(*data.draw(rows(shape)), strict=True))
    check(shape, blocks, data.draw(st.integers(0, 2**31 - 1)), lengths, starts)


def test_decode_is_attention():
    check(*QUICK, 0, [25, 144], [0, 47])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "blocks"), CASES, ids=lambda x: str(x) if isinstance(x, Shape) else "")
@settings(max_examples=2, deadline=None)  # 3 s each, in threads of its interpreter
@given(data=st.data())
def test_decode_is_attention_often(shape, blocks, data):
    check_drawn(shape, blocks, data)


@pytest.mark.parametrize("splits", [4, pytest.param(None, marks=pytest.mark.slow)])  # 4: items without a tile too
def test_any_number_of_splits_gives_the_result_of_one(splits):
    shape = Shape(K=1, G=2, H=64, P=64, M=5, q=bf16, pool=bf16)
    lengths, starts = [320, 0, 100], [3, 0, 99]
    arguments, _, _ = gpu_cases.make(shape, 0, lengths, starts)
    one, one_lse = decode(shape, arguments, starts, dataclasses.replace(BLOCKS, num_splits=1))
    o, lse = decode(shape, arguments, starts, dataclasses.replace(BLOCKS, num_splits=splits))
    np.testing.assert_allclose(o, one, rtol=1e-2, atol=4e-3)  # P is rounded to bf16, against another maximum
    np.testing.assert_allclose(lse, one_lse, rtol=1e-5)


def call(shape, *, interpret=False, blocks=None, device="h200", scales=None, struct=jax.ShapeDtypeStruct):
    """decode() and its abstract arguments."""
    B, K, G, H, P = shape.B, shape.K, shape.G, shape.H, shape.P
    pool = struct((shape.pages, K, P, H), jnp.dtype(shape.pool))
    i32 = lambda *dims: struct(dims, jnp.int32)
    arguments = (struct((B, K, G, H), jnp.dtype(shape.q)), pool, pool, scales, i32(B, shape.M), i32(B), i32(B), i32())
    return functools.partial(
        mosaic_decode.decode, scale=0.1, soft_cap=shape.soft_cap, interpret=interpret, block_sizes=blocks, device=DEVICES[device]
    ), arguments


GOOD = Shape(K=2, G=4, H=128, P=16, M=4, q=bf16, pool=bf16)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        (GOOD, {"device": "a100"}, r"capability 9\.0.*a100.*\(8, 0\)"),
        (dataclasses.replace(GOOD, pool="int8"), {}, "int8"),
        (dataclasses.replace(GOOD, pool="float8_e4m3fn"), {}, "float8_e4m3fn"),
        (dataclasses.replace(GOOD, q="float32"), {}, "float32 and bfloat16"),
        (dataclasses.replace(GOOD, q=f16), {}, "float16 and bfloat16"),
        (dataclasses.replace(GOOD, H=96), {}, "96"),
        (dataclasses.replace(GOOD, G=65), {}, "65"),
        (dataclasses.replace(GOOD, P=12), {}, "12"),
    ],
)
def test_what_it_is_not_for_is_refused_and_the_triton_kernel_named(shape, options, words):
    f, arguments = call(shape, **options)
    with pytest.raises(ValueError, match=rf"{words}.*'pallas_gpu'.*Triton"):
        jax.eval_shape(f, *arguments)


@pytest.mark.parametrize("blocks", [DecodeBlocks(tokens_per_block=32), DecodeBlocks(num_stages=3)])
def test_blocks_that_do_not_fit_are_refused(blocks):
    f, arguments = call(GOOD, blocks=blocks)
    with pytest.raises(ValueError, match="shared memory"):
        jax.eval_shape(f, *arguments)


TARGETS = [
    pytest.param(Shape(K=8, G=4, H=128, P=16, M=256, q=bf16, pool=bf16, B=32), "h200", id="h200-H128"),
    *(
        pytest.param(Shape(B=32, M=64, q=dtype, pool=dtype, **dims), target, marks=pytest.mark.slow, id=f"{target}-{dims}-{dtype}")
        for target, dtype, dims in (
            ("h100", bf16, {"K": 8, "G": 4, "H": 128, "P": 16}),
            ("h200", f16, {"K": 8, "G": 4, "H": 64, "P": 16, "soft_cap": 30.0}),
            ("h200", bf16, {"K": 4, "G": 2, "H": 256, "P": 16}),
            ("h100", f16, {"K": 1, "G": 4, "H": 256, "P": 128, "soft_cap": 50.0}),
            ("h200", bf16, {"K": 8, "G": 8, "H": 128, "P": 8}),
            ("h200", bf16, {"K": 1, "G": 64, "H": 128, "P": 256}),
            ("h200", bf16, {"K": 3, "G": 5, "H": 128, "P": 24}),
        )
    ),
]


@pytest.mark.aot
@pytest.mark.parametrize(("shape", "target"), TARGETS)
def test_it_compiles_for_hopper_without_spills(shape, target, monkeypatch, tmp_path):
    if reason := gpu_aot.missing():
        pytest.skip(reason)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    f, arguments = call(shape, device=target, struct=lambda *a: gpu_aot.spec(target, *a))
    jax.jit(f).lower(*arguments).compile()
    (report,) = tmp_path.glob("*.ptxas")
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report.read_text())]
    assert len(spills) >= 2
    assert not any(spills)
    (passes,) = tmp_path.glob("*.mlir-passes.log")
    shared = int(re.search(r"dynamic_shared_memory_size %c(\d+)", passes.read_text()).group(1))
    blocks = mosaic_decode.rule(shape.H, DEVICES[target])
    assert blocks.num_stages >= 2  # one tile on its way while another is computed
    assert shared <= mosaic_decode.shared_bytes(shape.H, blocks.tokens_per_block, blocks.num_stages) <= 232448
