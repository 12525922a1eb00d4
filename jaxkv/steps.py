"""The engine's jitted steps: the only `jax.jit` that sees a model. Static shapes in, static shapes out.

    step's name      function        what it does
    prefill          prefill_step    a chunk of tokens for R rows -> logits of each row's last token, and whether the chunk is sound
    decode           prefill_step    the same with one token for every slot
    decode_many      decode_many     up to n tokens for every slot in one dispatch: page reservation, forward, sampling, stop, all
                                     on the device
    first_tokens     first_tokens    samples from the prompts' logits
    collect_logits   collect_logits  puts prompts' logits at their slots
    pick_rows        pick_rows       the rows of logits that a verb was asked for
    copy_rows        copy_rows       copies pages and history for forks
    set_history      set_history     a slot's tokens, where its pages were found stored
    read_pages       read_pages      pages of all layers, to be kept elsewhere
    write_pages      write_pages     and back
    score            score_step      logits of every position, no cache

Each counts its traces (`trace_counts`) and the time they take. Pages and history are donated, parameters never.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.kv import pages
from jaxkv.kv.pages import Ownership
from jaxkv.kv.state import default_page_size, empty_pools
from jaxkv.kv.store import copy_pages, put_pages, take_pages
from jaxkv.model.decoder import Cache, forward, logits
from jaxkv.model.linear import EXACT_ROWS
from jaxkv.sample_step import Sampled, SamplingArrays, sample
from jaxkv.state import Static
from pallas_kernels import write_kv

# Steps a dispatch of `decode_many` takes at most: the length of its output buffers.
MAX_STEPS = 32
_TRACES: collections.Counter[str] = collections.Counter()
_COMPILING = {"seconds": 0.0}
# CPU: XLA vectorises a reduction only when it may reassociate it; NaN and Inf stay honoured (docs/performance.md).
# TPU: for TPU7x the compiler would carry 16-bit weights through the layer scan in tiles of 16 rows, and copy all of them first. And what
# is copied to the chip must be used as often as it is copied there and back: `write_kv` touches a few of the scales of an 8-bit pool, and
# on a v5e all of them went there and back at every step (2 x 67 MB for 16 layers of Llama 3.1 8B; the other steps compile as before).
COMPILER_OPTIONS: dict[str, dict[str, bool | int | float]] = {
    "cpu": {"xla_cpu_prefer_vector_width": 512, "xla_cpu_enable_fast_math": True},
    "tpu": {"xla_tpu_control_large_2nd_minor_layout_for_x16": False, "xla_tpu_msa_inefficient_use_to_copy_ratio": 1.0},
}


def trace_counts() -> dict[str, int]:
    """How often each step has been traced in this process, by the step's name. After `warmup` no call should change it."""
    return dict(_TRACES)


def compile_seconds() -> float:
    """Seconds this process has spent in dispatches that traced and compiled a step first."""
    return _COMPILING["seconds"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pools:
    """What a step updates in place: donated, and returned as its successor."""

    k_pages: jax.Array  # [L*C, K, P, H]
    v_pages: jax.Array  # [L*C, K, P, H]
    kv_scales: jax.Array | None  # f32[L*C, 2, R, 128] of 8-bit pools
    history: jax.Array  # i32[B, S]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loop:
    """What decoding carries from token to token, all on the device."""

    pools: Pools
    own: Ownership  # page_table i32[B, M], lengths i32[B], refcounts i32[C]
    token: jax.Array  # i32[B] emitted last, not stored yet
    done: jax.Array  # bool[B] rows that emit no more; idle slots too
    shortfall: jax.Array  # i32[] pages that were missing; anything but 0 ended the loop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Emitted:
    """What n steps emitted; [n, B, ..]. Where `valid` is False the row emitted nothing in that step."""

    sampled: Sampled
    valid: jax.Array  # bool[n, B]


@functools.cache
def step(name: str, platform: str) -> Callable:
    """The jitted function of that name for that backend, made once; `.lower` is that of `jax.jit`."""
    function, donated, static = _STEPS[name]

    @functools.wraps(function)
    def counted(*args, **kwargs):
        _TRACES[name] += 1
        return function(*args, **kwargs)

    jitted = jax.jit(counted, donate_argnames=donated, static_argnames=static, compiler_options=COMPILER_OPTIONS.get(platform))

    def timed(*args, **kwargs):
        before, started = _TRACES[name], time.perf_counter()
        out = jitted(*args, **kwargs)
        if _TRACES[name] != before:
            _COMPILING["seconds"] += time.perf_counter() - started
        return out

    timed.lower = jitted.lower  # type: ignore[attr-defined]
    return timed


def prefill_step(params, pools: Pools, page_table, lengths, rows, tokens, counts, *, static: Static, all_logits: bool):
    """Stores tokens[r, :counts[r]] behind the lengths[r] tokens of slot rows[r].

    Args:
      page_table: i32[R, M], of these rows, owning pages for what is stored.
      lengths, counts: i32[R]; a count of 0 stores nothing.
      rows: i32[R], the slot of each; B or more: padding.
      tokens: i32[R, T].

    Returns:
      pools; logits f32[R, V] of each row's last token, or f32[R, T, V] of all; sound bool[R], whether all that was stored of a row is
      free of NaN and infinity: a token's own keys and values, in whatever layer, are part of its last hidden state.
    """
    x, pools = _forward(params, pools, page_table, lengths, tokens, counts, static)
    T = tokens.shape[1]
    columns = lengths[:, None] + jnp.arange(T, dtype=jnp.int32)
    columns = jnp.where(jnp.arange(T) < counts[:, None], columns, pools.history.shape[1])
    history = pools.history.at[rows[:, None], columns].set(tokens, mode="drop")
    pools = dataclasses.replace(pools, history=history)
    sound = (jnp.isfinite(x).all(axis=-1) | (jnp.arange(T) >= counts[:, None])).all(axis=-1)
    if not all_logits:
        x = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], 1)[:, 0]
    return pools, logits(static.model, params, x, _operands(tokens, static)), sound


