"""Adds a term to a finished softmax by its log-sum-exp: o and lse f32 of some scores become those of one score more."""

from __future__ import annotations

import jax.numpy as jnp


def merge_own_token(o, lse, q, k_new, v_new, *, scale: float, soft_cap: float | None):
    """Returns (o, lse) with a decoded token's own key and value.

    Args:
      o, lse: f32 `[B, K, G, H]` and `[B, K, G]`; 0 and -inf where nothing was seen.
      q: `[B, K, G, H]`.
      k_new, v_new: `[B, K, H]`.
    """
    # A product and a sum, and not a dot: XLA fuses it with what follows, and a TPU keeps it in f32.
    scores = jnp.sum(q.astype(jnp.float32) * k_new.astype(jnp.float32)[:, :, None], -1) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    old, new, lse = _shares(lse, scores)
    return o * old + new * v_new.astype(jnp.float32)[:, :, None], lse


def merge_sinks(o, lse, sinks):
    """Returns (o, lse) with one score a head that has no value behind it; o `[.., K, G, H]`, lse `[.., K, G]`, sinks `[K, G]`."""
    old, _, lse = _shares(lse, jnp.broadcast_to(sinks.astype(jnp.float32), lse.shape))
    return (o.astype(jnp.float32) * old).astype(o.dtype), lse


def _shares(lse, score):
    """(share of what was there, share of the new score, their log-sum-exp); the shares with a last axis of 1."""
    top = jnp.maximum(lse, score)
    top = jnp.where(top == -jnp.inf, 0, top)  # nothing on either side: -inf - -inf is NaN
    old, new = jnp.exp(lse - top), jnp.exp(score - top)
    total = old + new
    safe = jnp.where(total == 0, 1, total)
    return (old / safe)[..., None], (new / safe)[..., None], jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
