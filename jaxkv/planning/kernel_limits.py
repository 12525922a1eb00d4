"""What kernels ask of a pool beyond that it fits the memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.planning.deployment import Deployment
from jaxkv.planning.memory import layer_page_bytes, pool_bytes
from pallas_kernels import DEVICES, check_implementation, default_device, pool_heads
from pallas_kernels.devices import DeviceSpec


def kernel_device(d: Deployment) -> DeviceSpec:
    """The device that kernels are built for: that of the chip, or a modest one of its kind where the chip is the user's own."""
    return DEVICES.get(d.chip.name) or default_device(d.chip.platform)


def refusal(d: Deployment, sequences: int) -> str | None:
    """Returns why kernels refuse the pool of so many sequences on all replicas, in their words; None where they take it."""
    if d.model.config is None:
        return None
    heads, dim = pool_heads(d.kv_heads_per_device, d.model.head_dim, d.chip.platform)
    each = -(-sequences // d.replicas)
    pages = pool_bytes(d.change(free_window_pages=False), each, d.context) // layer_page_bytes(d) + d.model.num_layers
    k_pages = jax.ShapeDtypeStruct((pages, heads, d.P, dim), jnp.dtype(d.kv_dtype))
    try:
        check_implementation(k_pages, device=kernel_device(d))
    except ValueError as error:
        return str(error)
    return None
