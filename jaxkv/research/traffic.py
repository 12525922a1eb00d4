"""What a decode step has to read, and how fast this machine reads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.kv.state import KVState
from jaxkv.loading import Model
from jaxkv.model.linear import Experts, Linear
from jaxkv.planning.shapes import shape_of
from jaxkv.state import init_state

_BUFFER_BYTES = 1 << 30  # well over any last-level cache
_PASSES = 4


class Reader:
    """Reads one large device buffer, again and again. On CPU two ways, since which is faster depends on the machine.

    Args:
      threads: of the host, that read beside each other in one of them.
    """

    def __init__(self, threads: int):
        # Maxima, because they compute least per byte; of bytes in XLA, of f32 in numpy with a thread a core.
        buffer = jax.block_until_ready(jnp.ones((1 << 16, _BUFFER_BYTES >> 16), jnp.uint8))
        on_cpu = jax.default_backend() == "cpu"
        options = {"xla_cpu_prefer_vector_width": 512} if on_cpu else None
        read = jax.jit(lambda a: jnp.max(a, 1), compiler_options=options)
        self._nbytes = buffer.nbytes
        self._readers = [lambda: read(buffer).block_until_ready()]
        if on_cpu:
            parts = np.array_split(np.asarray(buffer).view(np.float32).reshape(-1), threads)
            pool = ThreadPoolExecutor(threads)
            self._readers.append(lambda: list(pool.map(np.max, parts)))
        self.gb_s()

    def gb_s(self) -> float:
        """The best of a few passes, in 1e9 bytes a second."""
        best = float("inf")
        for read in self._readers * _PASSES:
            started = time.perf_counter()
            read()
            best = min(best, time.perf_counter() - started)
        return self._nbytes / best / 1e9


def weight_bytes(model: Model, rows: int) -> int:
    """Bytes of weights one decode step of so many rows reads. Tables that are only looked up count for their rows alone."""
    params, config = dict(model.params), model.config
    total = 0
    if "head" in params:
        embed = params.pop("embed")
        total += rows * (embed.weight.nbytes + _nbytes(embed.scale)) // config.vocab_size
    for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Linear | Experts)):
        if isinstance(leaf, Linear):
            total += leaf.bytes_read(rows, model.storage.dtype)
        elif isinstance(leaf, Experts):
            total += round((leaf.weight.nbytes + _nbytes(leaf.scale)) * experts_used(config, rows))
        else:
            total += leaf.nbytes
    return total


def experts_used(config: ModelConfig, rows: int) -> float:
    """The part of a mixture's experts that a step of so many rows reads, as the planner has it: rows choose each for itself."""
    shape = shape_of(config, config.architecture)
    left_out = shape.body_params + shape.head_params - shape.read_params(rows)
    return 1 - left_out / shape.expert_params


def kv_bytes(model: Model, rows: int, tokens: float, kv_dtype: str | None = None) -> int:
    """Bytes of keys and values that one decode step reads when every row holds so many tokens; a window's layers read less.

    Scales of an 8-bit pool count, one a token and head; what a backend pads does not.
    """
    config = model.config
    kv = init_state(model, num_slots=1, max_tokens_per_slot=1, kv_dtype=kv_dtype).kv
    vector = config.head_dim * kv.k_pages.dtype.itemsize + (0 if kv.kv_scales is None else 4)
    seen = sum(min(tokens, window) if window else tokens for window in config.layer_windows)
    return round(2 * rows * seen * config.num_kv_heads * vector)


def stored_kv_bytes_per_token(kv: KVState) -> float:
    """Bytes of memory that a token's keys and values take in full pages, with scales and what a backend pads."""
    return kv.nbytes / (kv.page_size * kv.refcounts.shape[0])


def _nbytes(array) -> int:
    return 0 if array is None else array.nbytes
