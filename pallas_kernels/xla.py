"""Paged attention in plain XLA: an online softmax over blocks of pages, fast on CPU and right everywhere.

The loop's trip count is data: it runs from the first block that any row's window reaches to the last block that any row fills,
so its cost follows the tokens there are and not the table. A chunk's own tokens (`k_new`) enter as one more block, unwritten.
Keys of 8 bits are not dequantised: a scale multiplies scores. So do those of values with probabilities where a row has one query.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_sizes import DecodeBlocks, PrefillBlocks, check_given
from pallas_kernels.quantise import dequantise, from_pool, has_scales, value_dtype

# Tokens a loop step gathers. Decode: 128 keep a block of keys and values of one head in L2 (docs/performance.md); a chunk of
# queries amortises a longer block.
DECODE_BLOCK = 128
PREFILL_BLOCK = 512
# Scores of one token against up to this many query heads are a variadic reduce: one pass over the keys for all of them, which XLA:CPU
# vectorises under fast math (`jaxkv.steps.COMPILER_OPTIONS`), but not with one operand; there the keys are halved (docs/performance.md).
_MOST_REDUCED = 16
# Stands in for -inf: finite, so that differences of two of them are 0 and not NaN, also under fast math.
_MASKED = -1e30


def decode(
    q, k_pages, v_pages, kv_scales, page_table, lengths, starts, page_offset,
    *, scale, soft_cap, interpret=False, block_sizes=None, device=None,
):  # fmt: skip  # q [B, K, G, H], starts i32[B] -> o f32[B, K, G, H], lse f32[B, K, G]
    """Returns attention of one query a row over keys [starts, lengths), and its log-sum-exp."""
    del interpret, device
    check_given("xla", DecodeBlocks, block_sizes, ("pages_per_block",))
    options = _Options(scale, soft_cap, _dot_dtype(q[:, None], k_pages.dtype))
    pools = (k_pages, v_pages, kv_scales)
    carry = _empty(q[:, None])
    carry = _attend_pages(carry, q[:, None], pools, page_table, lengths, starts[:, None], page_offset, options, block_sizes)
    o, lse = _finish(carry)
    return o[:, 0], lse[:, 0]


def prefill(
    q, k_pages, v_pages, kv_scales, page_table, lengths, chunk_lengths, k_new, v_new, window, page_offset,
    *, scale, soft_cap, interpret=False, block_sizes=None, device=None,
):  # fmt: skip  # q [B, T, K, G, H], k_new [B, T, K, H] -> o [B, T, K, G, H], lse f32[B, T, K, G]
    """Returns causal attention of a chunk over its row's pages and itself, and its log-sum-exp."""
    del interpret, device
    check_given("xla", PrefillBlocks, block_sizes, ("pages_per_block",))
    options = _Options(scale, soft_cap, _dot_dtype(q, k_pages.dtype))
    positions = lengths[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)  # [B, T]
    starts = jnp.where(window > 0, jnp.maximum(positions - window + 1, 0), 0)  # first key each query sees
    pools = (k_pages, v_pages, kv_scales)
    carry = _attend_pages(_empty(q), q, pools, page_table, lengths, starts, page_offset, options, block_sizes)
    o, lse = _finish(_attend_chunk(carry, q, k_new, v_new, chunk_lengths, window, options))
    return o.astype(q.dtype), lse


@dataclasses.dataclass(frozen=True)
class _Options:
    scale: float
    soft_cap: float | None
    dot_dtype: jnp.dtype  # of the operands of products


def _dot_dtype(q, pool_dtype):  # q [B, T, K, G, H]
    """f32 for one query a row: with few rows XLA:CPU is faster so than in 16 bits. Else q's: bf16 holds what any pool can hold, to its
    tolerance; f16 overflows on bf16's and underflows on values times scales."""
    if q.shape[1] == 1:
        return jnp.dtype(jnp.float32)
    if q.dtype == jnp.float16 and (has_scales(pool_dtype) or value_dtype(pool_dtype) != jnp.float16):
        return jnp.dtype(jnp.float32)
    return q.dtype


