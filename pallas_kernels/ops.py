"""The public ops: each validates, brings its arrays into the form that kernels expect, and hands them to an implementation.

What a kernel never sees: windows in decode (they are first positions), keys and values of decode's own token, attention sinks (both
are merged by log-sum-exp), heads in another form than the pool's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import heads, merge, quantise, reference
from pallas_kernels.block_sizes import DecodeBlocks, PrefillBlocks, WriteBlocks, check_given
from pallas_kernels.devices import DeviceSpec
from pallas_kernels.dispatch import REFERENCE, Choice, choose
from pallas_kernels.validate import check_attention, check_platform, check_write


def paged_decode(
    q,
    k_pages,
    v_pages,
    page_table,
    lengths,
    *,
    k_new=None,
    v_new=None,
    page_offset=0,
    scale: float,
    window=0,
    soft_cap: float | None = None,
    sinks=None,
    kv_scales=None,
    return_lse: bool = False,
    implementation: str | None = None,
    interpret=False,
    block_sizes=None,
    device: DeviceSpec | None = None,
):
    """Returns attention of one query token a row over the row's pages, o `[B, K, G, H]` in q's dtype.

    Args:
      q: `[B, K, G, H]`, not scaled.
      k_pages, v_pages: `[L*C, K, P, H]` f32, bf16, f16, int8 or float8_e4m3fn; uint16 and uint8 hold the bits of bf16 and
        float8_e4m3fn (what XLA:CPU moves fast). Heads may be padded or lie side by side (`pool_heads`).
      page_table: i32 `[B, M]`, pages of one layer; entries at and past ceil(length/P) are ignored, a negative one is page 0. Nothing
        checks that the others are pages of the layer.
      lengths: i32 `[B]`, tokens of the row that are in its pages: 0 to M*P, what lies outside counts as the nearer of the two.
      k_new, v_new: `[B, K, H]`, this token's own key and value when they are not in the pages yet; the query then stands at
        position `length`, else at `length - 1`. They count as the pool would store them.
      page_offset: i32 scalar, may be traced: the layer's first row of the pool.
      scale: multiplies q.k, before the soft cap. A plain number, as soft_cap: both are compiled into the kernel.
      window: tokens a query sees, itself included; 0 or None (or a traced negative): all. An int or a traced i32 scalar.
      soft_cap: c * tanh(scores / c), after the scale and before the mask.
      sinks: `[K, G]`, a score each head's softmax has besides those of the keys, with no value behind it.
      kv_scales: f32 `[L*C, 2, R, 128]` of 8-bit pools (`scales_shape`).
      return_lse: also return the natural log-sum-exp of the scores, the sink's too, f32 `[B, K, G]`; -inf where a row sees nothing.
      implementation: one of IMPLEMENTATIONS, or None: the platform's.
      interpret: run a Pallas implementation in interpret mode, on any platform; True, or a pltpu.InterpretParams for TPU kernels.
      block_sizes: a DecodeBlocks, or None: tuned or by rule.
      device: what to build for, None: the present device (interpreted: a modest one).

    Raises:
      ValueError, TypeError: shapes, dtypes or options that do not fit together, or an implementation that cannot run here.
    """
    if len(q.shape) != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}, expected [B, K, G, H]")
    window = 0 if window is None else window
    expand = lambda x: None if x is None else x[:, None]
    arrays = (q, k_pages, v_pages, kv_scales, page_table, lengths, k_new, v_new, sinks)
    checked = (*map(expand, (q,)), *arrays[1:6], None, expand(k_new), expand(v_new), sinks)
    check_attention(*checked, page_offset=page_offset, scale=scale, window=window, soft_cap=soft_cap)
    choice = choose(implementation, interpret, device)
    check_platform(choice, k_pages)
    q, k_pages, v_pages, kv_scales, page_table, lengths, k_new, v_new, sinks = jax.tree.map(jnp.asarray, arrays)  # numpy too
    page_table, lengths = _within(page_table, lengths, k_pages)
    page_offset, window = jnp.asarray(page_offset, jnp.int32), jnp.maximum(jnp.asarray(window, jnp.int32), 0)
    if choice.name == REFERENCE:
        check_given(REFERENCE, DecodeBlocks, block_sizes, ())
        o, lse = reference.attend(
            q[:, None], k_pages, v_pages, kv_scales, page_table, lengths, jnp.ones_like(lengths), expand(k_new), expand(v_new),
            sinks, page_offset=page_offset, scale=scale, window=window, soft_cap=soft_cap,
        )  # fmt: skip
        return (o[:, 0], lse[:, 0]) if return_lse else o[:, 0]

    position = lengths if k_new is not None else lengths - 1
    starts = jnp.where(window > 0, jnp.maximum(position - window + 1, 0), 0)
    o, lse = choice.function("decode")(
        heads.queries_to_pool(q, k_pages), *_as_numbers(choice, k_pages, v_pages), kv_scales, page_table, lengths, starts,
        page_offset, scale=float(scale), soft_cap=soft_cap, **_settings(choice, block_sizes),
    )  # fmt: skip
    o, lse = heads.outputs_from_pool(o, *q.shape[1:]), lse.reshape(q.shape[:3])
    if k_new is not None:
        own = _as_stored(k_new, k_pages), _as_stored(v_new, v_pages)
        o, lse = merge.merge_own_token(o, lse, q, *own, scale=scale, soft_cap=soft_cap)
    if sinks is not None:
        o, lse = merge.merge_sinks(o, lse, sinks)
    o = o.astype(q.dtype)
    return (o, lse) if return_lse else o


def paged_prefill(
    q,
    k_pages,
    v_pages,
    page_table,
    lengths,
    chunk_lengths,
    *,
    k_new,
    v_new,
    page_offset=0,
    scale: float,
    window=0,
    soft_cap: float | None = None,
    sinks=None,
    kv_scales=None,
    return_lse: bool = False,
    implementation: str | None = None,
    interpret=False,
    block_sizes=None,
    device: DeviceSpec | None = None,
):
    """Returns causal attention of a chunk over the row's pages and the chunk itself, o `[B, T, K, G, H]` in q's dtype.

    Query t of row b stands at position `lengths[b] + t`. `chunk_lengths` i32 `[B]` says how many of the T are real; the output
    of the others is meaningless. k_new, v_new `[B, T, K, H]` are the chunk's keys and values; they count as the pool
    would store them. block_sizes is a PrefillBlocks. The rest is as in `paged_decode`; lse is f32 `[B, T, K, G]`.
    """
    if k_new is None or v_new is None:
        raise ValueError("paged_prefill needs k_new and v_new, the chunk's own keys and values")
    window = 0 if window is None else window
    arrays = (q, k_pages, v_pages, kv_scales, page_table, lengths, chunk_lengths, k_new, v_new, sinks)
    check_attention(*arrays, page_offset=page_offset, scale=scale, window=window, soft_cap=soft_cap)
    choice = choose(implementation, interpret, device)
    check_platform(choice, k_pages)
    arrays = jax.tree.map(jnp.asarray, arrays)
    q, k_pages, v_pages, kv_scales, page_table, lengths, chunk_lengths, k_new, v_new, sinks = arrays
    page_table, lengths = _within(page_table, lengths, k_pages)
    chunk_lengths = jnp.clip(chunk_lengths, 0, q.shape[1])
    page_offset, window = jnp.asarray(page_offset, jnp.int32), jnp.maximum(jnp.asarray(window, jnp.int32), 0)
    if choice.name == REFERENCE:
        check_given(REFERENCE, PrefillBlocks, block_sizes, ())
        arrays = (q, k_pages, v_pages, kv_scales, page_table, lengths, chunk_lengths, k_new, v_new, sinks)
        o, lse = reference.attend(*arrays, page_offset=page_offset, scale=scale, window=window, soft_cap=soft_cap)
        return (o, lse) if return_lse else o

    own = (
        heads.vectors_to_pool(_as_stored(x, pages).astype(_chunk_dtype(q, pages)), pages)
        for x, pages in ((k_new, k_pages), (v_new, v_pages))
    )
    o, lse = choice.function("prefill")(
        heads.queries_to_pool(q, k_pages), *_as_numbers(choice, k_pages, v_pages), kv_scales, page_table, lengths, chunk_lengths,
        *own, window, page_offset, scale=float(scale), soft_cap=soft_cap, **_settings(choice, block_sizes),
    )  # fmt: skip
    o, lse = heads.outputs_from_pool(o, *q.shape[2:]), lse.reshape(q.shape[:4])
    if sinks is not None:
        o, lse = merge.merge_sinks(o, lse, sinks)
    return (o, lse) if return_lse else o


def write_kv(
    k_pages,
    v_pages,
    k_new,
    v_new,
    page_table,
    lengths,
    chunk_lengths,
    *,
    kv_scales=None,
    page_offset=0,
    implementation: str | None = None,
    interpret=False,
    block_sizes=None,
    device: DeviceSpec | None = None,
):
    """Returns (k_pages, v_pages, kv_scales) with new tokens stored: in place where the arguments are donated.

    Token t < chunk_lengths[b] of row b goes to position lengths[b] + t; one past the end of its table is dropped, as is a chunk behind a
    negative length. Pages of the positions written belong to one row each.

    Args:
      k_pages, v_pages, page_table, lengths, kv_scales: as in `paged_decode`; the table owns pages for what is stored.
      k_new, v_new: `[L, B, T, K, H]`, or `[B, T, K, H]` for one layer; converted or quantised to what the pool holds.
      chunk_lengths: i32 `[B]`.
      page_offset: i32 scalar, may be traced: first row of the first layer. Layer l lies l*C further, C = pool rows / L.
      implementation, interpret, device: as in `paged_decode`; block_sizes is a WriteBlocks.

    Raises:
      ValueError, TypeError: as in `paged_decode`.
    """
    if len(k_new.shape) == len(v_new.shape) == 4:
        k_new, v_new = k_new[None], v_new[None]
    arrays = (k_pages, v_pages, kv_scales, k_new, v_new, page_table, lengths, chunk_lengths)
    check_write(*arrays, page_offset=page_offset)
    choice = choose(implementation, interpret, device)
    check_platform(choice, k_pages)
    k_pages, v_pages, kv_scales, k_new, v_new, page_table, lengths, chunk_lengths = jax.tree.map(jnp.asarray, arrays)
    chunk_lengths = jnp.where(lengths < 0, 0, jnp.clip(chunk_lengths, 0, k_new.shape[2]))
    page_table, lengths = _within(page_table, lengths, k_pages)
    page_offset = jnp.asarray(page_offset, jnp.int32)
    if choice.name == REFERENCE:
        check_given(REFERENCE, WriteBlocks, block_sizes, ())
        arrays = (k_pages, v_pages, kv_scales, k_new, v_new, page_table, lengths, chunk_lengths)
        return reference.write(*arrays, page_offset=page_offset)
    k, v, kv_scales = choice.function("write")(
        *_as_numbers(choice, k_pages, v_pages), kv_scales, heads.vectors_to_pool(k_new, k_pages),
        heads.vectors_to_pool(v_new, v_pages), page_table, lengths, chunk_lengths, page_offset, **_settings(choice, block_sizes),
    )  # fmt: skip
    return _bitcast(k, k_pages.dtype), _bitcast(v, v_pages.dtype), kv_scales


def check_implementation(
    k_pages, q=None, page_table=None, *, implementation: str | None = None, interpret=False, device: DeviceSpec | None = None
) -> None:
    """Raises ValueError, as the ops would with block sizes by rule, where this implementation cannot run here or on such arrays.

    Args:
      k_pages: `[L*C, K, P, H]`; anything with a shape and a dtype, as the others.
      q: decode's `[B, K, G, H]`, and
      page_table: `[B, M]`, to know also whether tables and blocks fit a core's memories.
    """
    choice = choose(implementation, interpret, device)
    check_platform(choice, k_pages)
    if choice.has_check and q is not None and page_table is not None:
        choice.function("check")(q, k_pages, page_table, choice.device)


def _within(page_table, lengths, pages):
    """A table and lengths without what implementations would each take differently: pages below 0, lengths no table holds."""
    return jnp.maximum(page_table, 0), jnp.clip(lengths, 0, page_table.shape[1] * pages.shape[2])


def _settings(choice: Choice, block_sizes) -> dict:
    return {"interpret": choice.interpret, "block_sizes": block_sizes, "device": choice.device}


def _as_stored(x, pages):  # [.., K, H] -> [.., K, H]
    """x as it reads back from `pages`: a scale of a packed pool is of several heads."""
    return heads.vectors_from_pool(quantise.rounded(heads.vectors_to_pool(x, pages), pages.dtype), *x.shape[-2:])


def _chunk_dtype(q, pages):
    """Of a chunk's own keys and values: the pool's, or q's where a pool's number is values times scale."""
    return q.dtype if quantise.has_scales(pages.dtype) else quantise.value_dtype(pages.dtype)


def _as_numbers(choice: Choice, *pools):
    """Pools as Pallas kernels know them, without bits in integers; validation lets those through in interpret mode only."""
    return tuple(_bitcast(pool, quantise.value_dtype(pool.dtype)) if choice.is_pallas else pool for pool in pools)


def _bitcast(x, dtype):
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
