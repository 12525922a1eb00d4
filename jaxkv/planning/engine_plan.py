"""The plan of a deployment that the serving engine admits by, where it can hold it."""

from __future__ import annotations

from jaxkv.planning.deployment import Deployment
from jaxkv.planning.kernel_limits import refusal
from jaxkv.planning.memory import device_memory, max_context, max_sequences, pool_bytes
from jaxkv.planning.plan import CapacityPlan
from jaxkv.planning.units import GIB, count, gib


def capacity_plan(d: Deployment) -> CapacityPlan:
    """Returns the plan of one device that admits what is asked, or all that fits.

    Activations grow with the sequences, so KV that only more sequences than fit would need stays unassigned.

    Raises:
      ValueError: not one sequence fits, or fewer than asked; or the engine cannot hold them: it does not run the model, keeps pages
        behind windows, runs on one device, or its kernels refuse the pool.
    """
    most = max_sequences(d)
    wanted = d.sequences or most
    if wanted > most or not most:
        raise ValueError(
            f"{count(wanted or 1)} of {d.context:,} tokens {'do' if wanted > 1 else 'does'} not fit on {d.chips} {d.chip.name}:"
            f" {count(most)} fit{'s' if most == 1 else ''}, and at {wanted or 1:,} the longest context is"
            f" {count(max_context(d, wanted or 1), 'token')}"
        )
    _check_engine(d, wanted)
    memory, each, watermark = device_memory(d, wanted), -(-wanted // d.replicas), round(d.low_watermark_gib * GIB)
    reserve = pool_bytes(d, each, d.context) / each
    kv = memory.kv_budget_bytes
    if (kv - watermark) // reserve > most // d.replicas:
        kv = pool_bytes(d, most // d.replicas, d.context) + watermark
    return CapacityPlan(
        memory_gib=gib(memory.memory_bytes),
        weights_gib=gib(memory.weights_bytes),
        activations_gib=gib(memory.activations_bytes),
        runtime_and_fragmentation_gib=gib(memory.runtime_bytes),
        kv_budget_gib=gib(kv),
        max_context_tokens=d.context,
        max_active_sequences=each,
        reserve_per_sequence_gib=gib(reserve),
        low_watermark_gib=d.low_watermark_gib,
    ).check()


def provenance(d: Deployment) -> str:
    """Returns lines that say what deployment a plan is of, and what it takes for granted."""
    lines = [
        f"{d.model.name} on {d.chips} {d.chip.name}, tensor_parallel {d.tp}: weights {d.weights}, KV {d.kv_dtype} in pages of {d.P},"
        f" context {d.context:,}"
    ]
    if d.replicas > 1:
        lines.append(f"Of one of {d.replicas} replicas: an engine runs on one device, so each is an engine of its own")
    if d.shared_tokens:
        lines += [
            f"A prefix of {count(d.shared_tokens, 'token')} is shared by {count(d.sharers) if d.sharers else 'all sequences'}:"
            " reserve_per_sequence_gib counts it once,",
            "spread over them, so it is right only for requests that share it",
        ]
    return "\n".join(lines)


def _check_engine(d: Deployment, sequences: int) -> None:
    if d.model.config is None:
        raise ValueError(f"jaxkv does not run {d.model.name}, so no engine could hold its plan: choose another model")
    if d.free_window_pages:
        raise ValueError("the engine keeps pages behind windows, so it cannot hold this plan: leave out free_window_pages")
    if d.tp > 1:
        raise ValueError(
            f"jaxkv's engine runs on one device, so it cannot hold a plan of tensor_parallel={d.tp}: give tensor_parallel=1, for replicas"
        )
    if refused := refusal(d, sequences):
        raise ValueError(f"the kernels of {d.chip.name} take no such pool: {refused}; change page_size or kv_dtype")
