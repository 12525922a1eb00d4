"""From a source of named weights to the params tree a step reads: products fused, layers stacked, forms chosen.

params = {
  "embed": Linear [V, D]            also the head when the embeddings are tied
  "head": Linear [V, D]             only when they are not
  "final_norm": f32[D]
  "layers": one dict per segment (a run of layers with one body), every array with a leading axis over its layers:
    "qkv": Linear [N*H + 2*K*H, D]  "o": Linear [D, N*H]
    "gate_up": Linear [2*F, D]      "down": Linear [D, F]
    "router": Linear [E, D]         "experts_gate_up": Experts [E, 2*F, D]   "experts_down": Experts [E, D, F]
    "attn_norm", "q_norm", ...: f32[..]
}
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.io.source import WeightSource, expected_shapes
from jaxkv.model.key_balance import Balanced
from jaxkv.model.linear import WEIGHT_KINDS, Experts, Linear, stored_dtype, weight_dtype

# What a product fuses: the parts of a group share their input and are stacked on the output axis.
GROUPS = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    "router": ("router",),
    "experts_gate_up": ("experts_gate", "experts_up"),
    "experts_down": ("experts_down",),
    "embed": ("embed",),
    "head": ("head",),
}
# int8 columns that share a scale. With one scale a row Gemma 3 270M's mean NLL moves by 1.7 %, with groups of 32 by under 0.1 %
# (its GGUF table is in groups of 32 too); reading the scales costs nothing that could be measured (docs/performance.md). On a TPU,
# scales inside a row cost a copy of the weight (525 MB for a Llama 3 head): there a row has one.
INT8_GROUP = 32
# Goes up whenever `build_params` makes other params of the same weights: kept conversions of before are not read.
CONVERSION = 2
# Rows converted at once: bounds the temporaries of a large table.
_CHUNK_ROWS = 16384


@dataclasses.dataclass(frozen=True)
class Storage:
    """How weights are kept and multiplied.

    weights: "float32", "bfloat16" or "int8"; dtype: of the operands of large products; platform: jax's backend name.
    """

    weights: str
    dtype: str
    platform: str

    def __post_init__(self):
        if self.weights not in WEIGHT_KINDS:
            raise ValueError(f"weights={self.weights!r} is not one of {', '.join(WEIGHT_KINDS)}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype={self.dtype!r} is not one of float32, bfloat16, float16")

    @property
    def has_wide(self) -> bool:
        """Whether products over many rows have a bf16 form of the weight of their own."""
        return self.platform == "cpu" and self.weights != "float32" and self.dtype != "float32"

    @property
    def name(self) -> str:
        """Tells storages apart in a file name."""
        return "-".join(str(v) for v in dataclasses.astuple(self))

    @property
    def expert_dtype(self) -> str:
        """Of ragged products: XLA:CPU has no fast bf16 form of them."""
        return "float32" if self.platform == "cpu" else self.dtype


def build_params(source: WeightSource, storage: Storage, report=lambda done: None):
    """Reads every weight (q and k twice) and returns the params tree, on jax's default device; `report` hears the fraction done."""
    source = Balanced(_Counted(source, report), statistics=source)
    config = source.config
    shapes = expected_shapes(config)
    top = lambda name: _table(source, name, storage)
    params = {"embed": top("embed"), "final_norm": _vector(source, "final_norm", (None,))[0]}
    if not config.tie_embeddings:
        params["head"] = top("head")
    params["layers"] = tuple(
        _segment(source, shapes, tuple(range(first, stop)), storage) for first, stop in stacks(config, storage.platform)
    )
    return params


def init_params(config: ModelConfig, key, storage: Storage):
    """Random params of the right forms, N(0, 1/sqrt(fan in)): for tests and benchmarks."""
    return build_params(_RandomSource(config, key), storage)


def abstract_params(config: ModelConfig, storage: Storage):
    """The params tree with a ShapeDtypeStruct for every array: what `build_params` returns, without weights."""
    shapes = expected_shapes(config)
    array = jax.ShapeDtypeStruct

    def tree(lead, layer):
        here = {name: (*lead, *shape) for (name, at), shape in shapes.items() if at == layer}
        out = {}
        for group, parts in GROUPS.items():
            if parts[0] in here:
                arrays = _abstract(group, [here[part] for part in parts], f"{parts[0]}_bias" in here, storage)
                out[group] = _product(group, arrays, storage)
        grouped = {part for parts in GROUPS.values() for part in parts}
        vectors = here.keys() - grouped - {f"{part}_bias" for part in grouped}
        return out | {name: array(here[name], jnp.float32) for name in vectors}

    return tree((), None) | {"layers": tuple(tree((stop - first,), first) for first, stop in stacks(config, storage.platform))}