def _attend_pages(carry, q, pools, page_table, lengths, starts, page_offset, options, block_sizes):
    """Adds keys [starts[b, t], lengths[b]) of each row's pages, block by block."""
    k_pages, v_pages, kv_scales = pools
    P = k_pages.shape[2]
    tokens = DECODE_BLOCK if q.shape[1] == 1 else PREFILL_BLOCK
    pages_per_block = (block_sizes and block_sizes.pages_per_block) or max(1, tokens // P)
    block = pages_per_block * P
    table = _pad_columns(page_table, pages_per_block)

    def body(i, carry):
        columns = i * pages_per_block + jnp.arange(pages_per_block, dtype=jnp.int32)
        # Stale columns (past the row, behind its window) become the null page: only pages the row has are read.
        live = (columns * P < lengths[:, None]) & ((columns + 1) * P > starts[:, :1])
        ids = jnp.where(live, lax.dynamic_slice_in_dim(table, i * pages_per_block, pages_per_block, 1), 0) + page_offset
        keys, values = _tokens(_gather(k_pages, ids)), _tokens(_gather(v_pages, ids))  # [B, K, block, H]
        scales = None if kv_scales is None else _gather_scales(kv_scales, ids, *k_pages.shape[1:3])
        at = i * block + jnp.arange(block, dtype=jnp.int32)
        # What no query of the row can see may hold NaN: unwritten slots, and the null page in place of pages behind the window.
        seen = (at < lengths[:, None]) & (at >= starts[:, :1])  # [B, block]
        visible = seen[:, None] & (at >= starts[:, :, None])
        return _update(carry, q, keys, values, scales, seen, visible, options)

    some = starts[:, 0] < lengths
    first = jnp.min(jnp.where(some, starts[:, 0], jnp.iinfo(jnp.int32).max)) // block
    last = (jnp.max(jnp.where(some, lengths, 0)) + block - 1) // block
    return lax.fori_loop(first, last, body, carry)


def _attend_chunk(carry, q, k_new, v_new, chunk_lengths, window, options):
    """Adds the chunk's own keys and values, in blocks where the chunk is long."""
    T = q.shape[1]
    tokens = jnp.arange(T, dtype=jnp.int32)

    def add(carry, start, size):
        keys = lax.dynamic_slice_in_dim(k_new, start, size, 1)
        values = lax.dynamic_slice_in_dim(v_new, start, size, 1)
        key_tokens = start + jnp.arange(size, dtype=jnp.int32)
        exists = key_tokens[None] < chunk_lengths[:, None]
        distance = tokens[:, None] - key_tokens[None]
        near = (distance >= 0) & ((window == 0) | (distance < window))
        visible = exists[:, None] & near[None]
        return _update(carry, q, jnp.moveaxis(keys, 1, 2), jnp.moveaxis(values, 1, 2), None, exists, visible, options)

    if T <= PREFILL_BLOCK:
        return add(carry, 0, T)
    whole = T // PREFILL_BLOCK
    carry = lax.fori_loop(0, whole, lambda i, c: add(c, i * PREFILL_BLOCK, PREFILL_BLOCK), carry)
    return add(carry, whole * PREFILL_BLOCK, T - whole * PREFILL_BLOCK) if T % PREFILL_BLOCK else carry


def _empty(q):
    B, T, K, G, H = q.shape
    return (
        jnp.full((B, K, T, G), _MASKED, jnp.float32),  # running maximum
        jnp.zeros((B, K, T, G), jnp.float32),  # sum of weights
        jnp.zeros((B, K, T, G, H), jnp.float32),
    )


def _finish(carry):  # -> o f32[B, T, K, G, H], lse f32[B, T, K, G]
    m, total, o = carry
    alive = total != 0  # and not > 0: a NaN that a row sees must come out
    total = jnp.where(alive, total, 1.0)
    o = jnp.where(alive[..., None], o / total[..., None], 0.0)
    lse = jnp.where(alive, m + jnp.log(total), -jnp.inf)
    return jnp.moveaxis(o, 2, 1), jnp.moveaxis(lse, 2, 1)


def _update(carry, q, keys, values, scales, seen, visible, options):
    """One step of the online softmax (arXiv:2205.14135, with f32 state).

    keys, values [B, K, S, H]; scales f32[2, B, K, S] of 8-bit ones; seen bool[B, S] what the row's queries may see between them;
    visible bool[B, T, S] what each may see.
    """
    m, total, o = carry  # [B, K, T, G], [B, K, T, G], [B, K, T, G, H]
    scores = _scores(q, keys, options.dot_dtype) * options.scale  # f32[B, K, T, G, S]
    if scales is not None:
        scores = scores * scales[0][:, :, None, None]
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    visible = visible[:, None, :, None, :]
    scores = jnp.where(visible, scores, _MASKED)
    m_new = jnp.maximum(m, jnp.max(scores, -1))
    weights = jnp.where(visible, jnp.exp(scores - m_new[..., None]), 0.0)
    decay = jnp.exp(m - m_new)
    total = total * decay + jnp.sum(weights, -1)
    # 0 * NaN is NaN: what nobody sees is taken out of the values and their scales too, not only out of the scores.
    values = jnp.where(seen[:, None, :, None], values, jnp.zeros((), values.dtype))
    if scales is not None:
        v_scale = jnp.where(seen[:, None], scales[1], 0.0)
        if q.shape[1] == 1:
            weights = weights * v_scale[:, :, None, None]
        else:  # a chunk has more scores than its pages have numbers; for these XLA:CPU would also compute every exp twice
            values = dequantise(values, v_scale)
    return m_new, total, o * decay[..., None] + _weighted(weights, values, options.dot_dtype)


def _scores(q, keys, dtype):  # q [B, T, K, G, H], keys [B, K, S, H] -> f32[B, K, T, G, S]
    B, T, K, G, H = q.shape
    S = keys.shape[2]
    if T == 1 and G <= _MOST_REDUCED and (G > 1 or S % 2 == 0):
        q, keys = q[:, 0].astype(jnp.float32), keys.astype(jnp.float32)
        parts = jnp.split(keys, 2 if G == 1 else 1, axis=2)
        products = tuple(part * q[:, :, h, None, :] for part in parts for h in range(G))
        add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))
        rows = lax.reduce(products, (jnp.float32(0),) * len(products), add, (3,))
        return jnp.stack([jnp.concatenate(rows, 2)] if G == 1 else rows, 2)[:, :, None]
    q = jnp.moveaxis(q, 2, 1).reshape(B, K, T * G, H)
    return _dot(q, keys, dtype, "bkrh,bksh->bkrs").reshape(B, K, T, G, S)


