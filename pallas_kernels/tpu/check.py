"""Whether the TPU kernels can run a call at all: what their plans refuse, asked before anything is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.devices import DeviceSpec
from pallas_kernels.heads import queries_to_pool, scales_shape
from pallas_kernels.quantise import has_scales
from pallas_kernels.tpu import decode, prefill_sizes, write
from pallas_kernels.tpu.common import TABLE_BYTES, rows_at_once, vmem_limit

_CHUNK = 512  # tokens; the rule's tiles grow with a chunk up to here


def check(q, k_pages, page_table, device: DeviceSpec) -> None:
    """Checks decode, prefill and write of q `[B, K, G, H]` over pages `[L*C, K', P, H']` and a table `[B, M]`: shapes and dtypes.

    Raises:
      ValueError: a table row too long for scalar memory, or pages too large for VMEM.
    """
    B, M = page_table.shape
    rows, heads, P, dim = k_pages.shape
    rows_at_once(M, TABLE_BYTES)
    array = jax.ShapeDtypeStruct
    q = jax.eval_shape(queries_to_pool, array(q.shape, q.dtype), array(k_pages.shape, k_pages.dtype))
    pools = [k_pages, k_pages] + ([array(scales_shape(rows, heads, P), jnp.float32)] if has_scales(k_pages.dtype) else [])
    options: dict[str, Any] = {"scale": 1.0, "soft_cap": None, "block_sizes": None, "device": device}
    decode.make_plan(q, pools, M, **options)
    chunk = array((B, _CHUNK, *q.shape[1:]), q.dtype)
    sizes = prefill_sizes.sizes(chunk, k_pages, M, **options)
    operand = prefill_sizes.loaded_dtype(q.dtype, sizes.operand)
    vmem_limit(prefill_sizes.vmem(sizes, operand, k_pages.dtype), device)
    for tokens in (1, _CHUNK):
        write.make_plan(array((1, B, tokens, heads, dim), jnp.float32), pools, M, None, device)
