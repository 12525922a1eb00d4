"""What `gpu_check.py` checks: every GPU kernel against the oracle, memory, and speed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_sizes import DecodeBlocks
from scripts._kernel_cases import Case, Data, make_data
from scripts._kernel_check import How, attend, run, same_bits, worst_error, write
from scripts._kernel_machine import Machine, present_machine
from scripts._kernel_timing import Bench

LAYERS = 3
TRITON, MOSAIC = "gpu.triton_decode", "gpu.mosaic_decode"
PARTS = ("decode", "prefill", "shapes", "mosaic", "write", "memory", "bench")
# What issue 3 asks of an H200.
_LEAST_OF_COPY, _LEAST_GAIN_OF_8_BITS = 0.8, 1.6


class Skip(Exception):
    """A check that has nothing to check here, and why."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check found; it passes where `value` is at most `limit`."""

    value: float
    limit: float
    note: str = ""
    figures: dict | None = None


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the table."""

    part: str
    name: str
    run: Callable[[], Outcome]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A GPU and real sizes; or, dry, a CPU that interprets the kernels at tiny ones."""

    dry: bool
    machine: Machine

    @property
    def how(self) -> How:
        return How("pallas_gpu", interpret=self.dry, device=None if self.dry else self.machine.spec)

    def base(self, op: str, **changes) -> Case:
        shape = (8, 20, 2, 3, 16, 4) if self.dry else (8, 600, 8, 4, 128, 16)
        tokens = 1 if op == "decode" else 5 if self.dry else 100
        return dataclasses.replace(Case(op, *shape, "bfloat16", tokens=tokens, ragged=True), **changes)


def setting(dry: bool) -> Setting:
    """Returns the present device's.

    Raises:
      ValueError: no GPU, and not dry.
    """
    machine = present_machine(cache_mb=1 if dry else None)
    if not dry and machine.platform != "gpu":
        raise ValueError(f"jax sees no GPU but {machine.device.device_kind}: --cpu runs a dry check")
    return Setting(dry, machine)


def checks(part: str, at: Setting) -> list[Check]:
    """Returns the checks of a part, the most telling first."""
    makers = (_decode, _prefill, _shapes, _mosaic, _write, _memory, _bench)
    make = dict(zip(PARTS, makers, strict=True))[part]
    return [Check(part, name, check) for name, check in make(at).items()]


def _decode(at: Setting) -> dict:
    base = at.base("decode")
    out = _numerics(at, base) | {"own token, int8, sinks": _error(at, base, own=True, dtype="int8", sinks=True)}
    out["splits"] = functools.partial(_splits, at, base)
    if not at.dry:
        out["own token"] = _error(at, base, own=True)
        out["the Triton kernel by its name"] = _error(at, base, how=dataclasses.replace(at.how, implementation=None, module=TRITON))
        out["40,000 positions"] = _error(at, base, batch=3, context=40_000, ragged=False)
        out["pool past 2^31 elements"] = functools.partial(_large_pool, at, "bfloat16", 2**31)
        out["int8 pool of 3 GiB"] = functools.partial(_large_pool, at, "int8", 3 * 2**30)
    return out


def _prefill(at: Setting) -> dict:
    base = at.base("prefill")
    return _numerics(at, base) | ({} if at.dry else {"one token": _error(at, base, tokens=1)})


def _numerics(at: Setting, base: Case) -> dict:
    """Every dtype, window and option, for decode and prefill alike."""
    dtypes = ["bfloat16", "int8", "float8_e4m3fn", "float32"] + ["float16"] * (not at.dry)
    out = {name: _error(at, base, dtype=name) for name in dtypes}
    for dtype in ("bfloat16", "int8", "float8_e4m3fn"):
        out[f"NaN in unused slots, {dtype}"] = functools.partial(_poison, at, dataclasses.replace(base, dtype=dtype))
    out["windows"] = functools.partial(_windows, at, base, at.how)
    out["soft cap, sinks, window, int8"] = _error(at, base, soft_cap=3.0, sinks=True, window=2 * base.page_size + 1, dtype="int8")
    if not at.dry:
        out["soft cap"] = _error(at, base, soft_cap=3.0)
    return out


