"""Public models by name: the fields of their config.json that decide size and speed, read by the same reader as a file.

Shapes only, no weights. Each row's parameter count is checked in the tests against the one its makers publish.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.io.hf_config import config_from_hf
from jaxkv.io.json_file import read_object
from jaxkv.io.resolve import EMBEDDED_MODELS, resolve
from jaxkv.planning.shapes import Latent, ModelShape, shape_of


def _row(family: str, V: int, D: int, L: int, N: int, K: int, F: int, positions: int, **more: Any) -> dict[str, Any]:
    """A config.json in the letters of the README."""
    return {
        "model_type": family, "vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": N,
        "num_key_value_heads": K, "intermediate_size": F, "max_position_embeddings": positions, **more,
    }  # fmt: skip


_QWEN3_MOE = {
    "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _row("llama", 32_000, 4096, 32, 32, 32, 11_008, 4096),
    "llama-2-13b": _row("llama", 32_000, 5120, 40, 40, 40, 13_824, 4096),
    "llama-2-70b": _row("llama", 32_000, 8192, 80, 64, 8, 28_672, 4096),
    "llama-3.1-8b": _row("llama", 128_256, 4096, 32, 32, 8, 14_336, 131_072),
    "llama-3.1-70b": _row("llama", 128_256, 8192, 80, 64, 8, 28_672, 131_072),
    "llama-3.1-405b": _row("llama", 128_256, 16_384, 126, 128, 8, 53_248, 131_072),
    "qwen2.5-7b": _row("qwen2", 152_064, 3584, 28, 28, 4, 18_944, 131_072),
    "qwen2.5-32b": _row("qwen2", 152_064, 5120, 64, 40, 8, 27_648, 131_072),
    "qwen2.5-72b": _row("qwen2", 152_064, 8192, 80, 64, 8, 29_568, 131_072),
    "qwen3-8b": _row("qwen3", 151_936, 4096, 36, 32, 8, 12_288, 40_960, head_dim=128),
    "qwen3-32b": _row("qwen3", 151_936, 5120, 64, 64, 8, 25_600, 40_960, head_dim=128),
    "qwen3-30b-a3b": _row("qwen3_moe", 151_936, 2048, 48, 32, 4, 6144, 40_960, **_QWEN3_MOE),
    "mistral-7b": _row("mistral", 32_000, 4096, 32, 32, 8, 14_336, 32_768, sliding_window=4096),
    "gemma-2-9b": _row("gemma2", 256_000, 3584, 42, 16, 8, 14_336, 8192, head_dim=256),
    "gemma-3-270m": _row("gemma3_text", 262_144, 640, 18, 4, 1, 2048, 32_768, head_dim=256, sliding_window=512),
    "gemma-3-1b": _row("gemma3_text", 262_144, 1152, 26, 4, 1, 6912, 32_768, head_dim=256, sliding_window=512),
    "gemma-3-27b": _row(
        "gemma3_text", 262_208, 5376, 62, 32, 16, 21_504, 131_072, head_dim=128, sliding_window=1024, query_pre_attn_scalar=168
    ),
    "mixtral-8x7b": _row("mixtral", 32_000, 4096, 32, 32, 8, 14_336, 32_768, num_local_experts=8),
}
# The formula's MLA case; jaxkv does not run it. It is written out below.
MLA_PRESETS = ("deepseek-v3",)
MODELS = (*PRESETS, *MLA_PRESETS, *EMBEDDED_MODELS)  # every name


def model_shape(name: str) -> ModelShape:
    """Returns the shape of a preset or embedded model, of a Hugging Face or jaxkv folder, or of a config.json by its path.

    Raises:
      ValueError: none of these; or a model that jaxkv does not know, with the field that says so.
    """
    if name in MLA_PRESETS:
        return _deepseek_v3()
    if name in PRESETS:
        return shape_of(config_from_hf(PRESETS[name], name), name)
    path = resolve(name) if name in EMBEDDED_MODELS else Path(name)
    if (path / "jaxkv.json").is_file():
        return shape_of(_checkpoint_config(path), path.absolute().name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        if not path.exists():
            raise ValueError(f"{path}: there is no such file")
        given = read_object(path)
        if given.get("model_type") == "deepseek_v3":
            raise ValueError(f"{path}: jaxkv does not run deepseek_v3; its shape is the preset deepseek-v3")
        known_by = path.parent.name if path.name == "config.json" else path.stem
        return shape_of(config_from_hf(given, str(path)), known_by or str(path))
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), MODELS, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? If not, " if near else ""
    raise ValueError(
        f"no model {name!r}: {hint}give the path of a config.json, of a folder with one, or a preset: {', '.join(MODELS)}"
    )


def _checkpoint_config(folder: Path) -> ModelConfig:
    """Returns the config of a jaxkv checkpoint without reading its weights."""
    path = folder / "jaxkv.json"
    given: Any = read_object(path).get("config")
    try:
        ropes = tuple(RopeConfig(**rope) for rope in given["ropes"])
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        return ModelConfig(**fields | {"ropes": ropes})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a description of a model: {error}") from None


def _deepseek_v3() -> ModelShape:
    """DeepSeek-V3 (arXiv:2412.19437) without its multi-token prediction module."""
    V, D, L, N, F = 129_280, 7168, 61, 128, 18_432
    dense_layers, E, top, Fe = 3, 256, 8, 2048
    latent, q_rank = Latent(rank=512, rope_dim=64, nope_dim=128, value_dim=128), 1536
    key_dim = latent.nope_dim + latent.rope_dim
    queries = D * q_rank + q_rank + q_rank * N * key_dim
    to_latent = D * (latent.rank + latent.rope_dim) + latent.rank
    from_latent = latent.rank * N * (latent.nope_dim + latent.value_dim)
    attention = queries + to_latent + from_latent + N * latent.value_dim * D
    norms = 2 * D
    moe_layers = L - dense_layers
    experts = moe_layers * E * 3 * D * Fe
    shared_and_router = moe_layers * (3 * D * Fe + E * D + E)
    return ModelShape(
        name="deepseek-v3",
        model_dim=D,
        num_layers=L,
        num_q_heads=N,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rope_dim,
        vocab_size=V,
        max_positions=163_840,
        layer_windows=(0,) * L,
        mlp_width=max(F, (top + 1) * Fe),
        num_params=2 * V * D + D + L * (attention + norms) + dense_layers * 3 * D * F + experts + shared_and_router,
        embed_params=V * D,
        tied=False,
        kv_params=L * to_latent,
        expert_params=experts,
        num_experts=E,
        experts_per_token=top,
        latent=latent,
    )
