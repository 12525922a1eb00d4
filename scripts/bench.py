"""Measures prefill and decode of a model on this machine, alone or beside another
library that does the same work.

A turn fills empty slots with --batch prompts of --context tokens and emits
--new_tokens greedily through `jaxkv.generate`, not streamed. Prefill is the time to
the first token, a decode step the mean time between tokens after it; both include
sampling and the host's work. Every choice of --context, --pool_factor and
--kv_dtype is a case. A round runs each case, and with --peer the same prompts there too, in changing order.
Figures are medians over --repeats rounds, after one that does not count; ratios are
medians of the rounds' ratios.

A decode step's bytes are those it has to read: each weight once, in the form that
--batch rows are multiplied with, and the keys and values that a row attends to.
The machine's read bandwidth is that of a 1 GiB buffer, measured in every round.
A last-level cache that holds much of the weights can lift the fraction above 1.

  python scripts/bench.py --model gemma-3-270m --weights int8
  python scripts/bench.py --batch 8 --context 1000 --json
  python scripts/bench.py --weights int8 --peer llama.cpp
  python scripts/bench.py --context 100,4000
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from statistics import median

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags  # noqa: E402

from scripts import _script  # noqa: E402
from scripts._peers import PEERS, open_peer  # noqa: E402

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "model",
    None,
    "A known name, a Hugging Face folder, a .gguf file or a jaxkv checkpoint; without it gemma-3-270m if installed, else tiny-gqa.",
)
flags.DEFINE_integer("batch", 1, "Rows decoded together.", lower_bound=1)
flags.DEFINE(_script.Integers(), "context", "128", "Prompt tokens a row; several make several cases.")
flags.DEFINE(_script.Integers(), "pool_factor", "1", "Pages of the pool over what the rows need; several make several cases.")
flags.DEFINE_list("kv_dtype", [], "What keys and values are stored in; several make several cases; without it the backend's.")
flags.DEFINE_integer("new_tokens", 32, "Tokens to emit a row; the first is part of prefill.", lower_bound=2)
flags.DEFINE_enum("weights", None, _script.WEIGHTS, "How weights are stored; without it what suits the backend.")
flags.DEFINE_enum("dtype", None, _script.DTYPES, "Of the operands of large products; without it as --weights wants.")
flags.DEFINE_integer("repeats", 5, "Rounds that count.", lower_bound=1)
flags.DEFINE_enum("peer", "none", ["none", *PEERS], "Library to run beside: transformers in float32, llama.cpp at --batch 1.")
flags.DEFINE_bool("json", False, "One JSON object on stdout instead of the table.")


@dataclasses.dataclass(frozen=True)
class Case:
    """What one turn runs: prompt tokens a row, and pages in the pool for each that is needed."""

    context: int
    pool_factor: int
    kv_dtype: str | None  # None: the backend's


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one turn took and gave."""

    prefill_s: float
    decode_s: float
    tokens: list[list[int]] | None


def main(terminal) -> None:
    """Runs the rounds and prints what they took."""
    result = _measure(terminal)
    terminal.done()
    if FLAGS.json:
        print(json.dumps(result))
    else:
        _print_table(result)


def _measure(report) -> dict:
    cases = [Case(*choice) for choice in itertools.product(FLAGS.context, FLAGS.pool_factor, FLAGS.kv_dtype or [None])]
    if FLAGS.model is None:
        from jaxkv.io.resolve import default_model

        FLAGS["model"].value = default_model()
    peer = open_peer(FLAGS.peer, FLAGS.model, FLAGS.batch, max(FLAGS.context) + FLAGS.new_tokens, report)
    report("importing jax")
    import jax

    import jaxkv
    from jaxkv.io.cache import use_compilation_cache
    from jaxkv.research.traffic import Reader

    use_compilation_cache()
    model = jaxkv.load_model(FLAGS.model, dtype=FLAGS.dtype, weights=FLAGS.weights, report=report)
    report("compiling, and a round that does not count")
    reader = Reader(_script.num_cores())
    rounds = [_round(model, peer, cases, reader, i) for i in _counted(FLAGS.repeats, report)][1:]
    return {
        "model": FLAGS.model,
        "weights": model.storage.weights,
        "dtype": model.storage.dtype,
        "batch": FLAGS.batch,
        "new_tokens": FLAGS.new_tokens,
        "repeats": FLAGS.repeats,
        "backend": f"{model.storage.platform}, {_script.num_cores()} cores, jax {jax.__version__}",
        "peer": None if peer is None else peer.describe(),
        "read_gb_s": median(r["read_gb_s"] for r in rounds),
        "cases": [_result(model, peer, case, rounds, cases[0]) for case in cases],
    }


def _result(model, peer, case: Case, rounds: list[dict], first: Case) -> dict:
    """The medians of one case, and its ratios to the peer and to the first case."""
    ours = [r[case, "jaxkv"] for r in rounds]
    result: dict = dataclasses.asdict(case)
    result["jaxkv"] = _summary(case, ours) | _traffic(model, case, ours, [r["read_gb_s"] for r in rounds])
    if case != first:
        pairs = [(r[case, "jaxkv"], r[first, "jaxkv"]) for r in rounds]
        result["decode_ms_over_first_case"] = median(x.decode_s / y.decode_s for x, y in pairs)
    if peer is not None:
        theirs = [r[case, "peer"] for r in rounds]
        result[peer.name] = _summary(case, theirs)
        ratio = lambda time: median(time(x) / time(y) for x, y in zip(theirs, ours, strict=True))
        result["speedup"] = {"prefill": ratio(lambda turn: turn.prefill_s), "decode": ratio(lambda turn: turn.decode_s)}
        if theirs[0].tokens is not None:
            result["equal_first_tokens"] = _equal(ours[0].tokens, theirs[0].tokens)
    return result