def check_params(params, config: ModelConfig, storage: Storage, where: str) -> None:
    """Raises ValueError unless every array of a params tree has the shape and dtype that config and storage call for.

    The message names the first array that differs, such as "layers.0.qkv.scale".
    """
    form = lambda tree: {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{a.dtype}{list(a.shape)}"
        for path, a in jax.tree.flatten_with_path(tree)[0]
    }
    got, expected = form(params), form(abstract_params(config, storage))
    for name in expected | got:
        if got.get(name) != expected.get(name):
            raise ValueError(f"{where}: {name} is {got.get(name, 'missing')}, expected {expected.get(name, 'none')}")


def _abstract(group: str, parts: list[tuple[int, ...]], has_bias: bool, storage: Storage) -> dict:
    """The arrays of a product of parts [.., rows, D]."""
    kind = _kind(group, storage)
    shape = (*parts[0][:-2], sum(part[-2] for part in parts), parts[0][-1])
    array = jax.ShapeDtypeStruct
    arrays = {"weight": array(shape, weight_dtype(kind.weights, kind.platform))}
    if kind.weights == "int8":
        arrays["scale"] = array((*shape[:-1], _groups(shape[-1], kind.platform)), jnp.float32)
    if kind.has_wide and not group.startswith("experts"):
        arrays["wide"] = array(shape, stored_dtype("bfloat16", "cpu"))
    if has_bias:
        arrays["bias"] = array(shape[:-1], jnp.float32)
    return arrays


def _product(group: str, arrays: dict, storage: Storage):
    if group.startswith("experts"):
        return Experts(**arrays, dtype=storage.expert_dtype, platform=storage.platform)
    return Linear(**arrays, platform=storage.platform)


def _kind(group: str, storage: Storage) -> Storage:
    """How a group is kept: a router is small, and rounding it would change which experts are chosen."""
    return Storage("float32", "float32", storage.platform) if group == "router" else storage


def _groups(columns: int, platform: str) -> int:
    """How many scales a row of int8 weights has."""
    return columns // INT8_GROUP if platform == "cpu" and columns % INT8_GROUP == 0 else 1


def stacks(config: ModelConfig, platform: str) -> tuple[tuple[int, int], ...]:
    """Runs of layers (first, stop) whose weights are stacked and scanned: those with one body.

    On a GPU every layer is alone: XLA copies what it slices out of a stack before it multiplies it, which is three times the
    traffic of a decode step and a layer's weights of temporaries (238 MB for Llama 3.1 8B; now 2). Compiling takes longer.
    """
    if platform == "gpu":
        return tuple((i, i + 1) for i in range(config.num_layers))
    return tuple((first, stop) for _, first, stop in config.segments())


