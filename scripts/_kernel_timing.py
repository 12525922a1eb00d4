"""How long a call of a kernel takes on the present device, beside a copy and a matrix product of the same rounds.

A decode kernel lasts about as long as its dispatch, so calls are made by a loop inside one jit, each on the next layer of a pool
whose layers together are several times the cache, and with queries that follow from the call before, so that none can be dropped,
hoisted or overlapped. What the loop itself adds is measured too (`loop_us`) and stays in the figures.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scripts._kernel_cases import Case, Data, make_data
from scripts._kernel_check import How, attend, compare, compiler_options, oracle, worst_error, write
from scripts._kernel_machine import Copier, Machine, Multiplier

# A round of one implementation lasts about this long: well over a dispatch (0.1 ms) and the resolution of clocks.
_ROUND_S = 0.02
_MOST_CALLS = 2000
_TIMES_THE_CACHE = 3
_MOST_LAYERS = 512
Runs = dict[str, Callable[[], float]]  # each returns one figure of a round


class Loop:
    """Calls of one implementation on the layers of a pool, in turn."""

    def __init__(self, case: Case, data: Data, layers: int, calls: int, how: How | None):
        device = jax.devices()[0]
        unroll = _unrolled(layers) if device.platform == "gpu" else 1
        self._case, self._calls = case, -(-calls // unroll) * unroll
        writes = case.op == "write"
        if writes:
            loop = functools.partial(_writes, case, self._calls, how)
        else:
            loop = functools.partial(_attends, case, layers, self._calls, unroll, how)
        options = compiler_options(device, data)
        self._compiled = jax.jit(loop, compiler_options=options, donate_argnums=0 if writes else ()).lower(data).compile()

    def seconds(self, data: Data) -> tuple[float, Data]:
        """Returns the time of one call, and the arrays to go on with: a write takes the old ones over."""
        jax.block_until_ready(data)
        started = time.perf_counter()
        out = jax.block_until_ready(self._compiled(data))
        elapsed = time.perf_counter() - started
        return elapsed / self._calls, out if self._case.op == "write" else data


def _unrolled(layers: int) -> int:
    """How many calls a turn of the loop makes on a GPU.

    Every scalar that a turn computes is a kernel of about 2 us there. A turn over whole pools knows its layers at compile time, and
    needs none; XLA compiles the attention kernel once for all calls.
    """
    return layers * (8 // layers) if layers <= 8 else layers if layers <= 32 else 8


def _attends(case: Case, layers: int, calls: int, unroll: int, how: How | None, data: Data):
    """The last queries of a chain of calls; without `how`, what the loop itself does."""

    @jax.jit  # traced once for all calls of a turn
    def call(q, offset):
        o = q * (1 + offset.astype(q.dtype)) if how is None else attend(case, data._replace(q=q), offset, how)[0]
        return data.q + o.astype(q.dtype) * jnp.asarray(1e-3, q.dtype)

    def turn(i, q):
        for u in range(unroll):
            layer = u % layers if unroll % layers == 0 else lax.rem(i * unroll + u, layers)
            q = call(q, jnp.int32(layer * case.pages))
        return q

    return lax.fori_loop(0, calls // unroll, turn, data.q)


def _writes(case: Case, calls: int, how: How | None, data: Data):
    """The arrays after a chain of writes, each behind other lengths."""
    assert how is not None

    def body(i, pools):
        now = data._replace(k_pages=pools[0], v_pages=pools[1], kv_scales=pools[2])
        return write(now, (data.lengths + 7 * i) % (case.context + 1), how)

    pools = lax.fori_loop(0, calls, body, (data.k_pages, data.v_pages, data.kv_scales))
    return data._replace(k_pages=pools[0], v_pages=pools[1], kv_scales=pools[2])


def num_layers(case: Case, machine: Machine) -> int:
    """Returns how many layers make a pool well over the cache.

    Raises:
      ValueError: two do not fit the memory.
    """
    layer = case.layer_bytes(machine.platform)
    wanted = min(max(2, math.ceil(_TIMES_THE_CACHE * machine.cache_bytes / layer)), _MOST_LAYERS)
    fits = machine.memory_bytes // layer
    if fits < 2:
        raise ValueError(
            f"two layers of {layer / 1e9:.1f} GB are more than the {machine.memory_bytes / 1e9:.1f} GB that a case may take"
        )
    return min(wanted, fits)


class Bench:
    """Measures cases on one machine; buffers for copies and products are kept between them."""

    def __init__(self, machine: Machine, rounds: int, *, copy_bytes: int | None = None, round_s: float = _ROUND_S):
        self.machine, self.rounds, self._round_s = machine, rounds, round_s
        self.copier = Copier(machine, copy_bytes)
        self.copy_gb_s = self.copier.gb_s()
        self._multipliers: dict[str, Multiplier] = {}

    def measure(self, case: Case, hows: dict[str, How], peers=()) -> dict:
        """Returns everything about one case, units in the names; each implementation has figures, or "skipped" or "failed" with why.

        Raises:
          ValueError: the case does not fit the machine.
        """
        layers = num_layers(case, self.machine)
        data = make_data(case, layers, self.machine.platform)
        rows = sorted({0, case.batch - 1})
        num_bytes = case.bytes_in_use(self.machine.platform) * (layers if case.op == "write" else 1)
        multiplier = self._multiplier(case.q_dtype) if case.op == "prefill" else None
        want = None if case.op == "write" else oracle(case, data, (layers - 1) * case.pages, rows)
        calls = self._calls(case, num_bytes, layers, multiplier)
        outcomes: dict[str, dict] = {}
        runs: Runs = {}
        box = [data]  # writes pass it on
        del data
        for name, how in hows.items():
            # XLA's own gathers are many times slower: fewer calls, each layer once at least.
            own = calls if name != "xla" or self.machine.platform == "cpu" else max(layers, calls // 8)
            error_of = functools.partial(worst_error, case, box[0], layers, how, rows, want)
            outcomes[name], run = _ready(case, error_of, functools.partial(_timed, case, box, layers, own, how))
            if run is not None:
                runs[name] = run
        if case.op != "write":
            runs["loop"] = _timed(case, box, layers, calls, None)
        for peer in peers:
            outcomes[peer.name] = self._add_peer(peer, case, box[0], layers, calls, rows, want, runs)
        if multiplier is not None:
            runs["matmul_tflop_s"] = multiplier.tflop_s
        runs["copy_gb_s"] = self.copier.gb_s
        figures = interleave(runs, self.rounds)
        for name, outcome in outcomes.items():
            if name in figures:
                outcome |= _summary(figures[name], num_bytes, case.flops, figures["copy_gb_s"], figures.get("matmul_tflop_s"))
        return {
            "case": dataclasses.asdict(case), "label": str(case), "layers": layers, "calls_per_round": calls,
            "bytes_in_use": num_bytes, "flops": case.flops, "pool_bytes": box[0].pool_bytes,
            "copy_gb_s": median(figures["copy_gb_s"]),
            "matmul_tflop_s": median(figures["matmul_tflop_s"]) if multiplier else None,
            "loop_us": median(figures["loop"]) * 1e6 if "loop" in figures else None,
            "implementations": outcomes, "rounds_over_xla": _ratios(figures, outcomes, "xla"),
        }  # fmt: skip

    def _calls(self, case: Case, num_bytes: int, layers: int, multiplier: Multiplier | None) -> int:
        """How many calls fill a round, if they are as fast as the machine allows."""
        least_s = num_bytes / self.copy_gb_s / 1e9
        if multiplier is not None:
            least_s = max(least_s, case.flops / multiplier.tflop_s() / 1e12)
        enough = min(math.ceil(self._round_s / least_s), _MOST_CALLS)
        return max(1, enough) if case.op == "write" else max(layers, enough)

    def _multiplier(self, dtype: str) -> Multiplier:
        if dtype not in self._multipliers:
            self._multipliers[dtype] = Multiplier(self.machine, dtype)
        return self._multipliers[dtype]

    def _add_peer(self, peer, case: Case, data: Data, layers: int, calls: int, rows, want, runs: Runs) -> dict:
        try:
            once, many = peer.prepare(case, data, layers)
        except Exception as error:  # another library's errors are its own
            return {"skipped": _one_line(error)}
        error_of = lambda: compare(case, data, want, rows, once()[np.asarray(rows)])
        outcome, run = _ready(case, error_of, lambda: lambda: many(calls) / calls)
        if run is not None:
            runs[peer.name] = run
        return outcome


def _ready(case: Case, error_of: Callable[[], float], make_run: Callable[[], Callable[[], float]]):
    """An outcome with the error, and what to time; or an outcome that says why there is nothing to time, and None."""
    try:
        error = error_of()
        if not error <= case.tolerance:
            return {"failed": f"error {error:.1e} is over {case.tolerance:.0e}"}, None
        return {"error": error, "tolerance": case.tolerance}, make_run()
    except (ValueError, TypeError, NotImplementedError) as refusal:
        return {"skipped": _one_line(refusal)}, None
    except Exception as failure:  # whatever a compiler or a driver raises: the other cases go on
        return {"failed": _one_line(failure)}, None


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _timed(case: Case, box: list[Data], layers: int, calls: int, how: How | None) -> Callable[[], float]:
    loop = Loop(case, box[0], layers, calls, how)

    def run() -> float:
        seconds, box[0] = loop.seconds(box[0])
        return seconds

    return run


def interleave(runs: Runs, rounds: int) -> dict[str, list[float]]:
    """Returns what each run gave in each round, after one that does not count; who goes first changes."""
    figures: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for i in range(rounds):
        for name in list(runs) if i % 2 else list(reversed(runs)):
            figures[name].append(runs[name]())
    return figures


def _summary(seconds: list[float], num_bytes: int, flops: int, copy_gb_s: list[float], matmul_tflop_s: list[float] | None) -> dict:
    """Medians; fractions are medians of the rounds' own."""
    middle = median(seconds)
    out = {
        "us": middle * 1e6,
        "spread": (max(seconds) - min(seconds)) / middle,
        "rounds_us": [s * 1e6 for s in seconds],
        "gb_s": num_bytes / middle / 1e9,
        "fraction_of_copy": median(num_bytes / s / 1e9 / rate for s, rate in zip(seconds, copy_gb_s, strict=True)),
    }
    if matmul_tflop_s is not None:
        out["tflop_s"] = flops / middle / 1e12
        out["fraction_of_matmul"] = median(flops / s / 1e12 / rate for s, rate in zip(seconds, matmul_tflop_s, strict=True))
    return out


def _ratios(figures: dict[str, list[float]], outcomes: dict[str, dict], base: str) -> dict[str, float]:
    """How many times as fast as `base` each implementation is, by the median of the rounds' ratios."""
    if base not in figures:
        return {}
    others = [name for name in outcomes if name in figures and name != base]
    return {name: median(x / y for x, y in zip(figures[base], figures[name], strict=True)) for name in others}
