"""Which of the two GPU decode kernels a call runs: Triton's, or Mosaic GPU's where that was measured to be faster or is the only one."""

from __future__ import annotations

import importlib
from types import ModuleType

from pallas_kernels.block_sizes import DecodeBlocks, decode_key, tuned_us
from pallas_kernels.devices import DeviceSpec

TRITON, MOSAIC = "gpu.triton_decode", "gpu.mosaic_decode"


def decode(
    q,
    k_pages,
    v_pages,
    kv_scales,
    page_table,
    lengths,
    starts,
    page_offset,
    *,
    scale: float,
    soft_cap: float | None,
    interpret,
    block_sizes: DecodeBlocks | None,
    device: DeviceSpec,
):
    """Returns o f32 `[B, K, G, H]` and lse f32 `[B, K, G]` (natural; -inf where nothing is seen) of keys `[starts, lengths)`.

    Raises:
      ValueError: neither kernel can run with this jax, or the only one that can is not for this call.
    """
    kernel = choose_kernel(q, k_pages, kv_scales, page_table, interpret, device)
    return kernel.decode(
        q, k_pages, v_pages, kv_scales, page_table, lengths, starts, page_offset, scale=scale, soft_cap=soft_cap,
        interpret=interpret, block_sizes=block_sizes, device=device,
    )  # fmt: skip


def choose_kernel(q, k_pages, kv_scales, page_table, interpret, device: DeviceSpec) -> ModuleType:
    """Returns the module of the kernel for a call.

    Mosaic's is taken where both were tuned for exactly this call and its time is the lower. Block sizes that a caller gives do not
    change the choice: the tuner compares candidates of one kernel.

    Raises:
      ValueError: this jax has neither Pallas Triton nor what the Mosaic kernel uses, or that kernel is not for this call.
    """
    mosaic = _module(MOSAIC)
    refusal = mosaic.refusal(q, k_pages, kv_scales, interpret, device)
    try:
        triton = _module(TRITON)
    except ImportError as error:
        if refusal is None:
            return mosaic
        raise ValueError(
            f"'pallas_gpu' has no decode kernel for this call: {error}; Mosaic GPU's cannot do it: {refusal}"
        ) from error
    key = decode_key(q, k_pages, page_table)
    ours, theirs = (tuned_us(kernel, device.name, key) for kernel in (MOSAIC, TRITON))
    return mosaic if refusal is None and ours is not None and theirs is not None and ours < theirs else triton


def _module(kernel: str) -> ModuleType:
    return importlib.import_module(f"pallas_kernels.{kernel}")
