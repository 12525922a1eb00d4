"""Paged attention over a flat KV pool: arrays in, arrays out; no models, no engine.

    paged_decode    one query token a row against its pages
    paged_prefill   a chunk of query tokens a row against its pages and itself

Axes: B rows, T query tokens, K kv heads, G query heads per kv head, H head dim, P tokens a page, M pages a row can hold,
C pages of one layer. The pool is `[L*C, K, P, H]`: layer l's page c is row `l*C + c`, reached by `page_offset = l*C`.
"""

from pallas_kernels.ops import IMPLEMENTATIONS, paged_decode, paged_prefill

__all__ = ["IMPLEMENTATIONS", "paged_decode", "paged_prefill"]
