"""A plan as text: one page for a deployment, and one for a change of it."""

from __future__ import annotations

import textwrap
from typing import Any

from jaxkv.planning.deployment import Deployment
from jaxkv.planning.knobs import chips_for
from jaxkv.planning.memory import unpadded_page
from jaxkv.planning.plan import CapacityPlan
from jaxkv.planning.roofline import PUBLISHED_KV8_BREAK_EVEN_TOKENS, PUBLISHED_KV8_COST_RATIO
from jaxkv.planning.shapes import KV_BYTES
from jaxkv.planning.units import GIB, both, count, gb, ms

Figures = dict[str, Any]
_NOTHING_LEFT = "nothing is left for KV"


def describe(d: Deployment, f: Figures) -> str:
    """Returns the report of a deployment from its figures."""
    parts = [_title(d), _memory(d, f), _cache(d, f), _fits(d, f), _decode(d, f), _prefill(d, f), _eight_bits(d, f), _knobs(d, f)]
    return "\n\n".join("\n".join(part) for part in parts)


def _title(d: Deployment) -> list[str]:
    split = f", tensor_parallel {d.tp}" if d.tp > 1 else ""
    split += f", {d.replicas} replicas" if d.replicas > 1 else ""
    lines = [
        f"{d.model.name} on {d.chips} {d.chip.name}{split}: context {d.context:,}, weights {d.weights}, KV {d.kv_dtype} in pages of {d.P}"
    ]
    if d.model.config and d.tp > 1:
        lines.append("(planned for, not run by jaxkv yet: its engine runs on one device, without tensor parallelism)")
    elif d.model.config and d.replicas > 1:
        lines.append("(jaxkv's engine runs on one device: each replica is an engine of its own)")
    return lines


def _memory(d: Deployment, f: Figures) -> list[str]:
    params = f"{d.model.num_params:,} parameters" + (f" over {d.tp} devices" if d.tp > 1 else "")
    steps = f"{d.step_tokens:,} tokens or {count(f['decode_sequences_per_replica'])}"
    estimate = "given" if d.activations_gib is not None else f"estimated for steps of {steps}; --activations_gib"
    notes = {
        "weights": params,
        "activations": estimate,
        "runtime": f"memory_fraction {d.memory_fraction:g}, and a null page",
        "kv_budget": "" if f["kv_budget_gib_per_device"] > 0 else _NOTHING_LEFT,
        "memory": "",
    }
    labels = {"runtime": "runtime and fragmentation", "kv_budget": "KV budget", "memory": "all"}
    lines = [f"{'Memory of a device' if d.tp > 1 or d.replicas > 1 else 'Memory':30}{'GiB':>10}{'GB':>10}"]
    for name, note in notes.items():
        sizes = f"{f[f'{name}_gib_per_device']:10.2f}{f[f'{name}_gb_per_device']:10.2f}"
        lines.append(f"  {labels.get(name, name):28}{sizes}   {note}".rstrip())
    return lines


def _cache(d: Deployment, f: Figures) -> list[str]:
    m = d.model
    if m.latent:
        formula = f"{m.num_layers} layers x ({m.latent.rank} + {m.latent.rope_dim}) x {KV_BYTES[d.kv_dtype]} B"
    else:
        formula = f"2 x {m.num_layers} layers x {count(m.num_kv_heads, 'KV head')} x {m.head_dim} x {KV_BYTES[d.kv_dtype]} B"
    lines = [
        "KV cache",
        f"  a token       {f['kv_bytes_per_token']:,} B = {_short(f['kv_kib_per_token'])} KiB: {formula}",
        f"  a sequence    {both(f['kv_gib_per_sequence'] * GIB)} of {d.context:,} tokens",
    ]
    if f["kv_compression_over_mha"] > 1:
        lines[1] += f", {_short(f['kv_compression_over_mha'])} times less than MHA"
    if f["kv_stored_gib_per_sequence"] != f["kv_gib_per_sequence"]:
        each = f", {both(f['kv_stored_gib_per_sequence_per_device'] * GIB)} on each device" if d.tp > 1 else ""
        lines.append(f"  as stored     {_kv(f)}{each}: {', '.join(_reasons(d))}")
    elif d.tp > 1:
        lines.append(f"  a device      {both(f['kv_stored_gib_per_sequence_per_device'] * GIB)} of it")
    lines.append(
        f"  pages         waste at most {count(f['fragmentation_max_tokens_per_sequence'], 'token')} a sequence"
        f" ({f['fragmentation_max_mib_per_sequence']:.2f} MiB), {f['fragmentation_mean_tokens_per_sequence']:g} on average: under 4 % from"
        f" {f['mean_length_tokens_for_4_percent_waste']:,.0f} tokens on"
    )
    return lines