def decode_many(params, loop: Loop, options: SamplingArrays, halt, num_steps, *, static: Static, looped: bool):
    """Emits up to `num_steps` (i32, at most MAX_STEPS) tokens a slot; rows in `halt` bool[B] stop before the first.

    looped False is one step without a loop around it: XLA:CPU hoists the conversion of every weight out of a loop, so that
    dispatching each step is twice as fast there.

    Returns:
      the loop's successor and Emitted with n = MAX_STEPS (looped) or 1.
    """
    loop = dataclasses.replace(loop, done=loop.done | halt)
    if not looped:
        loop, emitted = _decode_one(params, loop, options, static)
        return loop, jax.tree.map(lambda a: a[None], emitted)

    shapes = jax.eval_shape(lambda: _decode_one(params, loop, options, static)[1])
    buffers = jax.tree.map(lambda a: jnp.zeros((MAX_STEPS, *a.shape), a.dtype), shapes)

    def more(carry):
        i, loop, _ = carry
        return (i < num_steps) & ~jnp.all(loop.done)

    def one(carry):
        i, loop, buffers = carry
        loop, emitted = _decode_one(params, loop, options, static)
        return i + 1, loop, jax.tree.map(lambda b, e: lax.dynamic_update_index_in_dim(b, e, i, 0), buffers, emitted)

    _, loop, buffers = lax.while_loop(more, one, (jnp.int32(0), loop, buffers))
    return loop, buffers


def first_tokens(loop: Loop, prompt_logits, options: SamplingArrays, rows, lengths):
    """Samples first tokens of slots that hold lengths i32[B] tokens, where `rows` bool[B], from their prompts' logits f32[B, V].

    Returns:
      the loop, in which those rows go on, and Emitted with n = 1.
    """
    own = dataclasses.replace(loop.own, lengths=jnp.where(rows, lengths, loop.own.lengths))
    loop = dataclasses.replace(loop, own=own, done=loop.done & ~rows)
    loop, emitted = _emit(loop, prompt_logits, rows, options)
    return loop, jax.tree.map(lambda a: a[None], emitted)


def collect_logits(buffer, new, source):
    """Returns buffer f32[B, V] with row b replaced by new[source[b]] where source[b] >= 0."""
    return jnp.where((source >= 0)[:, None], new[jnp.maximum(source, 0)], buffer)


def pick_rows(logits, rows):
    """Returns logits[rows], f32[R, V] from f32[B, V] and i32[R]."""
    return logits.at[rows].get(mode="clip")


def copy_rows(pools: Pools, page_src, page_dst, row_src, row_dst, *, num_layers: int):
    """Copies pages (all layers) and history rows; a destination past the end is dropped."""
    history = pools.history.at[row_dst].set(pools.history[row_src], mode="drop")
    copy = lambda a: copy_pages(a, page_src, page_dst, num_layers)
    scales = None if pools.kv_scales is None else copy(pools.kv_scales)
    return Pools(copy(pools.k_pages), copy(pools.v_pages), scales, history)


def set_history(pools: Pools, row, tokens):
    """Sets the history of slot `row` to tokens i32[S]."""
    return dataclasses.replace(pools, history=pools.history.at[row].set(tokens))


def read_pages(pools: Pools, chosen, *, num_layers: int):
    """Returns (k, v, scales) of the chosen pages i32[n] in every layer: [L, n, K, P, H], and f32[L, n, 2, R, 128] of 8-bit pools."""
    return jax.tree.map(lambda a: take_pages(a, chosen, num_layers), (pools.k_pages, pools.v_pages, pools.kv_scales))


def write_pages(pools: Pools, chosen, k, v, scales, *, num_layers: int):
    """Sets the chosen pages i32[n] of every layer to what `read_pages` gave; a page of C or more is dropped."""
    k_pages, v_pages, kv_scales = jax.tree.map(
        lambda a, new: put_pages(a, chosen, new, num_layers), (pools.k_pages, pools.v_pages, pools.kv_scales), (k, v, scales)
    )
    return Pools(k_pages, v_pages, kv_scales, pools.history)


