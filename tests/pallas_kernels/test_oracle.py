"""The oracle itself, in float64, against attention written as loops over rows, tokens, heads and keys."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_cases import quantised, scale_array

from pallas_kernels import paged_decode, paged_prefill

B, K, G, H, P, M, C, LAYERS = 5, 2, 3, 6, 4, 3, 21, 2  # K != P, and the pool holds more pages than the table reaches
LENGTHS = (0, 1, P - 1, 2 * P, 2 * P + 1)


def by_loops(
    q, k_pages, v_pages, page_table, lengths, chunk_lengths, k_new, v_new, offset, scale, window, soft_cap, sinks=None
):  # fmt: skip
    """o [B, T, K, G, H] and lse [B, T, K, G] in float64: one query, one key at a time."""
    o, lse = np.zeros(q.shape), np.full(q.shape[:4], -np.inf)
    for b, t, k, g in np.ndindex(*q.shape[:4]):
        position = lengths[b] + t if k_new is not None else lengths[b] - 1
        keys = []  # (position, key, value)
        for j in range(lengths[b]):
            row = offset + page_table[b, j // P]
            keys.append((j, k_pages[row, k, j % P], v_pages[row, k, j % P]))
        if k_new is not None:
            keys += [(lengths[b] + j, k_new[b, j, k], v_new[b, j, k]) for j in range(chunk_lengths[b])]
        total, weighted = 0.0 if sinks is None else math.exp(sinks[k, g]), np.zeros(q.shape[4])
        for at, key, value in keys:
            if at > position or (window and at <= position - window):
                continue
            score = scale * sum(float(x) * float(y) for x, y in zip(q[b, t, k, g], key, strict=True))
            if soft_cap is not None:
                score = soft_cap * math.tanh(score / soft_cap)
            total += math.exp(score)
            weighted += math.exp(score) * value.astype(np.float64)
        if total:
            o[b, t, k, g], lse[b, t, k, g] = weighted / total, math.log(total)
    return o, lse


def case(seed, T, own_keys):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)
    lengths = np.asarray(LENGTHS, np.int32)
    chunk_lengths = np.asarray([T, min(T, 2), 1, T, 0 if T > 1 else 1], np.int32)
    table = rng.permutation(np.arange(1, C))[: B * M].reshape(B, M).astype(np.int32)
    single = lambda *shape: normal(*shape).astype(np.float32)
    new = (single(B, T, K, H), single(B, T, K, H)) if own_keys else (None, None)
    pools = (single(LAYERS * C, K, P, H) for _ in range(2))
    return normal(B, T, K, G, H), *pools, table, lengths, chunk_lengths, *new


# Unoptimised, because compiling is most of the time.
_OPTIONS = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
jit = functools.partial(jax.jit, static_argnames=("scale", "soft_cap"), compiler_options=_OPTIONS)


@jit
def prefill_oracle(
    q, k_pages, v_pages, table, lengths, chunk_lengths, k_new, v_new, offset, window, scale, soft_cap, sinks=None, kv_scales=None
):
    return paged_prefill(
        q, k_pages, v_pages, table, lengths, chunk_lengths, k_new=k_new, v_new=v_new, page_offset=offset, scale=scale,
        window=window, soft_cap=soft_cap, sinks=sinks, kv_scales=kv_scales, return_lse=True, implementation="reference",
    )  # fmt: skip


@jit
def decode_oracle(
    q, k_pages, v_pages, table, lengths, chunk_lengths, k_new, v_new, offset, window, scale, soft_cap, sinks=None, kv_scales=None
):
    first = lambda x: None if x is None else x[:, 0]
    o, lse = paged_decode(
        first(q), k_pages, v_pages, table, lengths, k_new=first(k_new), v_new=first(v_new), page_offset=offset, scale=scale,
        window=window, soft_cap=soft_cap, sinks=sinks, kv_scales=kv_scales, return_lse=True, implementation="reference",
    )  # fmt: skip
    return o[:, None], lse[:, None]


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize(("T", "own_keys"), [(1, False), (1, True), (5, True)], ids=["decode", "decode_own", "prefill"])
def test_oracle_is_the_definition(T, own_keys, soft_cap):
    oracle = decode_oracle if T == 1 else prefill_oracle
    with jax.enable_x64(True):
        for seed, (offset, window) in enumerate([(0, 0), (C, 0), (C, 1), (0, P - 1), (C, P), (0, P + 1), (C, 2 * P + 1)]):
            q, *rest = case(seed, T, own_keys)
            want_o, want_lse = by_loops(q, *rest, offset, 0.7, window, soft_cap)
            o, lse = oracle(q, *rest, np.int32(offset), np.int32(window), 0.7, soft_cap)
            assert o.dtype == lse.dtype == np.float64
            np.testing.assert_allclose(o, want_o, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-12)
            if not own_keys:
                assert not np.asarray(o[0]).any()
                assert np.isneginf(lse[0]).all()


@pytest.mark.parametrize("oracle", [decode_oracle, prefill_oracle], ids=["decode", "prefill"])
def test_a_sink_takes_its_share(oracle):
    with jax.enable_x64(True):
        q, *rest = case(1, 1 if oracle is decode_oracle else 3, True)
        sinks = np.random.default_rng(0).standard_normal((K, G))
        want = by_loops(q, *rest, C, 0.7, P, None, sinks)
        for got, expected in zip(oracle(q, *rest, np.int32(C), np.int32(P), 0.7, None, sinks), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint16"])
def test_oracle_reads_narrow_pools(dtype):
    """And rounds new keys and values as these would store them."""
    with jax.enable_x64(True):
        q, k_pages, v_pages, table, lengths, chunk_lengths, *new = case(0, 1, True)
        narrow = jnp.float16 if dtype == "float16" else jnp.bfloat16
        pools = [x.astype(narrow) for x in (k_pages, v_pages)]
        exact = [np.asarray(x, np.float64) for x in pools], [np.asarray(x.astype(narrow), np.float64) for x in new]
        want, _ = by_loops(q, *exact[0], table, lengths, chunk_lengths, *exact[1], 0, 0.7, 0, None)
        given = [x.view(np.uint16) for x in pools] if dtype == "uint16" else pools
        o, _ = decode_oracle(q, *given, table, lengths, chunk_lengths, *new, np.int32(0), np.int32(0), 0.7, None)
        np.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["plain", "packed", "padded"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "uint8"])
def test_oracle_reads_8_bit_pools_in_every_form(dtype, form):
    """One scale a token and pool head: of both heads where two lie side by side. Scales of keys are not those of values."""
    into = {"plain": lambda x: x, "packed": lambda x: x.reshape(*x.shape[:-2], 1, 2 * H), "padded": lambda x: _padded(x)}[form]
    out_of = {"plain": lambda x: x, "packed": lambda x: x.reshape(*x.shape[:-2], K, H), "padded": lambda x: x[..., :H]}[form]
    with jax.enable_x64(True):
        q, k_pages, v_pages, table, lengths, chunk_lengths, *new = case(0, 3, True)
        pools, exact, scales = [], [], []
        for pages in (k_pages, 5 * v_pages):
            values, scale = quantised(into(np.moveaxis(pages, 1, 2)), dtype)  # [rows, P, K', H']
            meant = values.view(jnp.float8_e4m3fn) if dtype == "uint8" else values
            exact.append(np.moveaxis(out_of(meant.astype(np.float64) * scale[..., None]), 2, 1))
            pools.append(np.moveaxis(values, 2, 1))
            scales.append(np.moveaxis(scale, 2, 1))
        exact_new = []
        for x in new:
            values, scale = quantised(into(x), "int8" if dtype == "int8" else "float8_e4m3fn")
            exact_new.append(out_of(values.astype(np.float64) * scale[..., None]))
        want, want_lse = by_loops(q, *exact, table, lengths, chunk_lengths, *exact_new, C, 0.7, P + 1, None)
        o, lse = prefill_oracle(
            q, *pools, table, lengths, chunk_lengths, *new, np.int32(C), np.int32(P + 1), 0.7, None, kv_scales=scale_array(*scales)
        )
        np.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-12)


def _padded(x):
    return np.concatenate([x, np.zeros((*x.shape[:-1], 2), x.dtype)], -1)


def test_oracle_is_float32_without_x64_and_answers_in_the_dtype_of_q():
    q, *rest = case(3, 1, True)
    narrow = [x.astype(np.float32) if x.dtype == np.float64 else x for x in rest]
    want, _ = by_loops(q.astype(np.float32), *narrow, 0, 0.7, 0, None)
    o, lse = decode_oracle(q.astype(np.float32), *narrow, np.int32(0), np.int32(0), 0.7, None)
    assert o.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-5)
    o, lse = decode_oracle(q.astype(jnp.bfloat16), *narrow, np.int32(0), np.int32(0), 0.7, None)
    assert (o.dtype, lse.dtype) == (jnp.bfloat16, np.float32)