def _shapes(at: Setting) -> dict:
    """Groups, heads and pages, of decode and prefill."""
    out = {}
    for base in (at.base("decode"), at.base("prefill")):
        error = functools.partial(_error, at, base)
        if at.dry:  # each shape is compiled: seconds of a small CPU
            out[f"{base.op}, group 5, head dim 24, page size 8"] = error(group=5, head_dim=24, page_size=8)
            continue
        out |= {f"{base.op}, group {n}": error(group=n) for n in (1, 5, 8, 16)}
        out |= {f"{base.op}, head dim {n}": error(head_dim=n) for n in (64, 80, 96, 256)}
        out |= {f"{base.op}, page size {n}": error(page_size=n) for n in (8, 64, 128)}
    return out


def _mosaic(at: Setting) -> dict:
    # Interpreting its threads takes seconds a call, however small: once it is.
    base = at.base("decode", **({"head_dim": 64, "page_size": 8, "batch": 1, "kv_heads": 1, "context": 12} if at.dry else {}))
    how = dataclasses.replace(at.how, implementation=None, module=MOSAIC, device=at.machine.spec if not at.dry else _hopper())
    error = lambda **changes: _unless_refused(_error(at, base, how=how, **changes))
    out = {name: error(dtype=name) for name in ("bfloat16", "int8", "float8_e4m3fn")}
    if not at.dry:
        out["NaN in unused slots"] = _unless_refused(functools.partial(_poison, at, base, how))
        out["windows"] = _unless_refused(functools.partial(_windows, at, base, how))
        out |= {"float16": error(dtype="float16"), "soft cap": error(soft_cap=3.0)}
        out |= {f"group {group}": error(group=group) for group in (1, 8, 16)}
        out |= {f"head dim {dim}": error(head_dim=dim) for dim in (64, 256)}
        out |= {"page size 64": error(page_size=64), "40,000 positions": error(batch=3, context=40_000, ragged=False)}
    return out


def _hopper():
    from pallas_kernels.devices import DEVICES

    return DEVICES["h200"]


