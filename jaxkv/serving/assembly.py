"""What an engine is put together from: its fingerprint, its tiers, the shape of its pages."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable

import jax
import numpy as np

from jaxkv.loading import Model
from jaxkv.serving.disk_tier import DiskTier
from jaxkv.serving.engine_config import EngineConfig
from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.host_tier import HostTier
from jaxkv.serving.lane import Tier
from jaxkv.serving.page_data import PageLayout
from jaxkv.serving.tiers import Tiers
from jaxkv.serving.transfer_costs import TransferCosts
from jaxkv.state import State


def weights_digest(model: Model) -> str:
    """SHA-256 of config, storage and every weight, as hex: about a second a GB."""
    digest = hashlib.sha256(repr((model.config, model.storage)).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def base_fingerprint(model: Model, config: EngineConfig, state: State, layout: PageLayout) -> Fingerprint:
    """What all requests of an engine have in common."""
    return Fingerprint(
        model_revision=config.model_revision or weights_digest(model),
        tokenizer_revision=model.tokenizer.revision if model.tokenizer else None,
        position_encoding=repr((model.config.ropes, model.config.layer_ropes)),
        adapter=None,
        system_prompt=None,
        tenant=None,
        acl_epoch=None,
        kv_dtype=config.kv_dtype or state.kv.k_pages.dtype.name,
        layout=f"{layout} {state.static.platform}",
        page_size=state.kv.page_size,
    )


def kv_bytes_read(model: Model, bytes_per_token: int) -> Callable[[int], int]:
    """Bytes of keys and values that a decode step reads for a row: a layer with a window reads no more than that."""
    windows, of_layer = collections.Counter(model.config.layer_windows), bytes_per_token // model.config.num_layers
    return lambda stored: of_layer * sum(n * (min(stored, window) if window else stored) for window, n in windows.items())


def make_tiers(config: EngineConfig, secret: bytes, layout: PageLayout) -> Tiers | None:
    """The tiers below the device; None: none was asked for."""
    backlog = config.tier_backlog_bytes
    if (config.host_bytes or config.disk_bytes) and backlog < layout.nbytes:
        raise ValueError(f"tier_backlog_bytes={backlog} must hold a page, {layout.nbytes} bytes: nothing would be kept")
    tiers: list[Tier] = []
    if config.host_bytes:
        tiers.append(HostTier(config.host_bytes, config.host_dtype))
    if config.disk_folder is not None:
        tiers.append(DiskTier(config.disk_folder, config.disk_bytes, secret))
    return Tiers(tiers, layout, cost=TransferCosts(max_pending_bytes=backlog)) if tiers else None


def page_layout(state: State) -> PageLayout:
    """How a page of this pool lies when it is elsewhere."""
    L, scales = state.static.model.num_layers, state.kv.kv_scales
    _, K, P, H = state.kv.k_pages.shape
    scales_shape = None if scales is None else (L, 2, scales.shape[2], scales.shape[3])
    return PageLayout((L, K, P, H), state.kv.k_pages.dtype.name, scales_shape)
