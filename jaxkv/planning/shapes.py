"""ModelShape: what of a model decides its memory and its speed. Read from a ModelConfig, so presets and files are one path."""

from __future__ import annotations

import dataclasses
import math

from jaxkv.config import ModelConfig
from jaxkv.io.source import expected_shapes

# Bytes of a weight's number; what int8 adds in scales depends on the platform (`memory.bytes_read_a_weight`).
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one vector a token and layer serves every head."""

    rank: int  # of the compressed key and value
    rope_dim: int  # of the one rotated key
    nope_dim: int  # of a head's key that is not rotated
    value_dim: int


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes and counts of weights. `config` is what it was read from; None where jaxkv cannot run the model."""

    name: str
    model_dim: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    layer_windows: tuple[int, ...]  # in tokens, 0: all
    mlp_width: int  # hidden units that one token goes through in the widest layer
    num_params: int
    embed_params: int  # of the table that tokens are looked up in
    tied: bool  # the table is also the head
    kv_params: int  # of the projections to keys and values
    expert_params: int = 0  # of routed experts
    num_experts: int = 1
    experts_per_token: int = 1
    latent: Latent | None = None
    config: ModelConfig | None = None

    @property
    def kv_elements_per_token_and_layer(self) -> int:
        """2 * K * H, or the latent and the rotated key of MLA."""
        return self.latent.rank + self.latent.rope_dim if self.latent else 2 * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Returns 2 * L * K * H * bytes per element: the values alone, once, without padding or scales."""
        return self.num_layers * self.kv_elements_per_token_and_layer * KV_BYTES[kv_dtype]

    @property
    def head_params(self) -> int:
        """Weights of the product that gives logits; as many as the table of embeddings."""
        return self.embed_params

    @property
    def body_params(self) -> int:
        """Weights that every token of a prompt is multiplied with if there are no experts: all but table and head."""
        return self.num_params - self.embed_params - (0 if self.tied else self.head_params)

    @property
    def active_body_params(self) -> int:
        """Those of `body_params` that one token is multiplied with."""
        return self.body_params - self.expert_params + self.expert_params * self.experts_per_token // self.num_experts

    @property
    def active_params(self) -> int:
        """Weights that have a part in one token: what a mixture's makers publish as its active parameters."""
        return self.num_params - self.body_params + self.active_body_params

    def read_params(self, rows: float) -> float:
        """Returns how many weights a step of so many rows reads: of untied embeddings none, of experts those routed to.

        With uniform routing an expert is left out by all rows with probability (1 - k/E)^rows.
        """
        used = 1 - (1 - self.experts_per_token / self.num_experts) ** rows if self.num_experts > 1 else 1
        return self.body_params + self.head_params - self.expert_params * (1 - used)

    @property
    def decode_flop_per_key(self) -> int:
        """FLOP of one query token against one cached token in one layer: 4 * N * H; MLA works on the latent itself."""
        if self.latent:
            return 2 * self.num_q_heads * (2 * self.latent.rank + self.latent.rope_dim)
        return 4 * self.num_q_heads * self.head_dim

    @property
    def prefill_flop_per_key(self) -> int:
        """The same where keys and values of heads are at hand, as in a prefill."""
        if self.latent:
            return 2 * self.num_q_heads * (self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim)
        return 4 * self.num_q_heads * self.head_dim

    @property
    def compression(self) -> float:
        """How many times smaller the cache is than with one key and value head a query head."""
        heads = self.latent.nope_dim + self.latent.value_dim if self.latent else 2 * self.head_dim
        return self.num_q_heads * heads / self.kv_elements_per_token_and_layer

    def with_kv_heads(self, num_kv_heads: int) -> ModelShape:
        """Returns the same model with another head layout: MHA, GQA and MQA differ by this number."""
        if self.config is None:
            raise ValueError(f"num_kv_heads={num_kv_heads} does not apply to {self.name}: its heads share one latent vector")
        return shape_of(dataclasses.replace(self.config, num_kv_heads=num_kv_heads), f"{self.name}, K {num_kv_heads}")


def first_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    """Returns the same model without its last layers."""
    fields = {name: getattr(config, name)[:num_layers] for name in ("layer_windows", "layer_ropes", "moe_layers")}
    return dataclasses.replace(config, num_layers=num_layers, **fields)


def shape_of(config: ModelConfig, name: str) -> ModelShape:
    """Returns the shape of a model, with its weights counted from the same table that loading checks."""
    counts: dict[str, int] = {}
    for (weight, _), shape in expected_shapes(config).items():
        counts[weight] = counts.get(weight, 0) + math.prod(shape)
    moe = any(config.moe_layers)
    widths = [config.mlp_dim] if not moe or not all(config.moe_layers) else []
    widths += [config.expert_mlp_dim * config.experts_per_token] if moe else []
    return ModelShape(
        name=name,
        model_dim=config.model_dim,
        num_layers=config.num_layers,
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        layer_windows=config.layer_windows,
        mlp_width=max(widths),
        num_params=sum(counts.values()),
        embed_params=counts["embed"],
        tied=config.tie_embeddings,
        kv_params=sum(counts.get(name, 0) for name in ("k", "v", "k_bias", "v_bias")),
        expert_params=sum(counts.get(f"experts_{part}", 0) for part in ("gate", "up", "down")),
        num_experts=config.num_experts if moe else 1,
        experts_per_token=config.experts_per_token if moe else 1,
        config=config,
    )