def _prompts(model, context: int):
    """i32[B, context]: this script's documentation over and over, each row from another place; random without a tokenizer."""
    import numpy as np

    if model.tokenizer is None:
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 997)
    else:
        tokens = np.asarray(model.tokenizer.encode(__doc__, add_special=False))
    start = np.arange(FLAGS.batch)[:, None] * 17
    return tokens[(start + np.arange(context)) % len(tokens)].astype(np.int32)


def _counted(repeats: int, report):
    """Numbers the rounds, the one that does not count first, and says how far they are."""
    yield 0
    for i in range(repeats):
        report("measuring", i / repeats)
        yield i + 1


def _round(model, peer, cases: list[Case], reader, index: int) -> dict:
    """One turn of each case, here and there; who goes first changes."""
    out: dict = {"read_gb_s": reader.gb_s()}
    for case in cases if index % 2 else reversed(cases):
        prompts = _prompts(model, case.context)
        turns = {"jaxkv": partial(_run, model, prompts, case)}
        if peer is not None:
            turns["peer"] = partial(peer.run, prompts, FLAGS.new_tokens)
        for name in turns if index % 2 else reversed(turns):
            out[case, name] = Turn(*turns[name]())
    return out


def _run(model, prompts, case: Case):
    """(prefill seconds, seconds a decode step, tokens [B, new_tokens]) of jaxkv."""
    import jaxkv

    tokens, page_size = case.context + FLAGS.new_tokens, 16
    num_pages = FLAGS.batch * -(-tokens // page_size) * case.pool_factor + 1  # the null page
    state = jaxkv.init_state(model, FLAGS.batch, tokens, page_size=page_size, num_pages=num_pages, kv_dtype=case.kv_dtype)
    sampling = jaxkv.Sampling(ignore_eos=True)
    _, output = jaxkv.generate(state, prompts, max_new_tokens=FLAGS.new_tokens, sampling=sampling)
    return output.timings.ttft_s, output.timings.tpot_s, [row.tolist() for row in output.tokens]


def _summary(case: Case, turns: list[Turn]) -> dict:
    prefill_s, decode_s = median(t.prefill_s for t in turns), median(t.decode_s for t in turns)
    return {
        "prefill_tok_s": FLAGS.batch * case.context / prefill_s,
        "decode_ms": decode_s * 1e3,
        "decode_tok_s": FLAGS.batch / decode_s,
        "rounds_decode_ms": [t.decode_s * 1e3 for t in turns],
    }


def _traffic(model, case: Case, turns: list[Turn], read_gb_s: list[float]) -> dict:
    """Bytes a decode step reads, the rates they mean, and the median fraction of the read bandwidth measured beside each round."""
    from jaxkv.research.traffic import kv_bytes, weight_bytes

    weights = weight_bytes(model, FLAGS.batch)
    # The first decode step sees the prompt and one token; the others one more each.
    cached = kv_bytes(model, FLAGS.batch, case.context + FLAGS.new_tokens / 2, case.kv_dtype)
    step_s = median(t.decode_s for t in turns)
    fractions = [(weights + cached) / t.decode_s / 1e9 / rate for t, rate in zip(turns, read_gb_s, strict=True)]
    return {
        "weight_bytes": weights,
        "kv_bytes": cached,
        "weight_gb_s": weights / step_s / 1e9,
        "kv_gb_s": cached / step_s / 1e9,
        "fraction_of_read": median(fractions),
    }


def _equal(ours, theirs) -> str:
    """How many greedy tokens agree before the first that does not: "24 of 24", the least over the rows."""
    same = min(_common_prefix(x, y) for x, y in zip(ours, theirs, strict=True))
    return f"{same} of {len(ours[0])}"


def _common_prefix(x: list[int], y: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))


def _print_table(result: dict) -> None:
    print(
        f"{result['model']}, weights {result['weights']}, {result['backend']}\n"
        f"batch {result['batch']}, {result['new_tokens']} new tokens, median of {result['repeats']}"
    )
    for case in result["cases"]:
        _print_case(case, result["read_gb_s"])


def _print_case(case: dict, read_gb_s: float) -> None:
    ours = case["jaxkv"]
    factor = f", pool {case['pool_factor']} times as large" if case["pool_factor"] != 1 else ""
    factor += f", KV in {case['kv_dtype']}" if case["kv_dtype"] else ""
    print(f"\ncontext {case['context']}{factor}\n{'':14}{'prefill tok/s':>14}{'decode ms/step':>16}{'decode tok/s':>14}")
    for name in ("jaxkv", *(name for name in PEERS if name in case)):
        row = case[name]
        print(f"{name:14}{row['prefill_tok_s']:14.1f}{row['decode_ms']:16.2f}{row['decode_tok_s']:14.1f}")
    if "speedup" in case:
        equal = f"   first tokens equal: {case['equal_first_tokens']}" if "equal_first_tokens" in case else ""
        print(f"{'times as fast':14}{case['speedup']['prefill']:14.2f}{case['speedup']['decode']:16.2f}{equal}")
    if "decode_ms_over_first_case" in case:
        print(f"a decode step takes {case['decode_ms_over_first_case']:.2f} times what it does in the first case")
    print(
        f"a decode step reads {ours['weight_bytes'] / 1e6:.1f} MB of weights at {ours['weight_gb_s']:.2f} GB/s and"
        f" {ours['kv_bytes'] / 1e6:.2f} MB of KV at {ours['kv_gb_s']:.2f} GB/s:\n"
        f"{ours['fraction_of_read']:.0%} of this machine's {read_gb_s:.1f} GB/s"
    )


if __name__ == "__main__":
    _script.run(main)
