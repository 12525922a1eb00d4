"""The device half of sampling: logits to one token a row, on fixed shapes whatever options are set.

Nothing sorts the vocabulary: the tokens that top_k, top_p and min_p keep are a prefix of the descending order, found as
cuts (`vocab_search`). Probabilities are int32 fixed point, so sums of them are exact, and a token depends on its row's
logits, seed and position only, whatever the batch, the vector width or the order of additions.

Letters: B slots, V vocabulary, S history, N = ceil(V / 512) blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv import vocab_search as search

MAX_BIAS = 512  # biased tokens a row: public APIs allow 300; scattering 512 ids a row is lost in the cost of a [B, V] pass
MAX_STOP = 64  # stop token ids a row, the model's own included: models have 1 to 5; a [B, 64] compare costs nothing
MAX_LOGPROBS = 20  # alternatives a token: what public APIs allow
MIN_TEMPERATURE = 1e-5  # below it a row is greedy: a gap of 0.001 is 100 nats already, and 1/T would leave float32

_SHORTLIST = 64  # blocks searched when every drawing row has top_k <= 64: an eighth of a vocabulary of 262144
_MASS_BITS = 29  # a row's probability is 2**29..2**30 units, so that int32 sums cannot overflow
_FLOAT_MAX = float(jnp.finfo(jnp.float32).max)
_SLACK_BITS = 20
_SLACK = 2.0**-_SLACK_BITS  # top_p and min_p count this close to the limit as reaching it: exp in float32 errs by 2**-23


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
    max_tokens: jax.Array  # i32[B]; history length, new token included, at which the loop (`steps`) ends the row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """One step's outcome. Logprobs nobody asked for are 0, their ids -1."""

    tokens: jax.Array  # i32[B]; 0 where failed
    logprobs: jax.Array  # f32[B]; of the chosen token under the raw logits
    top_ids: jax.Array  # i32[B, MAX_LOGPROBS], best first
    top_logprobs: jax.Array  # f32[B, MAX_LOGPROBS]
    is_stop: jax.Array  # bool[B]; the token is one of the row's stop ids
    failed: jax.Array  # bool[B]; NaN or Inf among the raw logits, or every token banned