def _reasons(d: Deployment) -> list[str]:
    """Why what is stored differs from the formula."""
    reasons = []
    if d.kv_copies > 1:
        heads = "the latent" if d.model.latent else "the KV head" if d.model.num_kv_heads == 1 else "each KV head"
        reasons.append(f"{d.kv_copies} copies of {heads}")
    if KV_BYTES[d.kv_dtype] == 1:
        reasons.append("scales, padded to rows of 128" if d.P % unpadded_page(d) else "a scale a token and head")
    if d.chip.platform == "tpu" and d.model.head_dim % 128:
        reasons.append("lanes of 128")
    if d.free_window_pages:
        reasons.append("without pages behind windows")
    return [*reasons, "whole pages"] if d.context % d.P or not reasons else reasons


def _fits(d: Deployment, f: Figures) -> list[str]:
    most, wanted, longest = f["max_sequences"], f["max_context_at_sequences"], f["max_context_tokens"]
    lines = ["What fits", f"  {count(most)} of {d.context:,} tokens" + _shared(d)]
    if d.context > d.model.max_positions:
        lines[-1] += f"; the model was made for {d.model.max_positions:,}"
    if longest is None:
        lines.append(f"  {count(wanted)} of any length: every layer forgets what is behind its window")
    elif longest:
        made_for = f"; the model was made for {d.model.max_positions:,}" if longest > d.model.max_positions else ""
        lines.append(f"  {count(wanted)} of up to {longest:,} tokens{made_for}")
    return lines + _obstacles(d, f)


def _obstacles(d: Deployment, f: Figures) -> list[str]:
    """Why what was asked for is not held, and which chips would hold it."""
    lines = []
    if not f["requested_fits"]:
        chips, tp = f["chips_for_requested"], f["tensor_parallel_for_requested"]
        need = (
            f"{chips:,} {d.chip.name} with tensor_parallel {tp} {'does' if chips == 1 else 'do'}"
            if chips
            else f"nor with any tensor_parallel on {d.chip.name}"
        )
        lines.append(f"  not {count(f['max_context_at_sequences'])} of {d.context:,} tokens: {need}")
    if refused := f["kernels_refuse"]:
        told = f"but the kernels of {d.chip.name} take no such pool: {refused}"
        lines += textwrap.wrap(told, 120, initial_indent="  ", subsequent_indent="    ")
    return lines


def _shared(d: Deployment) -> str:
    if not d.shared_tokens:
        return ""
    return f", {d.shared_tokens:,} of them the same for " + (f"each {d.sharers:,}" if d.sharers else "all")


