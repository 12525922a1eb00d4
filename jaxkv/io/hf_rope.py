"""The rotary settings of a config.json, as written before and since transformers 5.

Before: `rope_theta`, `rope_scaling {type | rope_type, ...}`, `rope_local_base_freq`, `partial_rotary_factor` at the top
level. Since: `rope_parameters {rope_theta, rope_type, ...}`, or one such object per layer type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxkv.config import ROPE_KINDS, RopeConfig

if TYPE_CHECKING:
    from jaxkv.io.hf_config import Fields

_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_ropes(
    fields: Fields, family: str, windowed: tuple[bool, ...], head_dim: int
) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """The distinct ropes, global one first, and each layer's index into them."""
    full, local = _parameters(fields, family)
    main = _rope(fields, full, head_dim)
    if family == "phi3" and main.kind != "default":
        raise ValueError(f"{fields.where}: rope kind {main.kind!r} is not supported for phi3; supported: default")
    if local is None:
        return (main,), (0,) * len(windowed)
    return (main, _rope(fields, local, head_dim)), tuple(int(w) for w in windowed)


def _parameters(fields: Fields, family: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """One flat description of global layers, and one of windowed layers where they differ."""
    theta = {"rope_theta": fields.get("rope_theta")}
    local_theta = {"rope_theta": fields.get("rope_local_base_freq")}
    new, old = _object(fields, "rope_parameters"), _object(fields, "rope_scaling")
    if any(kind in new for kind in _LAYER_TYPES):
        unknown = set(new) - set(_LAYER_TYPES)
        if unknown:
            raise ValueError(f"{fields.where}: rope_parameters for layer type {sorted(unknown)[0]!r} are not supported")
        parts = [dict(new.get(kind) or {}) for kind in _LAYER_TYPES]
        return theta | parts[0], local_theta | parts[1] if family == "gemma3" else theta | parts[1]
    # An older file's rope_scaling says what rope_parameters, if present, may only repeat. Gemma 3 never scales its
    # local layers.
    return theta | (old or new), local_theta if family == "gemma3" else None


def _object(fields: Fields, name: str) -> dict[str, Any]:
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{fields.where}: {name} must be an object, got {value!r}")
    return dict(value or {})


def _rope(fields: Fields, given: dict[str, Any], head_dim: int) -> RopeConfig:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(f"{fields.where}: rope kind {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")

    def number(name: str, default: float | None = None) -> float:
        value = given.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{fields.where}: rope {kind!r} needs a number for {name!r}, got {value!r}")
        return float(value)

    share = given.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    given = given | {"partial_rotary_factor": 1.0 if share is None else share}
    rotary = int(head_dim * number("partial_rotary_factor"))
    base: dict[str, Any] = {
        "kind": kind,
        "theta": number("rope_theta"),
        "rotary_dim": 0 if rotary == head_dim else rotary,
    }
    if rotary < 2:
        raise ValueError(f"{fields.where}: partial_rotary_factor={share} of head_dim={head_dim} leaves {rotary} rotated dims")
    if kind == "default":
        return RopeConfig(**base)
    maximum = fields.count("max_position_embeddings")
    original = given.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings") or maximum
    if type(original) is not int:
        raise ValueError(f"{fields.where}: original_max_position_embeddings must be a count, got {original!r}")
    base["factor"] = number("factor", maximum / original if kind == "yarn" else None)
    if kind == "linear":
        return RopeConfig(**base)
    base["original_max_positions"] = original
    if kind == "llama3":
        return RopeConfig(**base, low_freq_factor=number("low_freq_factor"), high_freq_factor=number("high_freq_factor"))
    return RopeConfig(
        **base,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(base["factor"], given, number),
        truncate=given.get("truncate") is not False,
    )


def _yarn_attention_factor(factor: float, given: dict[str, Any], number: Any) -> float:
    """The scale of cos and sin: given, or the ratio of DeepSeek's two mscales, or 0.1 ln(factor) + 1."""
    if given.get("attention_factor") is not None:
        return number("attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(number("mscale")) / mscale(number("mscale_all_dim"))
    return mscale(1.0)
