"""The Triton decode kernel in interpret mode, against attention in float64."""

import functools

import gpu_cases
import jax
import numpy as np
import pytest
from gpu_cases import Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_sizes import DecodeBlocks
from pallas_kernels.devices import DEVICES
from pallas_kernels.gpu import triton_decode
from pallas_kernels.gpu.splits import find_item, split_rows

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="interpret mode")
_STATIC = ("scale", "soft_cap", "blocks")
# Unoptimised code is the most literal, and compiles in a third of the time.
_OPTIONS = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


@functools.partial(jax.jit, static_argnames=_STATIC, compiler_options=_OPTIONS)
def _decode(arguments, starts, *, scale, soft_cap, blocks):
    return triton_decode.decode(
        **arguments, starts=starts, scale=scale, soft_cap=soft_cap, interpret=True, block_sizes=blocks, device=DEVICES["h200"]
    )


def decode(shape, arguments, starts, blocks):
    with jax.numpy_dtype_promotion("strict"):
        out = _decode(arguments, np.asarray(starts, np.int32), scale=shape.H**-0.5, soft_cap=shape.soft_cap, blocks=blocks)
    return jax.tree.map(np.asarray, out)


def check(shape, blocks, seed, lengths, starts):
    arguments, keys, values = gpu_cases.make(shape, seed, lengths, starts)
    o, lse = decode(shape, arguments, starts, blocks)
    assert o.dtype == lse.dtype == np.float32
    at = np.arange(keys.shape[1])
    want_o, want_lse = np.zeros(o.shape), np.zeros(lse.shape)
    for b, k in np.ndindex(shape.B, shape.K):
        visible = (at >= starts[b]) & (at < lengths[b])
        q = arguments["q"][b, k][None]
        out = gpu_cases.attend(q, keys[b, :, k], values[b, :, k], visible[None], shape.H**-0.5, shape.soft_cap)
        want_o[b, k], want_lse[b, k] = out[0][0], out[1][0]
    gpu_cases.assert_close(shape, o, lse, want_o, want_lse)


def rows(shape):
    """Lengths and starts around every edge of a page and of the table."""
    S, P = shape.M * shape.P, shape.P
    edges = st.sampled_from([0, 1, P - 1, P, P + 1, S - 1, S]) | st.integers(0, S)
    row = edges.flatmap(lambda n: st.tuples(st.just(n), st.just(0) | st.integers(0, max(n - 1, 0)) | st.just(n)))
    return st.lists(row, min_size=shape.B, max_size=shape.B)


bf16, f16, fp8 = "bfloat16", "float16", "float8_e4m3fn"
CASES = [
    (Shape(K=2, G=3, H=64, P=16, M=8), DecodeBlocks(tokens_per_block=32)),
    (Shape(K=3, G=1, H=80, P=8, M=8, q=bf16, pool=bf16), DecodeBlocks(tokens_per_block=16, num_splits=2)),
    (Shape(K=2, G=5, H=96, P=32, M=4, q=f16, pool=f16, soft_cap=3.0), DecodeBlocks(tokens_per_block=16)),
    (Shape(K=3, G=7, H=128, P=16, M=6, q=bf16, pool="int8"), DecodeBlocks(tokens_per_block=32, num_splits=1)),
    (Shape(K=2, G=16, H=64, P=64, M=2, q=bf16, pool=fp8), DecodeBlocks(tokens_per_block=32, num_splits=3)),
]
SLOW = [
    (Shape(K=1, G=6, H=80, P=16, M=5, pool="int8", soft_cap=5.0), DecodeBlocks(tokens_per_block=16)),
    (Shape(K=1, G=64, H=128, P=128, M=3, q=bf16, pool=bf16), DecodeBlocks(tokens_per_block=64, num_splits=5)),
    (Shape(K=2, G=32, H=256, P=8, M=16, pool=fp8), DecodeBlocks(tokens_per_block=64)),
    (Shape(K=3, G=8, H=256, P=256, M=2, q=bf16, pool="int8"), None),
    (Shape(K=2, G=4, H=64, P=16, M=9, q=bf16, pool=bf16, held_as_bits=True, B=5), None),
    (Shape(K=2, G=4, H=64, P=16, M=9, q=f16, pool=fp8, held_as_bits=True, B=1), None),
    (Shape(K=2, G=2, H=128, P=24, M=7, q=bf16, pool="float32", B=4), DecodeBlocks(tokens_per_block=64)),
    (Shape(K=2, G=2, H=128, P=16, M=7, pool=bf16, soft_cap=2.0), DecodeBlocks(tokens_per_block=16, num_splits=4)),
    (Shape(K=2, G=2, H=128, P=16, M=7, q=f16, pool=bf16), DecodeBlocks(tokens_per_block=128)),
]


@pytest.mark.parametrize(("shape", "blocks"), [pytest.param(*c, id=str(c[0])) for c in CASES] + [
    pytest.param(*c, id=str(c[0]), marks=pytest.mark.slow) for c in SLOW
])  # fmt: skip
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_decode_is_attention(shape, blocks, data):
    drawn = data.draw(rows(shape))
    lengths, starts = (list(x) for x in zip(*drawn, strict=True))
    check(shape, blocks, data.draw(st.integers(0, 2**31 - 1)), lengths, starts)


def test_any_number_of_splits_gives_the_result_of_one():
    shape = Shape(K=2, G=2, H=64, P=8, M=12)
    lengths, starts = [96, 0, 41], [3, 0, 40]
    arguments, _, _ = gpu_cases.make(shape, 0, lengths, starts)
    one, one_lse = decode(shape, arguments, starts, DecodeBlocks(tokens_per_block=16, num_splits=1))
    for splits in (3, 20):  # 20: more than a combining step reads at once, and than there are tiles
        o, lse = decode(shape, arguments, starts, DecodeBlocks(tokens_per_block=16, num_splits=splits))
        np.testing.assert_allclose(o, one, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(lse, one_lse, rtol=1e-6)


_find_items = jax.jit(jax.vmap(find_item, (None, None, None, 0)))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=9),
    st.sampled_from([16, 48, 64]),
    st.integers(1, 40),
    st.none() | st.integers(1, 7),
)
def test_the_work_list_holds_every_tile_once(spans, block, target, num_splits):
    starts, lengths = (np.asarray([f(s) for s in spans], np.int32) for f in (min, max))
    split = dict(block=block, target=target, num_splits=num_splits)
    first, tiles, items = (np.asarray(x) for x in split_rows(lengths, starts, **split))
    total = int(items.sum())
    padded = [np.pad(x, (0, 9 - len(x))) for x in (first, tiles, items)]
    found = np.stack(_find_items(*padded, np.arange(80, dtype=np.int32)), 1).tolist()
    assert (items >= 1).all()
    assert total <= len(spans) + target if num_splits is None else total == len(spans) * num_splits
    done = [set() for _ in spans]
    for row, tile, end, count in found[:total]:
        assert count == items[row]
        assert done[row].isdisjoint(range(tile, end))
        done[row] |= set(range(tile, end))
        if num_splits is None:
            assert end - tile <= -(-int(tiles.sum()) // target) or tiles[row] == 0
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert done[row] == set(range(start // block, -(-length // block)) if length > start else ())
    assert all(count == 0 and tile == end for _, tile, end, count in found[total:])
