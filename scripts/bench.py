"""Measures prefill and decode of a model on this machine, alone or beside another
library that does the same work.

Each round fills empty slots with --batch prompts of --context tokens and --new_tokens greedily through `jaxkv.generate`, not streamed. Prefill is the time
to the first token, a decode step the mean time between tokens after it; both
include sampling and the host's work. Figures are medians over --repeats rounds,
after one that does not count. With --peer every round runs the same prompts there
too, in changing order, and ratios are medians of the rounds' ratios.

A decode step's bytes are those it has to read: each weight once, in the form that
--batch rows are multiplied with, and the keys and values that a row attends to.
The machine's read bandwidth is that of a 1 GiB buffer, measured in every round.
A last-level cache that holds much of the weights can lift the fraction above 1.

  python scripts/bench.py --model gemma-3-270m --weights int8
  python scripts/bench.py --batch 8 --context 1000 --json
  python scripts/bench.py --weights int8 --peer llama.cpp
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags  # noqa: E402

from scripts import _script  # noqa: E402
from scripts._peers import PEERS, open_peer  # noqa: E402

FLAGS = flags.FLAGS

flags.DEFINE_string("model", "gemma-3-270m", "A known name, a Hugging Face folder, a .gguf file or a jaxkv checkpoint.")
flags.DEFINE_integer("batch", 1, "Rows decoded together.", lower_bound=1)
flags.DEFINE_integer("context", 128, "Prompt tokens a row.", lower_bound=1)
flags.DEFINE_integer("new_tokens", 32, "Tokens to emit a row; the first is part of prefill.", lower_bound=2)
flags.DEFINE_enum("weights", None, _script.WEIGHTS, "How weights are stored; without it what suits the backend.")
flags.DEFINE_enum("dtype", None, _script.DTYPES, "Of the operands of large products; without it as --weights wants.")
flags.DEFINE_integer("repeats", 5, "Rounds that count.", lower_bound=1)
flags.DEFINE_enum("peer", "none", ["none", *PEERS], "Library to run beside: transformers in float32, llama.cpp at --batch 1.")
flags.DEFINE_bool("json", False, "One JSON object on stdout instead of the table.")


def main(terminal) -> None:
    """Runs the rounds and prints what they took."""
    result = _measure(terminal)
    terminal.done()
    if FLAGS.json:
        print(json.dumps(result))
    else:
        _print_table(result)


def _measure(report) -> dict:
    peer = open_peer(FLAGS.peer, FLAGS.model, FLAGS.batch, FLAGS.context + FLAGS.new_tokens, report)
    report("importing jax")
    import jax

    import jaxkv
    from jaxkv.io.cache import use_compilation_cache
    from scripts._bandwidth import Reader

    use_compilation_cache()
    model = jaxkv.load_model(FLAGS.model, dtype=FLAGS.dtype, weights=FLAGS.weights, report=report)
    prompts = _prompts(model)
    report("compiling, and a round that does not count")
    reader = Reader()
    rounds = [_round(model, peer, prompts, reader, i) for i in _counted(FLAGS.repeats, report)][1:]
    result = {
        "model": FLAGS.model,
        "weights": model.storage.weights,
        "dtype": model.storage.dtype,
        "batch": FLAGS.batch,
        "context": FLAGS.context,
        "new_tokens": FLAGS.new_tokens,
        "repeats": FLAGS.repeats,
        "backend": f"{model.storage.platform}, {_script.num_cores()} cores, jax {jax.__version__}",
        "read_gb_s": median(r["read_gb_s"] for r in rounds),
        "jaxkv": _summary([r["jaxkv"] for r in rounds]) | _traffic(model, rounds),
    }
    if peer is not None:
        result[peer.name] = _summary([r["peer"] for r in rounds]) | {"library": peer.describe()}
        ratio = lambda key: median(r["peer"][key] / r["jaxkv"][key] for r in rounds)
        result["speedup"] = {"prefill": ratio("prefill_s"), "decode": ratio("decode_s")}
        if rounds[0]["peer"]["tokens"] is not None:
            result["equal_first_tokens"] = _equal(rounds[0]["jaxkv"]["tokens"], rounds[0]["peer"]["tokens"])
    return result


def _prompts(model):
    """i32[B, context]: this script's documentation over and over, each row from another place; random without a tokenizer."""
    import numpy as np

    if model.tokenizer is None:
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 997)
    else:
        tokens = np.asarray(model.tokenizer.encode(__doc__, add_special=False))
    start = np.arange(FLAGS.batch)[:, None] * 17
    return tokens[(start + np.arange(FLAGS.context)) % len(tokens)].astype(np.int32)


