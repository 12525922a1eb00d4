"""The one way weights reach the model: `WeightSource`, tensor by tensor, under the names of this glossary.

Without a layer: embed [V,D], final_norm [D], head [V,D] (absent when tied).
With a layer: attn_norm, post_attn_norm, mlp_norm, post_mlp_norm [D]; q [N*H,D], k v [K*H,D], o [D,N*H]; q_bias k_bias
v_bias o_bias; q_norm k_norm [H] or [N*H]/[K*H]; gate up [F,D], down [D,F]; gate_bias up_bias down_bias; router [E,D];
experts_gate experts_up [E,F,D], experts_down [E,D,F].

Matrices are [out, in]. Norm weights multiply as they are (a family that stores w and multiplies by 1+w has had the 1
added). Heads are in the half-split rope order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from jaxkv.config import ModelConfig

_SHOWN = 5  # names in the message about unknown tensors


@runtime_checkable
class WeightSource(Protocol):
    """Lazy access to a model's weights: each call touches only the tensor it names."""

    @property
    def config(self) -> ModelConfig: ...

    def has(self, name: str, layer: int | None = None) -> bool:
        """Whether the source holds this weight."""
        ...

    def shape(self, name: str, layer: int | None = None) -> tuple[int, ...]:
        """Its shape, without reading it."""
        ...

    def read(self, name: str, layer: int | None = None) -> np.ndarray:
        """The weight as float32, float16, bfloat16 or float64; KeyError when absent."""
        ...

    def read_rows(self, name: str, layer: int | None, start: int, stop: int) -> np.ndarray:
        """`read(name, layer)[start:stop]` at the cost of those rows: converting large tables stays small in memory."""
        ...


def expected_shapes(config: ModelConfig) -> dict[tuple[str, int | None], tuple[int, ...]]:
    """Every weight `config` needs, as {(name, layer or None): shape}."""
    c = config
    d, q, kv = c.model_dim, c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[tuple[str, int | None], tuple[int, ...]] = {
        ("embed", None): (c.vocab_size, d),
        ("final_norm", None): (d,),
    }
    if not c.tie_embeddings:
        shapes["head", None] = (c.vocab_size, d)
    body: dict[str, tuple[int, ...]] = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}
    if c.norm_placement in ("pre", "both"):
        body |= {"attn_norm": (d,), "mlp_norm": (d,)}
    if c.norm_placement in ("post", "both"):
        body |= {"post_attn_norm": (d,), "post_mlp_norm": (d,)}
    if c.qkv_bias:
        body |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if c.out_bias:
        body["o_bias"] = (d,)
    if c.qk_norm != "none":
        per_head = c.qk_norm == "head"
        body |= {"q_norm": (c.head_dim if per_head else q,), "k_norm": (c.head_dim if per_head else kv,)}
    f, e, fe = c.mlp_dim, c.num_experts, c.expert_mlp_dim
    dense: dict[str, tuple[int, ...]] = {"gate": (f, d), "up": (f, d), "down": (d, f)}
    if c.mlp_bias:
        dense |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (d,)}
    moe = {"router": (e, d), "experts_gate": (e, fe, d), "experts_up": (e, fe, d), "experts_down": (e, d, fe)}
    for layer in range(c.num_layers):
        is_moe = bool(c.moe_layers) and c.moe_layers[layer]
        shapes |= {(name, layer): shape for name, shape in (body | (moe if is_moe else dense)).items()}
    return shapes


def check_complete(source: WeightSource, where: str) -> None:
    """Raises ValueError unless `source` holds every weight its config needs, in the right shape; reads no data."""
    for (name, layer), want in expected_shapes(source.config).items():
        what = f"{where}: weight {name!r}" + ("" if layer is None else f" of layer {layer}")
        if not source.has(name, layer):
            raise ValueError(f"{what} (shape {want}) is missing")
        if (got := source.shape(name, layer)) != want:
            raise ValueError(f"{what} has shape {got}, but the config needs {want}")


def check_no_others(stored: Iterable[str], used: Iterable[str], harmless: Mapping[str, str], where: str) -> None:
    """Raises ValueError if a file stores tensors that no weight of its config is read from.

    A tensor the engine does not know may be a bias, a norm or a whole branch of the model: without it the text is plausible and
    wrong.

    Args:
      stored: names of all tensors of the file.
      used: names of those that weights are read from.
      harmless: patterns (regular expressions that match a whole name) of tensors to leave unread, each with the reason.
      where: the file or folder, for the message.
    """
    unknown = sorted(set(stored) - set(used))
    unknown = [name for name in unknown if not any(re.fullmatch(pattern, name) for pattern in harmless)]
    if unknown:
        shown = ", ".join(map(repr, unknown[:_SHOWN])) + (", ..." if len(unknown) > _SHOWN else "")
        raise ValueError(
            f"{where}: {len(unknown)} tensor{'' if len(unknown) == 1 else 's'} that the config does not call for: {shown}. The model"
            " has parts that jaxkv does not know, so its text would be wrong: check that the config belongs to these weights (its"
            " number of layers, its bias flags); adapters must be merged first, other architectures are not supported"
        )
