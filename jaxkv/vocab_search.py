"""Exact searches over a vocabulary without sorting it: argmax, cuts, inverse of a prefix sum, the best few.

Everything works on blocks [B, N, 512] of the vocabulary and on `image`, the int32 that orders as the float does. Sums of
int32 are exact in any order and integer tests survive fast-math, so results depend neither on the batch nor on flags.

A *cut* `(threshold, last)` describes a prefix of the order (image descending, index ascending): the tokens above the
threshold, and those equal to it up to index `last`.

Letters: B slots, V vocabulary, N = ceil(V / 512) blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 512  # lanes of a block: sqrt(262144), so that both levels of a two-level search are equally short
LOWEST = -0x7F800000  # image of -float32.max: -inf and padding lie below it
INFINITY_BITS = 0x7F800000  # magnitude bits from here on are Inf or NaN
_INT32_MIN = -0x80000000


def to_blocks(logits: jax.Array) -> jax.Array:
    """[B, V] -> [B, N, 512], padded with -inf, which no cut keeps."""
    padding = -logits.shape[1] % BLOCK
    return jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(logits.shape[0], -1, BLOCK)


def image(x: jax.Array) -> jax.Array:
    """int32 in the order of the floats, -0 equal to 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = jnp.where(bits == _INT32_MIN, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def value(images: jax.Array) -> jax.Array:
    """The floats that have these images."""
    return lax.bitcast_convert_type(images ^ ((images >> 31) & 0x7FFFFFFF), jnp.float32)


def indices(block: jax.Array) -> jax.Array:
    """Index of each lane of the given blocks: [...] -> [..., 512]."""
    return block[..., None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)


def spread(per_row: jax.Array, like: jax.Array) -> jax.Array:
    """[B] -> [B, 1, ...] with the rank of `like`."""
    return per_row.reshape(per_row.shape + (1,) * (like.ndim - 1))


def sums(*operands: jax.Array) -> list[jax.Array]:
    """Sums arrays over their last axis, several in one pass; see `_reduce`."""
    return _reduce(jnp.add, 0, *operands)


def totals(*operands: jax.Array) -> list[jax.Array]:
    """Sums int32 [B, N, 512] to [B]: lanes, then blocks, so that a single row still uses every core."""
    return sums(*sums(*operands))


def _reduce(op: Callable, init: int, *operands: jax.Array) -> list[jax.Array]:
    """Reduces the last axis in one pass.

    XLA:CPU fuses what feeds a reduce of two operands or more, but materialises what feeds a single one (V 262144, B 1:
    0.13 ms against 0.6). So a single one goes in twice, and both results are used, or the second would be dropped.
    """
    inputs = list(operands) * (2 if len(operands) == 1 else 1)
    results = lax.reduce(
        inputs,
        [jnp.asarray(init, x.dtype) for x in inputs],
        lambda a, b: [op(x, y) for x, y in zip(a, b, strict=True)],
        (inputs[0].ndim - 1,),
    )
    return [jnp.minimum(*results)] if len(operands) == 1 else results


def block_tops(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Highest image of each block [B, N] and of each row [B]."""
    (tops,) = _reduce(jnp.maximum, _INT32_MIN, image(blocks))
    (highest,) = _reduce(jnp.maximum, _INT32_MIN, tops)
    return tops, highest


def checked_tops(blocks: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`block_tops`, and whether a row holds NaN or Inf, bool[B], in one pass."""
    magnitudes = lax.bitcast_convert_type(blocks, jnp.int32) & 0x7FFFFFFF
    if vocab_size < blocks.shape[1] * BLOCK:
        magnitudes = jnp.where(indices(jnp.arange(blocks.shape[1])) < vocab_size, magnitudes, 0)
    tops, worst = _reduce(jnp.maximum, _INT32_MIN, image(blocks), magnitudes)
    highest, worst = _reduce(jnp.maximum, _INT32_MIN, tops, worst)
    return tops, highest, worst >= INFINITY_BITS


def take(blocks: jax.Array, block: jax.Array) -> jax.Array:
    """[B, N, 512] at one block a row -> [B, 512]. Scalars stay scalars."""
    return blocks if blocks.ndim == 0 else jnp.take_along_axis(blocks, block[:, None, None], 1, mode="clip")[:, 0]


def argmax(blocks: jax.Array, tops: jax.Array) -> jax.Array:
    """i32[B], lowest index on ties, in two levels: jnp.argmax takes 7 ms where this takes 1 (XLA:CPU, B 8, V 262144)."""
    block = jnp.argmax(tops, axis=1).astype(jnp.int32)
    return block * BLOCK + jnp.argmax(image(take(blocks, block)), axis=1).astype(jnp.int32)


def cut(blocks: jax.Array, weights: jax.Array, target: jax.Array, wanted: jax.Array, highest: jax.Array):
    """The shortest prefix whose weight reaches `target`; all finite tokens where not `wanted` or where none reaches it.

    Three thresholds a pass quarter the interval of images, 16 passes at most: three sums take the time of one (0.13 ms,
    XLA:CPU, B 1, V 262144).

    Args:
      blocks: f32[B, N, 512].
      weights: i32[B, N, 512] or i32[], not negative.
      target: i32[B], at least 1.
      wanted: bool[B].
      highest: i32[B], the highest image of each row.

    Returns:
      threshold f32[B], last i32[B].
    """

    def narrow(interval):
        low, high = interval
        steps = _quarters(high - low)
        reached = totals(*(jnp.where(blocks >= spread(value(low + step), blocks), weights, 0) for step in steps))
        for step, total in zip(steps, reached, strict=True):
            low = jnp.where(total >= target, jnp.maximum(low, interval[0] + step), low)
            high = jnp.where(total <= target, jnp.minimum(high, interval[0] + step - (total < target)), high)
        return low, jnp.maximum(low, high)

    start = jnp.full(target.shape, LOWEST, jnp.int32)
    interval = start, jnp.where(wanted, jnp.maximum(start, highest), start)
    threshold, _ = lax.while_loop(lambda interval: jnp.any(interval[0] < interval[1]), narrow, interval)
    threshold = value(threshold)
    target = jnp.where(wanted, target, jnp.iinfo(jnp.int32).max)

    def ties(x, weights):
        return jnp.where(x == spread(threshold, x), weights, 0)

    above, tied = sums(jnp.where(blocks > spread(threshold, blocks), weights, 0), ties(blocks, weights))
    rank = target - sums(above)[0] - 1
    return threshold, locate(tied, lambda block: ties(take(blocks, block), take(weights, block)), rank)


def _quarters(span: jax.Array) -> list[jax.Array]:
    """Steps at about 1/4, 2/4, 3/4 of a span, each in [1, span] (0 for 0). Spans pass 2**31, so they count unsigned."""
    span = lax.bitcast_convert_type(span, jnp.uint32)
    steps = (span >> 2) + (span & 3 != 0), span - (span >> 1), span - (span >> 2)
    return [lax.bitcast_convert_type(step.astype(jnp.uint32), jnp.int32) for step in steps]


def inside(x: jax.Array, ids: jax.Array, threshold: jax.Array, last: jax.Array) -> jax.Array:
    """Which of the tokens x [B, ...] with indices `ids` [B or 1, ...] a cut keeps."""
    threshold, last = spread(threshold, x), spread(last, x)
    return (x > threshold) | ((x == threshold) & (ids <= last))


def locate(masses: jax.Array, mass_of: Callable, rank: jax.Array) -> jax.Array:
    """First index whose prefix sum passes `rank`, i32[B]; N * 512 when none does.

    Args:
      masses: i32[B, N], the weight of each block.
      mass_of: block i32[B] -> the weights of its lanes i32[B, 512].
      rank: i32[B].
    """
    num_blocks = masses.shape[1]
    block, rest = _first_past(masses, rank)
    weights = mass_of(block)
    # Weights computed again may differ in the last bit: stay on the last lane that has any.
    lane, _ = _first_past(weights, jnp.minimum(rest, sums(weights)[0] - 1))
    return jnp.where(block < num_blocks, block * BLOCK + lane, num_blocks * BLOCK)


def _first_past(weights: jax.Array, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index of [B, X] whose prefix sum passes `rank` (X when none does), and the rank left inside it."""
    lane = jnp.arange(weights.shape[1])
    passed = prefix_sums(weights, lane[:, None] >= lane) <= rank[:, None]
    count, mass = sums(passed.astype(jnp.int32), jnp.where(passed, weights, 0))
    return count, rank - mass


def prefix_sums(weights: jax.Array, covers: jax.Array) -> jax.Array:
    """Sum of the weights [B, X] that each index covers, bool[.., X, X]: one pass, where jnp.cumsum compiles to many."""
    return sums(jnp.where(covers, weights[:, None, :], 0))[0]


def best(blocks: jax.Array, tops: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` highest tokens, best first, ties by lowest index: values f32[B, count], ids i32[B, count].

    They lie in the `count` blocks with the highest tops: any token elsewhere has `count` tokens ahead of it. Where fewer
    exist the rest is -inf.
    """
    chosen = jnp.sort(lax.top_k(tops, min(count, tops.shape[1]))[1], axis=1)
    candidates = value(image(blocks[jnp.arange(blocks.shape[0])[:, None], chosen]))  # -0 becomes 0, which top_k orders apart
    values, place = lax.top_k(candidates.reshape(candidates.shape[0], -1), count)
    block = jnp.take_along_axis(chosen, place // BLOCK, axis=1)
    return values, block * BLOCK + place % BLOCK
