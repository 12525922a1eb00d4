"""Measures the serving engine on this machine: many requests of mixed length, or many
that share a prefix.

Mixed: --requests prompts of 20 to 600 random tokens, answers of 16 to 128, all
submitted at once to --num_slots slots. With --peer=transformers the same requests also
go through its generate in static batches of as many rows, in order, in the same run.

--shared_tokens N: --requests prompts that begin with the same N tokens, with the prefix
cache and without it, one after the other.

Everything is compiled before the clock starts. Figures are medians over --repeats
rounds, in changing order; ratios are medians of the rounds' ratios.

  python scripts/serving_bench.py --peer transformers
  python scripts/serving_bench.py --requests 32 --shared_tokens 600 --new_tokens 16
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

from scripts import _script  # noqa: E402
from scripts._peers import open_peer  # noqa: E402

FLAGS = flags.FLAGS

flags.DEFINE_string("model", "gemma-3-270m", "A known name, a Hugging Face folder, a .gguf file or a jaxkv checkpoint.")
flags.DEFINE_enum("weights", "float32", _script.WEIGHTS, "How weights are stored.")
flags.DEFINE_integer("requests", 64, "Requests, submitted together.", lower_bound=1)
flags.DEFINE_integer("num_slots", 8, "Rows of the batch.", lower_bound=1)
flags.DEFINE_integer("prefill_tokens", 512, "Prompt tokens a step.", lower_bound=1)
flags.DEFINE_integer("shared_tokens", 0, "Tokens that all prompts begin with; 20 of their own follow.", lower_bound=0)
flags.DEFINE_integer("new_tokens", None, "Tokens of every answer; without it 16 to 128.", lower_bound=1)
flags.DEFINE_integer("repeats", 1, "Rounds.", lower_bound=1)
flags.DEFINE_integer("seed", 1, "Of the requests.", lower_bound=0)
flags.DEFINE_enum("peer", "none", ["none", "transformers"], "Library to run beside.")
flags.DEFINE_bool("json", False, "One JSON object on stdout instead of the table.")

_OWN_TOKENS = 20


def main(terminal) -> None:
    """Runs the rounds."""
    import jaxkv
    from jaxkv.io.cache import use_compilation_cache

    use_compilation_cache()
    model = jaxkv.load_model(FLAGS.model, weights=FLAGS.weights, report=terminal)
    prompts, limits = _requests(model.config.vocab_size)
    longest = max(len(p) + n for p, n in zip(prompts, limits, strict=True))
    peer = open_peer(FLAGS.peer, FLAGS.model, FLAGS.num_slots, longest, terminal)
    runs = {"prefix cache": lambda: _ours(model, prompts, limits, True, longest)}
    if FLAGS.shared_tokens:
        runs["no prefix cache"] = lambda: _ours(model, prompts, limits, False, longest)
    if peer is not None:
        runs[peer.describe()] = lambda: _theirs(peer, prompts, limits)
    rounds: list[dict[str, dict]] = []
    for i in range(FLAGS.repeats):
        order = list(runs)[:: 1 if i % 2 == 0 else -1]
        rounds.append({})
        for name in order:
            terminal(f"round {i + 1} of {FLAGS.repeats}: {name}")
            rounds[-1][name] = runs[name]()
    terminal.done()
    _report(list(runs), rounds, sum(map(len, prompts)), sum(limits))


def _requests(vocab_size: int):
    rng = np.random.default_rng(FLAGS.seed)
    tokens = lambda count: rng.integers(5, vocab_size - 5, count).astype(np.int32)
    shared = tokens(FLAGS.shared_tokens)
    sizes = [_OWN_TOKENS] * FLAGS.requests if FLAGS.shared_tokens else rng.integers(20, 601, FLAGS.requests).tolist()
    limits = [FLAGS.new_tokens or int(rng.integers(16, 129)) for _ in range(FLAGS.requests)]
    return [np.concatenate([shared, tokens(size)]) for size in sizes], limits


def _ours(model, prompts, limits, prefix_cache: bool, longest: int) -> dict:
    import jaxkv

    room = -(-longest // 16) * 16
    config = jaxkv.EngineConfig(
        num_slots=FLAGS.num_slots,
        max_tokens_per_slot=room,
        prefill_tokens=FLAGS.prefill_tokens,
        prefix_cache=prefix_cache,
        model_revision="bench",
    )
    engine = jaxkv.Engine(model, config)
    engine.warmup()
    endless = jaxkv.Sampling(ignore_eos=True)
    started = time.perf_counter()
    for prompt, limit in zip(prompts, limits, strict=True):
        engine.submit(jaxkv.Request(prompt, limit, endless))
    engine.run()
    summary = engine.metrics.summary()
    names = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "itl_p99_s", "kv_hit_rate", "block_fragmentation", "kv_read_gbps")
    return {"total_s": time.perf_counter() - started, **{name: summary[name] for name in names}}


def _theirs(peer, prompts, limits) -> dict:
    started = time.perf_counter()
    for first in range(0, len(prompts), FLAGS.num_slots):
        rows = slice(first, first + FLAGS.num_slots)
        peer.generate(prompts[rows], limits[rows])
    return {"total_s": time.perf_counter() - started}


def _report(names: list[str], rounds: list[dict[str, dict]], prompt_tokens: int, new_tokens: int) -> None:
    """The first run's figures, and the others' against it."""
    result: dict = {"requests": FLAGS.requests, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "runs": {}}
    first = names[0]
    for name in names:
        figures = {key: _median([r[name][key] for r in rounds]) for key in rounds[0][name]}
        figures["new_tokens_per_s"] = new_tokens / figures["total_s"]
        for key in ("total_s", "ttft_p50_s"):
            if name != first and key in figures:
                figures[f"{key}_over_first"] = median(r[name][key] / r[first][key] for r in rounds)
        result["runs"][name] = figures
    if FLAGS.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    sys.stdout.write(
        f"{FLAGS.requests} requests, {prompt_tokens:,} prompt and {new_tokens:,} new tokens, {FLAGS.num_slots} slots\n"
    )
    for name, figures in result["runs"].items():
        shown = "  ".join(f"{key} {value:.4g}" for key, value in figures.items() if value is not None)
        sys.stdout.write(f"{name}: {shown}\n")


def _median(values):
    return None if None in values else median(values)


if __name__ == "__main__":
    _script.run(main)
