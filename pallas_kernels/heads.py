"""How a pool holds the heads of a model: as they are, padded to whole lanes, or several side by side.

A TPU moves and multiplies 128 lanes. A pool whose last axis is 64 or 80 gets a transposed layout there, and is copied on every
call. So a pool may hold K' heads of H' where the model has K of H:

    plain     K' = K       H' = H
    padded    K' = K       H' > H         lanes H.. of every vector are 0
    packed    K' = K / n   H' = n * H     pool head j holds heads j*n .. j*n + n-1: a reshape of [K, H]

Kernels only ever see K', H' and queries of H'. In a packed pool the queries of head j*n + i are rows i*G.. of pool head j, with
zeros in the lanes of the other heads. 8-bit pools have one scale a token and pool head.
"""

from __future__ import annotations

import jax.numpy as jnp

LANES = 128


def pool_heads(num_kv_heads: int, head_dim: int, platform: str) -> tuple[int, int]:
    """Returns (K', H'), the head axes to allocate a pool with on "tpu", "gpu" or "cpu"."""
    if platform != "tpu" or head_dim % LANES == 0:
        return num_kv_heads, head_dim
    if 2 * head_dim == LANES and num_kv_heads % 2 == 0:
        return num_kv_heads // 2, LANES
    return num_kv_heads, -(-head_dim // LANES) * LANES


def scales_shape(num_rows: int, pool_heads: int, page_size: int) -> tuple[int, int, int, int]:
    """Returns the shape of `kv_scales` f32 for a pool of `num_rows` = L*C pages: [L*C, 2, R, 128].

    [c, 0] holds the scales of page c's keys and [c, 1] of its values; that of token p of pool head k is number k*P + p.
    """
    return num_rows, 2, -(-pool_heads * page_size // LANES), LANES


def heads_packed(num_kv_heads: int, head_dim: int, pool_heads: int, pool_dim: int) -> int:
    """Returns how many heads lie side by side in one pool head; 0 where the pool cannot hold these heads."""
    if num_kv_heads == pool_heads:
        return 1 if pool_dim >= head_dim else 0
    n, rest = divmod(num_kv_heads, pool_heads)
    return n if rest == 0 and n * head_dim == pool_dim else 0


def vectors_to_pool(x, pool):  # [.., K, H] -> [.., K', H']
    """Returns keys or values in the form of `pool` [L*C, K', P, H']."""
    *_, K, H = x.shape
    _, heads, _, dim = pool.shape
    if K != heads:
        return x.reshape(*x.shape[:-2], heads, dim)
    return _pad(x, dim)


def vectors_from_pool(x, K: int, H: int):  # [.., K', H'] -> [.., K, H]
    """Returns keys or values in the model's form: undoes `vectors_to_pool`."""
    return x[..., :H] if x.shape[-2] == K else x.reshape(*x.shape[:-2], K, H)


def queries_to_pool(q, pool):  # [.., K, G, H] -> [.., K', G', H']
    """Returns queries that `pool` [L*C, K', P, H'] can be multiplied with."""
    *lead, K, G, H = q.shape
    _, heads, _, dim = pool.shape
    if K == heads:
        return _pad(q, dim)
    n = K // heads
    q = q.reshape(*lead, heads, n, G, 1, H)
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    return jnp.where(own, q, jnp.zeros((), q.dtype)).reshape(*lead, heads, n * G, dim)


def outputs_from_pool(o, K: int, G: int, H: int):  # [.., K', G', H'] -> [.., K, G, H]
    """Returns attention outputs in the model's form: undoes `queries_to_pool`."""
    *lead, heads, rows, dim = o.shape
    if K == heads:
        return o[..., :H]
    n = K // heads
    o = o.reshape(*lead, heads, n, G, n, H)
    return jnp.stack([o[..., i, :, i, :] for i in range(n)], -3).reshape(*lead, K, G, H)


def _pad(x, dim: int):
    return x if x.shape[-1] == dim else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, dim - x.shape[-1])])
