"""The Triton prefill kernel in interpret mode, against attention in float64."""

import functools

import gpu_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_cases import Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_sizes import PrefillBlocks
from pallas_kernels.devices import DEVICES
from pallas_kernels.gpu import triton_prefill
from pallas_kernels.quantise import rounded

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="interpret mode")
_OPTIONS = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "blocks"), compiler_options=_OPTIONS)
def _prefill(arguments, chunk_lengths, k_new, v_new, window, *, scale, soft_cap, blocks):
    return triton_prefill.prefill(
        **arguments, chunk_lengths=chunk_lengths, k_new=k_new, v_new=v_new, window=window, scale=scale, soft_cap=soft_cap,
        interpret=True, block_sizes=blocks, device=DEVICES["h200"],
    )  # fmt: skip


def check(shape, blocks, seed, lengths, chunks, window):
    oldest = [max(0, n - window + 1) if window else 0 for n in lengths]
    arguments, keys, values = gpu_cases.make(shape, seed, lengths, oldest)
    rng = np.random.default_rng(seed + 1)
    new = [rng.standard_normal((shape.B, shape.T, shape.K, shape.H), np.float32) for _ in range(2)]
    new = [np.array(rounded(jnp.asarray(x), jnp.dtype(shape.pool))) for x in new]
    for x in new:  # padding may hold anything
        x[np.arange(shape.T) >= np.asarray(chunks)[:, None]] = np.nan
    with jax.numpy_dtype_promotion("strict"):
        o, lse = _prefill(
            arguments,
            np.asarray(chunks, np.int32),
            *new,
            np.int32(window),
            scale=shape.H**-0.5,
            soft_cap=shape.soft_cap,
            blocks=blocks,
        )
    o, lse = np.asarray(o), np.asarray(lse)
    assert (o.dtype, lse.dtype) == (jnp.dtype(shape.q), np.float32)
    assert np.isfinite(o.astype(np.float32)).all()
    for b, k in np.ndindex(shape.B, shape.K):
        n, c = lengths[b], chunks[b]
        if c == 0:
            continue
        join = lambda old, x, b=b, k=k, n=n, c=c: np.concatenate([old[b, :n, k], x[b, :c, k].astype(np.float64)])
        at, position = np.arange(n + c), n + np.arange(c)
        distance = position[:, None] - at
        visible = (distance >= 0) & ((window == 0) | (distance < window))
        want = gpu_cases.attend(
            arguments["q"][b, :c, k], join(keys, new[0]), join(values, new[1]), visible, shape.H**-0.5, shape.soft_cap
        )
        gpu_cases.assert_close(shape, o[b, :c, k], lse[b, :c, k], *want)


bf16, f16, fp8 = "bfloat16", "float16", "float8_e4m3fn"
CASES = [
    (Shape(T=9, K=2, G=3, H=64, P=16, M=4), PrefillBlocks(queries_per_block=16, keys_per_block=16)),
    (Shape(T=20, K=1, G=1, H=80, P=8, M=6, q=bf16, pool=bf16), PrefillBlocks(queries_per_block=16, keys_per_block=16)),
    (Shape(T=9, K=3, G=2, H=64, P=16, M=4, q=bf16, pool="int8"), PrefillBlocks(queries_per_block=16, keys_per_block=16)),
    (Shape(T=5, K=2, G=4, H=80, P=16, M=4, pool=fp8), PrefillBlocks(queries_per_block=16, keys_per_block=32)),
]
SLOW = [
    (Shape(T=7, K=3, G=5, H=96, P=32, M=2, q=f16, pool=f16, soft_cap=3.0), PrefillBlocks(queries_per_block=32, keys_per_block=16)),
    (Shape(T=33, K=2, G=2, H=128, P=64, M=2, q=bf16, pool=fp8), None),
    (Shape(T=65, K=1, G=8, H=256, P=128, M=2, q=bf16, pool=bf16), None),
    (Shape(T=3, K=2, G=64, H=64, P=256, M=1, q=bf16, pool=bf16), None),
    (Shape(T=16, K=2, G=2, H=64, P=24, M=3, q=bf16, pool=bf16, held_as_bits=True), None),
    (Shape(T=16, K=2, G=2, H=64, P=16, M=3, q=f16, pool=fp8, held_as_bits=True, soft_cap=4.0), None),
    (Shape(T=16, K=2, G=2, H=96, P=16, M=3, q="float32", pool="int8"), None),
    (Shape(T=1, K=2, G=2, H=64, P=16, M=3, q=bf16, pool="float32"), None),
]


@pytest.mark.parametrize(("shape", "blocks"), [pytest.param(*c, id=str(c[0])) for c in CASES] + [
    pytest.param(*c, id=str(c[0]), marks=pytest.mark.slow) for c in SLOW
])  # fmt: skip
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_prefill_is_attention(shape, blocks, data):
    S, P, T, B = shape.M * shape.P, shape.P, shape.T, shape.B
    lengths = st.sampled_from([0, 1, P - 1, P, min(P + 1, S), S]) | st.integers(0, S)
    chunks = st.sampled_from([T, T, 1, 0]) | st.integers(0, T)
    windows = st.sampled_from([0, 0, 1, P - 1, P, P + 1, 2 * P + 1]) | st.integers(1, S + T)
    draw = lambda each: data.draw(st.lists(each, min_size=B, max_size=B))
    check(shape, blocks, data.draw(st.integers(0, 2**31 - 1)), draw(lengths), draw(chunks), data.draw(windows))
