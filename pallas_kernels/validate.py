"""What every implementation may assume, checked once, with the numbers in the message."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_POOL_DTYPES = ("float32", "bfloat16", "float16", "uint16")


def _expect(name: str, array, shape: tuple) -> None:
    """Raises unless `array.shape` is `shape`; a None in `shape` fits any size."""
    if len(array.shape) != len(shape) or any(b is not None and a != b for a, b in zip(array.shape, shape, strict=False)):
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name} has shape {tuple(array.shape)}, expected ({wanted})")


def _expect_int32(name: str, array) -> None:
    if array.dtype != jnp.int32:
        raise TypeError(f"{name} must be int32, got {array.dtype}")


def _expect_whole_number(name: str, value) -> None:
    """Raises unless `value` is one integer, traced or not: a longer array would broadcast, a float be cut."""
    if isinstance(value, int) and not isinstance(value, bool):
        return
    if not hasattr(value, "dtype"):
        raise TypeError(f"{name} must be one whole number, got {type(value).__name__} {value!r}")
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name} must be one whole number, got {value.dtype} of shape {value.shape}")


def validate(q, k_pages, v_pages, page_table, lengths, chunk_lengths, k_new, v_new, *, page_offset, window, soft_cap) -> None:
    """Checks shapes, dtypes and options of one call; `q` is `[B, T, K, G, H]` here (T 1 for decode)."""
    if len(q.shape) != 5:
        raise ValueError(f"q has shape {tuple(q.shape)}, expected [B, K, G, H] for decode or [B, T, K, G, H] for prefill")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"q must be floating point, got {q.dtype}")
    B, T, K, G, H = q.shape
    if len(k_pages.shape) != 4:
        raise ValueError(f"k_pages has shape {tuple(k_pages.shape)}, expected [L*C, K, P, H]")
    _expect("k_pages", k_pages, (None, K, None, H))
    _expect("v_pages", v_pages, k_pages.shape)
    if k_pages.dtype != v_pages.dtype or str(k_pages.dtype) not in _POOL_DTYPES:
        raise TypeError(f"k_pages is {k_pages.dtype} and v_pages {v_pages.dtype}: both must be one of {', '.join(_POOL_DTYPES)}")
    _expect("page_table", page_table, (B, None))
    _expect("lengths", lengths, (B,))
    _expect_int32("page_table", page_table)
    _expect_int32("lengths", lengths)
    if chunk_lengths is not None:
        _expect("chunk_lengths", chunk_lengths, (B,))
        _expect_int32("chunk_lengths", chunk_lengths)
    if (k_new is None) != (v_new is None):
        raise ValueError("k_new and v_new go together: give both or neither")
    if k_new is not None:
        _expect("k_new", k_new, (B, T, K, H))
        _expect("v_new", v_new, (B, T, K, H))
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive or None, got {soft_cap}")
    _expect_whole_number("page_offset", page_offset)
    _expect_whole_number("window", window)
    if not isinstance(window, jax.core.Tracer) and window < 0:
        raise ValueError(f"window must be 0 (no window) or a positive number of tokens, got {window}")