def sample(
    logits: jax.Array,
    history: jax.Array,
    history_lengths: jax.Array | np.ndarray,
    arrays: SamplingArrays,
    live: jax.Array | np.ndarray,
) -> Sampled:
    """Returns each row's next token: bias, penalties, temperature, top_k, top_p, min_p, then one draw.

    What no live row asks for is skipped at run time (lax.cond), never at trace time. Not for vmap: B is the batch.

    Args:
      logits: f32[B, V].
      history: i32[B, S] tokens of each row, prompt first.
      history_lengths: i32[B] valid tokens of `history`: the position which, with the seed, keys the draw.
      arrays: options per row.
      live: bool[B]; the other rows are finished or idle: nobody reads theirs, which cost no more than a greedy row's.
    """
    num_slots, vocab_size = logits.shape
    arrays = _asking(arrays, jnp.asarray(live))
    blocks = search.to_blocks(logits)
    tops, highest, broken = search.checked_tops(blocks, vocab_size)
    best = search.argmax(blocks, tops)

    adjusting = _biases(arrays, vocab_size) | _penalises(arrays)
    wanted = adjusting | (arrays.temperature >= MIN_TEMPERATURE)
    tokens, banned = _by_row(
        wanted, _choose, (logits, tops, highest, history, history_lengths, arrays), (best, jnp.zeros(num_slots, bool))
    )
    failed = broken | banned
    tokens = jnp.where(failed, 0, tokens)

    asked = jnp.where(failed, -1, arrays.num_logprobs)
    nothing = jnp.zeros((num_slots, MAX_LOGPROBS), jnp.float32)
    logprobs, top_ids, top_logprobs = _by_row(
        asked >= 0,
        _logprobs,
        (logits, tops, highest, tokens, asked),
        (nothing[:, 0], jnp.full_like(nothing, -1, jnp.int32), nothing),
    )
    return Sampled(
        tokens=tokens,
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        is_stop=~failed & jnp.any(tokens[:, None] == arrays.stop_ids, axis=1),
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


def _asking(arrays: SamplingArrays, live: jax.Array) -> SamplingArrays:
    """The options with those of rows that are not live turned off: greedy, no bias, no penalty, no logprobs."""
    only_live = lambda values, off: jnp.where(search.spread(live, values), values, jnp.asarray(off, values.dtype))
    return dataclasses.replace(
        arrays,
        temperature=only_live(arrays.temperature, 0),
        repetition_penalty=only_live(arrays.repetition_penalty, 1),
        presence_penalty=only_live(arrays.presence_penalty, 0),
        frequency_penalty=only_live(arrays.frequency_penalty, 0),
        bias_ids=only_live(arrays.bias_ids, jnp.iinfo(jnp.int32).max),
        num_logprobs=only_live(arrays.num_logprobs, -1),
    )


def _biases(arrays: SamplingArrays, vocab_size: int) -> jax.Array:
    return jnp.any(arrays.bias_ids < vocab_size, axis=1)


def _penalises(arrays: SamplingArrays) -> jax.Array:
    return (arrays.repetition_penalty != 1) | (arrays.presence_penalty != 0) | (arrays.frequency_penalty != 0)


def _choose(logits, tops, highest, history, history_lengths, arrays) -> tuple[jax.Array, jax.Array]:
    """Greedy or drawn token of each row after bias and penalties, and whether everything is banned."""

    def adjusted():
        blocks = search.to_blocks(_adjust(logits, history, history_lengths, arrays))
        return blocks, *search.block_tops(blocks)

    adjusting = _biases(arrays, logits.shape[1]) | _penalises(arrays)
    blocks, tops, highest = lax.cond(jnp.any(adjusting), adjusted, lambda: (search.to_blocks(logits), tops, highest))
    greedy = arrays.temperature < MIN_TEMPERATURE
    best = search.argmax(blocks, tops)

    def draw():
        bits = _random_bits(arrays.seeds, history_lengths)
        short = greedy | ((arrays.top_k > 0) & (arrays.top_k <= _SHORTLIST))
        return lax.cond(
            jnp.all(short),
            lambda: _draw_short(*search.best(blocks, tops, _SHORTLIST), highest, bits, arrays),
            lambda: _draw(blocks, highest, bits, arrays),
        )

    drawn = lax.cond(jnp.all(greedy), lambda: best, draw)
    return jnp.where(greedy, best, drawn), highest < search.LOWEST


def _adjust(logits: jax.Array, history: jax.Array, history_lengths: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """Bias, then repetition (arXiv:1909.05858), then presence and frequency penalties: f32[B, V], -inf where banned."""
    num_slots, vocab_size = logits.shape

    def scatter(ids, valid, values, width):
        """[B, X] -> [B, width]. Padding goes past the end, which mode="drop" drops (-1 would wrap)."""
        row = jnp.arange(num_slots, dtype=jnp.int32)[:, None] * width
        flat = jnp.where(valid & (ids >= 0) & (ids < width), row + ids, num_slots * width)
        return jnp.zeros(num_slots * width).at[flat].add(values, mode="drop").reshape(num_slots, width)

    def penalise(x):
        position = jnp.arange(history.shape[1], dtype=jnp.int32)
        generated = position >= arrays.prompt_lengths[:, None]
        known = (history >= 0) & (history < vocab_size) & (position < history_lengths[:, None])
        counts = scatter(history + jnp.where(generated, vocab_size, 0), known, jnp.float32(1), 2 * vocab_size)
        prompt, count = counts[:, :vocab_size], counts[:, vocab_size:]
        repetition = jnp.where(prompt + count > 0, arrays.repetition_penalty[:, None], 1)
        x = jnp.where(x > 0, x / repetition, x * repetition)
        presence = jnp.where(count > 0, arrays.presence_penalty[:, None], 0)
        return x - presence - count * arrays.frequency_penalty[:, None]

    offsets = scatter(arrays.bias_ids, True, arrays.bias_values, vocab_size)
    x = logits + jnp.maximum(offsets, -_FLOAT_MAX)
    x = lax.cond(jnp.any(_penalises(arrays)), penalise, lambda x: x, x)
    banned = search.image(offsets) < search.LOWEST
    return jnp.where(banned, -jnp.inf, jnp.clip(x, -_FLOAT_MAX, _FLOAT_MAX))


def _random_bits(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """u32[B] from (seed, position) only. The generator is named, so that no global default can change tokens."""

    def one(seed, position):
        return jax.random.bits(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position), (), jnp.uint32)

    return jax.vmap(one)(seeds, positions)


def _draw(blocks: jax.Array, highest: jax.Array, bits: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """Token by inverse CDF in vocabulary order: the first whose prefix of mass passes bits / 2**32 of the total."""
    mass = _mass(blocks, highest, arrays)
    masses = search.sums(mass(blocks, _ids(blocks)))[0]
    drawn = _multiply_high(bits, search.sums(masses)[0])
    return search.locate(masses, lambda block: mass(search.take(blocks, block), search.indices(block)), drawn)


def _mass(blocks: jax.Array, highest: jax.Array, arrays: SamplingArrays) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns mass(x, ids): int32 probability of the tokens `ids` with logits x, 0 for those not kept."""
    drawing = arrays.temperature >= MIN_TEMPERATURE
    wants_k, wants_p = drawing & (arrays.top_k > 0), drawing & (arrays.top_p < 1)

    def mass(x, ids, kept, min_ratio):
        ratios = _ratios(x, highest, arrays)
        keep = search.inside(x, ids, *kept) & (ratios >= search.spread(min_ratio, x))
        return jnp.where(keep, _fixed_point(ratios, scale), 0)

    def best_k():
        return search.cut(blocks, jnp.int32(1), arrays.top_k, wants_k, highest)

    def nucleus():
        weights = mass(blocks, _ids(blocks), best, jnp.zeros_like(arrays.min_p))
        target = _nucleus_target(arrays.top_p, search.totals(weights)[0])
        found = search.cut(blocks, weights, target, wants_p, highest)
        return tuple(jnp.where(wants_p, new, old) for new, old in zip(found, best, strict=True))

    everything = jnp.full(highest.shape, -_FLOAT_MAX), jnp.full_like(highest, jnp.iinfo(jnp.int32).max)
    best = lax.cond(jnp.any(wants_k), best_k, lambda: everything)
    # Another floor than in `mass`, or XLA:CPU would share, hence materialise, the exponentials. Both floors count as 0.
    ratios = _ratios(blocks, highest, arrays, floor=-61.0)
    scale = _mass_scale(_coarse(ratios, search.inside(blocks, _ids(blocks), *best)))
    kept = lax.cond(jnp.any(wants_p), nucleus, lambda: best)
    return lambda x, ids: mass(x, ids, kept, _min_ratio(arrays))


def _ids(blocks: jax.Array) -> jax.Array:
    return search.indices(jnp.arange(blocks.shape[1], dtype=jnp.int32))[None]


def _draw_short(values, ids, highest, bits, arrays) -> jax.Array:
    """What `_draw` returns, from each row's best tokens in order [B, X], where 1 <= top_k <= X."""
    mass = _mass_short(values, highest, arrays)
    prefix = search.prefix_sums(mass, ids[:, :, None] >= ids[:, None, :])
    drawn = _multiply_high(bits, search.sums(mass)[0])
    return jnp.min(jnp.where(prefix > drawn[:, None], ids, jnp.iinfo(jnp.int32).max), axis=1)


def _mass_short(values: jax.Array, highest: jax.Array, arrays: SamplingArrays) -> jax.Array:
    """i32[B, X]: what `_mass` gives these tokens."""
    rank = jnp.arange(values.shape[1], dtype=jnp.int32)
    best = (rank < arrays.top_k[:, None]) & (search.image(values) >= search.LOWEST)
    ratios = _ratios(values, highest, arrays)
    mass = jnp.where(best, _fixed_point(ratios, _mass_scale(_coarse(ratios, best))), 0)
    before = search.prefix_sums(mass, rank[:, None] > rank)
    target = _nucleus_target(arrays.top_p, search.sums(mass)[0])
    kept = (before < target[:, None]) | (arrays.top_p >= 1)[:, None]
    return jnp.where(kept & (ratios >= _min_ratio(arrays)[:, None]), mass, 0)


def _ratios(x: jax.Array, highest: jax.Array, arrays: SamplingArrays, floor: float = -60.0) -> jax.Array:
    """Probability over that of the best token, in (0, 1], after temperature. Padding and bans need masking."""
    gap = (x - search.spread(search.value(highest), x)) / search.spread(arrays.temperature, x)
    return jnp.exp(jnp.clip(gap, floor, 0))


def _min_ratio(arrays: SamplingArrays) -> jax.Array:
    return arrays.min_p * (1 - _SLACK)


def _nucleus_target(top_p: jax.Array, total: jax.Array) -> jax.Array:
    """i32[B]: the mass a nucleus must reach."""
    share = (top_p * 2.0**31).astype(jnp.int32).astype(jnp.uint32) << 1
    return jnp.maximum(_multiply_high(share, total) - (total >> _SLACK_BITS), 1)


def _coarse(ratios: jax.Array, kept: jax.Array) -> jax.Array:
    """f32[B, X]: kept ratios in steps of 2**-21, which 512 lanes can add in int32."""
    units = jnp.where(kept, (ratios * 2.0**21 + 0.5).astype(jnp.int32), 0)
    return (units if units.ndim == 2 else search.sums(units)[0]).astype(jnp.float32)


def _mass_scale(coarse: jax.Array) -> jax.Array:
    """f32[B]: the power of two that brings the sum of the kept ratios to 2**29..2**30.

    A power of two keeps products exact and hides rounding of the sum. Coarse steps may make it 6 % low: there is room.
    """
    total = search.sums(coarse)[0] * 2.0**-21
    exponent = jnp.clip((lax.bitcast_convert_type(total, jnp.int32) >> 23) - 127, 0, _MASS_BITS)
    return lax.bitcast_convert_type((_MASS_BITS - exponent + 127) << 23, jnp.float32)


def _fixed_point(ratios: jax.Array, scale: jax.Array) -> jax.Array:
    return (ratios * search.spread(scale, ratios) + 0.5).astype(jnp.int32)


def _multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """floor(a * b / 2**32) of u32 and non-negative i32 as i32. In 16-bit limbs: without x64 there is no longer product."""
    b = b.astype(jnp.uint32)
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    cross, other = a_high * b_low, a_low * b_high
    carry = ((cross & 0xFFFF) + (other & 0xFFFF) + (a_low * b_low >> 16)) >> 16
    return (a_high * b_high + (cross >> 16) + (other >> 16) + carry).astype(jnp.int32)


def _logprobs(logits, tops, highest, tokens, asked):
    """Log-softmax of the raw logits: of the chosen token, and of the best `asked` alternatives."""
    peak = search.value(highest)
    total = peak + jnp.log(jnp.sum(jnp.exp(logits - peak[:, None]), axis=1))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")[:, 0] - total
    values, ids = search.best(search.to_blocks(logits), tops, MAX_LOGPROBS)
    shown = (jnp.arange(MAX_LOGPROBS) < asked[:, None]) & (search.image(values) >= search.LOWEST)
    return jnp.where(asked >= 0, chosen, 0), jnp.where(shown, ids, -1), jnp.where(shown, values - total[:, None], 0)
