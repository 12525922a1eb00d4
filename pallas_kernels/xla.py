"""Paged attention in plain XLA: an online softmax over blocks of pages, fast on CPU and right everywhere.

The loop's trip count is data: it runs from the first block that any row's window reaches to the last block that any row fills,
so its cost follows the tokens there are and not the table. Tokens of this call (`k_new`) enter as one more block, unwritten.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

# Tokens a loop step gathers. Decode: 128 keep a block of keys and values of one head in L2 (docs/performance.md); a chunk of
# queries amortises a longer block.
_DECODE_BLOCK = 128
_PREFILL_BLOCK = 512
# Stands in for -inf: finite, so that differences of two of them are 0 and not NaN, also under fast math.
_MASKED = -1e30
# A variadic reduce multiplies a block by up to this many query heads in one pass over it.
_REDUCE_GROUP = 8


def attend(
    q, k_pages, v_pages, page_table, lengths, chunk_lengths, k_new, v_new, *, page_offset, scale, window, soft_cap
):  # q [B, T, K, G, H] -> o [B, T, K, G, H], lse f32[B, T, K, G]
    B, T, K, G, H = q.shape
    P = k_pages.shape[2]
    pages_per_block = max(1, (_DECODE_BLOCK if T == 1 else _PREFILL_BLOCK) // P)
    block = pages_per_block * P
    table = _pad_columns(page_table, pages_per_block)
    first_query = lengths if k_new is not None else lengths - 1
    positions = first_query[:, None] + jnp.arange(T, dtype=jnp.int32)  # [B, T]
    starts = jnp.where(window > 0, jnp.maximum(positions - window + 1, 0), 0)  # first key each query sees

    def body(i, carry):
        columns = i * pages_per_block + jnp.arange(pages_per_block, dtype=jnp.int32)
        # Stale columns (past the row, behind its window) become the null page: only pages the row has are read.
        live = (columns * P < lengths[:, None]) & ((columns + 1) * P > starts[:, :1])
        ids = jnp.where(live, lax.dynamic_slice_in_dim(table, i * pages_per_block, pages_per_block, 1), 0) + page_offset
        keys, values = _gather(k_pages, ids), _gather(v_pages, ids)  # [B, n, K, P, H]
        key_positions = i * block + jnp.arange(block, dtype=jnp.int32)
        # What no query of the row can see may hold NaN: unwritten slots, and the null page in place of pages behind the window.
        seen = (key_positions < lengths[:, None]) & (key_positions >= starts[:, :1])  # [B, block]
        visible = seen[:, None] & (key_positions >= starts[:, :, None]) & (key_positions <= positions[:, :, None])
        return _update(carry, q, _tokens(keys), _tokens(values), seen, visible, scale, soft_cap)

    carry = (
        jnp.full((B, K, T, G), _MASKED, jnp.float32),
        jnp.zeros((B, K, T, G), jnp.float32),
        jnp.zeros((B, K, T, G, H), jnp.float32),
    )
    first = jnp.min(jnp.where(lengths > 0, starts[:, 0], jnp.iinfo(jnp.int32).max)) // block
    last = (jnp.max(lengths) + block - 1) // block
    carry = lax.fori_loop(first, last, body, carry)
    if k_new is not None:
        carry = _attend_chunk(carry, q, k_new, v_new, chunk_lengths, window, scale, soft_cap)
    m, total, o = carry
    alive = total > 0
    o = jnp.where(alive[..., None], o / jnp.where(alive, total, 1.0)[..., None], 0.0)
    lse = jnp.where(alive, m + jnp.log(jnp.where(alive, total, 1.0)), -jnp.inf)
    return jnp.moveaxis(o, 2, 1).astype(q.dtype), jnp.moveaxis(lse, 2, 1)


def _attend_chunk(carry, q, k_new, v_new, chunk_lengths, window, scale, soft_cap):
    """Adds the chunk's own keys and values, in blocks where the chunk is long."""
    T = q.shape[1]
    tokens = jnp.arange(T, dtype=jnp.int32)

    def add(carry, start, size):
        keys = lax.dynamic_slice_in_dim(k_new, start, size, 1)
        values = lax.dynamic_slice_in_dim(v_new, start, size, 1)
        key_tokens = start + jnp.arange(size, dtype=jnp.int32)
        exists = key_tokens[None] < chunk_lengths[:, None]
        distance = tokens[:, None] - key_tokens[None]
        seen = (distance >= 0) & ((window == 0) | (distance < window))
        visible = exists[:, None] & seen[None]
        return _update(carry, q, jnp.moveaxis(keys, 1, 2), jnp.moveaxis(values, 1, 2), exists, visible, scale, soft_cap)

    if T <= _PREFILL_BLOCK:
        return add(carry, 0, T)
    whole = T // _PREFILL_BLOCK
    carry = lax.fori_loop(0, whole, lambda i, c: add(c, i * _PREFILL_BLOCK, _PREFILL_BLOCK), carry)
    return add(carry, whole * _PREFILL_BLOCK, T - whole * _PREFILL_BLOCK) if T % _PREFILL_BLOCK else carry