def score_step(params, tokens, counts, *, static: Static):
    """Logits f32[B, T, V] of tokens i32[B, T], each row causal over itself alone; no pages."""
    dtype, platform = _operands(tokens, static), static.platform
    kv_dtype = "float32" if platform == "cpu" else dtype
    pools = empty_pools(static.model, 1, default_page_size(static.model, platform), kv_dtype, platform)
    empty = Cache(*pools, jnp.zeros((tokens.shape[0], 1), jnp.int32), jnp.zeros_like(counts))
    x, _, _ = forward(static.model, params, empty, tokens, counts, dtype, static.kernels)
    return logits(static.model, params, x, dtype)


def _decode_one(params, loop: Loop, options: SamplingArrays, static: Static):
    live = ~loop.done
    own, _, shortfall = pages.append(loop.own, live.astype(jnp.int32))
    live &= shortfall == 0
    # Rows that emit nothing attend to nothing: their pages are not read.
    before = jnp.where(live, loop.own.lengths, 0)
    counts = live.astype(jnp.int32)
    x, pools = _forward(params, loop.pools, own.page_table, before, loop.token[:, None], counts, static)
    loop = dataclasses.replace(loop, pools=pools, own=own, shortfall=loop.shortfall + shortfall, done=loop.done | (shortfall > 0))
    return _emit(loop, logits(static.model, params, x[:, 0], static.dtype), live, options)


def _emit(loop: Loop, row_logits, live, options: SamplingArrays):
    """Samples a token for every live row, appends it to the history as pending, and says who is done."""
    lengths = loop.own.lengths
    sampled = sample(row_logits, loop.pools.history, lengths, options, live)
    valid = live & ~sampled.failed
    B, S = loop.pools.history.shape
    column = jnp.where(valid, lengths, S)
    history = loop.pools.history.at[jnp.arange(B), column].set(sampled.tokens, mode="drop")
    done = loop.done | (live & (sampled.failed | sampled.is_stop | (lengths + 1 >= options.max_tokens)))
    loop = dataclasses.replace(
        loop,
        pools=dataclasses.replace(loop.pools, history=history),
        token=jnp.where(valid, sampled.tokens, loop.token),
        done=done,
    )
    return loop, Emitted(sampled, valid)


def _operands(tokens, static: Static) -> str:
    """The dtype of large products' operands. A short prompt on CPU is read in f32: that costs it little, and a first token that
    hangs on a hair falls as it does with float32 weights (docs/performance.md). It is the prompt's own length that decides, not how
    many rows are read together: a row must not depend on its neighbours."""
    short = static.platform == "cpu" and 1 < tokens.shape[1] <= EXACT_ROWS
    return "float32" if short else static.dtype


def _forward(params, pools: Pools, page_table, lengths, tokens, counts, static: Static):
    """Runs the decoder and writes the new keys and values; returns (hidden, pools)."""
    cache = Cache(pools.k_pages, pools.v_pages, pools.kv_scales, page_table, lengths)
    x, k, v = forward(static.model, params, cache, tokens, counts, _operands(tokens, static), static.kernels)
    lengths = _known_after(x, lengths)
    k_pages, v_pages, kv_scales = write_kv(
        pools.k_pages, pools.v_pages, k, v, page_table, lengths, counts, kv_scales=pools.kv_scales, **static.kernels.options
    )
    return x, Pools(k_pages, v_pages, kv_scales, pools.history)


def _known_after(x, lengths):  # x f32[B, T, D]
    """Returns `lengths`, which XLA knows only after x, and so a write behind them only after the last layer has read the pools.

    The last layer's keys are there before its attention. Nothing else keeps XLA from writing them first, and then it copies what
    attention has yet to read: all scales of an 8-bit pool in a GPU's prefill step, the whole pool in a CPU's step of one layer.
    Barriers are gone when the order is decided. One number of x needs all of the last layer; the minimum is 0, and no pass of XLA's
    finds that out.
    """
    bits = jax.lax.bitcast_convert_type(x[0, 0, 0], jnp.int32) & jnp.iinfo(jnp.int32).max
    return lengths + jnp.minimum(bits, 0)


_STEPS: dict[str, tuple[Callable, tuple[str, ...], tuple[str, ...]]] = {
    "prefill": (prefill_step, ("pools",), ("static", "all_logits")),
    "decode": (prefill_step, ("pools",), ("static", "all_logits")),
    "decode_many": (decode_many, ("loop",), ("static", "looped")),
    "first_tokens": (first_tokens, ("loop",), ()),
    "collect_logits": (collect_logits, (), ()),
    "pick_rows": (pick_rows, (), ()),
    "copy_rows": (copy_rows, ("pools",), ("num_layers",)),
    "set_history": (set_history, ("pools",), ()),
    "read_pages": (read_pages, (), ("num_layers",)),
    "write_pages": (write_pages, ("pools",), ("num_layers",)),
    "score": (score_step, (), ("static",)),
}
