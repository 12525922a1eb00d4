"""The device half of sampling: logits to one token a row, on fixed shapes whatever options are set.

Nothing sorts the vocabulary: the tokens that top_k, top_p and min_p keep are a prefix of the descending order, found as cuts
(`vocab_search`). Probabilities are int32 fixed point, so every sum is exact, and a token depends on its row's logits, seed and
position only, whatever the batch, the vector width or the order of additions.

Letters: B slots, V vocabulary, S history, N = ceil(V / 512) blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv import vocab_search as search

MAX_BIAS = 512  # biased tokens a row: public APIs allow 300; scattering 512 ids a row is lost in the cost of a [B, V] pass
MAX_STOP = 64  # stop token ids a row, the model's own included: models have 1 to 5; a [B, 64] compare costs nothing
MAX_LOGPROBS = 20  # alternatives a token: what public APIs allow
MIN_TEMPERATURE = 1e-5  # below it a row is greedy: a gap of 0.001 is 100 nats already, and 1/T would leave float32

_SHORTLIST = 64  # blocks searched when every drawing row has top_k <= 64: an eighth of a vocabulary of 262144
_MASS_BITS = 29  # a row's probability is 2**29..2**30 units, so that int32 sums cannot overflow
_FLOAT_MAX = float(jnp.finfo(jnp.float32).max)
_SLACK = 2.0**-20  # top_p and min_p count this close to the limit as reaching it: exp in float32 errs by 2**-23


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingArrays:
    """Every option as an array of fixed shape and dtype, so that no mix of options traces anything anew."""

    temperature: jax.Array  # f32[B]; below MIN_TEMPERATURE: greedy
    top_k: jax.Array  # i32[B]; 0 or less: off
    top_p: jax.Array  # f32[B]; 1: off
    min_p: jax.Array  # f32[B]; 0: off
    repetition_penalty: jax.Array  # f32[B]; 1: off; over the whole history
    presence_penalty: jax.Array  # f32[B]; 0: off; over generated tokens
    frequency_penalty: jax.Array  # f32[B]; 0: off; over generated tokens
    bias_ids: jax.Array  # i32[B, MAX_BIAS]; padding is int32.max, which the scatter drops
    bias_values: jax.Array  # f32[B, MAX_BIAS]; -inf bans
    seeds: jax.Array  # u32[B]
    stop_ids: jax.Array  # i32[B, MAX_STOP]; padding is -1
    num_logprobs: jax.Array  # i32[B]; -1: none, 0: the chosen token only
    prompt_lengths: jax.Array  # i32[B]; history from here on is generated
    max_tokens: jax.Array  # i32[B]; a history of this length, new token included, is full


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """One step's outcome. Logprobs nobody asked for are 0, their ids -1."""

    tokens: jax.Array  # i32[B]; 0 where failed
    logprobs: jax.Array  # f32[B]; of the chosen token under the raw logits
    top_ids: jax.Array  # i32[B, MAX_LOGPROBS], best first
    top_logprobs: jax.Array  # f32[B, MAX_LOGPROBS]
    is_stop: jax.Array  # bool[B]; the token is one of the row's stop ids
    is_full: jax.Array  # bool[B]; with this token the history reaches max_tokens
    failed: jax.Array  # bool[B]; NaN or Inf among the raw logits, or every token banned