def _update(carry, q, keys, values, seen, visible, scale, soft_cap):
    """One step of the online softmax (arXiv:2205.14135, with f32 state).

    keys, values [B, K, S, H]; seen bool[B, S] what the row's queries may see between them; visible bool[B, T, S] what each may see.
    """
    m, total, o = carry  # [B, K, T, G], [B, K, T, G], [B, K, T, G, H]
    scores = _scores(q, keys) * scale  # f32[B, K, T, G, S]
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    visible = visible[:, None, :, None, :]
    scores = jnp.where(visible, scores, _MASKED)
    m_new = jnp.maximum(m, jnp.max(scores, -1))
    weights = jnp.where(visible, jnp.exp(scores - m_new[..., None]), 0.0)
    decay = jnp.exp(m - m_new)
    # 0 * NaN is NaN: what nobody sees is taken out of the values too, not only out of the scores.
    values = jnp.where(seen[:, None, :, None], values, jnp.zeros((), values.dtype))
    o = o * decay[..., None] + _weighted(weights, values, q.dtype)
    return m_new, total * decay + jnp.sum(weights, -1), o


def _scores(q, keys):  # q [B, T, K, G, H], keys [B, K, S, H] -> f32[B, K, T, G, S]
    B, T, K, G, H = q.shape
    if T > 1:
        q = jnp.moveaxis(q, 2, 1).reshape(B, K, T * G, H)
        return _dot(q, keys, q.dtype, "bkrh,bksh->bkrs").reshape(B, K, T, G, keys.shape[2])
    # XLA:CPU turns one variadic reduce into one vectorised pass over the keys for all heads of a group; a batched dot with few
    # rows becomes a scalar loop (docs/performance.md).
    q, keys = q[:, 0].astype(jnp.float32), keys.astype(jnp.float32)
    rows = []
    for g in range(0, G, _REDUCE_GROUP):
        heads = range(g, min(G, g + _REDUCE_GROUP))
        products = tuple(keys * q[:, :, h, None, :] for h in heads)
        zeros = (jnp.float32(0),) * len(products)
        rows += lax.reduce(products, zeros, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), (3,))
    return jnp.stack(rows, 2)[:, :, None]


def _weighted(weights, values, dtype):  # f32[B, K, T, G, S], [B, K, S, H] -> f32[B, K, T, G, H]
    B, K, T, G, S = weights.shape
    rows = weights.reshape(B, K, T * G, S)
    o = _dot(rows, values, dtype if T > 1 else jnp.float32, "bkrs,bksh->bkrh")
    return o.reshape(B, K, T, G, values.shape[3])


def _dot(a, b, dtype, spec):
    precision = "highest" if dtype == jnp.float32 else None  # a TPU would round f32 operands to bf16
    return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32, precision=precision)


def _tokens(pages):  # [B, n, K, P, H] -> [B, K, n*P, H]
    B, n, K, P, H = pages.shape
    return jnp.moveaxis(pages, 2, 1).reshape(B, K, n * P, H)


def _gather(pages, ids):
    """Pages by id, as floats. uint16 pools hold bf16 bits: XLA:CPU would upcast a bf16 pool whole, every step."""
    picked = pages.at[ids].get(mode="clip")
    if picked.dtype == jnp.uint16:
        return lax.bitcast_convert_type(picked.astype(jnp.uint32) << 16, jnp.float32)
    return picked


def _pad_columns(table, multiple: int):
    """Pads the table with null pages, because dynamic_slice clamps a last block that does not fit."""
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % multiple)))
