"""What an engine is asked to be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from jaxkv.planning.plan import CapacityPlan
from jaxkv.serving.ladder import LadderConfig
from jaxkv.serving.request import is_finite, is_whole

_LEAST_SECRET = 16  # bytes


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine serves. Sizes of the pool are as in `jaxkv.init_state`."""

    num_slots: int = 8
    max_tokens_per_slot: int = 1024
    page_size: int | None = None
    num_pages: int | None = None
    kv_dtype: str | None = None
    implementation: str | None = None
    interpret: bool = False
    seed: int = 0  # of the seeds of requests that name none

    prefill_tokens: int = 512  # of prompts, a step; fewer keep decoding rows at a steadier pace
    ageing_s: float = 10.0  # waiting that makes up for one step of priority
    plan: CapacityPlan | None = None  # None: the pool alone limits
    ladder: LadderConfig | None = None  # what is given up under pressure; None: nothing, requests wait
    overcommit: bool = False  # pages as sequences grow, with preemption, instead of all on admission

    prefix_cache: bool = True
    secret: bytes | None = None  # keys the cache's names; None: a random one of this process. At least 16 bytes
    model_revision: str | None = None  # None: the digest of config and weights
    quotas: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)  # tenant: pages it should keep at most
    hold_ttl_s: float = 900.0
    reusable_ttl_s: float | None = None  # None: a page is kept until its room is needed
    host_bytes: int = 0  # of the tier in host memory; 0: none
    host_dtype: Literal["int8"] | None = None  # "int8" halves and quarters it, at a small loss; None: as the pool
    disk_folder: str | Path | None = None
    disk_bytes: int = 0
    tier_backlog_bytes: int = 256 << 20  # of pages on their way to a tier; what is evicted beyond that is not kept

    def __post_init__(self):
        least = dict(prefill_tokens=1, host_bytes=0, disk_bytes=0, tier_backlog_bytes=0)
        for name, low in least.items():
            if not is_whole(getattr(self, name), low):
                raise ValueError(f"{name} must be a whole number of at least {low}, got {getattr(self, name)!r}")
        for name in ("ageing_s", "hold_ttl_s", "reusable_ttl_s"):
            seconds = getattr(self, name)
            if not (seconds is None and name == "reusable_ttl_s") and not (is_finite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")
        if self.secret is not None and not (isinstance(self.secret, bytes) and len(self.secret) >= _LEAST_SECRET):
            raise ValueError(f"secret must be at least {_LEAST_SECRET} bytes (secrets.token_bytes(32)), or None")
        if self.model_revision is not None and not isinstance(self.model_revision, str):
            raise ValueError(f"model_revision must be a text or None, got {self.model_revision!r}")
        if (self.disk_folder is None) != (not self.disk_bytes):
            raise ValueError(f"a disk tier needs both disk_folder and disk_bytes, got {self.disk_folder!r} and {self.disk_bytes}")
        if self.host_dtype is not None and not self.host_bytes:
            raise ValueError(f"host_dtype={self.host_dtype!r} needs host_bytes")
        for tenant, pages in self.quotas.items():
            check_quota(tenant, pages)


def check_quota(tenant: str, pages: int | None) -> None:
    """Raises ValueError unless these are a tenant's name and whole pages."""
    if not isinstance(tenant, str) or not is_whole(pages, 0):
        raise ValueError(f"quotas map a tenant's name to whole pages, got {tenant!r}: {pages!r}")
