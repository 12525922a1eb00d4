"""A Hugging Face config.json -> ModelConfig, for both generations of the format.

Missing fields take the defaults of the family's config class in transformers (checked against 5.24), but a size that every
maker writes must be there. What the decoder cannot do is refused by name, never guessed: architectures, activations, rope
kinds, layer types, quantised weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.io.hf_rope import read_ropes
from jaxkv.io.json_file import read_object

_COMMON = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "sliding_window": None,
}  # fmt: skip
_GEMMA = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
_QWEN = {
    "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "max_position_embeddings": 32_768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32_000, "max_position_embeddings": 2048},
    "mistral": {
        "vocab_size": 32_000, "max_position_embeddings": 131_072, "intermediate_size": 14_336, "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "mixtral": {
        "vocab_size": 32_000, "max_position_embeddings": 131_072, "intermediate_size": 14_336, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2, "num_experts": 8,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": _QWEN | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "max_window_layers": 0, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": (),
    },
    "gemma2": _GEMMA | {
        "vocab_size": 256_000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "sliding_window_pattern": 2,
    },
    "gemma3": _GEMMA | {
        "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6, "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    "phi3": {
        "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "olmo2": {"vocab_size": 50_304, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
}  # fmt: skip
_MODEL_TYPES = {name: name for name in _FAMILIES} | {"gemma3_text": "gemma3"}
# A text_config inside another may lack these where they are the family's defaults: Gemma 3's do.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class Fields:
    """A config's fields with the family's defaults; reads check the kind of value."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], where: str):
        self.given, self.defaults, self.where = given, defaults, where

    def get(self, name: str) -> Any:
        return self.given[name] if name in self.given else self.defaults.get(name)

    def count(self, name: str) -> int:
        value = self.get(name)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise ValueError(f"{self.where}: {name} must be a count, got {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.where}: {name} must be a finite number, got {value!r}")
        return value

    def maybe(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise ValueError(f"{self.where}: {name} must be true or false, got {value!r}")
        return bool(value)


def read_hf_config(folder: str | Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder."""
    path = Path(folder) / "config.json"
    return config_from_hf(read_object(path), str(path))


def config_from_hf(given: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The ModelConfig of a parsed config.json.

    Raises:
      ValueError: names the unsupported or impossible setting, and what is supported.
    """
    family, given = _family(given, where)
    fields = Fields(given, _COMMON | _FAMILIES[family], where)
    layers, heads, dim = (
        fields.count("num_hidden_layers"),
        fields.count("num_attention_heads"),
        fields.count("hidden_size"),
    )
    if not 0 < layers <= 10_000 or not heads:
        raise ValueError(f"{where}: num_hidden_layers={layers} and num_attention_heads={heads} are impossible")
    head_dim = fields.count("head_dim") if fields.get("head_dim") is not None else dim // heads
    windowed, window = _windowed_layers(fields, family, layers)
    ropes, layer_ropes = read_ropes(fields, family, windowed, head_dim)
    gemma, moe = family.startswith("gemma"), _moe_layers(fields, family, layers)
    scaled_by = fields.number("query_pre_attn_scalar") if gemma else head_dim
    if scaled_by <= 0:
        name = "query_pre_attn_scalar" if gemma else "head_dim"
        raise ValueError(f"{where}: {name}={scaled_by} must be positive")
    is_qwen3 = family in ("qwen3", "qwen3_moe")
    has_bias = fields.flag("attention_bias") if family not in ("qwen2", "mistral", "mixtral", "phi3") else False
    return ModelConfig(
        architecture=family,
        vocab_size=fields.count("vocab_size"),
        model_dim=dim,
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=heads if fields.get("num_key_value_heads") is None else fields.count("num_key_value_heads"),
        head_dim=head_dim,
        mlp_dim=fields.count("intermediate_size"),
        max_positions=fields.count("max_position_embeddings"),
        query_scale=scaled_by**-0.5,
        layer_windows=tuple(window if w else 0 for w in windowed),
        layer_ropes=layer_ropes,
        ropes=ropes,
        activation=_activation(fields, gemma),
        norm_eps=fields.number("rms_norm_eps"),
        norm_placement="both" if gemma else "post" if family == "olmo2" else "pre",
        qk_norm="projection" if family == "olmo2" else "head" if is_qwen3 or family == "gemma3" else "none",
        qkv_bias=has_bias or family == "qwen2",
        out_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias") if family == "llama" else False,
        attn_soft_cap=fields.maybe("attn_logit_softcapping") if gemma else None,
        final_soft_cap=fields.maybe("final_logit_softcapping") if gemma else None,
        embed_scale=math.sqrt(dim) if gemma else 1.0,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        moe_layers=moe,
        **_experts(fields, family) if any(moe) else {},
    )


def _family(given: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """The family's name and the text model's fields; refuses what is not a plain decoder of ours."""
    supported = ", ".join(sorted(_MODEL_TYPES))
    kind = given.get("model_type")
    for holder in (given, given.get("text_config") or {}):
        if isinstance(holder, Mapping) and holder.get("quantization_config"):
            quant = holder["quantization_config"]
            method = quant.get("quant_method", "unknown") if isinstance(quant, Mapping) else quant
            raise ValueError(f"{where}: quantised weights ({method!r}) are not supported; supported: float weights, or a GGUF file")
    if not isinstance(kind, str) or kind not in _MODEL_TYPES:
        raise ValueError(f"{where}: architecture (model_type) {kind!r} is not supported; supported: {supported}")
    if (text := given.get("text_config")) is not None:
        if kind != "gemma3" or not isinstance(text, Mapping) or text.get("model_type", "gemma3_text") != "gemma3_text":
            raise ValueError(f"{where}: text_config is only supported for gemma3 with a gemma3_text inside, not for {kind!r}")
        outer = {name: given[name] for name in ("tie_word_embeddings",) if name in given}
        given = outer | dict(text)
    elif missing := [name for name in _SIZES if name not in given]:
        raise ValueError(f"{where}: {', '.join(missing)} missing; is the file whole?")
    if given.get("use_bidirectional_attention"):
        raise ValueError(f"{where}: use_bidirectional_attention is not supported; only causal decoders are")
    return _MODEL_TYPES[kind], given


def _activation(fields: Fields, gemma: bool) -> str:
    name = fields.get("hidden_act")
    if gemma:  # hidden_activation rules; a bare "gelu" in an old file always meant the tanh form
        name = fields.get("hidden_activation") or fields.given.get("hidden_act") or "gelu_pytorch_tanh"
        name = "gelu_pytorch_tanh" if name == "gelu" and not fields.get("hidden_activation") else name
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"{fields.where}: activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _windowed_layers(fields: Fields, family: str, layers: int) -> tuple[tuple[bool, ...], int]:
    """Which layers see only a window, and its size in tokens."""
    has_window = fields.get("sliding_window") is not None and (fields.get("use_sliding_window") is not False)
    window = fields.count("sliding_window") if has_window else 0
    if has_window and not window:
        raise ValueError(f"{fields.where}: sliding_window must be positive or null, got 0")
    if (kinds := fields.get("layer_types")) is not None and family in ("qwen2", "qwen3", "gemma2", "gemma3"):
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ValueError(f"{fields.where}: layer_types must list {layers} layers, got {str(kinds)[:80]}")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(f"{fields.where}: layer type {kind!r} is not supported; known: full_attention, sliding_attention")
        windowed = tuple(kind == "sliding_attention" for kind in kinds)
        if any(windowed) and not window:
            raise ValueError(f"{fields.where}: layer_types names sliding_attention, but sliding_window is not set")
        return windowed, window
    if not window or family == "olmo2" or family == "llama":
        return (False,) * layers, 0
    if family in ("gemma2", "gemma3"):
        pattern = fields.get("_sliding_window_pattern") or fields.get("sliding_window_pattern")
        if type(pattern) is not int or pattern < 1:
            raise ValueError(f"{fields.where}: sliding_window_pattern must be a positive count, got {pattern!r}")
        return tuple((i + 1) % pattern != 0 for i in range(layers)), window
    first = fields.count("max_window_layers") if family in ("qwen2", "qwen3") else 0
    return tuple(i >= first for i in range(layers)), window


def _moe_layers(fields: Fields, family: str, layers: int) -> tuple[bool, ...]:
    if family == "mixtral":
        return (True,) * layers
    if family != "qwen3_moe":
        return ()
    step, dense = fields.count("decoder_sparse_step"), fields.get("mlp_only_layers") or ()
    if not step or not isinstance(dense, list | tuple) or not all(type(i) is int for i in dense):
        raise ValueError(f"{fields.where}: decoder_sparse_step={step}, mlp_only_layers={dense!r} are impossible")
    has_experts = _num_experts(fields) > 0
    return tuple(has_experts and i not in dense and (i + 1) % step == 0 for i in range(layers))


def _num_experts(fields: Fields) -> int:
    return fields.count("num_local_experts" if "num_local_experts" in fields.given else "num_experts")


def _experts(fields: Fields, family: str) -> dict[str, Any]:
    return {
        "num_experts": _num_experts(fields),
        "experts_per_token": fields.count("num_experts_per_tok"),
        "expert_mlp_dim": fields.count("intermediate_size" if family == "mixtral" else "moe_intermediate_size"),
        "normalize_router": True if family == "mixtral" else fields.flag("norm_topk_prob"),
    }
