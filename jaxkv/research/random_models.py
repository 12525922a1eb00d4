"""Models of a public shape with weights that mean nothing: for times and bytes, which do not depend on them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax
import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.io.source import expected_shapes
from jaxkv.loading import Model
from jaxkv.model.params import Storage, build_params
from jaxkv.planning.memory import stored_weights_bytes
from jaxkv.planning.presets import model_shape
from jaxkv.planning.shapes import first_layers, shape_of

_BLOCK = (1 << 20) - 3  # no multiple of a row's length, so that rows differ
# Pools, logits and what converting weights takes for a while.
_SPARE_BYTES = 2 << 30


def random_models(
    shape: str, num_kv_heads: list[int], storage: Storage, num_layers: int | None = None, room_bytes: int | None = None
) -> tuple[list[Model], int]:
    """([a model of the shape for each number of KV heads], layers of the whole model). They share the tables of their vocabulary.

    Args:
      shape: a preset of `jaxkv.planning`, a Hugging Face folder or a config.json.
      num_layers: the first so many layers alone; None: all.
      room_bytes: memory that the weights of all of them may take; None: what this device has free.

    Raises:
      ValueError: no such shape, heads that do not divide, or weights that do not fit, with how many layers do.
    """
    whole = model_shape(shape).config
    if whole is None:
        raise ValueError(f"jaxkv does not run {shape}: its heads share one latent vector")
    if num_layers is not None and not 1 <= num_layers <= whole.num_layers:
        raise ValueError(f"{num_layers=} must be 1 to {whole.num_layers}, the layers of {shape}")
    configs = [dataclasses.replace(first_layers(whole, num_layers or whole.num_layers), num_kv_heads=K) for K in num_kv_heads]
    _check_room(shape, configs, storage, free_bytes() if room_bytes is None else room_bytes)
    models: list[Model] = []
    for config in configs:
        if not models:
            models.append(Model(config, build_params(_Tiled(config), storage), storage))
            continue
        # The tables are of gigabytes: those of this model are made with a vocabulary of one and then taken from the first.
        params = build_params(_Tiled(dataclasses.replace(config, vocab_size=1)), storage)
        tables = {name: models[0].params[name] for name in ("embed", "head") if name in params}
        models.append(Model(config, params | tables, storage))
    return models, whole.num_layers


def free_bytes() -> int:
    """Bytes that the default device has free, as far as it tells."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    told = Path("/proc/meminfo")
    if told.exists():
        lines = dict(line.split(":") for line in told.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_room(name: str, configs: list[ModelConfig], storage: Storage, room: int) -> None:
    size = lambda config: stored_weights_bytes(shape_of(config, name), storage.weights, storage.platform)
    one = first_layers(configs[0], 1)
    tables = size(one) - size(dataclasses.replace(one, vocab_size=1))

    def needed(num_layers: int) -> int:
        return sum(size(first_layers(config, num_layers)) - tables for config in configs) + tables + _SPARE_BYTES

    layers = configs[0].num_layers
    if needed(layers) <= room:
        return
    fits = max((n for n in range(1, layers) if needed(n) <= room), default=0)
    told = f"{len(configs)} layouts of {name} with {layers} layers in {storage.weights} need {needed(layers) / 1e9:.1f} GB"
    way_out = f"--num_layers={fits} fits" if fits else "not even one layer fits: fewer layouts, or --weights=int8"
    raise ValueError(f"{told}, and {room / 1e9:.1f} GB are free: {way_out}")


class _Tiled:
    """A WeightSource whose every row is cut out of one block of normal numbers: made at the speed of memory. Norms are 1."""

    def __init__(self, config: ModelConfig):
        self.config, self._shapes = config, expected_shapes(config)
        self._block = np.random.default_rng(0).standard_normal(_BLOCK, np.float32)

    def has(self, name, layer=None):
        return (name, layer) in self._shapes

    def shape(self, name, layer=None):
        return self._shapes[name, layer]

    def read(self, name, layer=None):
        shape = self.shape(name, layer)
        return self._numbers(name, shape)

    def read_rows(self, name, layer, start, stop):
        return self._numbers(name, (stop - start, *self.shape(name, layer)[1:]))

    def _numbers(self, name, shape):
        if name.endswith("norm"):
            return np.ones(shape, np.float32)
        return np.resize(self._block, shape) * np.float32(shape[-1] ** -0.5)