def sample(logits: jax.Array, history: jax.Array, history_lengths: jax.Array, arrays: SamplingArrays) -> Sampled:
    """Returns each row's next token: bias, penalties, temperature, top_k, top_p, min_p, then one draw.

    What a row does not ask for is skipped at run time (lax.cond), never at trace time. Not to be vmapped: B is the batch.

    Args:
      logits: f32[B, V].
      history: i32[B, S] tokens of each row, prompt first.
      history_lengths: i32[B] valid tokens of `history`: the position which, with the seed, keys the draw.
      arrays: options per row.
    """
    num_slots, vocab_size = logits.shape
    blocks = search.to_blocks(logits)
    tops, broken = search.block_tops(blocks, vocab_size)
    best = search.argmax(blocks, tops)

    adjusting = _biases(arrays, vocab_size) | _penalises_repeats(arrays) | _penalises_generated(arrays)
    wanted = adjusting | (arrays.temperature >= MIN_TEMPERATURE)
    tokens, banned = _by_row(
        wanted, _choose, (logits, tops, history, history_lengths, arrays), (best, jnp.zeros(num_slots, bool))
    )
    failed = broken | banned
    tokens = jnp.where(failed, 0, tokens)

    asked = jnp.where(failed, -1, arrays.num_logprobs)
    nothing = jnp.zeros((num_slots, MAX_LOGPROBS), jnp.float32)
    logprobs, top_ids, top_logprobs = _by_row(
        asked >= 0, _logprobs, (logits, tops, tokens, asked), (nothing[:, 0], jnp.full_like(nothing, -1, jnp.int32), nothing)
    )
    return Sampled(
        tokens=tokens,
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        is_stop=~failed & jnp.any(tokens[:, None] == arrays.stop_ids, axis=1),
        is_full=history_lengths + 1 >= arrays.max_tokens,
        failed=failed,
    )


def _by_row(wanted: jax.Array, function: Callable, args, otherwise):
    """`function(*args)` in the rows that want it, `otherwise` in the others; every leaf has B leading.

    On CPU rows go one after the other: a row of 262144 stays in cache, where temporaries of 32 rows cost 25 ms of page
    faults each, and rows that want nothing cost nothing. Elsewhere all rows go at once.
    """

    def in_turn():
        def one(row):
            def alone(tree):
                return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1), tree)

            picked = lax.cond(wanted[row], lambda: function(*alone(args)), lambda: alone(otherwise))
            return jax.tree.map(lambda x: x[0], picked)

        return lax.map(one, jnp.arange(wanted.shape[0]))

    def at_once():
        results = function(*args)
        return jax.tree.map(lambda a, b: jnp.where(search.spread(wanted, a), a, b), results, otherwise)

    def work():
        return lax.platform_dependent(cpu=in_turn, default=at_once)

    return lax.cond(jnp.any(wanted), work, lambda: otherwise)


def _biases(arrays: SamplingArrays, vocab_size: int) -> jax.Array:
    return jnp.any(arrays.bias_ids < vocab_size, axis=1)


def _penalises_repeats(arrays: SamplingArrays) -> jax.Array:
    return arrays.repetition_penalty != 1


def _penalises_generated(arrays: SamplingArrays) -> jax.Array:
    return (arrays.presence_penalty != 0) | (arrays.frequency_penalty != 0)


def _choose(logits, tops, history, history_lengths, arrays) -> tuple[jax.Array, jax.Array]:
    """Greedy or drawn token of each row after bias and penalties, and whether everything is banned."""
    vocab_size = logits.shape[1]

    def adjusted():
        blocks = search.to_blocks(_adjust(logits, history, history_lengths, arrays))
        return blocks, search.block_tops(blocks, vocab_size)[0]

    adjusting = _biases(arrays, vocab_size) | _penalises_repeats(arrays) | _penalises_generated(arrays)
    blocks, tops = lax.cond(jnp.any(adjusting), adjusted, lambda: (search.to_blocks(logits), tops))
    greedy = arrays.temperature < MIN_TEMPERATURE
    best = search.argmax(blocks, tops)
    highest = tops.max(axis=1)

    def draw():
        bits = _random_bits(arrays.seeds, history_lengths)
        draw_from = functools.partial(_draw, highest=highest, bits=bits, arrays=arrays)
        if tops.shape[1] <= _SHORTLIST:
            return draw_from(blocks)

        def draw_short():
            short, ids = search.shortlist(blocks, tops, _SHORTLIST)
            place = draw_from(short)
            return jnp.take_along_axis(ids.reshape(ids.shape[0], -1), place[:, None], axis=1, mode="clip")[:, 0]

        short = greedy | ((arrays.top_k > 0) & (arrays.top_k <= _SHORTLIST))
        return lax.cond(jnp.all(short), draw_short, lambda: draw_from(blocks))

    drawn = lax.cond(jnp.all(greedy), lambda: best, draw)
    return jnp.where(greedy, best, drawn), highest < search.LOWEST


