"""One call of a kernel, and how far its result is from the oracle's in float64.

Needs jax and numpy alone, so that a bare machine with a GPU can run it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_decode, paged_prefill, write_kv
from pallas_kernels.devices import DeviceSpec
from pallas_kernels.heads import vectors_from_pool
from pallas_kernels.quantise import from_pool, has_scales
from scripts._kernel_cases import Case, Data

# How the engine compiles on CPU (jaxkv/steps.py); and for tiny arrays, whose code takes longer to compile than to run.
_ENGINE_OPTIONS = {"xla_cpu_prefer_vector_width": 512, "xla_cpu_enable_fast_math": True}
_QUICK_OPTIONS = {"xla_backend_optimization_level": 0}
_TINY_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True)
class How:
    """Which implementation, and its options, as the public ops take them.

    Attributes:
      module: a decode kernel by its name below `pallas_kernels`, called without the public op.
    """

    implementation: str | None = None
    interpret: Any = False
    block_sizes: Any = None
    device: DeviceSpec | None = None
    module: str | None = None

    @property
    def options(self) -> dict:
        return {name: getattr(self, name) for name in ("implementation", "interpret", "block_sizes", "device")}


ORACLE = How("reference")


def attend(case: Case, data: Data, page_offset, how: How):  # -> o [B, (T,) K, G, H], lse f32[B, (T,) K, G]
    """Returns what one call gives on the layer at `page_offset`."""
    if how.module is not None:
        return _call_kernel(case, data, page_offset, how)
    options = how.options | {
        "k_new": data.k_new, "v_new": data.v_new, "page_offset": page_offset, "scale": case.head_dim**-0.5, "window": data.window,
        "soft_cap": case.soft_cap, "sinks": data.sinks, "kv_scales": data.kv_scales, "return_lse": True,
    }  # fmt: skip
    arrays = (data.q, data.k_pages, data.v_pages, data.page_table, data.lengths)
    if case.op == "decode":
        return paged_decode(*arrays, **options)
    return paged_prefill(*arrays, data.chunk_lengths, **options)


def _call_kernel(case: Case, data: Data, page_offset, how: How):
    if case.op != "decode" or case.own or case.sinks:
        raise ValueError(f"{how.module} does no {case}: the public op adds that around a kernel")
    starts = jnp.where(data.window > 0, jnp.maximum(data.lengths - data.window, 0), 0)
    decode = importlib.import_module(f"pallas_kernels.{how.module}").decode
    return decode(
        data.q, data.k_pages, data.v_pages, data.kv_scales, data.page_table, data.lengths, starts, page_offset,
        scale=case.head_dim**-0.5, soft_cap=case.soft_cap, interpret=how.interpret, block_sizes=how.block_sizes, device=how.device,
    )  # fmt: skip


def write(data: Data, lengths, how: How):
    """Returns (k_pages, v_pages, kv_scales) with every layer's new tokens written behind `lengths`."""
    arrays = (data.k_pages, data.v_pages, data.k_new, data.v_new, data.page_table, lengths, data.chunk_lengths)
    return write_kv(*arrays, kv_scales=data.kv_scales, **how.options)


def compiler_options(device, data: Data) -> dict | None:
    """Returns what to compile for `device` with."""
    if device.platform != "cpu":
        return None
    return _QUICK_OPTIONS if data.pool_bytes < _TINY_BYTES else _ENGINE_OPTIONS


def run(case: Case, data: Data, page_offset: int, how: How):
    """Returns (o, lse) of `attend`, compiled."""
    options = compiler_options(jax.devices()[0], data)
    return _attend(_hashable(options))(case.form, data, jnp.int32(page_offset), how)


def worst_error(case: Case, data: Data, layers: int, how: How, rows=None, want=None) -> float:
    """Returns the worst error of a result on the last layer, relative to each [H] vector of the oracle's.

    For a write it is 0 or inf: caches are compared bit for bit.

    Args:
      rows: those to compare, all of them by default; the oracle is slow.
      want: the oracle's (o, lse) of those rows, where they are known.
    """
    offset = (layers - 1) * case.pages
    if case.op == "write":
        return _write_error(case, data, offset, how, rows)
    o, lse = run(case, data, offset, how)
    pick = lambda x: np.asarray(x if rows is None else x[jnp.asarray(rows)])
    return compare(case, data, want or oracle(case, data, offset, rows), rows, pick(o), pick(lse))