def _unless_refused(check: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """The second decode kernel may do less than the first; what it does not do it must refuse."""

    def checked() -> Outcome:
        try:
            importlib.import_module(f"pallas_kernels.{MOSAIC}")
            return check()
        except (ImportError, ValueError, NotImplementedError) as error:
            raise Skip(f"{type(error).__name__}: {error}") from error

    return checked


def _write(at: Setting) -> dict:
    base = at.base("write")
    out = {f"{dtype}, a chunk": _error(at, base, dtype=dtype) for dtype in ("bfloat16", "int8", "float8_e4m3fn")}
    return out | {"bfloat16, a token": _error(at, base, tokens=1), "int8, a token": _error(at, base, tokens=1, dtype="int8")}


def _error(at: Setting, base: Case, *, how: How | None = None, **changes) -> Callable[[], Outcome]:
    case = dataclasses.replace(base, **changes)

    def check() -> Outcome:
        data = make_data(case, LAYERS, at.machine.platform)
        return Outcome(worst_error(case, data, LAYERS, how or at.how), 0.0 if case.op == "write" else case.tolerance, str(case))

    return check


def _windows(at: Setting, base: Case, how: How) -> Outcome:
    """A window is data: one compilation for all."""
    P, worst = base.page_size, 0.0
    for window in (1, P - 1, P, P + 1, 4 * P - 1, 4 * P + 1):
        case = dataclasses.replace(base, window=window)
        worst = max(worst, worst_error(case, make_data(case, LAYERS, at.machine.platform), LAYERS, how))
    return Outcome(worst, base.tolerance, str(base))


def _poison(at: Setting, case: Case, how: How | None = None) -> Outcome:
    """NaN and zeros in slots that nobody uses give the same bits."""
    pools = [make_data(case, LAYERS, at.machine.platform, poison=value) for value in (math.nan, 0.0)]
    dirty, clean = (run(case, data, case.pages, how or at.how) for data in pools)
    # In prefill, outputs of a chunk's tokens past its length mean nothing, but must be numbers.
    same = all(same_bits(x, y) for x, y in zip(dirty, clean, strict=True))
    return Outcome(0.0 if same and bool(jnp.isfinite(dirty[0]).all()) else math.inf, 0.0, str(case))


def _splits(at: Setting, case: Case) -> Outcome:
    data = make_data(case, LAYERS, at.machine.platform)
    hows = [dataclasses.replace(at.how, block_sizes=DecodeBlocks(num_splits=n)) for n in ((7,) if at.dry else (1, 7))]
    return Outcome(max(worst_error(case, data, LAYERS, how) for how in hows), case.tolerance, str(case))


def _large_pool(at: Setting, dtype: str, elements: int) -> Outcome:
    """Offsets past int32: pages of the last layer of pools of so many elements each and more, 2^31 at least."""
    case = at.base("decode", ragged=False, dtype=dtype)
    layers = elements // (case.pages * case.kv_heads * case.page_size * case.head_dim) + 2
    data = make_data(case, layers, "gpu")
    assert data.k_pages.size > elements >= 2**31
    return Outcome(worst_error(case, data, layers, at.how), case.tolerance, f"{layers} layers, {data.k_pages.size:,} elements")


def _memory(at: Setting) -> dict:
    # Interpreted kernels copy pools: a dry check is of the xla implementation.
    how = How("xla") if at.dry else at.how
    shape: dict[str, Any] = (
        {"context": 2000, "kv_heads": 2, "head_dim": 64, "page_size": 16} if at.dry else {"context": 4096, "batch": 16}
    )
    return {
        f"decode step, {dtype}": functools.partial(
            _step_memory, at, at.base("decode", own=True, ragged=False, dtype=dtype, **shape), how
        )
        for dtype in ("bfloat16", "int8")
    }


def _step_memory(at: Setting, case: Case, how: How) -> Outcome:
    """A step over all layers, then one write: pools in place, and nothing as large as a quarter of a layer beside them."""

    def step(pools, data: Data):
        data = data._replace(k_pages=pools[0], v_pages=pools[1], kv_scales=pools[2])

        def layer(q, offset):
            o, _ = attend(case, data._replace(q=q), offset, how)
            return o, (o[:, :, 0] + data.k_new, o[:, :, 0] - data.k_new)

        o, new = lax.scan(layer, data.q, jnp.arange(LAYERS, dtype=jnp.int32) * case.pages)
        k_new, v_new = (x[:, :, None] for x in new)
        return o, write(data._replace(k_new=k_new, v_new=v_new), data.lengths, how)

    data = jax.eval_shape(lambda: make_data(case, LAYERS, at.machine.platform))
    pools = (data.k_pages, data.v_pages, data.kv_scales)
    rest = data._replace(k_pages=None, v_pages=None, kv_scales=None)
    memory = jax.jit(step, donate_argnums=0).lower(pools, rest).compile().memory_analysis()
    kv_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in pools if x is not None)
    assert memory is not None
    note = f"KV {kv_bytes:,} B, alias {memory.alias_size_in_bytes:,} B, temp {memory.temp_size_in_bytes:,} B"
    limit = case.layer_bytes(at.machine.platform) / 4
    return Outcome(memory.temp_size_in_bytes if memory.alias_size_in_bytes >= kv_bytes else math.inf, limit, note)


