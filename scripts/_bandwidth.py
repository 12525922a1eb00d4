"""What a decode step has to read, and how fast this machine reads: for `bench.py`."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.model import linear
from jaxkv.model.linear import Experts, Linear

_BUFFER_BYTES = 1 << 30  # well over any last-level cache
_PASSES = 4


class Reader:
    """Reads one large device buffer; keeps it, so that a round costs reads alone."""

    def __init__(self):
        # Maxima of bytes: of the reductions XLA:CPU makes, the one that computes least per byte (measured fastest on 2 cores).
        self._buffer = jax.block_until_ready(jnp.ones((1 << 16, _BUFFER_BYTES >> 16), jnp.uint8))
        options = {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else None
        self._read = jax.jit(lambda a: jnp.max(a, 1), compiler_options=options)
        self._read(self._buffer).block_until_ready()

    def gb_s(self) -> float:
        """The best of a few passes, in 1e9 bytes a second."""
        best = float("inf")
        for _ in range(_PASSES):
            started = time.perf_counter()
            self._read(self._buffer).block_until_ready()
            best = min(best, time.perf_counter() - started)
        return self._buffer.nbytes / best / 1e9


def weight_bytes(model, rows: int) -> int:
    """Bytes of weights one decode step of so many rows reads. Tables that are only looked up count for their rows alone."""
    params, config = dict(model.params), model.config
    total = 0
    if "head" in params:
        embed = params.pop("embed")
        total += rows * (embed.weight.nbytes + _nbytes(embed.scale)) // config.vocab_size
    for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Linear | Experts)):
        if isinstance(leaf, Linear):
            total += _linear_bytes(leaf, rows)
        elif isinstance(leaf, Experts):
            used = min(1.0, rows * config.experts_per_token / config.num_experts)
            total += round((leaf.weight.nbytes + _nbytes(leaf.scale)) * used)
        else:
            total += leaf.nbytes
    return total


def kv_bytes(model, rows: int, tokens: float) -> int:
    """Bytes of keys and values that one decode step reads when every row holds so many tokens; a window's layers read less."""
    config = model.config
    itemsize = 4 if model.storage.platform == "cpu" else np.dtype(jnp.dtype(model.storage.dtype)).itemsize
    seen = sum(min(tokens, window) if window else tokens for window in config.layer_windows)
    return round(2 * rows * seen * config.num_kv_heads * config.head_dim * itemsize)


def _linear_bytes(weight: Linear, rows: int) -> int:
    """The form that a product of so many rows reads (see `jaxkv.model.linear`)."""
    many = rows >= linear._MANY_ROWS and weight.platform == "cpu" and weight.wide is not None
    read = _nbytes(weight.wide) if many else weight.weight.nbytes + _nbytes(weight.scale)
    return read + _nbytes(weight.bias)


def _nbytes(array) -> int:
    return 0 if array is None else array.nbytes
