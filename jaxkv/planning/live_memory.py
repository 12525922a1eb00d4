"""What a real state takes on the device that is here: jax's own account of live arrays, before and after steps have run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jaxkv.loading import Model
from jaxkv.model.params import Storage, abstract_params
from jaxkv.planning import memory
from jaxkv.planning.audit import Audit, Line, checked, kv_bytes
from jaxkv.planning.deployment import Deployment
from jaxkv.planning.units import both
from jaxkv.state import init_state
from jaxkv.verbs import decode, prefill
from pallas_kernels.devices import device_spec

_LEFT_BYTES = 1 << 20  # what steps may leave behind: random seeds and the like
_PROMPT_TOKENS = 16  # enough to write pages; the sizes of the arrays are those of the state whatever it holds


@dataclasses.dataclass(frozen=True)
class Live:
    """Bytes of live arrays on the device that is here."""

    sequences: int
    context: int
    weights_bytes: int
    state_bytes: int  # pools, scales and history
    left_bytes: int  # what a prefill and a decode step left behind besides
    device_bytes: int | None  # what the device itself counts for all of it; None where it does not


def is_here(d: Deployment) -> bool:
    """Whether jax runs on a device of that kind in this process."""
    if jax.default_backend() != d.chip.platform:
        return False
    try:
        return device_spec(jax.devices()[0].device_kind).name == d.chip.name
    except ValueError:
        return False


def too_large(d: Deployment, sequences: int, context: int) -> str | None:
    """Returns why the state is not made, where it would not fit beside what else needs memory; None where it does."""
    need = memory.weights_bytes(d) + kv_bytes(d, sequences, context)
    free = d.chip.memory_bytes // d.chip.devices_per_chip
    if d.chip.platform == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None if need < 0.8 * free else f"{both(need)} do not fit in 80 % of {both(free)} of free memory"


def with_live(audit: Audit, report: Callable[[str], None] = lambda doing: None) -> Audit:
    """Returns the audit with the smallest point of its grid compared with a real state, or with why it was not."""
    smallest = min(audit.steps, key=lambda step: step.sequences * step.context)
    d, size = audit.deployment, (smallest.sequences, smallest.context)
    reason = too_large(d, *size)
    if reason:
        return dataclasses.replace(audit, not_live=reason)
    report(f"making a state of {size[0]} x {size[1]:,} tokens")
    return dataclasses.replace(audit, live=tuple(compare_live(d, measure(d, *size))))


def compare_live(d: Deployment, live: Live) -> Iterator[Line]:
    """Yields what a real state takes against the prediction."""
    line = lambda what, predicted, found, reasons: Line("live", live.sequences, live.context, what, predicted, found, reasons)
    history = 4 * live.sequences * -(-live.context // d.P) * d.P
    yield checked(line("weights", memory.weights_bytes(d), live.weights_bytes, {}))
    yield checked(line("KV", kv_bytes(d, live.sequences, live.context), live.state_bytes, {"history": history}))
    leak = f"a prefill and a decode step leave {live.left_bytes:,} bytes behind" if live.left_bytes > _LEFT_BYTES else ""
    yield dataclasses.replace(line("left by steps", 0, live.left_bytes, {}), flag=leak)
    if live.device_bytes is not None:
        arrays = live.weights_bytes + live.state_bytes + live.left_bytes
        yield line("device's own count", arrays, live.device_bytes, {"what the runtime keeps": live.device_bytes - arrays})


def measure(d: Deployment, sequences: int, context: int) -> Live:
    """Makes weights of zeros and a real state, runs a prefill and a decode step on it, and returns what lives on the device."""
    config = d.model.config
    assert config is not None  # `audit.run` asks
    storage = Storage(d.weights, "float32" if d.weights == "float32" else "bfloat16", d.chip.platform)
    start, device_start = live_bytes(), _device_bytes()
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract_params(config, storage))
    weights = live_bytes() - start
    state = init_state(Model(config, params, storage), sequences, context, d.P, kv_dtype=d.kv_dtype)
    made = live_bytes() - start
    prompt = min(_PROMPT_TOKENS, context - 1)
    state, _ = prefill(state, [[1] * prompt] * sequences)
    state, logits = decode(state, [1] * sequences)
    logits.block_until_ready()
    del logits, _
    left, device = live_bytes() - start - made, _device_bytes()
    measured = None if device is None or device_start is None else device - device_start
    return Live(sequences, context, weights, made - weights, left, measured)


def live_bytes() -> int:
    """Returns the bytes of all arrays that jax holds in this process."""
    return sum(a.nbytes for a in jax.live_arrays())


def _device_bytes() -> int | None:
    stats = jax.devices()[0].memory_stats()
    return stats.get("bytes_in_use") if stats else None
