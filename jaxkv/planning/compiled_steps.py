"""The engine's real steps, compiled without weights for a device that may not be here, and what the compiler says of their memory."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.buckets import CHUNK_TOKENS, bucket_tokens, most_rows
from jaxkv.kv import pages
from jaxkv.kv.pages import Ownership
from jaxkv.kv.state import empty_pools
from jaxkv.model.decoder import Kernels
from jaxkv.model.params import Storage, abstract_params
from jaxkv.planning import compilers
from jaxkv.planning.deployment import Deployment
from jaxkv.planning.kernel_limits import kernel_device
from jaxkv.sampling import Sampling
from jaxkv.state import Static
from jaxkv.steps import Loop, Pools, step
from pallas_kernels import check_implementation


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Arguments of one purpose, in bytes."""

    bytes: int  # as their shapes say
    laid_out_bytes: int  # as the compiler lays them out: with the padding of its tiles
    unused_bytes: int = 0  # of those that the step does not take: on CPU, the form of the weights that is for more or fewer rows


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What the compiler says of one step for `sequences` slots of `context` tokens; bytes of one device."""

    name: str  # "prefill" or "decode"
    sequences: int
    context: int
    rows: int  # sequences that the step runs
    new_tokens: int  # of each
    weights: Arrays
    kv: Arrays  # pools and scales
    other: Arrays  # page table, history, sampling options
    argument_bytes: int
    temporary_bytes: int  # this and the next two as in `compilers.Compiled`
    output_bytes: int
    live_bytes: int
    code_bytes: int
    compile_s: float

    @property
    def shape(self) -> str:
        """Such as "prefill 4 x 512"."""
        return f"{self.name} {self.rows} x {self.new_tokens}"


class DoesNotFit(ValueError):
    """A compiler refuses a step that takes more memory than the device has, or a kernel a pool so large; the message is theirs."""


def prefill(d: Deployment, sequences: int, context: int) -> CompiledStep:
    """Returns the prefill step with the most tokens that the engine dispatches, compiled for the device of `d`."""
    T = min(CHUNK_TOKENS, bucket_tokens(context))
    R = most_rows(T, sequences)
    params, pools, own = _arguments(d, sequences, context)
    M = own.page_table.shape[1]
    args = (params, pools, _i32(R, M), _i32(R), _i32(R), _i32(R, T), _i32(R))
    return _compile(d, "prefill", args, sequences, context, (R, T), "prefill", all_logits=False)


def decode(d: Deployment, sequences: int, context: int) -> CompiledStep:
    """Returns the decode step: forward, sampling, stop and pages, in a loop on the device where the engine has one."""
    params, pools, own = _arguments(d, sequences, context)
    flags: Any = jax.ShapeDtypeStruct((sequences,), jnp.bool_)
    loop = Loop(pools, own, _i32(sequences), flags, _i32())
    options = Sampling().arrays(
        num_slots=sequences,
        rows=range(sequences),
        vocab_size=d.model.vocab_size,
        eos_token_ids=(),
        seeds=[0] * sequences,
        prompt_lengths=[1] * sequences,
    )
    looped = d.chip.platform != "cpu"
    return _compile(
        d, "decode_many", (params, loop, options, flags, _i32()), sequences, context, (sequences, 1), "decode", looped=looped
    )


STEPS: dict[str, Callable[[Deployment, int, int], CompiledStep]] = {"prefill": prefill, "decode": decode}


def _kernels(d: Deployment) -> Kernels:
    return Kernels(device=kernel_device(d))


def _arguments(d: Deployment, sequences: int, context: int) -> tuple[dict, Pools, Ownership]:
    """(params, pools, ownership) without data."""
    config, platform = d.model.config, d.chip.platform
    assert config is not None  # `audit.run` asks
    per_slot = -(-context // d.P)
    num_pages = sequences * per_slot + 1
    make = lambda: empty_pools(config, num_pages, d.P, d.kv_dtype, platform)
    k_pages, v_pages, kv_scales = jax.eval_shape(make)
    try:
        check_implementation(k_pages, **_kernels(d).options)  # as `init_state` does
    except ValueError as error:
        raise DoesNotFit(str(error)) from None
    pools = Pools(k_pages, v_pages, kv_scales, _i32(sequences, per_slot * d.P))
    own = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, pages.empty(sequences, per_slot, num_pages, d.P)))
    return abstract_params(config, Storage(d.weights, _dtype(d), platform)), pools, own


def _compile(d: Deployment, jitted: str, args: tuple, sequences: int, context: int, shape: tuple[int, int], name: str, **static):
    config, platform, started = d.model.config, d.chip.platform, time.perf_counter()
    assert config is not None
    function = step(jitted, platform)
    static["static"] = Static(config, _dtype(d), _kernels(d))
    try:
        if platform == "cpu":
            compiled = compilers.compile_for_cpu(function, *args, **static)
        else:
            compiled = compilers.compile_for(d.chip.name, function, *args, **static)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFit(str(error).splitlines()[0]) from None
    memory: Any = compiled.executable.memory_analysis()
    kinds = _by_purpose(args, compiled.executable.input_formats[0])
    return CompiledStep(
        name,
        sequences,
        context,
        *shape,
        weights=kinds["weights"],
        kv=kinds["kv"],
        other=kinds["other"],
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=compiled.temporary_bytes,
        output_bytes=compiled.output_bytes,
        live_bytes=compiled.live_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        compile_s=time.perf_counter() - started,
    )


def _by_purpose(args: tuple, formats: tuple) -> dict[str, Arrays]:
    """Sorts a step's arguments into weights, KV and the rest."""
    pools = args[1].pools if isinstance(args[1], Loop) else args[1]
    is_kv = {id(a) for a in (pools.k_pages, pools.v_pages, pools.kv_scales) if a is not None}
    sums = {kind: [0, 0, 0] for kind in ("weights", "kv", "other")}
    for position, (arg, laid_out) in enumerate(zip(args, formats, strict=True)):
        for a, form in zip(jax.tree.leaves(arg), jax.tree.leaves(laid_out), strict=True):
            kind = "weights" if position == 0 else "kv" if id(a) in is_kv else "other"
            size = laid_out_bytes(a.shape, a.dtype.itemsize, form.layout)
            unused = size if form.layout is None else 0  # jax leaves out what a function does not use
            sums[kind] = [x + y for x, y in zip(sums[kind], (a.size * a.dtype.itemsize, size, unused), strict=True)]
    return {kind: Arrays(*three) for kind, three in sums.items()}


def laid_out_bytes(shape: tuple[int, ...], itemsize: int, layout: Any) -> int:
    """Returns the bytes of an array in a layout of XLA's: its minor axes are padded to whole tiles.

    Tiles inside tiles, such as the (2, 1) of bf16, divide the outer one and pad nothing more.
    """
    if layout is None or not layout.tiling:
        return math.prod(shape) * itemsize
    tile = layout.tiling[0]
    sizes = [shape[axis] for axis in layout.major_to_minor]
    sizes = [1] * (len(tile) - len(sizes)) + sizes
    first = len(sizes) - len(tile)
    padded = [-(-size // t) * t for size, t in zip(sizes[first:], tile, strict=True)]
    return math.prod(sizes[:first]) * math.prod(padded) * itemsize


def _dtype(d: Deployment) -> str:
    """Operands of large products."""
    return "float32" if d.weights == "float32" else "bfloat16"


def _i32(*shape: int) -> Any:
    """An abstract array where an array is meant."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)