def compare(case: Case, data: Data, want, rows, o, lse=None) -> float:
    """Returns the worst error of `o` and `lse` of some rows against the oracle's (o, lse), as `worst_error`."""
    want_o, want_lse = want
    real = np.ones(want_lse.shape[:1], bool)  # the outputs that mean something
    if case.op == "prefill":
        chunks = np.asarray(data.chunk_lengths)[slice(None) if rows is None else rows]
        real = np.arange(case.tokens) < chunks[:, None]
    o, want_o = o.astype(np.float64)[real], want_o[real]
    distance, norm = np.linalg.norm(o - want_o, axis=-1), np.linalg.norm(want_o, axis=-1)
    errors = [np.where(norm > 0, distance / np.where(norm > 0, norm, 1), np.where(distance == 0, 0, np.inf))]
    if lse is not None:
        lse, want_lse = lse.astype(np.float64)[real], want_lse[real]
        with np.errstate(invalid="ignore"):  # both are -inf where nothing is seen
            errors.append(np.where(lse == want_lse, 0, np.abs(lse - want_lse) / (1 + np.abs(want_lse))))
    worst = max((float(np.max(e)) for e in errors if e.size), default=0.0)  # np.max keeps a NaN, max may not
    return math.inf if any(np.isnan(e).any() for e in errors) else worst


def oracle(case: Case, data: Data, page_offset: int, rows=None):
    """Returns (o, lse) of some rows, made on the host's CPU in float64 from exactly the numbers that the device has."""
    if rows is not None:
        data, page_offset = _compact(data, jnp.asarray(rows), jnp.int32(page_offset)), 0
    data = _on_host(data)
    data = data._replace(q=data.q.astype(jnp.float32))  # the oracle would round its result to the query's type
    options = _QUICK_OPTIONS if data.pool_bytes < _TINY_BYTES else None
    with jax.enable_x64(True), jax.default_device(host()):
        o, lse = _attend(_hashable(options))(case.form, data, np.int32(page_offset), ORACLE)
    return np.asarray(o), np.asarray(lse)


def _write_error(case: Case, data: Data, offset: int, how: How, rows) -> float:
    """Against the oracle's write of the last layer: every slot of the rows' pages, also those that must not change."""
    rows = jnp.arange(case.batch) if rows is None else jnp.asarray(rows)
    before = _on_host(_compact(data, rows, jnp.int32(offset)))
    got = _write(_hashable(compiler_options(jax.devices()[0], data)))(data, data.lengths, how)
    after = _compact(data._replace(k_pages=got[0], v_pages=got[1], kv_scales=got[2]), rows, jnp.int32(offset))
    with jax.default_device(host()):
        want = _write(_hashable(_QUICK_OPTIONS))(before, before.lengths, ORACLE)
    have = (after.k_pages, after.v_pages, after.kv_scales)
    return 0.0 if all(same_bits(x, y) for x, y in zip(have, want, strict=True)) else math.inf


def same_bits(x, y) -> bool:
    """Whether two arrays, or two Nones, hold the same bytes."""
    return (x is None and y is None) or np.asarray(x).tobytes() == np.asarray(y).tobytes()


@jax.jit
def _compact(data: Data, rows, page_offset) -> Data:
    """The same call over a pool that holds nothing but the pages of `rows`, in the order of their columns."""
    pages = (data.page_table[rows] + page_offset).reshape(-1)
    table = jnp.arange(pages.size, dtype=jnp.int32).reshape(rows.size, -1)
    # What a write is given has its layers first: of them only the last is in the small pool.
    layered = data.k_new is not None and data.k_new.ndim == data.q.ndim == 5
    new = lambda x: None if x is None else x[-1:, rows] if layered else x[rows]
    return data._replace(
        q=data.q[rows], k_pages=data.k_pages[pages], v_pages=data.v_pages[pages],
        kv_scales=None if data.kv_scales is None else data.kv_scales[pages], page_table=table,
        lengths=data.lengths[rows], chunk_lengths=data.chunk_lengths[rows], k_new=new(data.k_new), v_new=new(data.v_new),
    )  # fmt: skip


def dense(case: Case, data: Data, page_offset):  # -> k, v [B, K, S, H]
    """Returns one layer's keys and values as one piece a row, in the query's type: for libraries without pages."""
    if has_scales(data.k_pages.dtype):
        raise ValueError("8-bit keys have no dense form")

    def gather(pages):
        stored = from_pool(pages[data.page_table + page_offset])  # [B, M, K', P, H']
        plain = vectors_from_pool(jnp.moveaxis(stored, 2, 3), case.kv_heads, case.head_dim)
        plain = plain.reshape(case.batch, -1, case.kv_heads, case.head_dim)[:, : case.context]
        return jnp.swapaxes(plain, 1, 2).astype(case.q_dtype)

    return jax.jit(gather)(data.k_pages), jax.jit(gather)(data.v_pages)


def host():
    """The CPU, where jax was started with it, else the default device."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


def _on_host(tree: Any) -> Any:
    return jax.device_put(tree, host())


def _hashable(options: dict | None):
    return None if options is None else tuple(options.items())


@functools.cache
def _attend(options):
    return jax.jit(attend, static_argnums=(0, 3), compiler_options=None if options is None else dict(options))


@functools.cache
def _write(options):
    return jax.jit(write, static_argnums=2, compiler_options=None if options is None else dict(options))