def _decode(d: Deployment, f: Figures) -> list[str]:
    ridge, rows = f["ridge_flop_per_byte"], f["weights_compute_bound_sequences_per_replica"]
    each = " a replica" if d.replicas > 1 else ""
    bound = lambda intensity: "compute-bound" if intensity > ridge else "bandwidth-bound"
    weights = f"  weights       {f['weights_flop_per_byte']:,.1f} FLOP/byte: {bound(f['weights_flop_per_byte'])}"
    if d.model.num_experts == 1:
        weights += f", compute-bound from {rows:,.0f} sequences{each} on" if f["weights_flop_per_byte"] <= ridge else ""
    overlap = f["tpot_weights_lower_bound_ms"] + f["tpot_attention_lower_bound_ms"] > f["tpot_lower_bound_ms"] * (1 + 1e-9)
    attention = f["attention_flop_per_byte"]
    lines = [
        f"A decode step of {count(f['decode_sequences_per_replica'])}{each}{_held(f)} (ridge {ridge:,.0f} FLOP/byte)",
        f"  traffic       weights {f['decode_weights_gib']:,.2f} GiB, KV {f['decode_kv_gib']:,.2f} GiB:"
        f" {f['decode_kv_traffic_fraction']:.1%} is KV",
        weights,
        f"  attention     {_short(attention)} FLOP/byte however many sequences: {bound(attention)}",
        f"  TPOT          at least {ms(f['tpot_lower_bound_ms'] / 1e3)}: weights {ms(f['tpot_weights_lower_bound_ms'] / 1e3)}, attention"
        f" {ms(f['tpot_attention_lower_bound_ms'] / 1e3)}{', which may overlap' if overlap else ''}; at most"
        f" {f['decode_tokens_per_s_upper_bound']:,.0f} tokens/s in all",
    ]
    if d.model.num_experts > 1:
        lines[1] += f" (of {d.model.num_experts} experts a layer, those that {count(f['decode_sequences_per_replica'])} reach)"
    if f["decode_lookup_table_gib"]:
        lines.append(
            f"                ({f['decode_lookup_table_gib']:.2f} GiB are a table to look rows up in: no part of the times)"
        )
    return lines


def _held(f: Figures) -> str:
    """What the sequences of the decode step are, where they are not those asked for."""
    if f["requested_fits"]:
        return ""
    return ", as many as fit" if f["max_sequences"] else ", which does not fit"


def _prefill(d: Deployment, f: Figures) -> list[str]:
    lines = ["A prompt", f"  TTFT          at least {ms(f['ttft_lower_bound_ms'] / 1e3)} for {d.context:,} tokens, alone"]
    if d.shared_tokens >= d.P:
        lines[-1] += f"; {ms(f['ttft_cached_prefix_lower_bound_ms'] / 1e3)} with the shared prefix cached"
    lines.append(
        f"  offload       {ms(f['offload_restore_ms'] / 1e3)} to bring its KV back at {f['link_gbps']:g} GB/s:"
        f" {f['offload_better']}; below {f['offload_break_even_gbps']:.2f} GB/s recomputing wins"
    )
    return lines


def _eight_bits(d: Deployment, f: Figures) -> list[str]:
    saved, extra = f["kv8_saved_ns_per_token_per_step"], f["kv8_extra_us_per_step"]
    cost = f"at {f['kv8_cost_fraction']:.0%} of the 16-bit cost ({f['kv8_cost_source']})"
    lines = ["8-bit KV", f"  saves         {saved:.2f} ns a step for every cached token it reads, {cost}"]
    if not saved:
        return [*lines, "  breaks even   never: it is stored in no fewer bytes"]
    if extra is None:
        lines += [
            "  breaks even   where that makes up for its extra time a step: measure it and give --kv8_extra_us",
            f"                (published for Llama 3.1 8B: {PUBLISHED_KV8_COST_RATIO:.0%} of the cost a token, near"
            f" {PUBLISHED_KV8_BREAK_EVEN_TOKENS:,} tokens)",
        ]
    else:
        tokens, rows = f["kv8_break_even_tokens_per_step"], f["decode_sequences_per_replica"]
        each = f", {tokens / rows:,.0f} in each of {count(rows)}" if rows > 1 else ""
        lines.append(f"  breaks even   at {tokens:,.0f} cached tokens a step{each}: {extra:g} us extra a step over {saved:.2f} ns")
    return lines


def _knobs(d: Deployment, f: Figures) -> list[str]:
    lines = [f"{'Knobs, least risk first':74}{'sequences':>10}{'gained':>9}"]
    for i, knob in enumerate(f["knobs"], 1):
        lines.append(f"  {i}. {knob['what']:69}{knob['max_sequences']:10,}{knob['sequences_gained']:+9,}")
    return lines


