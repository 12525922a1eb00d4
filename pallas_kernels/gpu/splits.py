"""How GPU decode kernels share rows of unequal length out: by work, in a list whose length is static. Plain jnp, no backend.

A row's keys are cut into *tiles* of `block` tokens, counted from position 0, and its tiles into *items*, runs of neighbouring tiles.
Both follow from `lengths` and `starts` alone: a kernel may derive its own entry, or read a list made before it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Kernels take exp2, one instruction, and log: Triton lowers log2 in newer jax only.
LOG2E, LN2 = math.log2(math.e), math.log(2)


def split_rows(lengths, starts, *, block: int, target: int, num_splits: int | None):
    """Returns (first tile, tiles, items) of each row, i32 [B].

    Each row has `num_splits` items, where that is given. Else it has one at least, for its result must be written, and the others
    in proportion to its tiles: at most `len(lengths) + target` in all, about equally long.
    """
    first = lax.div(starts, np.int32(block))
    tiles = jnp.where(lengths > starts, lax.div(lengths + (block - 1), np.int32(block)) - first, 0)
    if num_splits is not None:
        return first, tiles, jnp.full_like(tiles, num_splits)
    target = max(target, 1)
    longest = jnp.maximum(lax.div(_sum(tiles) + (target - 1), np.int32(target)), 1)
    return first, tiles, jnp.maximum(lax.div(tiles + (longest - 1), longest), 1)


def find_item(first, tiles, items, item):
    """Returns (row, first tile, end tile, items of the row) of entry `item` of the list; 0 items of row len(items) past its end."""
    ends = lax.cumsum(items)
    row = _sum(jnp.where(ends <= item, 1, 0))
    here = jnp.arange(items.shape[0], dtype=jnp.int32) == row
    pick = lambda x: _sum(jnp.where(here, x, 0))
    count = pick(items)
    index = item - (pick(ends) - count)
    at = lambda i: pick(first) + lax.div(i * pick(tiles), jnp.maximum(count, 1))
    return row, at(index), at(index + 1), count


def work_list(lengths, starts, *, items: int, block: int, target: int, num_splits: int | None):
    """Returns (row, start, end, tile, end tile), each i32 [items]: keys [start, end) of tiles [tile, end tile).

    Past the list's end the row is len(lengths) and there are no tiles.
    """
    first, tiles, count = split_rows(lengths, starts, block=block, target=target, num_splits=num_splits)
    row, tile, end_tile, _ = jax.vmap(lambda item: find_item(first, tiles, count, item))(jnp.arange(items, dtype=jnp.int32))
    known = jnp.minimum(row, lengths.shape[0] - 1)
    return row, starts[known], jnp.minimum(lengths[known], end_tile * block), tile, end_tile


def combine(row, o, lse, num_rows: int):
    """Returns (o [num_rows, K, G, H], natural lse) of partials o [items, K, G, H] and base-2 lse [items, K, G] of rows `row`.

    A product with the items' weights, zero in other rows: sums in a fixed order, which a scatter of the partials would not have.
    """
    mine = (row[None] == jnp.arange(num_rows, dtype=jnp.int32)[:, None])[:, :, None, None]  # [B, items, 1, 1]
    top = jnp.max(jnp.where(mine, lse[None], -jnp.inf), 1)
    pivot = jnp.where(top > -jnp.inf, top, 0.0)  # every part may be empty
    weights = jnp.where(mine, jnp.exp2(lse[None] - pivot[:, None]), 0.0)
    total = jnp.sum(weights, 1)
    safe = jnp.where(total != 0, total, 1.0)
    o = jnp.einsum("bikg,ikgh->bkgh", weights, o, precision=lax.Precision.HIGHEST)
    return o / safe[..., None], jnp.where(total != 0, (pivot + jnp.log2(safe)) * LN2, -jnp.inf)


def _sum(x):
    return jnp.sum(x, dtype=jnp.int32)  # int64 otherwise, under jax.enable_x64