def _bench(at: Setting) -> dict:
    # Made by the first check that needs it, so that a copy is measured once.
    bench = functools.cache(lambda: Bench(at.machine, 1, copy_bytes=1 << 20, round_s=0.0) if at.dry else Bench(at.machine, 5))
    K, G, H, P = (2, 2, 16, 4) if at.dry else (8, 4, 128, 16)
    shape: dict[str, Any] = {"kv_heads": K, "group": G, "head_dim": H, "page_size": P}
    decode = functools.partial(Case, "decode", **shape)
    prefill = functools.partial(Case, "prefill", **shape)
    mosaic = {"mosaic": How(module=MOSAIC, device=at.machine.spec)}
    ours, xla = {"pallas_gpu": at.how}, {"xla": How("xla", device=at.machine.spec)}
    if at.dry:
        small: dict[str, Any] = {"batch": 2, "context": 16}
        cases = [
            (decode(dtype="bfloat16", **small), ours | xla),
            (prefill(dtype="bfloat16", tokens=8, **small), ours),
            (Case("write", dtype="bfloat16", **small, **shape), ours),
        ]
        return {str(case): functools.partial(_measure, bench, case, hows) for case, hows in cases}
    cases = [
        (decode(batch=32, context=4096, dtype="bfloat16"), ours | mosaic | xla),
        (decode(batch=32, context=16384, dtype="bfloat16"), ours | mosaic),
        (decode(batch=32, context=16384, dtype="int8"), ours),
        (decode(batch=32, context=16384, dtype="float8_e4m3fn"), ours),
        (prefill(batch=4, context=4096, dtype="bfloat16", tokens=512), ours | xla),
        (Case("write", batch=32, context=4096, dtype="bfloat16", **shape), ours),
        (decode(batch=1, context=16384, dtype="bfloat16"), ours | mosaic | xla),
        (prefill(batch=4, context=4096, dtype="int8", tokens=512), ours),
    ]
    return {str(case): functools.partial(_measure, bench, case, hows) for case, hows in cases}


def _measure(bench: Callable[[], Bench], case: Case, hows: dict[str, How]) -> Outcome:
    """Fails where the first implementation does not run or is wrong; another that refuses is none of its failures."""
    figures = bench().measure(case, hows)
    outcomes = figures["implementations"]
    first = next(iter(hows))
    wrong = [f"{name}: {row['failed']}" for name, row in outcomes.items() if "failed" in row]
    if "skipped" in outcomes[first]:
        wrong.append(f"{first}: {outcomes[first]['skipped']}")
    errors = [row["error"] for row in outcomes.values() if "error" in row]
    return Outcome(math.inf if wrong else max(errors), case.tolerance, "; ".join(wrong), figures)


def goals(results: list[dict]) -> list[dict]:
    """Returns what the measured figures say about the speed that is asked for, as results of a part of their own."""
    best: dict[tuple, dict] = {}
    for figures in (result["figures"] for result in results if result.get("figures")):
        rows = [row for row in figures["implementations"].values() if "us" in row]
        if rows:
            key = tuple(figures["case"][name] for name in ("op", "batch", "context", "dtype"))
            best[key] = min(rows, key=lambda row: row["us"])
    out = []
    if (fast := best.get(("decode", 32, 4096, "bfloat16"))) is not None:
        out.append(_goal("decode B32 S4096 bf16, of a copy", fast["fraction_of_copy"], _LEAST_OF_COPY))
    base = best.get(("decode", 32, 16384, "bfloat16"))
    for dtype in ("int8", "float8_e4m3fn"):
        fast = best.get(("decode", 32, 16384, dtype))
        if fast is not None and base is not None:
            out.append(_goal(f"{dtype} S16384, times as fast as bf16", base["us"] / fast["us"], _LEAST_GAIN_OF_8_BITS))
    return out


def _goal(name: str, value: float, least: float) -> dict:
    status = "pass" if value >= least else "fail"
    return {"part": "goal", "name": name, "status": status, "value": value, "limit": least, "note": f"at least {least}"}
