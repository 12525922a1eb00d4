"""GGUF metadata -> ModelConfig. The rules are llama.cpp's (src/llama-model.cpp) and its converter's."""

from __future__ import annotations

import math

import numpy as np

from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.io.gguf_reader import GGUFFile

# general.architecture -> (our architecture, activation, norm placement, qk_norm)
_FAMILIES = {
    "llama": ("llama", "silu", "pre", "none"),
    "qwen2": ("qwen2", "silu", "pre", "none"),
    "qwen3": ("qwen3", "silu", "pre", "head"),
    "qwen3moe": ("qwen3_moe", "silu", "pre", "head"),
    "gemma2": ("gemma2", "gelu_tanh", "both", "none"),
    "gemma3": ("gemma3", "gelu_tanh", "both", "head"),
    "phi3": ("phi3", "silu", "pre", "none"),
    "olmo2": ("olmo2", "silu", "post", "projection"),
}


class _Metadata:
    """Typed look-ups under the architecture's prefix."""

    def __init__(self, file: GGUFFile, arch: str):
        self.file, self.arch = file, arch

    def number(self, key: str, default: float | None = None) -> float:
        full = f"{self.arch}.{key}"
        value = self.file.metadata.get(full, default)
        if value is None:
            raise ValueError(f"{self.file.path}: metadata {full!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.file.path}: metadata {full!r} must be a finite number, got {str(value)[:80]!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or not 0 <= value < 1 << 31:
            raise ValueError(f"{self.file.path}: metadata {self.arch}.{key} must be a count, got {value}")
        return int(value)

    def uniform(self, key: str, default: int | None = None) -> int:
        """A count that the file may give per layer; layers that differ are refused."""
        value = self.file.metadata.get(f"{self.arch}.{key}")
        if not isinstance(value, np.ndarray):
            return self.count(key, default)
        if len(set(value.tolist())) != 1:
            raise ValueError(f"{self.file.path}: {self.arch}.{key} differs between layers, which is not supported")
        return int(value[0])

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.file.metadata


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The decoder this file describes; ValueError names an unsupported architecture, rope kind or missing key."""
    arch = file.metadata.get("general.architecture")
    if arch not in _FAMILIES:
        raise ValueError(f"{file.path}: GGUF architecture {arch!r} is not supported; supported: {', '.join(_FAMILIES)}")
    name, activation, placement, qk_norm = _FAMILIES[arch]
    meta = _Metadata(file, arch)
    layers, heads, dim = meta.count("block_count"), meta.uniform("attention.head_count"), meta.count("embedding_length")
    if not 0 < layers <= 10_000 or not heads or not dim:
        raise ValueError(f"{file.path}: block_count={layers}, attention.head_count={heads}, embedding_length={dim} are impossible")
    head_dim = meta.count("attention.key_length", dim // heads)
    if not head_dim:
        raise ValueError(f"{file.path}: heads of no dimension: embedding_length={dim}, attention.head_count={heads}")
    if meta.count("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{file.path}: attention.value_length must equal key_length={head_dim}")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: tensor 'token_embd.weight' is missing")
    experts = meta.count("expert_count", 0)
    if name == "llama" and experts:
        name = "mixtral"
    if (name in ("mixtral", "qwen3_moe")) != bool(experts):
        raise ValueError(f"{file.path}: expert_count={experts} does not fit architecture {arch!r}")
    windows, is_global = _windows(meta, name, layers)
    ropes = _ropes(meta, name, head_dim)
    mlp_dim = meta.uniform("feed_forward_length", 0) or meta.count("expert_feed_forward_length")
    return ModelConfig(
        architecture=name,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        model_dim=dim,
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=meta.uniform("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        max_positions=meta.count("context_length"),
        query_scale=_query_scale(name, layers, dim, heads, head_dim),
        layer_windows=windows,
        layer_ropes=tuple(0 if g or len(ropes) == 1 else 1 for g in is_global),
        ropes=ropes,
        activation=activation,
        norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        norm_placement=placement,
        qk_norm=qk_norm,
        qkv_bias="blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        attn_soft_cap=meta.number("attn_logit_softcapping", 50.0) if name == "gemma2" else None,
        final_soft_cap=meta.number("final_logit_softcapping", 30.0) if name == "gemma2" else None,
        embed_scale=math.sqrt(dim) if name.startswith("gemma") else 1.0,
        tie_embeddings="output.weight" not in file.tensors,
        moe_layers=(True,) * layers if experts else (),
        num_experts=experts,
        experts_per_token=meta.count("expert_used_count") if experts else 0,
        expert_mlp_dim=meta.count("expert_feed_forward_length", mlp_dim) if experts else 0,
    )


def _query_scale(name: str, layers: int, dim: int, heads: int, head_dim: int) -> float:
    """1/sqrt(head_dim); the 27B Gemmas, known by their depth as in llama.cpp, divide by model_dim / heads instead."""
    if (name, layers) in (("gemma2", 46), ("gemma3", 62)):
        return (dim / heads) ** -0.5
    return head_dim**-0.5


def _windows(meta: _Metadata, name: str, layers: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Each layer's window (0: none) and whether the layer is global.

    Gemma's pattern is not in most files: every second layer of gemma2, every sixth of gemma3 is global.
    """
    everywhere = (True,) * layers
    if name not in ("gemma2", "gemma3"):
        window = meta.count("attention.sliding_window", 0)
        if window and name in ("olmo2", "qwen2", "qwen3", "qwen3_moe"):
            raise ValueError(f"{meta.file.path}: attention.sliding_window={window} is not supported for {meta.arch!r} files")
        return (window,) * layers, everywhere
    window = meta.count("attention.sliding_window", 4096 if name == "gemma2" else None)
    pattern = meta.file.metadata.get(f"{meta.arch}.attention.sliding_window_pattern", 2 if name == "gemma2" else 6)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != layers:
            raise ValueError(f"{meta.file.path}: sliding_window_pattern has {len(pattern)} entries for {layers} layers")
        is_global = tuple(not bool(local) for local in pattern)
    elif type(pattern) is int and pattern > 0:
        is_global = tuple((i + 1) % pattern == 0 for i in range(layers))
    else:
        raise ValueError(f"{meta.file.path}: sliding_window_pattern must be a positive count or one flag a layer, got {pattern!r}")
    return tuple(0 if g else window for g in is_global), is_global


def _ropes(meta: _Metadata, name: str, head_dim: int) -> tuple[RopeConfig, ...]:
    theta = float(meta.number("rope.freq_base", 10_000.0))
    rotary = meta.count("rope.dimension_count", head_dim)
    if meta.arch == "llama" and rotary != head_dim:
        raise ValueError(f"{meta.file.path}: rope.dimension_count={rotary} of head_dim={head_dim} is not supported for llama files")
    rotary = 0 if rotary == head_dim else rotary
    kind = meta.file.metadata.get(f"{meta.arch}.rope.scaling.type", "none")
    if "rope_factors_long.weight" in meta.file.tensors or kind == "longrope":
        raise ValueError(f"{meta.file.path}: rope kind 'longrope' is not supported; supported: none, linear, yarn, llama3")
    if "rope_freqs.weight" in meta.file.tensors:
        main = _llama3_rope(meta, theta, rotary, head_dim)
    elif kind == "none":
        main = RopeConfig(theta=theta, rotary_dim=rotary)
    elif kind == "linear":
        main = RopeConfig("linear", theta, rotary, factor=meta.number("rope.scaling.factor"))
    elif kind == "yarn":
        factor = meta.number("rope.scaling.factor")
        scale = meta.number("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor) if factor > 1 else 1.0)
        main = RopeConfig(
            "yarn",
            theta,
            rotary,
            factor=factor,
            original_max_positions=meta.count("rope.scaling.original_context_length", meta.count("context_length")),
            beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=scale,
        )
    else:
        raise ValueError(f"{meta.file.path}: rope kind {kind!r} is not supported; supported: none, linear, yarn, llama3")
    if name != "gemma3":
        return (main,)
    return (main, RopeConfig(theta=float(meta.number("rope.freq_base_swa", 10_000.0)), rotary_dim=rotary))


def _llama3_rope(meta: _Metadata, theta: float, rotary: int, head_dim: int) -> RopeConfig:
    """The llama3 scaling whose divisors are the file's `rope_freqs.weight`.

    The converter stores only the divisors, made with low_freq_factor 1, high_freq_factor 4 and mostly 8,192 original
    positions: try what is plausible and accept only an exact reproduction.
    """
    stored = np.asarray(meta.file.read("rope_freqs.weight"), np.float64)
    dim = rotary or head_dim
    if stored.shape != (dim // 2,) or not np.all(np.isfinite(stored)) or stored.min() < 1:
        raise ValueError(f"{meta.file.path}: rope_freqs.weight must hold {dim // 2} divisors of at least 1, got {stored.shape}")
    factor = float(stored.max())
    if factor == 1.0:
        return RopeConfig(theta=theta, rotary_dim=rotary)
    freqs = theta ** (-np.arange(0, dim, 2) / dim)
    for original in {meta.count("rope.scaling.original_context_length", 8192), 8192}:
        smooth = np.clip((original * freqs / (2 * math.pi) - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), stored, rtol=1e-4):
            return RopeConfig(
                "llama3",
                theta,
                rotary,
                factor,
                original_max_positions=original,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            )
    raise ValueError(
        f"{meta.file.path}: rope_freqs.weight (divisors up to {factor}) is not a llama3 scaling over 8192 positions;"
        " other frequency tables are not supported"
    )