def compare(d: Deployment, f: Figures, changed: Deployment, g: Figures, change: str) -> str:
    """Returns what a change does: the answer in one line, then both sides, then the knobs of the changed one."""
    parts = [
        [answer(d, f, changed, g, change)],
        _sides(f, g),
        _misfit("Now", d, f),
        _misfit("Then", changed, g),
        _keep(f, changed, g),
        _knobs(changed, g),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _misfit(when: str, d: Deployment, f: Figures) -> list[str]:
    """What the plain report says of a side that does not hold what was asked for."""
    lines = [] if f["kv_budget_gib_per_device"] > 0 else ["  " + _NOTHING_LEFT]
    lines += _obstacles(d, f)
    return [when, *lines] if lines else []


def answer(d: Deployment, f: Figures, changed: Deployment, g: Figures, change: str) -> str:
    """Returns in one line what the chips hold after a change."""
    beyond = changed.context > changed.model.max_positions
    return (
        f"{d.model.name} on {d.chips} {d.chip.name}, {change}: {count(g['max_sequences'])} of {changed.context:,} tokens,"
        f" {_kv(g)} of KV each, instead of {f['max_sequences']:,} of {d.context:,} tokens, {_kv(f)}"
        + (f"; but the model was made for {changed.model.max_positions:,}" if beyond else "")
    )


def _kv(f: Figures) -> str:
    return both(f["kv_stored_gib_per_sequence"] * GIB)


_ROWS = (
    ("sequences that fit", "max_sequences", "", ",.0f"),
    ("context", "context_tokens", "tokens", ",.0f"),
    ("KV of a token", "kv_kib_per_token", "KiB", ",.1f"),
    ("KV of a sequence, as stored", "kv_stored_gib_per_sequence", "GiB", ",.2f"),
    ("KV budget of a device", "kv_budget_gib_per_device", "GiB", ",.2f"),
    ("KV share of decode traffic", "decode_kv_traffic_fraction", "", ".1%"),
    ("TTFT, at least", "ttft_lower_bound_ms", "ms", ",.1f"),
    ("TPOT, at least", "tpot_lower_bound_ms", "ms", ",.1f"),
    ("tokens/s in all, at most", "decode_tokens_per_s_upper_bound", "", ",.0f"),
)

_DECODE = ("decode_kv_traffic_fraction", "tpot_lower_bound_ms", "decode_tokens_per_s_upper_bound")


def _sides(f: Figures, g: Figures) -> list[str]:
    lines = [f"{'':32}{'now':>12}{'then':>12}"]
    for label, key, unit, form in _ROWS:
        now, then = (format(side[key], form) if side["max_sequences"] or key not in _DECODE else "-" for side in (f, g))
        lines.append(f"  {label:30}{now:>12}{then:>12}  {unit}".rstrip())
    lines.append("Decode figures are of the sequences asked for, or of as many as fit.")
    return lines


def _keep(f: Figures, changed: Deployment, g: Figures) -> list[str]:
    """What it takes to hold as many as before."""
    now = f["requested_sequences"] or f["max_sequences"]
    told = not g["requested_fits"] and g["max_context_at_sequences"] == now
    if g["max_sequences"] >= now or told:
        return []
    needed = chips_for(changed, now)
    if needed is None:
        return []
    return [f"To hold {count(now)} of {changed.context:,} tokens: {needed[0]:,} {changed.chip.name}, tensor_parallel {needed[1]}."]


def describe_plan(plan: CapacityPlan, where: str) -> str:
    """Returns a plan that adds up, part by part."""
    lines = [f"{where + ' adds up':32}{'GiB':>10}{'GB':>10}"]
    for label, value in (
        ("weights", plan.weights_gib),
        ("activations", plan.activations_gib),
        ("runtime and fragmentation", plan.runtime_and_fragmentation_gib),
        ("KV budget", plan.kv_budget_gib),
        ("unassigned", plan.unassigned_gib),
        ("all", plan.memory_gib),
    ):
        lines.append(f"  {label:30}{value:10.2f}{gb(value * GIB):10.2f}")
    return "\n".join(
        [
            *lines,
            f"{count(plan.max_active_sequences)} of up to {plan.max_context_tokens:,} tokens reserve {plan.reserve_per_sequence_gib:.2f} GiB"
            f" each; with the low watermark {plan.committed_gib:.2f} GiB of the KV budget.",
            f"At most {count(plan.largest_active_sequences)} {'is' if plan.largest_active_sequences == 1 else 'are'} admissible.",
        ]
    )


def _short(x: float) -> str:
    return f"{x:,.2f}".rstrip("0").rstrip(".")
