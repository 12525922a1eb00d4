"""Every figure of a plan by a name that ends in its unit: what `--json` prints and what the report is written from."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxkv.planning import roofline
from jaxkv.planning.deployment import Deployment
from jaxkv.planning.kernel_limits import refusal
from jaxkv.planning.knobs import chips_for, knobs
from jaxkv.planning.memory import (
    UNBOUNDED,
    device_memory,
    held_sequences,
    max_context,
    max_sequences,
    mean_length_for_waste,
    pool_bytes,
    stored_bytes_per_token,
    stored_weights_bytes,
    waste_tokens,
)
from jaxkv.planning.units import KIB, MIB, gb, gib

WASTE_FRACTION = 0.04


@dataclasses.dataclass(frozen=True)
class Costs:
    """What no data sheet says: measured or given.

    link_gbps: 10^9 bytes/s of a replica's links to the host together. kv8_extra_us: extra fixed time of a decode step with 8-bit KV
    in microseconds; None: not measured. kv8_cost_ratio: what a cached token costs a step in 8-bit KV, against 16-bit.
    """

    link_gbps: float = 50.0
    kv8_extra_us: float | None = None
    kv8_cost_ratio: float = roofline.PUBLISHED_KV8_COST_RATIO


def figures(d: Deployment, costs: Costs) -> dict[str, Any]:
    """Returns all figures; sizes of one jax device say so, others are of one replica or, for sequences, of all."""
    return _question(d) | _memory(d) | _cache(d) | _fits(d) | _speed(d) | _costs(d, costs) | {"knobs": _knobs(d)}


def _question(d: Deployment) -> dict[str, Any]:
    return {
        "model": d.model.name,
        "device": d.chip.name,
        "chips": d.chips,
        "tensor_parallel": d.tp,
        "replicas": d.replicas,
        "weights_dtype": d.weights,
        "kv_dtype": d.kv_dtype,
        "page_size_tokens": d.P,
        "context_tokens": d.context,
        "requested_sequences": d.sequences,
        "shared_tokens": d.shared_tokens,
        "params": d.model.num_params,
        "active_params": d.model.active_params,
    }


def _memory(d: Deployment) -> dict[str, Any]:
    memory = dataclasses.asdict(device_memory(d))
    weights = stored_weights_bytes(d.model, d.weights, d.chip.platform)
    out: dict[str, Any] = {"weights_gib": gib(weights), "weights_gb": gb(weights)}
    for name, size in memory.items():
        out |= {name.replace("_bytes", "_gib_per_device"): gib(size), name.replace("_bytes", "_gb_per_device"): gb(size)}
    return out


def _cache(d: Deployment) -> dict[str, Any]:
    per_token = d.model.kv_bytes_per_token(d.kv_dtype)
    most, mean = waste_tokens(d.P)
    return {
        "kv_bytes_per_token": per_token,
        "kv_kib_per_token": per_token / KIB,
        "kv_gib_per_sequence": gib(per_token * d.context),
        "kv_gb_per_sequence": gb(per_token * d.context),
        "kv_stored_bytes_per_token": stored_bytes_per_token(d),
        "kv_stored_gib_per_sequence": gib(pool_bytes(d, 1, d.context) * d.tp),
        "kv_stored_gib_per_sequence_per_device": gib(pool_bytes(d, 1, d.context)),
        "kv_copies": d.kv_copies,
        "kv_compression_over_mha": d.model.compression,
        "fragmentation_max_tokens_per_sequence": most,
        "fragmentation_mean_tokens_per_sequence": mean,
        "fragmentation_max_mib_per_sequence": most * stored_bytes_per_token(d) / MIB,
        "mean_length_tokens_for_4_percent_waste": mean_length_for_waste(d.P, WASTE_FRACTION),
    }


def _fits(d: Deployment) -> dict[str, Any]:
    most, wanted = max_sequences(d), d.sequences or 1
    longest = max_context(d, wanted)
    needed = chips_for(d, max(wanted, 1)) if most < wanted else (d.chips, d.tp)
    refused = refusal(d, d.sequences or most) if most >= wanted else None
    return {
        "max_sequences": most,
        "max_context_tokens": None if longest >= UNBOUNDED else longest,
        "max_context_at_sequences": wanted,
        "model_max_context_tokens": d.model.max_positions,
        "requested_fits": most >= wanted,
        "chips_for_requested": needed[0] if needed else None,
        "tensor_parallel_for_requested": needed[1] if needed else None,
        "kernels_refuse": refused,
    }


def _speed(d: Deployment) -> dict[str, Any]:
    sequences = held_sequences(d)
    step, tp = roofline.decode_step(d, sequences), d.tp
    return {
        "decode_sequences": sequences,
        "decode_sequences_per_replica": step.rows,
        "decode_weights_gib": gib(step.weights_bytes),
        "decode_kv_gib": gib(step.kv_bytes),
        "decode_kv_traffic_fraction": step.kv_fraction,
        "decode_lookup_table_gib": gib(step.lookup_bytes),
        "ridge_flop_per_byte": d.chip.ridge_flop_per_byte,
        "weights_flop_per_byte": step.weights_flop_per_byte,
        "attention_flop_per_byte": step.attention_flop_per_byte,
        "weights_compute_bound_sequences_per_replica": roofline.compute_bound_rows(d),
        "tpot_lower_bound_ms": step.seconds * 1e3,
        "tpot_weights_lower_bound_ms": step.weights_s * 1e3,
        "tpot_attention_lower_bound_ms": step.attention_s * 1e3,
        "decode_tokens_per_s_upper_bound": sequences / step.seconds,
        "ttft_lower_bound_ms": roofline.prefill_seconds(d) * 1e3,
        "ttft_cached_prefix_lower_bound_ms": roofline.prefill_seconds(d, cached=d.shared_tokens // d.P * d.P) * 1e3,
        "bandwidth_gbps_per_replica": d.chip.hbm_gbps * tp / d.chip.devices_per_chip,
        "peak_tflops_per_replica": d.chip.matrix_tflops_bf16 * tp / d.chip.devices_per_chip,
    }


def _costs(d: Deployment, costs: Costs) -> dict[str, Any]:
    saved = roofline.kv8_saved_s_per_token(d, costs.kv8_cost_ratio)
    stored = roofline.kv8_stored_ratio(d)
    source = "published" if costs.kv8_cost_ratio == Costs.kv8_cost_ratio else "given"
    extra = costs.kv8_extra_us
    even = roofline.kv8_break_even_tokens(extra / 1e6, saved) if extra is not None and saved else None
    move = roofline.offload(d, costs.link_gbps)
    return {
        "kv8_cost_fraction": max(costs.kv8_cost_ratio, stored),
        "kv8_cost_source": "stored" if stored > costs.kv8_cost_ratio else source,
        "kv8_saved_ns_per_token_per_step": saved * 1e9,
        "kv8_extra_us_per_step": extra,
        "kv8_break_even_tokens_per_step": even,
        "link_gbps": costs.link_gbps,
        "offload_restore_ms": move.restore_s * 1e3,
        "offload_recompute_lower_bound_ms": move.recompute_s * 1e3,
        "offload_break_even_gbps": move.break_even_gbps,
        "offload_better": move.better,
    }


def _knobs(d: Deployment) -> list[dict[str, Any]]:
    return [{"knob": k.name, "what": k.what, "max_sequences": k.sequences, "sequences_gained": k.gained} for k in knobs(d)]
