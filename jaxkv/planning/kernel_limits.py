"""What kernels ask of a pool beyond that it fits: which number of sequences makes one that they refuse."""

from __future__ import annotations

import bisect
import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.planning.deployment import Deployment
from jaxkv.planning.memory import pages_of
from pallas_kernels import DEVICES, check_implementation, default_device, pool_heads


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A pool that the kernels do not take, and the nearest ones that they do."""

    sequences: int  # of one replica, for which the pool is made
    reason: str  # theirs
    fewer: int  # sequences whose pool they take; 0: none
    more: int | None  # the next larger pool that they take is for so many; None: none is


def kernel_device(d: Deployment):
    """The DeviceSpec that kernels are built for: that of the chip, or of a modest device of its kind where it is the user's own."""
    return DEVICES.get(d.chip.name) or default_device(d.chip.platform)


def refusal(d: Deployment, sequences: int) -> Refusal | None:
    """Returns why a pool with room for just so many sequences, on all replicas, is refused; None where it is not."""
    each = -(-sequences // d.replicas)
    reason = _reason(d, each)
    if reason is None or d.model.config is None:
        return None
    # A limit is a range of sizes, so pools are taken below it and beyond it.
    refused = lambda n: _reason(d, n) is not None
    fewer = bisect.bisect_left(range(1, each + 1), True, key=refused)
    larger = range(each, 4 * each)
    more = bisect.bisect_left(larger, True, key=lambda n: not refused(n))
    return Refusal(each, reason, fewer, larger[more] if more < len(larger) else None)


def _reason(d: Deployment, sequences: int) -> str | None:
    heads, dim = pool_heads(d.kv_heads_per_device, d.model.head_dim, d.chip.platform)
    pages = sequences * pages_of(d.change(free_window_pages=False), d.context)[0] + d.model.num_layers
    k_pages = jax.ShapeDtypeStruct((pages, heads, d.P, dim), jnp.dtype(d.kv_dtype))
    try:
        check_implementation(k_pages, device=kernel_device(d))
    except ValueError as error:
        return str(error)
    return None
