"""Static descriptions: what a decoder is (`ModelConfig`) and how it rotates (`RopeConfig`).

Both are frozen and hashable, so they can be static arguments of jit and keys of caches. No array lives here.
"""

from __future__ import annotations

import dataclasses

ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "mixtral",
    "qwen3_moe",
)
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position encoding of one kind of layer.

    `kind` picks which of the later fields count: `linear` reads factor; `llama3` reads factor, low_freq_factor,
    high_freq_factor and original_max_positions; `yarn` (arXiv:2309.00071) reads factor, original_max_positions, beta_fast,
    beta_slow, attention_factor (None: 0.1 ln(factor) + 1) and truncate.
    """

    kind: str = "default"
    theta: float = 10_000.0
    rotary_dim: int = 0  # how many leading head dims are rotated; 0: all of head_dim
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True  # yarn: round the correction range to whole dims

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope kind {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if not self.theta > 0:
            raise ValueError(f"rope theta must be positive, got {self.theta}")
        if not self.factor > 0:
            raise ValueError(f"rope factor must be positive, got {self.factor}")
        if self.kind in ("llama3", "yarn") and self.original_max_positions <= 0:
            raise ValueError(f"rope kind {self.kind!r} needs original_max_positions > 0, got {self.original_max_positions}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything static about a decoder. MHA, GQA and MQA differ by `num_kv_heads` alone.

    Per-layer settings are tuples of length num_layers, so that layers which differ are data of one scanned body.
    """

    architecture: str
    vocab_size: int
    model_dim: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int  # hidden width of a dense MLP
    max_positions: int  # the longest context the model was made for, in tokens
    query_scale: float  # multiplies q.k before soft cap and mask
    layer_windows: tuple[int, ...]  # attention window in tokens, the query's own included; 0: all
    layer_ropes: tuple[int, ...]  # index into ropes
    ropes: tuple[RopeConfig, ...]
    activation: str = "silu"
    norm_eps: float = 1e-6
    norm_placement: str = "pre"  # "pre", "post" (olmo2: on the branch's output), "both" (gemma)
    qk_norm: str = "none"  # "none", "head" (per head), "projection" (olmo2: over all heads of the projection)
    qkv_bias: bool = False
    out_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embed_scale: float = 1.0
    tie_embeddings: bool = False
    moe_layers: tuple[bool, ...] = ()  # which layers are mixtures of experts; () : none
    num_experts: int = 0
    experts_per_token: int = 0
    expert_mlp_dim: int = 0
    normalize_router: bool = True  # weights of the chosen experts sum to 1

    def __post_init__(self):
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture {self.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        if self.norm_placement not in ("pre", "post", "both"):
            raise ValueError(f"norm_placement must be pre, post or both, got {self.norm_placement!r}")
        if self.qk_norm not in ("none", "head", "projection"):
            raise ValueError(f"qk_norm must be none, head or projection, got {self.qk_norm!r}")
        for name in (
            "vocab_size",
            "model_dim",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_dim",
            "max_positions",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"num_q_heads={self.num_q_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        for name in ("layer_windows", "layer_ropes"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for num_layers={self.num_layers}")
        if any(w < 0 for w in self.layer_windows):
            raise ValueError(f"layer_windows must be 0 (no window) or positive, got {min(self.layer_windows)}")
        if any(not 0 <= r < len(self.ropes) for r in self.layer_ropes):
            raise ValueError(f"layer_ropes point at {max(self.layer_ropes)} but there are {len(self.ropes)} ropes")
        for rope in self.ropes:
            if not 0 <= rope.rotary_dim <= self.head_dim or rope.rotary_dim % 2 or (rope.rotary_dim == 0 and self.head_dim % 2):
                raise ValueError(f"rotary_dim={rope.rotary_dim} must be even and at most head_dim={self.head_dim}")
        if self.moe_layers and len(self.moe_layers) != self.num_layers:
            raise ValueError(f"moe_layers has {len(self.moe_layers)} entries for num_layers={self.num_layers}")
        if any(self.moe_layers) and not (0 < self.experts_per_token <= self.num_experts and self.expert_mlp_dim > 0):
            raise ValueError(
                f"a mixture needs 0 < experts_per_token={self.experts_per_token} <= num_experts={self.num_experts}"
                f" and expert_mlp_dim={self.expert_mlp_dim} > 0"
            )

    def segments(self) -> tuple[tuple[bool, int, int], ...]:
        """Runs of layers with one body, as (is_moe, first, stop): each is one scan."""
        kinds = self.moe_layers or (False,) * self.num_layers
        starts = [i for i in range(self.num_layers) if i == 0 or kinds[i] != kinds[i - 1]]
        return tuple((kinds[a], a, b) for a, b in zip(starts, [*starts[1:], self.num_layers], strict=True))
