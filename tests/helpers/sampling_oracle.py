"""One sampling step of one shape, and a plain float64 oracle with its own defaults."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.sample_step import Sampled, sample
from jaxkv.sampling import Sampling

# Compiling a step takes seconds, so nearly every test has this shape.
B, V = 6, 130
FAST_MATH = {"xla_cpu_prefer_vector_width": 512, "xla_cpu_enable_fast_math": True}
HISTORY = 24
TRACES: list[tuple] = []


def counted(*args):
    TRACES.append(args[0].shape)
    return sample(*args)


STEP = jax.jit(counted, compiler_options=FAST_MATH)
PLAIN_STEP = jax.jit(sample)


def run(
    logits, sampling=None, *, history=None, lengths=None, prompt_lengths=None, seeds=None, eos=(), live=None, step=STEP
) -> Sampled:
    """Samples one step, every slot live unless told."""
    logits = np.asarray(logits, np.float32)
    B, V = logits.shape  # the large vocabulary, the lone row and the statistics differ
    history = np.zeros((B, HISTORY), np.int32) if history is None else history
    lengths = np.zeros(B, np.int32) if lengths is None else np.asarray(lengths, np.int32)
    arrays = (sampling or Sampling()).arrays(
        num_slots=B,
        rows=range(B),
        vocab_size=V,
        eos_token_ids=eos,
        seeds=range(B) if seeds is None else seeds,
        prompt_lengths=np.zeros(B, np.int32) if prompt_lengths is None else prompt_lengths,
    )
    live = np.ones(B, bool) if live is None else np.asarray(live)
    return jax.tree.map(np.asarray, step(logits, history, lengths, arrays, live))


def assert_same(a: Sampled, rows_a, b: Sampled, rows_b, rtol=0.0):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[rows_a], y[rows_b], rtol=rtol), a, b)


# --- the oracle ---


def oracle_logits(logits, options, tokens, prompt_length):
    """Bias, then penalties, one token at a time."""
    x = np.asarray(logits, np.float64).copy()
    for token, bias in (options.get("logit_bias") or {}).items():
        x[token] += bias
    for token in set(tokens):
        penalty = options.get("repetition_penalty", 1.0)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in tokens[prompt_length:]:
        x[token] -= options.get("frequency_penalty", 0.0)
    for token in set(tokens[prompt_length:]):
        x[token] -= options.get("presence_penalty", 0.0)
    return x


def oracle_kept(x, options, slack=2.0**-20):
    """By sorting: (kept bool[V], probabilities f64[V], whether some limit is too close to call in float32)."""
    z = (x - x.max()) / options.get("temperature", 1.0)
    order = np.lexsort((np.arange(x.size), -x))
    order = order[np.isfinite(x[order])]
    k = options.get("top_k", 0)
    if k > 0:
        order = order[:k]
    p = np.exp(z[order])
    p /= p.sum()
    close = False
    if options.get("top_p", 1.0) < 1:
        before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
        margin = before - options["top_p"] + slack
        close |= bool(np.any(np.abs(margin[1:]) < 4e-7))
        order = order[: max(1, np.count_nonzero(margin < 0))]
    ratio = np.exp(z[order])
    limit = options.get("min_p", 0.0) * (1 - slack)
    close |= bool(np.any(np.abs(ratio - limit) < 4e-7 * limit))
    order = order[ratio >= limit]
    kept = np.zeros(x.size, bool)
    kept[order] = True
    probabilities = np.where(kept, np.exp(z), 0.0)
    return kept, probabilities / probabilities.sum(), close


def uniform_bits(seed, position) -> int:
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return int(jax.random.bits(key, (), jnp.uint32))


SIZES = (1, 2, 7, 130, 512, 513, 5000)
KINDS = ("normal", "peaked", "ties", "constant", "zeros", "extreme")


def make_logits(rng, kind, size):
    if kind == "normal":
        x = rng.normal(size=size) * 3
    elif kind == "peaked":
        x = rng.normal(size=size) + 12 * (rng.random(size) < 0.01)
    elif kind == "ties":
        x = rng.integers(-2, 3, size=size) * 0.75
    elif kind == "constant":
        x = np.full(size, -3.25)
    elif kind == "zeros":
        x = rng.choice([0.0, -0.0], size=size)
    else:
        x = rng.choice([1e30, -1e30, 3e38, -3e38, 0.0, 5.0], size=size)
    return np.asarray(x, np.float32)


def random_options(rng, V):
    """One row's options, each off half of the time."""
    choices = {
        "temperature": [1.0, 0.6, 1.7],
        "top_k": [1, 5, 40, 64, 100],
        "top_p": [0.9, 0.5, 0.99],
        "min_p": [0.05, 0.3],
        "repetition_penalty": [1.3, 0.7],
        "presence_penalty": [0.5, -0.8],
        "frequency_penalty": [0.3, -0.4],
    }
    options = {name: values[rng.integers(len(values))] for name, values in choices.items() if rng.random() < 0.5}
    options.setdefault("temperature", 0.0)
    if rng.random() < 0.5:
        ids = rng.choice(V, size=min(V - 1, 9), replace=False)
        options["logit_bias"] = {int(i): float(rng.choice([3.0, -3.0, -math.inf])) for i in ids}
    return options


DEFAULTS = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
}


def as_sampling(rows, **more):
    """Sampling with a sequence for each field."""
    return Sampling(**{name: [row.get(name, default) for row in rows] for name, default in DEFAULTS.items()}, **more)
