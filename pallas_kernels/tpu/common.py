"""What the TPU kernels share: operand types, tiles, products, and the facts of the memories they live in."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.devices import DeviceSpec

LANES = 128
MASKED = -1e30  # finite: MASKED - MASKED is 0, not NaN
LOG2_E = 1.4426950408889634
_UNASKED_VMEM = 12 * 2**20  # of the 16 MiB that every TPU compiler grants; the rest is for what it spills
TABLE_BYTES = 900 * 2**10  # of the 1 MiB of scalar memory; the rest holds cursors, a table's tail and what the compiler spills


def tile_rows(dtype) -> int:
    """Returns how many rows the smallest piece of a `[.., rows, 128]` array has that a copy may address."""
    return 32 // jnp.dtype(dtype).itemsize


def rows_at_once(columns: int, table_bytes: int) -> int:
    """Returns how many rows' page tables, and two more numbers a row, `table_bytes` of scalar memory hold.

    Raises:
      ValueError: not even one.
    """
    if 4 * columns > table_bytes:
        raise ValueError(
            f"a page table of {columns} columns does not fit the {table_bytes} bytes of scalar memory: use larger pages"
        )
    return max(1, table_bytes // (4 * (columns + 2)))


def operand_dtype(q_dtype, pool_dtype):
    """Returns the dtype in which q.k and p.v are multiplied; sums are f32."""
    return jnp.float32 if jnp.float32 in (q_dtype, pool_dtype) else jnp.bfloat16


def dot(a, b, contract: tuple[int, int]):
    """Returns the f32 product over axis `contract[0]` of a and `contract[1]` of b, exact to f32 for f32 operands."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32, precision=precision)


def repeat(x, width: int):  # [S, 128] -> [S, width]
    """Returns x whose lanes are all equal, made `width` lanes wide: registers are reused, nothing moves."""
    return jnp.concatenate([x] * pl.cdiv(width, LANES), axis=1)[:, :width]


def start_copy(source, destination, semaphore) -> None:
    """Starts one transfer. Tests count the bytes that pass here."""
    pltpu.make_async_copy(source, destination, semaphore).start()


def wait_parts(part, count, most: int, semaphore) -> None:
    """Waits for `count` <= most transfers, each as large as part(1), where part(n) is n in a row.

    A wait is for a number of bytes, so one for each power of two will do.
    """
    for bit in range(most.bit_length()):

        @pl.when(count & (1 << bit) != 0)
        def _(n=1 << bit):
            pltpu.make_async_copy(part(n), part(n), semaphore).wait()


def vmem_limit(needed: int, device: DeviceSpec) -> int | None:
    """Returns how much VMEM to ask for where buffers of `needed` bytes are; None: as much as the compiler gives unasked.

    Raises:
      ValueError: the device has less.
    """
    if needed > device.vmem_bytes:
        raise ValueError(
            f"{needed} bytes of buffers do not fit the {device.vmem_bytes} bytes of VMEM of {device.name}: use smaller pages or block_sizes"
        )
    return None if needed <= _UNASKED_VMEM else min(device.vmem_bytes, needed + _UNASKED_VMEM)


def divide(x, n: int):
    """Returns x // n for x >= 0: a shift where n is a power of two."""
    return x >> (n.bit_length() - 1) if n & (n - 1) == 0 else lax.div(x, jnp.int32(n))


def ceil_divide(x, n: int):
    """Returns ceil(x / n) for x >= 0."""
    return divide(x + (n - 1), n)


def token_scales(ref, which: int, K: int, P: int):  # [pages, 2, R, 128] -> [>= K, pages * P]
    """Returns the scales of a block's pages as one row of tokens a head; `which` 0: keys, 1: values.

    A page's scales are flat, head-major and token-minor; P divides 128 or is a multiple of it. Where 128 / P = n heads share a row of lanes, n pages of n heads are an
    n x n transposition of pieces of P lanes: one exchange of halves for each bit of n.
    """
    pages = ref.shape[0]
    if P >= LANES:
        n = P // LANES
        parts = [ref[j, which, :, :] for j in range(pages)]
        parts = [x if n == 1 else jnp.concatenate([x[k * n + i][None] for k in range(K)]) for x in parts for i in range(n)]
        return jnp.concatenate(parts, axis=1)
    n, R = LANES // P, ref.shape[2]
    height = -(-R * n // 8) * 8
    row = lax.broadcasted_iota(jnp.int32, (height, LANES), 0)
    piece = lax.broadcasted_iota(jnp.int32, (height, LANES), 1) // P
    zero = jnp.zeros((1, LANES), jnp.float32)
    parts = []
    for first in range(0, pages, n):
        rows = [ref[first + j, which, r][None] if first + j < pages else zero for r in range(R) for j in range(n)]
        x = jnp.concatenate(rows + [zero] * (height - len(rows)))
        for bit in range(n.bit_length() - 1):
            half = 1 << bit
            down = pltpu.roll(pltpu.roll(x, height - half, 0), half * P, 1)  # from `half` rows below, `half` pieces before
            up = pltpu.roll(pltpu.roll(x, half, 0), LANES - half * P, 1)
            mine, theirs = (row >> bit) & 1, (piece >> bit) & 1
            x = jnp.where(mine == theirs, x, jnp.where(mine == 0, down, up))
        parts.append(x)
    return jnp.concatenate(parts, axis=1)[:, : pages * P]