def num_parameters(config: ModelConfig) -> int:
    """Weights of the model, tied tables counted once."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def _segment(source, shapes, layers, storage):
    names = {name for name, layer in shapes if layer == layers[0]}
    out = {}
    for group, parts in GROUPS.items():
        if parts[0] not in names:
            continue
        biases = [f"{part}_bias" for part in parts]
        bias = None
        if biases[0] in names:
            bias = jnp.concatenate([_vector(source, b, layers) for b in biases], -1)
        kind = _kind(group, storage)
        if group.startswith("experts"):
            out[group] = _experts(source, parts, layers, kind)
        else:
            out[group] = _stored(source, parts, layers, kind, bias=bias)
    grouped = {part for parts in GROUPS.values() for part in parts}
    for name in sorted(names - grouped - {f"{part}_bias" for part in grouped}):
        out[name] = _vector(source, name, layers)
    return out


def _vector(source, name, layers):
    return jnp.asarray(np.stack([np.asarray(source.read(name, layer), np.float32) for layer in layers]))


def _table(source, name, storage):
    return _stored(source, (name,), (None,), storage, bias=None, stacked=False)


def _experts(source, parts, layers, storage):
    stored = _stored(source, parts, layers, storage, bias=None, wide=False)
    return Experts(stored.weight, stored.scale, dtype=storage.expert_dtype, platform=storage.platform)


def _stored(source, parts, layers, storage, *, bias, stacked=True, wide=True):
    """Fills preallocated [L, .., N, D] buffers chunk by chunk, so that a load never holds a tensor twice."""
    per_part = [source.shape(part, layers[0]) for part in parts]
    lead, (rows, columns) = per_part[0][:-2], (sum(s[-2] for s in per_part), per_part[0][-1])
    groups = _groups(columns, storage.platform)
    shape = (len(layers), *lead, rows, columns)
    dtype = weight_dtype(storage.weights, storage.platform)
    buffers = {"weight": aligned_empty(shape, dtype)}
    if storage.weights == "int8":
        buffers["scale"] = aligned_empty((*shape[:-1], groups), np.float32)
    if wide and storage.has_wide:
        buffers["wide"] = aligned_empty(shape, stored_dtype("bfloat16", "cpu"))
    for i, layer in enumerate(layers):
        offset = 0
        for part, part_shape in zip(parts, per_part, strict=True):
            _fill(source, part, layer, part_shape, {k: b[i] for k, b in buffers.items()}, offset, storage, groups)
            offset += part_shape[-2]
    _trim_heap()
    arrays = {}
    for key in list(buffers):
        buffer = buffers.pop(key)
        arrays[key] = adopt(buffer if stacked else buffer[0])
    return Linear(**arrays, bias=bias, platform=storage.platform)


def _fill(source, part, layer, shape, buffers, offset, storage, groups):
    step = _CHUNK_ROWS if len(shape) == 2 else shape[0]
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        chunk = np.asarray(source.read_rows(part, layer, start, stop))
        forms = _convert(chunk, str(buffers["weight"].dtype), groups, "wide" in buffers)
        if not bool(forms.pop("fits")):
            raise ValueError(
                f"weight {part!r} of layer {layer} holds values that are not finite or pass float16's 65504: load it with weights='float32'"
            )
        for key, form in forms.items():
            target = (
                buffers[key][:, offset : offset + shape[-2]] if len(shape) == 3 else buffers[key][offset + start : offset + stop]
            )
            target[...] = np.asarray(form).view(target.dtype)  # bits as they are, where uint16 holds bf16


def _convert(x, dtype: str, groups: int, wide: bool):
    with jax.default_device(jax.devices("cpu")[0]):
        return _CONVERT(x, dtype, groups, wide)


def _forms(x, dtype, groups, wide):  # [.., N, D] -> the arrays of one Linear
    x = x.astype(jnp.float32)
    if dtype != "int8":
        forms, value = {"weight": x.astype(dtype)}, x
    else:
        grouped = x.reshape(*x.shape[:-1], groups, -1)
        scale = jnp.max(jnp.abs(grouped), -1) / 127
        q = jnp.rint(grouped / jnp.where(scale > 0, scale, 1)[..., None])  # half to even; |q| <= 127 by the choice of scale
        forms, value = {"weight": q.astype(jnp.int8).reshape(x.shape), "scale": scale}, (q * scale[..., None]).reshape(x.shape)
    if wide:
        forms["wide"] = value.astype(jnp.bfloat16)
    return {**forms, "fits": jnp.all(jnp.abs(x) <= 65504) if dtype == "float16" else jnp.bool_(True)}


_CONVERT = jax.jit(_forms, static_argnums=(1, 2, 3))


def aligned_empty(shape, dtype) -> np.ndarray:
    """An uninitialised array at a 64-byte boundary, for `adopt`."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def adopt(array: np.ndarray) -> jax.Array:
    """The array on the default device; on CPU the very same memory if it is aligned. The caller writes to it no more."""
    return jax.device_put(array, may_alias=True)


def _trim_heap() -> None:
    """Returns to the system what conversions freed: glibc would hold 270 MiB of it by the end of a load of Gemma 3 270M."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class _Counted:
    """A source that reports which fraction of its weights has been read."""

    def __init__(self, source: WeightSource, report):
        self.config, self.shape, self.has = source.config, source.shape, source.has
        self._source, self._report = source, report
        self._total, self._done = num_parameters(source.config), 0

    def read(self, name, layer=None):
        return self._count(self._source.read(name, layer))

    def read_rows(self, name, layer, start, stop):
        return self._count(self._source.read_rows(name, layer, start, stop))

    def _count(self, array):
        self._done += array.size
        self._report(self._done / self._total)
        return array


class _RandomSource:
    """A WeightSource of normal weights; norms are 1."""

    def __init__(self, config, key):
        self.config = config
        self._shapes = expected_shapes(config)
        self._seed = int(jax.random.bits(key, dtype=jnp.uint32))

    def has(self, name, layer=None):
        return (name, layer) in self._shapes

    def shape(self, name, layer=None):
        return self._shapes[name, layer]

    def read(self, name, layer=None):
        shape = self._shapes[name, layer]
        if name.endswith("norm"):
            return np.ones(shape, np.float32)
        index = list(self._shapes).index((name, layer))
        rng = np.random.default_rng((self._seed, index))
        return rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[-1]))

    def read_rows(self, name, layer, start, stop):
        return self.read(name, layer)[start:stop]
