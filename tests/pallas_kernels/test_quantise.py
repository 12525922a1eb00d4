"""8-bit values and scales: exactly the numpy definition, whatever the compiler's options; and what a pool gives back."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import ENGINE_OPTIONS, LITERAL_OPTIONS, quantised

from pallas_kernels import dequantise, has_scales, quantise
from pallas_kernels.quantise import from_pool, rounded, to_pool, value_dtype

EIGHT_BIT = ("int8", "float8_e4m3fn")
CPU = jax.default_backend() == "cpu"
OPTIONS = {"plain": None} | ({"engine": ENGINE_OPTIONS, "literal": LITERAL_OPTIONS} if CPU else {})
every_option = pytest.mark.parametrize("options", OPTIONS)
every_dtype = pytest.mark.parametrize("dtype", EIGHT_BIT)


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@functools.cache
def compiled(function, options, **static):
    return jax.jit(functools.partial(function, **static), compiler_options=OPTIONS[options])


def assert_exact(x, dtype, options):
    values, scale = compiled(quantise, options, dtype=dtype)(x)
    want, want_scale = quantised(x, dtype)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), want.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(scale), want_scale)


@every_option
@every_dtype
@pytest.mark.parametrize("H", [64, 80, 96, 128, 256])
def test_it_is_exactly_the_definition(H, dtype, options):
    rng = np.random.default_rng(H)
    x = rng.standard_normal((500, 3, H), np.float32) * np.exp(8 * rng.standard_normal((500, 3, 1), np.float32))
    assert_exact(x, dtype, options)


@every_dtype
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_is_exactly_the_definition_of_any_vector(dtype, data):
    largest = data.draw(st.sampled_from([0.0, 1e-45, 2e-38, 1e-30, 1.0, 3.4e38]))
    parts = data.draw(st.lists(st.floats(-1, 1, width=32, allow_subnormal=False), min_size=8, max_size=8))
    with jax.numpy_dtype_promotion("strict"):
        assert_exact(np.asarray([parts], np.float32) * np.float32(largest), dtype, "plain")


@every_option
def test_int8_rounds_ties_to_even_and_never_leaves_its_range(options):
    values, scale = compiled(quantise, options, dtype="int8")(
        np.asarray([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127]], np.float32)
    )
    np.testing.assert_array_equal(values[0], [127, 0, 2, 2, 0, -2, -2, -127])
    assert scale[0] == 1
    rng = np.random.default_rng(0)
    values, _ = compiled(quantise, options, dtype="int8")(rng.standard_normal((2000, 64), np.float32) * 1e30)
    assert np.abs(np.asarray(values, np.int32)).max() == 127


@every_option
def test_fp8_rounds_as_the_type_says(options):
    """Every representable value, every tie between two, and the neighbours of both, in one vector with the largest."""
    grid = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (grid[1:] + grid[:-1]) / 2
    near = np.concatenate([ties, np.nextafter(ties, np.float32(1e9)), np.nextafter(ties, np.float32(-1e9)), grid])
    assert_exact(np.concatenate([near, -near])[None], "float8_e4m3fn", options)


@every_dtype
@every_option
def test_zero_vectors_and_vanishing_ones_have_scale_zero_without_nan(options, dtype):
    """CASES 10. A scale below the smallest normal float would be flushed by some units and not by others."""
    x = np.zeros((4, 64), np.float32)
    x[1, 3], x[2, 3], x[3, :2] = 1e-45, -1e-37, [2e-35, -1e-35]
    values, scale = compiled(quantise, options, dtype=dtype)(x)
    assert not np.asarray(values, np.float32)[:3].any()
    np.testing.assert_array_equal(np.asarray(scale)[:3], 0)
    np.testing.assert_allclose(np.asarray(dequantise(values, scale))[3, :2], x[3, :2], rtol=0.07)


@every_dtype
def test_what_is_not_finite_stays_visible(dtype):
    x = np.ones((3, 8), np.float32)
    x[0, 2], x[1, 2] = np.nan, np.inf
    _, scale = quantise(jnp.asarray(x), dtype)
    assert not np.isfinite(scale[:2]).any()
    assert np.isfinite(scale[2])


@every_dtype
def test_the_error_is_half_a_step(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1000, 128), np.float32)
    values, scale = quantise(jnp.asarray(x), dtype)
    error = np.abs(np.asarray(dequantise(values, scale)) - x)
    if dtype == "int8":
        assert (error <= 0.5001 * np.asarray(scale)[:, None]).all()
    else:  # 3 bits of fraction; below 2^-6 of a step, steps of 2^-9
        assert (error <= np.maximum(np.abs(x) * 2**-4, np.asarray(scale)[:, None] * 2**-10) * 1.0001).all()


@every_option
@pytest.mark.parametrize("x64", [False, True])
def test_narrow_inputs_and_x64_change_nothing(options, x64):
    x = np.random.default_rng(0).standard_normal((50, 64), np.float32).astype(ml_dtypes.bfloat16)
    with jax.enable_x64(x64):
        for dtype in EIGHT_BIT:
            values, scale = compiled(quantise, options, dtype=dtype)(jnp.asarray(x))
            want, want_scale = quantised(x.astype(np.float32), dtype)
            np.testing.assert_array_equal(np.asarray(values).view(np.uint8), want.view(np.uint8))
            np.testing.assert_array_equal(scale, want_scale)
            assert scale.dtype == np.float32


@every_option
def test_every_fp8_number_reads_back_from_its_bits(options):
    bits = np.arange(256, dtype=np.uint8)
    want = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = np.asarray(compiled(from_pool, options)(bits))
    finite = np.isfinite(want)
    assert finite.sum() == 254
    np.testing.assert_array_equal(got[finite], want[finite])
    assert np.isfinite(got).all()  # so that no select on values is needed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint16", "int8", "float8_e4m3fn", "uint8"])
def test_what_a_pool_stores_and_gives_back(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((20, 64), np.float32))
    values, scale = to_pool(x, dtype)
    assert values.dtype == dtype
    assert (scale is not None) == has_scales(dtype) == (values.dtype.itemsize == 1)
    back = from_pool(values).astype(jnp.float32)
    back = back if scale is None else back * scale[:, None]
    np.testing.assert_array_equal(back, np.asarray(rounded(x, dtype)).astype(np.float32))
    assert value_dtype(dtype) == {"uint16": "bfloat16", "uint8": "float8_e4m3fn"}.get(dtype, dtype)
    np.testing.assert_allclose(back, x, rtol=0.07, atol=0.02)
