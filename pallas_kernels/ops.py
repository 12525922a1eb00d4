"""The public ops: one validator and one table of implementations each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import reference, xla
from pallas_kernels.validate import validate

IMPLEMENTATIONS = ("reference", "xla")
_MODULES = {"reference": reference, "xla": xla}


def _module(implementation: str | None):
    if implementation is None:
        return xla
    if implementation not in _MODULES:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation {implementation!r} is not one of {known} (or None: pick by platform)")
    return _MODULES[implementation]


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
    return_lse: bool = False,
    implementation: str | None = None,
):
    """Returns attention of one query token a row over the row's pages, o `[B, K, G, H]` in q's dtype.

    Args:
      q: `[B, K, G, H]`, not scaled.
      k_pages, v_pages: `[L*C, K, P, H]` f32, bf16, f16, or uint16 holding bf16 bits (what XLA:CPU moves fast).
      page_table: i32 `[B, M]`, pages of one layer; entries at and past ceil(length/P) are ignored.
      lengths: i32 `[B]`, tokens of the row that are in its pages.
      k_new, v_new: `[B, K, H]`, this token's own key and value when they are not in the pages yet; the query then stands at
        position `length`, else at `length - 1`.
      page_offset: i32 scalar, may be traced: the layer's first row of the pool.
      scale: multiplies q.k, before the soft cap.
      window: tokens a query sees, itself included; 0: all. An int or a traced i32 scalar.
      soft_cap: c * tanh(scores / c), after the scale and before the mask.
      return_lse: also return the natural log-sum-exp of the scores, f32 `[B, K, G]`; -inf where a row sees nothing.
      implementation: one of IMPLEMENTATIONS, or None.

    Raises:
      ValueError, TypeError: shapes, dtypes or options that do not fit together.
    """
    if len(q.shape) != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}, expected [B, K, G, H]")
    expand = lambda x: None if x is None else x[:, None]
    o, lse = _attend(
        q[:, None], k_pages, v_pages, page_table, lengths, None, expand(k_new), expand(v_new), page_offset, scale, window,
        soft_cap, implementation,
    )  # fmt: skip
    return (o[:, 0], lse[:, 0]) if return_lse else o[:, 0]


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
    return_lse: bool = False,
    implementation: str | None = None,
):
    """Returns causal attention of a chunk over the row's pages and the chunk itself, o `[B, T, K, G, H]` in q's dtype.

    Query t of row b stands at position `lengths[b] + t`. `chunk_lengths` i32 `[B]` says how many of the T are real; the output
    of the others is finite and meaningless. k_new, v_new `[B, T, K, H]` are the chunk's keys and values. The rest is as in
    `paged_decode`; lse is f32 `[B, T, K, G]`.
    """
    if k_new is None or v_new is None:
        raise ValueError("paged_prefill needs k_new and v_new, the chunk's own keys and values")
    o, lse = _attend(
        q, k_pages, v_pages, page_table, lengths, chunk_lengths, k_new, v_new, page_offset, scale, window, soft_cap,
        implementation,
    )  # fmt: skip
    return (o, lse) if return_lse else o


def _attend(
    q, k_pages, v_pages, page_table, lengths, chunk_lengths, k_new, v_new, page_offset, scale, window, soft_cap, implementation
):
    arrays = (q, k_pages, v_pages, page_table, lengths, chunk_lengths, k_new, v_new)
    validate(*arrays, page_offset=page_offset, window=window, soft_cap=soft_cap)
    q, k_pages, v_pages, page_table, lengths, chunk_lengths, k_new, v_new = jax.tree.map(jnp.asarray, arrays)  # numpy too
    if chunk_lengths is None:
        chunk_lengths = jnp.ones_like(lengths)
    return _module(implementation).attend(
        q, k_pages, v_pages, page_table, lengths, chunk_lengths, k_new, v_new,
        page_offset=jnp.asarray(page_offset, jnp.int32), scale=scale, window=jnp.asarray(window, jnp.int32), soft_cap=soft_cap,
    )  # fmt: skip
