"""A GGUF file as a `WeightSource`: its names mapped to ours, fused tensors split, llama's q and k un-permuted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.io.gguf_config import config_from_gguf
from jaxkv.io.gguf_reader import GGUFFile, read_gguf
from jaxkv.io.source import check_complete, check_no_others, expected_shapes

_GLOBAL = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER = {
    "attn_norm": "attn_norm.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
    "router": "ffn_gate_inp.weight",
    "experts_gate": "ffn_gate_exps.weight",
    "experts_up": "ffn_up_exps.weight",
    "experts_down": "ffn_down_exps.weight",
}
_SINGLE_EXPERT = {"experts_gate": "ffn_gate", "experts_up": "ffn_up", "experts_down": "ffn_down"}  # files of early 2024
# Tensors of a file that are left unread, and why that loses nothing.
_HARMLESS = {
    r"rope_freqs\.weight": "divisors of rope's frequencies, which config_from_gguf has read and turned into a RopeConfig",
    r"blk\.\d+\.attn_rot_embd(\.weight)?": "rope's frequencies in files of 2023, computed from the metadata",
}


class GGUFSource:
    """Weights of an open GGUF file, dequantised when read."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.config: ModelConfig = config_from_gguf(file)
        check_complete(self, str(file.path))
        used = (tensor for name, layer in expected_shapes(self.config) for tensor in self._tensors(name, layer))
        check_no_others(file.tensors, used, _HARMLESS, str(file.path))

    def _tensors(self, name: str, layer: int | None) -> list[str]:
        """The tensors that a weight is read from."""
        place = self._place(name, layer)
        return [place[0]] if place else self._single_experts(name, layer)

    def _place(self, name: str, layer: int | None) -> tuple[str, int, int] | None:
        """(tensor, first row, number of rows) that hold a weight, or None."""
        tensors = self.file.tensors
        if layer is None:
            tensor = _GLOBAL.get(name, "")
        else:
            tensor = f"blk.{layer}.{_LAYER[name]}" if name in _LAYER else ""
            fused = self._fused(name, layer)
            if fused:
                return fused
        if tensor not in tensors:
            return None
        return tensor, 0, tensors[tensor].shape[0]

    def _fused(self, name: str, layer: int) -> tuple[str, int, int] | None:
        """phi3 keeps q, k, v in attn_qkv and gate, up in ffn_up."""
        c, kind = self.config, "bias" if name.endswith("_bias") else "weight"
        base, q, kv = name.removesuffix("_bias"), c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        if base in ("q", "k", "v") and (tensor := f"blk.{layer}.attn_qkv.{kind}") in self.file.tensors:
            parts = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}
        elif base in ("gate", "up") and c.architecture == "phi3":
            tensor = f"blk.{layer}.ffn_up.{kind}"
            parts = {"gate": (0, c.mlp_dim), "up": (c.mlp_dim, c.mlp_dim)}
        else:
            return None
        rows = sum(count for _, count in parts.values())
        if tensor not in self.file.tensors:
            return None
        if (have := self.file.tensors[tensor].shape[0]) != rows:
            raise ValueError(f"{self.file.path}: fused tensor {tensor!r} has {have} rows, the config needs {rows}")
        return (tensor, *parts[base])

    def _single_experts(self, name: str, layer: int | None) -> list[str]:
        if layer is None or name not in _SINGLE_EXPERT:
            return []
        tensors = self.file.tensors
        names = [f"blk.{layer}.{_SINGLE_EXPERT[name]}.{e}.weight" for e in range(self.config.num_experts)]
        if not names or any(n not in tensors for n in names):
            return []
        for other in names:
            if tensors[other].shape != tensors[names[0]].shape:
                raise ValueError(f"{self.file.path}: {other!r} has shape {tensors[other].shape}, not {tensors[names[0]].shape}")
        return names

    def has(self, name: str, layer: int | None = None) -> bool:
        return self._place(name, layer) is not None or bool(self._single_experts(name, layer))

    def shape(self, name: str, layer: int | None = None) -> tuple[int, ...]:
        if place := self._place(name, layer):
            return place[2], *self.file.tensors[place[0]].shape[1:]
        if singles := self._single_experts(name, layer):
            return len(singles), *self.file.tensors[singles[0]].shape
        raise KeyError(f"{self.file.path}: no weight {name!r}" + ("" if layer is None else f" in layer {layer}"))

    def read(self, name: str, layer: int | None = None) -> np.ndarray:
        return self.read_rows(name, layer, 0, self.shape(name, layer)[0])

    def read_rows(self, name: str, layer: int | None, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a weight. Quantised types come as float32, the others as stored."""
        rows = self.shape(name, layer)[0]
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows [{start}, {stop}) are outside of weight {name!r} with {rows} rows")
        place = self._place(name, layer)
        if place is None:
            return np.stack([self.file.read(n) for n in self._single_experts(name, layer)[start:stop]])
        tensor, first, _ = place
        if layer is not None and self._interleaved(name):
            return self._half_split(self.file.read(tensor, first, first + rows))[start:stop]
        return self.file.read(tensor, first + start, first + stop)

    def _interleaved(self, name: str) -> bool:
        """llama-type files (mistral and mixtral too) keep rope's pairs as neighbours; all others keep halves."""
        return self.file.metadata["general.architecture"] == "llama" and name in ("q", "k", "q_bias", "k_bias")

    def _half_split(self, rows: np.ndarray) -> np.ndarray:
        """Rows (h, i, half) -> (h, half, i): the inverse of the converter's permutation."""
        head_dim = self.config.head_dim
        pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
        return np.ascontiguousarray(np.swapaxes(pairs, 1, 2)).reshape(rows.shape)


def open_gguf(path: str | Path) -> GGUFSource:
    """Opens a GGUF model: header parsed, config read, every weight's presence and shape checked; no tensor read.

    Raises:
      ValueError: a malformed file, a setting that is not supported, a weight that is missing or of another shape, or tensors that
        no weight is read from and that are not known to be harmless.
    """
    return GGUFSource(read_gguf(path))
