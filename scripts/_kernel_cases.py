"""Cases of the scripts that measure kernels, and their arrays.

Needs jax and numpy alone, so that a bare machine with a GPU can run it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.heads import pool_heads, scales_shape, vectors_to_pool
from pallas_kernels.quantise import HELD_AS_BITS, has_scales, to_pool

_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "int8", "float8_e4m3fn": "fp8"}
# Pages that are drawn; the others repeat them times a factor of their own, because drawing gigabytes takes a CPU minutes.
_DRAWN_PAGES = 61


@dataclasses.dataclass(frozen=True)
class Case:
    """What one call computes. Each row holds `context` tokens; ragged ones 0, 1, P-1, P, P+1 .. `context`."""

    op: str
    batch: int
    context: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dtype: str  # of keys and values in the pool
    tokens: int = 1  # new tokens a row: the chunk of prefill, what is written
    ragged: bool = False
    own: bool = False  # decode: the query's own key and value are not in the pages yet
    window: int = 0
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        shape = f"B{self.batch} S{self.context} K{self.kv_heads} G{self.group} H{self.head_dim} P{self.page_size}"
        tokens = f" T{self.tokens}" if self.tokens > 1 else ""
        options = (
            f" window {self.window}" * bool(self.window),
            f" cap {self.soft_cap}" * bool(self.soft_cap),
            " sinks" * self.sinks,
        )
        return f"{self.op} {shape}{tokens} {_SHORT[self.dtype]}{' own' * self.own}{''.join(options)}"

    @property
    def q_dtype(self) -> str:
        return self.dtype if self.dtype in ("float32", "float16") else "bfloat16"

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype == "float32" else 1e-2

    @property
    def form(self) -> Case:
        """The part of it that code is compiled for; shapes come with the arrays."""
        return dataclasses.replace(self, context=0, ragged=False, window=0)

    @property
    def columns(self) -> int:
        """M, of the page table."""
        return -(-(self.context + self.tokens) // self.page_size)

    @property
    def pages(self) -> int:
        """C, of one layer: each row's and the null page."""
        return self.batch * self.columns + 1

    def bytes_in_use(self, platform: str) -> int:
        """Bytes one call has to move, as the pool of that platform holds them: each once."""
        vector = self._token_bytes(platform)
        queries = self.batch * self.tokens * self.kv_heads * self.head_dim * jnp.dtype(self.q_dtype).itemsize
        if self.op == "write":
            return 2 * queries + self.batch * self.tokens * vector
        new = 2 * queries if self.op == "prefill" or self.own else 0
        return self.batch * min(self.context, self.window or self.context) * vector + new + 2 * self.group * queries

    def layer_bytes(self, platform: str) -> int:
        """Bytes of one layer's pages."""
        return self.pages * self.page_size * self._token_bytes(platform)

    def _token_bytes(self, platform: str) -> int:
        """Of a token's keys and values in the pool."""
        heads, dim = pool_heads(self.kv_heads, self.head_dim, platform)
        return 2 * heads * (dim * jnp.dtype(self.dtype).itemsize + 4 * has_scales(self.dtype))

    @property
    def flops(self) -> int:
        """Of both products, multiply and add apart: visible keys only."""
        if self.op == "write":
            return 0
        seen = self.tokens * self.context + (self.tokens * (self.tokens + 1) // 2 if self.op == "prefill" else self.own)
        return 4 * self.batch * self.kv_heads * self.group * self.head_dim * seen


class Data(NamedTuple):
    """The arrays of a case: a pool of several layers, L*C pages."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    kv_scales: jax.Array | None
    page_table: jax.Array
    lengths: jax.Array
    chunk_lengths: jax.Array
    k_new: jax.Array | None
    v_new: jax.Array | None
    sinks: jax.Array | None
    window: jax.Array  # i32[], traced as in the engine: one compilation serves all

    @property
    def pool_bytes(self) -> int:
        return sum(a.nbytes for a in (self.k_pages, self.v_pages, self.kv_scales) if a is not None)


def make_data(case: Case, layers: int, platform: str, *, seed: int = 0, poison: float = math.nan) -> Data:
    """Returns N(0, 1) queries, keys and values; shuffled pages; `poison` in every slot that no row uses, the null page too.

    On CPU pools hold bf16 and fp8 as the engine does there, as bits.
    """
    rng = np.random.default_rng(seed)
    B, P, M, C, T = case.batch, case.page_size, case.columns, case.pages, case.tokens
    table = (1 + rng.permutation(C - 1)).reshape(B, M).astype(np.int32)
    lengths, chunks = np.full(B, case.context), np.full(B, T)
    if case.ragged:
        some = np.minimum([case.context, 0, 1, P - 1, P, P + 1, case.context // 2, 2 * P + 3], case.context)
        lengths, chunks = some[np.arange(B) % len(some)], np.array([T, T, (T + 1) // 2, T, 0])[np.arange(B) % 5]
    used = np.zeros((C, P), bool)
    at = np.arange(M * P)
    for b in range(B):
        mine = at[: lengths[b]]
        used[table[b, mine // P], mine % P] = True
    form = dataclasses.replace(case.form, own=False, soft_cap=None, sinks=False)  # what a pool depends on
    gain = rng.uniform(0.5, 1.5, (2, layers * C)).astype(np.float32)
    k_pages, v_pages, kv_scales = _pools(form, layers, platform, _drawn(case, rng), gain, used, poison)
    k_new, v_new = _new(case, layers, rng)
    i32 = lambda x: jnp.asarray(x, jnp.int32)
    return Data(
        q=_normal(rng, case, *_q_shape(case)), k_pages=k_pages, v_pages=v_pages, kv_scales=kv_scales, page_table=i32(table),
        lengths=i32(lengths), chunk_lengths=i32(chunks), k_new=k_new, v_new=v_new, sinks=_sinks(case, rng), window=i32(case.window),
    )  # fmt: skip


def _q_shape(case: Case) -> tuple[int, ...]:
    heads = (case.kv_heads, case.group, case.head_dim)
    return (case.batch, *heads) if case.op == "decode" else (case.batch, case.tokens, *heads)


def _new(case: Case, layers: int, rng):
    """k_new and v_new, or two Nones."""
    if case.op == "decode" and not case.own:
        return None, None
    lead = {"decode": (), "prefill": (case.tokens,), "write": (case.tokens,)}[case.op]
    shape = (*[layers] * (case.op == "write"), case.batch, *lead, case.kv_heads, case.head_dim)
    return _normal(rng, case, *shape), _normal(rng, case, *shape)


def _sinks(case: Case, rng):
    return jnp.asarray(rng.standard_normal((case.kv_heads, case.group)), jnp.float32) if case.sinks else None


def _normal(rng, case: Case, *shape: int):
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(case.q_dtype)


def _drawn(case: Case, rng):
    """The keys and values of a few pages, f32 [2, n, P, K, H], on the host."""
    return rng.standard_normal((2, _DRAWN_PAGES, case.page_size, case.kv_heads, case.head_dim), np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _pools(case: Case, layers: int, platform: str, drawn, gain, used, poison):
    """k_pages, v_pages, kv_scales from f32 drawn [2, n, P, K, H], gain [2, L*C] and bool used [C, P]."""
    used = jnp.tile(used, (layers, 1))[:, None]  # [L*C, 1, P]
    (k, k_scale), (v, v_scale) = (_pool(case, platform, *x, used, poison) for x in zip(drawn, gain, strict=True))
    return k, v, None if k_scale is None else _pack_scales(k_scale, v_scale, poison)


def _pool(case: Case, platform: str, drawn, gain, used, poison):  # -> values [L*C, K', P, H'], scale f32[L*C, K', P] or None
    heads, dim = pool_heads(case.kv_heads, case.head_dim, platform)
    pool = jax.ShapeDtypeStruct((gain.shape[0], heads, case.page_size, dim), pool_dtype(case.dtype, platform))
    drawn = jnp.swapaxes(vectors_to_pool(drawn, pool), 1, 2)
    which = jnp.arange(gain.shape[0], dtype=jnp.int32) % _DRAWN_PAGES
    if not has_scales(pool.dtype):
        return to_pool(jnp.where(used[..., None], drawn[which] * gain[:, None, None, None], poison), pool.dtype)
    values, scale = to_pool(drawn, pool.dtype)
    bad, _ = to_pool(jnp.full((1,), poison, jnp.float32), pool.dtype)
    return jnp.where(used[..., None], values[which], bad[0]), jnp.where(used, scale[which] * gain[:, None, None], poison)


def _pack_scales(k_scale, v_scale, poison):  # f32[L*C, K', P] -> f32[L*C, 2, R, 128]
    rows, heads, P = k_scale.shape
    shape = scales_shape(rows, heads, P)
    flat = jnp.stack([k_scale, v_scale], 1).reshape(rows, 2, heads * P)
    return jnp.pad(flat, ((0, 0), (0, 0), (0, shape[2] * shape[3] - heads * P)), constant_values=poison).reshape(shape)


def pool_dtype(dtype: str, platform: str):
    """Returns the dtype of the pool's array: on CPU, bits for bf16 and fp8."""
    held = {jnp.dtype(meant).name: bits for bits, meant in HELD_AS_BITS.items()} if platform == "cpu" else {}
    return jnp.dtype(held.get(dtype, dtype))
