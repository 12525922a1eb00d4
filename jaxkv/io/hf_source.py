"""A Hugging Face folder as a `WeightSource`: its names mapped to ours, fused and per-expert tensors handled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.io.hf_config import read_hf_config
from jaxkv.io.safetensors_reader import SafetensorsFiles, open_folder
from jaxkv.io.source import check_complete, check_no_others, expected_shapes

_PREFIXES = (
    "model.",
    "language_model.model.",
    "model.language_model.",
    "",
)  # plain, and inside gemma3's multimodal files
_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "router": "mlp.gate.weight",
}
_BOTH_NORMS = {"mlp_norm": "pre_feedforward_layernorm.weight"}  # gemma has norms before and after
_SINGLE_EXPERT = {
    "experts_gate": ("gate_proj", "w1"),
    "experts_up": ("up_proj", "w3"),
    "experts_down": ("down_proj", "w2"),
}

# Tensors of a folder that are left unread, and why that loses nothing.
_HARMLESS = {
    r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)": "a buffer of old checkpoints, computed from config.json's rope settings",
}
_HARMLESS_TIED = {
    r"(.*\.)?lm_head\.weight": "tie_word_embeddings declares it equal to the embedding, which is read",
}
_HARMLESS_GEMMA3 = {
    r"(model\.)?vision_tower\..*": "the image encoder of a multimodal gemma3: text does not pass through it",
    r"(model\.)?multi_modal_projector\..*": "what joins the image encoder to the text model",
}


class _Plan(NamedTuple):
    """One way a weight is stored."""

    tensors: tuple[str, ...]
    shape: tuple[int, ...]  # of the weight
    rows: Callable[[int, int], np.ndarray]  # makes rows [start, stop) of it


class HFSource:
    """Weights of a Hugging Face folder, as stored (views of the files where nothing has to be done)."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config: ModelConfig = read_hf_config(self.folder)
        self.files: SafetensorsFiles = open_folder(self.folder)
        names = self.files.tensors
        self._prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in names), "model.")
        self._plus_one = self.config.architecture in ("gemma2", "gemma3")
        check_complete(self, str(self.folder))
        plans = [self._need(name, layer) for name, layer in expected_shapes(self.config)]
        check_no_others(names, (tensor for plan in plans for tensor in plan.tensors), self._harmless(), str(self.folder))

    def _harmless(self) -> dict[str, str]:
        tied = _HARMLESS_TIED if self.config.tie_embeddings else {}
        multimodal = "language_model." in self._prefix and self.config.architecture == "gemma3"
        return _HARMLESS | tied | (_HARMLESS_GEMMA3 if multimodal else {})

    def has(self, name: str, layer: int | None = None) -> bool:
        return self._plan(name, layer) is not None

    def shape(self, name: str, layer: int | None = None) -> tuple[int, ...]:
        return self._need(name, layer).shape

    def read(self, name: str, layer: int | None = None) -> np.ndarray:
        plan = self._need(name, layer)
        return plan.rows(0, plan.shape[0])

    def read_rows(self, name: str, layer: int | None, start: int, stop: int) -> np.ndarray:
        plan = self._need(name, layer)
        if not 0 <= start <= stop <= plan.shape[0]:
            raise ValueError(f"rows [{start}, {stop}) are outside of weight {name!r} of shape {plan.shape}")
        return plan.rows(start, stop)

    def _need(self, name: str, layer: int | None) -> _Plan:
        plan = self._plan(name, layer)
        if plan is None:
            raise KeyError(f"{self.folder}: no weight {name!r}" + ("" if layer is None else f" in layer {layer}"))
        return plan

    def _plan(self, name: str, layer: int | None) -> _Plan | None:
        if layer is None:
            if name == "head":
                return self._slice("lm_head.weight") or self._slice(f"{self._prefix.removesuffix('model.')}lm_head.weight")
            known = {"embed": "embed_tokens.weight", "final_norm": "norm.weight"}
            return self._slice(self._prefix + known[name], add=name == "final_norm") if name in known else None
        base = f"{self._prefix}layers.{layer}."
        if name in _SINGLE_EXPERT:
            return self._experts(name, base)
        if name not in _LAYER:
            return None
        tail = _BOTH_NORMS.get(name, _LAYER[name]) if self.config.norm_placement == "both" else _LAYER[name]
        plan = self._slice(base + tail, add=name.endswith("_norm"))
        if plan is None and name == "router":
            return self._slice(base + "block_sparse_moe.gate.weight")
        return plan or self._fused(name, base)

    def _slice(self, tensor: str, first: int = 0, count: int | None = None, add: bool = False) -> _Plan | None:
        """Rows [first, first + count) of one tensor; `add` adds gemma's 1 to a norm weight (in f32)."""
        stored = self.files.tensors.get(tensor)
        if stored is None:
            return None
        if not stored.shape:
            raise ValueError(f"{stored.path}: tensor {tensor!r} is a scalar")
        shape = stored.shape if count is None else (count, *stored.shape[1:])

        def rows(start: int, stop: int) -> np.ndarray:
            part = self.files.read(tensor)[first + start : first + stop]
            return part.astype(np.float32) + np.float32(1) if add and self._plus_one else part

        return _Plan((tensor,), shape, rows)

    def _fused(self, name: str, base: str) -> _Plan | None:
        """phi3 keeps q, k, v in one tensor, and gate, up in another."""
        c = self.config
        q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        if name in ("q", "k", "v"):
            tensor, parts = base + "self_attn.qkv_proj.weight", {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}
        elif name in ("gate", "up"):
            tensor, parts = base + "mlp.gate_up_proj.weight", {"gate": (0, c.mlp_dim), "up": (c.mlp_dim, c.mlp_dim)}
        else:
            return None
        want = sum(count for _, count in parts.values())
        stored = self.files.tensors.get(tensor)
        if stored is not None and stored.shape[:1] != (want,):
            raise ValueError(f"{stored.path}: fused tensor {tensor!r} has shape {stored.shape}, the config needs {want} rows")
        return self._slice(tensor, *parts[name])

    def _experts(self, name: str, base: str) -> _Plan | None:
        """Stacked experts: fused over all (gate_up_proj [E, 2F, D], down_proj [E, D, F]) or one tensor an expert."""
        f, count, names = self.config.expert_mlp_dim, self.config.num_experts, self.files.tensors
        fused = base + ("mlp.experts.down_proj" if name == "experts_down" else "mlp.experts.gate_up_proj")
        if (stored := names.get(fused)) is not None:
            half = {"experts_gate": slice(0, f), "experts_up": slice(f, 2 * f)}.get(name, slice(None))
            if len(stored.shape) != 3 or (name != "experts_down" and stored.shape[1] != 2 * f):
                raise ValueError(f"{stored.path}: tensor {fused!r} has shape {stored.shape}, the config needs [E, {2 * f}, D]")
            shape = (stored.shape[0], f if name != "experts_down" else stored.shape[1], stored.shape[2])
            return _Plan((fused,), shape, lambda start, stop: self.files.read(fused)[start:stop, half])
        new, old = _SINGLE_EXPERT[name]
        for form in (f"{base}mlp.experts.{{}}.{new}.weight", f"{base}block_sparse_moe.experts.{{}}.{old}.weight"):
            singles = [form.format(e) for e in range(count)]
            if not singles or singles[0] not in names:
                continue
            for single in singles:
                if single not in names or names[single].shape != names[singles[0]].shape:
                    raise ValueError(
                        f"{self.folder}: expert tensor {single!r} is missing or not of shape {names[singles[0]].shape}"
                    )
            read = lambda start, stop, singles=singles: np.stack([self.files.read(s) for s in singles[start:stop]])
            return _Plan(tuple(singles), (count, *names[singles[0]].shape), read)
        return None


def open_hf_folder(folder: str | Path) -> HFSource:
    """Opens a folder: config read, headers parsed, every weight's presence and shape checked; no tensor read.

    Raises:
      ValueError: a malformed file, a setting that is not supported, a weight that is missing or of another shape, or tensors that
        no weight is read from and that are not known to be harmless.
    """
    return HFSource(folder)
