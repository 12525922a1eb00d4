"""Paged attention over a flat KV pool: arrays in, arrays out; no models, no engine.

    paged_decode    one query token a row against its pages
    paged_prefill   a chunk of query tokens a row against its pages and itself
    write_kv        new keys and values into the pages, quantised where the pool is

Axes: B rows, T query tokens, K kv heads, G query heads per kv head, H head dim, P tokens a page, M pages a row can hold,
C pages of one layer. The pool is `[L*C, K, P, H]`: layer l's page c is row `l*C + c`, reached by `page_offset = l*C`.
"""

from pallas_kernels.block_sizes import DecodeBlocks, PrefillBlocks, WriteBlocks
from pallas_kernels.devices import DEVICES, DeviceSpec, default_device, device_spec, present_spec
from pallas_kernels.dispatch import IMPLEMENTATIONS
from pallas_kernels.heads import pool_heads, scales_shape
from pallas_kernels.ops import check_implementation, paged_decode, paged_prefill, write_kv
from pallas_kernels.quantise import HELD_AS_BITS, dequantise, has_scales, quantise

__all__ = [
    "DEVICES",
    "HELD_AS_BITS",
    "IMPLEMENTATIONS",
    "DecodeBlocks",
    "DeviceSpec",
    "PrefillBlocks",
    "WriteBlocks",
    "check_implementation",
    "default_device",
    "dequantise",
    "device_spec",
    "has_scales",
    "paged_decode",
    "paged_prefill",
    "pool_heads",
    "present_spec",
    "quantise",
    "scales_shape",
    "write_kv",
]