def _counted(repeats: int, report):
    """Numbers the rounds, the one that does not count first, and says how far they are."""
    yield 0
    for i in range(repeats):
        report("measuring", i / repeats)
        yield i + 1


def _round(model, peer, prompts, reader, index: int) -> dict:
    """One turn of each; who goes first changes."""
    turns = [("jaxkv", lambda: _run(model, prompts))]
    if peer is not None:
        turns.append(("peer", lambda: peer.run(prompts, FLAGS.new_tokens)))
    out: dict = {"read_gb_s": reader.gb_s()}
    for name, turn in turns if index % 2 else reversed(turns):
        prefill_s, decode_s, tokens = turn()
        out[name] = {"prefill_s": prefill_s, "decode_s": decode_s, "tokens": tokens}
    return out


def _run(model, prompts):
    """(prefill seconds, seconds a decode step, tokens [B, new_tokens]) of jaxkv."""
    import jaxkv

    state = jaxkv.init_state(model, num_slots=FLAGS.batch, max_tokens_per_slot=FLAGS.context + FLAGS.new_tokens)
    sampling = jaxkv.Sampling(ignore_eos=True)
    _, output = jaxkv.generate(state, prompts, max_new_tokens=FLAGS.new_tokens, sampling=sampling)
    return output.timings.ttft_s, output.timings.tpot_s, [row.tolist() for row in output.tokens]


def _summary(turns: list[dict]) -> dict:
    prefill_s, decode_s = (median(t[key] for t in turns) for key in ("prefill_s", "decode_s"))
    return {
        "prefill_tok_s": FLAGS.batch * FLAGS.context / prefill_s,
        "decode_ms": decode_s * 1e3,
        "decode_tok_s": FLAGS.batch / decode_s,
        "rounds_decode_ms": [t["decode_s"] * 1e3 for t in turns],
    }


def _traffic(model, rounds) -> dict:
    """Bytes a decode step reads, the rates they mean, and the median fraction of the read bandwidth measured beside each round."""
    from scripts._bandwidth import kv_bytes, weight_bytes

    weights = weight_bytes(model, FLAGS.batch)
    # The first decode step sees the prompt and one token; the others one more each.
    cached = kv_bytes(model, FLAGS.batch, FLAGS.context + FLAGS.new_tokens / 2)
    step_s = median(r["jaxkv"]["decode_s"] for r in rounds)
    fraction = median((weights + cached) / r["jaxkv"]["decode_s"] / 1e9 / r["read_gb_s"] for r in rounds)
    return {
        "weight_bytes": weights,
        "kv_bytes": cached,
        "weight_gb_s": weights / step_s / 1e9,
        "kv_gb_s": cached / step_s / 1e9,
        "fraction_of_read": fraction,
    }


def _equal(ours, theirs) -> str:
    """How many greedy tokens agree before the first that does not: "24 of 24", the least over the rows."""
    same = min(_common_prefix(x, y) for x, y in zip(ours, theirs, strict=True))
    return f"{same} of {len(ours[0])}"


def _common_prefix(x: list[int], y: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))


def _print_table(result: dict) -> None:
    ours = result["jaxkv"]
    print(
        f"{result['model']}, weights {result['weights']}, {result['backend']}\n"
        f"batch {result['batch']}, context {result['context']}, {result['new_tokens']} new tokens, median of {result['repeats']}\n"
    )
    names = ["jaxkv", *(name for name in PEERS if name in result)]
    print(f"{'':14}{'prefill tok/s':>14}{'decode ms/step':>16}{'decode tok/s':>14}")
    for name in names:
        row = result[name]
        print(f"{name:14}{row['prefill_tok_s']:14.1f}{row['decode_ms']:16.2f}{row['decode_tok_s']:14.1f}")
    if "speedup" in result:
        equal = f"   first tokens equal: {result['equal_first_tokens']}" if "equal_first_tokens" in result else ""
        print(f"{'times as fast':14}{result['speedup']['prefill']:14.2f}{result['speedup']['decode']:16.2f}{equal}")
    print(
        f"\na decode step reads {ours['weight_bytes'] / 1e6:.1f} MB of weights at {ours['weight_gb_s']:.2f} GB/s and"
        f" {ours['kv_bytes'] / 1e6:.2f} MB of KV at {ours['kv_gb_s']:.2f} GB/s:\n"
        f"{ours['fraction_of_read']:.0%} of this machine's {result['read_gb_s']:.1f} GB/s"
    )


if __name__ == "__main__":
    _script.run(main)
