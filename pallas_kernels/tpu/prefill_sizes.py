"""How much of a chunk and of its keys the TPU prefill kernel holds at a time, and the VMEM that takes."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.block_sizes import PrefillBlocks, choose, tpu_prefill_blocks
from pallas_kernels.devices import DeviceSpec
from pallas_kernels.heads import scales_shape
from pallas_kernels.quantise import has_scales
from pallas_kernels.tpu.common import operand_dtype
from pallas_kernels.tpu.prefill_block import ROWS, TURN_ROWS, Sizes

_LEAST_QUERIES = 16  # rows of a tile of bf16, so that a block of q and o is whole tiles


def sizes(q, k_pages, M: int, *, scale: float, soft_cap: float | None, block_sizes, device: DeviceSpec) -> Sizes:
    """Returns the static side of a call with q `[B, T, K, G, H]` and tables of M columns: what was given, tuned or ruled.

    Raises:
      ValueError: block sizes that the kernel has no loop for.
    """
    B, T, K, G, H = q.shape
    P, dtype = k_pages.shape[2], k_pages.dtype
    operand = jnp.dtype(operand_dtype(q.dtype, dtype))

    def of(queries: int, pages: int) -> Sizes:
        items = B * pl.cdiv(T, queries)
        cores = device.num_cores if items % device.num_cores == 0 else 1
        heads = max(n for n in range(1, K + 1) if K % n == 0 and n * G * queries <= max(TURN_ROWS, G * queries))
        return Sizes(
            T=T, K=K, G=G, H=H, P=P, M=M, queries=queries, pages=pages, heads=heads, cores=cores, items=items // cores,
            operand=operand.name, staged=dtype != operand, scaled=has_scales(dtype), scale=scale, soft_cap=soft_cap,
        )  # fmt: skip

    rule = tpu_prefill_blocks(T, G, P, device, lambda *blocks: vmem(of(*blocks), loaded_dtype(q.dtype, operand), dtype))
    key = {"T": T, "K": K, "G": G, "H": H, "P": P, "dtype": dtype.name}
    blocks = choose("tpu.prefill", device, key, PrefillBlocks, rule, block_sizes)
    queries, pages = blocks.queries_per_block, blocks.pages_per_block
    assert queries is not None and pages is not None
    if queries % _LEAST_QUERIES or (queries > ROWS and queries % ROWS):
        raise ValueError(
            f"queries_per_block={queries} must be a multiple of {_LEAST_QUERIES} up to {ROWS}, or of {ROWS}: rows of q are multiplied "
            f"in groups of {ROWS}"
        )
    return of(queries, pages)


def loaded_dtype(q_dtype, operand):
    """Returns the dtype in which q comes and o goes: float16 Mosaic does not know."""
    return q_dtype if q_dtype != jnp.float16 else jnp.dtype(operand)


def vmem(z: Sizes, q_dtype, pool_dtype) -> int:
    """Returns the bytes of VMEM that the kernel asks for: its buffers, and tiles of q, o and lse twice."""
    size = lambda shape, dtype: math.prod(shape) * jnp.dtype(dtype).itemsize
    buffers = sum(size(*buffer) for buffer in scratch(z, pool_dtype).values())
    return buffers + z.K * z.G * z.queries * (4 * z.H * q_dtype.itemsize + 8)


def scratch(z: Sizes, pool_dtype) -> dict:
    """Returns (shape, dtype) of the kernel's buffers by their names in `Refs`."""
    f32, N = jnp.float32, z.K * z.G
    pages, scores, probs = (2, z.pages, z.K, z.P, z.H), ((1, ROWS, z.keys), f32), ((ROWS, z.keys), z.operand)
    state = (N, z.queries, z.lanes)
    buffers = {
        "k": (pages, pool_dtype), "v": (pages, pool_dtype), "visible": ((z.queries, z.keys), jnp.int32),
        "even_scores": scores, "odd_scores": scores, "even_probs": probs, "odd_probs": probs,
        "top": (state, f32), "total": (state, f32), "acc": ((N, z.queries, z.H), f32),
    }  # fmt: skip
    if z.scaled:
        buffers |= {"scale_pages": ((2, z.pages, *scales_shape(1, z.K, z.P)[1:]), f32), "scale_rows": ((2, z.K, 1, z.keys), f32)}
    if z.staged:
        turn = ((z.heads, z.keys, z.H), z.operand)
        buffers |= {"k_own": (pages, z.operand), "v_own": (pages, z.operand), "k_turn": turn, "v_turn": turn}
    return buffers