def _weighted(weights, values, dtype):  # f32[B, K, T, G, S], [B, K, S, H] -> f32[B, K, T, G, H]
    B, K, T, G, S = weights.shape
    rows = weights.reshape(B, K, T * G, S)
    o = _dot(rows, values, dtype, "bkrs,bksh->bkrh")
    return o.reshape(B, K, T, G, values.shape[3])


def _dot(a, b, dtype, spec):
    precision = "highest" if dtype == jnp.float32 else None  # a TPU would round f32 operands to bf16
    return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32, precision=precision)


def _tokens(pages):  # [B, n, K, P, H] -> [B, K, n*P, H]
    B, n, K, P, H = pages.shape
    return jnp.moveaxis(pages, 2, 1).reshape(B, K, n * P, H)


def _gather(pages, ids):  # [L*C, K, P, H], [B, n] -> [B, n, K, P, H]
    return from_pool(pages.at[ids].get(mode="clip"))


def _gather_scales(kv_scales, ids, K, P):  # f32[L*C, 2, R, 128], [B, n] -> f32[2, B, K, n*P]
    picked = kv_scales.at[ids].get(mode="clip")
    B, n = ids.shape
    picked = picked.reshape(B, n, 2, -1)[..., : K * P].reshape(B, n, 2, K, P)
    scales = jnp.moveaxis(picked, (2, 0, 3), (0, 1, 2)).reshape(2, B, K, n * P)
    # XLA:CPU would gather a scale anew for every score it multiplies. It drops a barrier late, but fuses no concatenate.
    half = n * P // 2
    return jnp.concatenate(lax.optimization_barrier((scales[..., :half], scales[..., half:])), -1)


def _pad_columns(table, multiple: int):
    """Pads the table with null pages, because dynamic_slice clamps a last block that does not fit."""
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % multiple)))
