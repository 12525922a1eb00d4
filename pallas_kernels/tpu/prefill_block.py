"""Attention of a tile of queries to one block of keys in VMEM: the inner loop of `pallas_kernels.tpu.prefill`.

One turn of the loop takes the queries of one or two kv heads in groups of ROWS and keeps three groups in flight, so that the
matrix units do not wait for a softmax:

    group j        q.k -> row maximum; scores to VMEM
    group j - 1          exp(scores - maximum) to VMEM; running sum; output rescaled
    group j - 2                output += p.v

Running maxima and sums fill all 128 lanes of a register: a [rows, 1] column takes as many registers and needs a broadcast
before each use. A sum is kept as one partial sum a lane, added up once at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.common import LANES, LOG2_E, MASKED, dot, repeat

ROWS = 128  # of q in one matrix product: with 512 keys their scores are 64 registers, all there are. 64 rows: 65 % of v5e's peak
TURN_ROWS = 1024  # of q in one turn: with 512, filling and draining the pipeline shows (78 % of v5e's peak against 87 %)
Ref = Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is known when the kernel is built."""

    T: int
    K: int
    G: int
    H: int
    P: int
    M: int
    queries: int  # Q: tokens of the chunk in a tile
    pages: int  # in a block
    heads: int  # kv heads in a turn
    cores: int
    items: int  # tiles of one core
    operand: str  # dtype of the products
    staged: bool  # keys and values are converted to `operand` before use
    scaled: bool  # 8-bit pages
    scale: float
    soft_cap: float | None

    @property
    def tiles(self) -> int:
        """Returns the tiles of a row."""
        return pl.cdiv(self.T, self.queries)

    @property
    def keys(self) -> int:
        """Returns the keys of a block."""
        return self.pages * self.P

    @property
    def lanes(self) -> int:
        """Returns the width of maxima and sums: a register's, or what divides an odd block."""
        return math.gcd(self.keys, LANES)

    @property
    def exponent(self) -> float:
        """Returns what turns squashed scores into exponents of two."""
        return LOG2_E * (self.soft_cap or self.scale)

    def groups(self) -> list[Group]:
        """Returns the groups of q rows of a turn."""
        tokens = min(self.queries, ROWS)
        per = max(1, ROWS // tokens)
        heads, starts = range(self.heads), range(0, self.queries, tokens)
        return [Group(h, g, min(per, self.G - g), t, tokens) for h in heads for g in range(0, self.G, per) for t in starts]


class Group(NamedTuple):
    """Rows of q that are multiplied together: some query heads of one kv head, some tokens of the tile."""

    head: int  # of the turn
    g: int
    num_g: int
    t: int
    tokens: int


class Refs(NamedTuple):
    """The kernel's memory. N = K*G query heads; the buffers of pages have two slots."""

    lengths: Ref  # i32[B], in scalar memory up to `options`
    chunk_lengths: Ref
    table: Ref  # i32[B*M]
    options: Ref  # i32[3]: window, page_offset, 0
    q: Ref  # [1, N, Q, H]
    k_pages: Ref  # [L*C, K, P, H], in HBM up to kv_scales
    v_pages: Ref
    k_new: Ref  # [B, K, T, H]
    v_new: Ref
    o: Ref  # [1, N, Q, H]
    lse: Ref  # [1, 1, N, 1, Q]
    k: Ref  # [2, pages, K, P, H]
    v: Ref
    visible: Ref  # i32[Q, keys], 0 where a mask hides the key
    even_scores: Ref  # [1, ROWS, keys], of every other group; these are four arrays so that the compiler can tell them apart
    odd_scores: Ref
    even_probs: Ref  # [ROWS, keys]
    odd_probs: Ref
    top: Ref  # [N, Q, lanes] running maximum
    total: Ref  # [N, Q, lanes] running sum, in parts
    acc: Ref  # [N, Q, H] running output
    semaphores: Ref  # one a slot
    slot: Ref  # where the first block of this tile is, or will be
    kv_scales: Ref = None  # [L*C, 2, R, 128]; 8-bit pages only, as the next two
    scale_pages: Ref = None  # [2, pages, 2, R, 128]
    scale_rows: Ref = None  # [2, K, 1, keys]
    k_own: Ref = None  # [2, pages, K, P, H], the chunk's own keys; staged only, as all that follow. Else they lie in `k`
    v_own: Ref = None
    k_turn: Ref = None  # [heads, keys, H]
    v_turn: Ref = None


class Turn(NamedTuple):
    """The block in `slot`, and the kv heads that attend it."""

    slot: jax.Array
    is_own: jax.Array  # its keys are the chunk's own
    live: tuple | None  # [first, last) of the keys in use; None: every query sees every key
    head: jax.Array | int = 0  # the first of the turn


def attend(r: Refs, z: Sizes, turn: Turn) -> None:
    """Attends the block with every head: updates `top`, `total` and `acc`."""
    groups = z.groups()
    scores, probs = (r.even_scores, r.odd_scores), (r.even_probs, r.odd_probs)

    def heads(i, _):
        turn_i, tops = turn._replace(head=i * z.heads), {}
        if z.staged:
            for h in range(z.heads):
                _stage(r, z, turn_i, h)
        for j in range(len(groups) + 2):
            if j < len(groups):
                tops[j] = _scores(r, z, turn_i, groups[j], scores[j % 2])
            if 1 <= j <= len(groups):
                _softmax(r, z, turn_i, groups[j - 1], tops.pop(j - 1), scores[(j - 1) % 2], probs[(j - 1) % 2])
            if 2 <= j:
                _values(r, z, turn_i, groups[j - 2], probs[j % 2])

    lax.fori_loop(0, z.K // z.heads, heads, None)


def mark_visible(r: Refs, first_distance, window, end) -> None:
    """Writes which keys of the block, before its `end`, each token of the tile sees.

    The same for all heads, and too much for registers. `first_distance` is from the block's first key to the tile's first token.
    """
    query, key = (lax.broadcasted_iota(jnp.int32, r.visible.shape, axis) for axis in (0, 1))
    distance = query - key + first_distance
    r.visible[...] = ((distance >= 0) & (distance < window) & (key < end)).astype(jnp.int32)


def squash(x, z: Sizes):
    """Returns scores divided by `exponent`. It keeps their order, so that a maximum may be squashed once it is found."""
    return x if z.soft_cap is None else jnp.tanh(x * (z.scale / z.soft_cap))


def _stage(r: Refs, z: Sizes, turn: Turn, h: int) -> None:
    """Converts keys and values of the turn's head h for the matrix units."""

    def convert(keys, values):
        for source, target in ((keys, r.k_turn), (values, r.v_turn)):
            x = source[turn.slot, :, turn.head + h].astype(jnp.float32).reshape(z.keys, z.H)
            if turn.live is not None and source is values:  # p = 0 does not hide the NaN of a dead token
                row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
                x = jnp.where((row >= turn.live[0]) & (row < turn.live[1]), x, 0)
            target[h] = x.astype(target.dtype)

    pl.when(turn.is_own)(lambda: convert(r.k_own, r.v_own))
    pl.when(~turn.is_own)(lambda: convert(r.k, r.v))


def _operand(z: Sizes, turn: Turn, pages: Ref, staged: Ref, h: int):  # -> [keys, H]
    return staged[h] if z.staged else pages[turn.slot, :, turn.head + h].reshape(z.keys, z.H)


def _place(z: Sizes, turn: Turn, group: Group):
    """Returns where the group's rows are in `[N, Q, ..]`."""
    return pl.ds((turn.head + group.head) * z.G + group.g, group.num_g), slice(group.t, group.t + group.tokens)


def _scores(r: Refs, z: Sizes, turn: Turn, group: Group, scores: Ref):  # -> [rows, 1]
    """Writes q.k of the group and returns the maximum of each row."""
    q = r.q[(0, *_place(z, turn, group))].reshape(-1, z.H).astype(z.operand)
    x = dot(q, _operand(z, turn, r.k, r.k_turn, group.head), (1, 1))
    if z.scaled:
        x = x * r.scale_rows[0, turn.head + group.head]
    if turn.live is not None:
        seen = r.visible[group.t : group.t + group.tokens]
        x = jnp.where(jnp.concatenate([seen] * group.num_g) != 0, x, MASKED)
    scores[0, : len(x)] = x
    widest = functools.reduce(jnp.maximum, [x[:, c : c + z.lanes] for c in range(0, z.keys, z.lanes)])
    return jnp.max(widest, axis=1, keepdims=True)


def _softmax(r: Refs, z: Sizes, turn: Turn, group: Group, top, scores: Ref, probs: Ref) -> None:
    """Writes the group's exp(score - maximum), and moves its maximum, sum and output on."""
    place, n = _place(z, turn, group), len(top)
    old = r.top[place].reshape(n, z.lanes)
    new = jnp.maximum(old, squash(top, z))
    decay = jnp.exp2((old - new) * z.exponent)
    total = decay * r.total[place].reshape(n, z.lanes)
    for c in range(0, z.keys, z.lanes):
        # options[2] is 0, which the compiler cannot know. If it saw the address just written, it would keep all the scores in
        # registers instead, and those spill.
        x = scores[r.options[2], :n, c : c + z.lanes]
        seen = lambda p, x=x: p if turn.live is None else jnp.where(x == MASKED, 0, p)  # a NaN score is seen
        p = seen(jnp.exp2((squash(x, z) - new) * z.exponent))
        total += p
        if z.scaled:  # the scale of a dead token may be NaN
            p = seen(p * r.scale_rows[1, turn.head + group.head, :, c : c + z.lanes])
        probs[:n, c : c + z.lanes] = p.astype(z.operand)
    r.top[place] = new.reshape(group.num_g, group.tokens, z.lanes)
    r.total[place] = total.reshape(group.num_g, group.tokens, z.lanes)
    decay = repeat(decay, z.H) if z.lanes == LANES else jnp.broadcast_to(decay[:, :1], (n, z.H))
    r.acc[place] = r.acc[place] * decay.reshape(group.num_g, group.tokens, z.H)


def _values(r: Refs, z: Sizes, turn: Turn, group: Group, probs: Ref) -> None:
    """Adds p.v to the group's output."""
    n = group.num_g * group.tokens
    x = dot(probs[:n], _operand(z, turn, r.v, r.v_turn, group.head), (1, 0))
    r.acc[_place(z, turn, group)] += x.reshape(group.num_g, group.tokens, z.H)
