"""Deployment: the question. A model, the chips it runs on, and what is asked of them."""

from __future__ import annotations

import dataclasses
import math

from jaxkv.planning.devices import Chip
from jaxkv.planning.shapes import KV_BYTES, WEIGHT_BYTES, ModelShape
from pallas_kernels.heads import pool_heads


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Everything a plan depends on.

    tensor_parallel: jax devices that share one copy of the weights; None: all. Chips beyond it hold replicas.
    context: tokens a sequence may have, prompt and answer. sequences: wanted at once on all replicas; None: as many as fit.
    weights, kv_dtype: how they are stored. page_size: tokens; None for the platform's.
    memory_fraction: of a device's memory, for weights, activations and KV; the rest is the runtime's.
    activations_gib: GiB of one device, measured; None estimates it. step_tokens: of the largest step, for that estimate.
    low_watermark_gib: GiB of KV kept free on each device.
    shared_tokens: of a prefix; sharers: how many sequences have the same one; 0: all of them.
    free_window_pages: pages that lie behind the window of a windowed layer are given back.

    Raises:
      ValueError: a value out of its range, a prefix as long as the context, or heads that the devices cannot split evenly.
    """

    model: ModelShape
    chip: Chip
    chips: int = 1
    tensor_parallel: int | None = None
    context: int = 8192
    sequences: int | None = None
    weights: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    page_size: int | None = None
    memory_fraction: float = 0.9
    activations_gib: float | None = None
    step_tokens: int = 2048
    low_watermark_gib: float = 0.0
    shared_tokens: int = 0
    sharers: int = 0
    free_window_pages: bool = False

    def __post_init__(self):
        for name in ("chips", "context", "step_tokens", "page_size", "sequences", "tensor_parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("activations_gib", "low_watermark_gib", "shared_tokens", "sharers"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction must be above 0 and at most 1, got {self.memory_fraction}")
        for name, known in (("weights", WEIGHT_BYTES), ("kv_dtype", KV_BYTES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}")
        if self.shared_tokens >= self.context and self.shared_tokens:
            raise ValueError(
                f"shared_tokens={self.shared_tokens} must be less than context={self.context}: one token is always new"
            )
        if self.sharers and not self.shared_tokens:
            raise ValueError(f"sharers={self.sharers} share nothing: give shared_tokens, too")
        self._check_split()

    def _check_split(self) -> None:
        devices, tp = self.devices, self.tp
        if devices % tp:
            raise ValueError(f"tensor_parallel={tp} must divide the {devices} jax devices of {self.chips} {self.chip.name}")
        if not can_split(self.model, tp):
            able = [str(n) for n in range(1, self.model.num_q_heads + 1) if can_split(self.model, n)]
            what = f"tensor_parallel={tp}" if self.tensor_parallel else f"chips={self.chips} ({tp} jax devices)"
            raise ValueError(
                f"{what} cannot split num_q_heads={self.model.num_q_heads} and num_kv_heads={self.model.num_kv_heads} of"
                f" {self.model.name} evenly; tensor_parallel may be {', '.join(able)}, and more chips then hold replicas"
            )

    @property
    def devices(self) -> int:
        """jax devices of all chips."""
        return self.chips * self.chip.devices_per_chip

    @property
    def tp(self) -> int:
        """jax devices that share one copy of the weights."""
        return self.tensor_parallel or self.devices

    @property
    def replicas(self) -> int:
        """Copies of the weights."""
        return self.devices // self.tp

    @property
    def kv_heads_per_device(self) -> int:
        """Each device has whole heads: with fewer heads than devices, copies of one."""
        return max(1, self.model.num_kv_heads // self.tp)

    @property
    def kv_copies(self) -> int:
        """How often each key and value is stored in a replica: tp / K where there are fewer heads than devices."""
        return max(1, self.tp // self.model.num_kv_heads)

    @property
    def P(self) -> int:
        """Tokens a page: given, or as `jaxkv.init_state` chooses on each device."""
        if self.page_size or self.chip.platform != "tpu":
            return self.page_size or 16
        heads, _ = pool_heads(self.kv_heads_per_device, self.model.head_dim, "tpu")
        return 256 if heads == 1 else 128

    def change(self, **changes) -> Deployment:
        """Returns the deployment with other values."""
        return dataclasses.replace(self, **changes)


def can_split(model: ModelShape, tp: int) -> bool:
    """Whether every device gets as many query heads, and as many key and value heads or a copy of one."""
    K = model.num_kv_heads
    return model.num_q_heads % tp == 0 and (K % tp == 0 or tp % K == 0)
