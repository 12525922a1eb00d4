"""A model whose weights are given one by one, for tests that must know which number is where."""

from __future__ import annotations

import numpy as np

from jaxkv.config import ModelConfig


class ArraySource:
    """A `WeightSource` over arrays in memory, keyed by name or (name, layer)."""

    def __init__(self, config: ModelConfig, arrays: dict[str | tuple[str, int], np.ndarray]):
        self.config = config
        self._arrays = dict(arrays)

    def _get(self, name: str, layer: int | None) -> np.ndarray:
        key = name if layer is None else (name, layer)
        if key not in self._arrays:
            raise KeyError(f"no weight {name!r}" + ("" if layer is None else f" in layer {layer}"))
        return self._arrays[key]

    def has(self, name: str, layer: int | None = None) -> bool:
        return (name if layer is None else (name, layer)) in self._arrays

    def shape(self, name: str, layer: int | None = None) -> tuple[int, ...]:
        return self._get(name, layer).shape

    def read(self, name: str, layer: int | None = None) -> np.ndarray:
        return self._get(name, layer)

    def read_rows(self, name: str, layer: int | None, start: int, stop: int) -> np.ndarray:
        return self._get(name, layer)[start:stop]