def _adjust(logits: jax.Array, history: jax.Array, history_lengths: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """Bias, then repetition (arXiv:1909.05858), then presence and frequency penalties: f32[B, V], -inf where banned."""
    num_slots, vocab_size = logits.shape
    position = jnp.arange(history.shape[1], dtype=jnp.int32)
    filled = position < history_lengths[:, None]
    generated = filled & (position >= arrays.prompt_lengths[:, None])

    def scatter(ids, valid, values):
        """[B, X] -> [B, V]. Padding goes to the first index past the end, which mode="drop" drops (-1 would wrap)."""
        row = jnp.arange(num_slots, dtype=jnp.int32)[:, None] * vocab_size
        flat = jnp.where(valid & (ids >= 0) & (ids < vocab_size), row + ids, num_slots * vocab_size)
        target = jnp.zeros(num_slots * vocab_size, values.dtype)
        return target.at[flat].add(values, mode="drop").reshape(num_slots, vocab_size)

    def counts(valid):
        return scatter(history, valid, jnp.ones(history.shape, jnp.float32))

    def bias():
        return scatter(arrays.bias_ids, True, arrays.bias_values)

    def repeat(x):
        penalty = jnp.where(counts(filled) > 0, arrays.repetition_penalty[:, None], 1)
        return jnp.where(x > 0, x / penalty, x * penalty)

    def discourage(x):
        count = counts(generated)
        presence = jnp.where(count > 0, arrays.presence_penalty[:, None], 0)
        return x - presence - count * arrays.frequency_penalty[:, None]

    offsets = lax.cond(jnp.any(_biases(arrays, vocab_size)), bias, lambda: jnp.zeros_like(logits))
    x = logits + jnp.maximum(offsets, -_FLOAT_MAX)
    x = lax.cond(jnp.any(_penalises_repeats(arrays)), repeat, lambda x: x, x)
    x = lax.cond(jnp.any(_penalises_generated(arrays)), discourage, lambda x: x, x)
    x = jnp.clip(x, -_FLOAT_MAX, _FLOAT_MAX)
    return jnp.where(search.image(offsets) < search.LOWEST, -jnp.inf, x)


def _random_bits(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """u32[B] that depend on (seed, position) only; the generator is named so that a global default cannot change tokens."""

    def one(seed, position):
        return jax.random.bits(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position), (), jnp.uint32)

    return jax.vmap(one)(seeds, positions)


def _draw(blocks: jax.Array, *, highest: jax.Array, bits: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """Index into [N * 512] by inverse CDF in vocabulary order: the first whose prefix of mass passes bits / 2**32."""
    drawing = arrays.temperature >= MIN_TEMPERATURE
    wants_k, wants_p = drawing & (arrays.top_k > 0), drawing & (arrays.top_p < 1)
    min_p = arrays.min_p * (1 - _SLACK)

    def ids():
        return search.indices(jnp.arange(blocks.shape[1], dtype=jnp.int32))[None]

    def mass(x, ids, kept, min_p):
        ratios = _ratios(x, highest, arrays, floor=-60.0)
        keep = search.inside(x, ids, *kept) & (ratios >= search.spread(min_p, x))
        return jnp.where(keep, _fixed_point(ratios, scale), 0)

    def best_k():
        return search.cut(blocks, jnp.int32(1), arrays.top_k, wants_k, highest)

    def nucleus():
        weights = mass(blocks, ids(), kept, jnp.zeros_like(min_p))
        total = search.block_sums(weights)[0].sum(axis=1)
        share = (arrays.top_p * 2.0**31).astype(jnp.int32).astype(jnp.uint32) << 1
        target = jnp.maximum(_multiply_high(share, total) - (total >> 20), 1)
        found = search.cut(blocks, weights, target, wants_p, highest)
        return tuple(jnp.where(wants_p, new, old) for new, old in zip(found, kept, strict=True))

    everything = jnp.full(highest.shape, -_FLOAT_MAX), jnp.full_like(highest, jnp.iinfo(jnp.int32).max)
    kept = lax.cond(jnp.any(wants_k), best_k, lambda: everything)
    scale = _mass_scale(blocks, search.inside(blocks, ids(), *kept), highest, arrays)
    shortest = lax.cond(jnp.any(wants_p), nucleus, lambda: kept)
    sums = search.block_sums(mass(blocks, ids(), shortest, min_p))[0]
    rank = _multiply_high(bits, sums.sum(axis=1))

    def block_mass(block):
        return mass(search.take(blocks, block), search.indices(block), shortest, min_p)

    return search.locate(sums, block_mass, rank)


def _ratios(x: jax.Array, highest: jax.Array, arrays: SamplingArrays, floor: float) -> jax.Array:
    """Probability over that of the best token, in (0, 1], after temperature. Padding and bans need masking."""
    gap = (x - search.spread(search.value(highest), x)) / search.spread(arrays.temperature, x)
    return jnp.exp(jnp.clip(gap, floor, 0))


def _mass_scale(blocks: jax.Array, kept: jax.Array, highest: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """f32[B]: the power of two that brings the sum of the kept ratios to 2**29..2**30.

    A power of two keeps products exact. Ratios are summed in steps of 2**-21, so the sum may be 6 % low: there is room.
    Its floor differs from that of later passes, or XLA would share, hence materialise, the exponentials.
    """
    coarse = jnp.where(kept, (_ratios(blocks, highest, arrays, -61.0) * 2.0**21 + 0.5).astype(jnp.int32), 0)
    total = search.block_sums(coarse)[0].astype(jnp.float32).sum(axis=1) * 2.0**-21
    exponent = jnp.clip((lax.bitcast_convert_type(total, jnp.int32) >> 23) - 127, 0, _MASS_BITS)
    return lax.bitcast_convert_type((_MASS_BITS - exponent + 127) << 23, jnp.float32)


def _fixed_point(ratios: jax.Array, scale: jax.Array) -> jax.Array:
    return (ratios * search.spread(scale, ratios) + 0.5).astype(jnp.int32)


def _multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """floor(a * b / 2**32) of u32 and non-negative i32 as i32, in 16-bit limbs: there is no 64-bit product without x64."""
    b = b.astype(jnp.uint32)
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    cross, other = a_high * b_low, a_low * b_high
    carry = ((cross & 0xFFFF) + (other & 0xFFFF) + (a_low * b_low >> 16)) >> 16
    return (a_high * b_high + (cross >> 16) + (other >> 16) + carry).astype(jnp.int32)


def _logprobs(logits, tops, tokens, asked):
    """Log-softmax of the raw logits: of the chosen token, and of the best `asked` alternatives."""
    highest = search.value(tops.max(axis=1))[:, None]
    total = highest[:, 0] + jnp.log(jnp.sum(jnp.exp(logits - highest), axis=1))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")[:, 0] - total
    short, ids = search.shortlist(search.to_blocks(logits), tops, min(MAX_LOGPROBS, tops.shape[1]))
    width = min(MAX_LOGPROBS, logits.shape[1])
    best, place = lax.top_k(short.reshape(short.shape[0], -1), width)
    best_ids = jnp.take_along_axis(ids.reshape(ids.shape[0], -1), place, axis=1)
    shown = jnp.arange(width) < asked[:, None]
    filler = ((0, 0), (0, MAX_LOGPROBS - width))
    return (
        jnp.where(asked >= 0, chosen, 0),
        jnp.pad(jnp.where(shown, best_ids, -1), filler, constant_values=-1),
        jnp.pad(jnp.where(shown, best - total[:, None], 0), filler),
    )
