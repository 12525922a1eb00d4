"""Answers a file of requests: JSON lines in, JSON lines out, each line exactly once.

A line of the input is {"custom_id": ..., and one of "prompt", "messages", "tokens"}, with
any of max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty,
frequency_penalty, logit_bias, seed, stop, stop_token_ids, ignore_eos, logprobs, n, tenant,
priority, acl_epoch, allow_truncation, use_cache; or a line of OpenAI's batch files.
docs/batch.md shows both, and the records that answer them.

Records are on the disk a fraction of a second after their lines end. Kill this at any
moment and run the same command again: it goes on with the lines that have no record.
A line that cannot be answered gets a record with an error and stops nothing.

It exits with 0 if every line was answered, 1 if some were not or nothing could run, 130 or
143 after Ctrl-C or SIGTERM.

  python scripts/batch_generate.py --input in.jsonl --output out.jsonl --model hf_folder
  python scripts/batch_generate.py --input in.jsonl --output out-3.jsonl --num_shards 8 --shard_index 3
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags  # noqa: E402

from scripts import _script  # noqa: E402

FLAGS = flags.FLAGS

flags.DEFINE_string("input", None, "JSONL file of requests.")
flags.DEFINE_string("output", None, "JSONL file that answers are added to.")
flags.DEFINE_string("model", "gemma-3-270m", "A known name, a Hugging Face folder, a .gguf file or a jaxkv checkpoint.")
flags.DEFINE_bool("ordered", False, "When all lines are done, sort the output as the input; the disk must have room for both.")
flags.DEFINE_integer("num_shards", 1, "Machines that share the input, each with its own output.", lower_bound=1)
flags.DEFINE_integer("shard_index", 0, "Run the lines whose number (from 1) modulo --num_shards is this.", lower_bound=0)
flags.DEFINE_string("summary", None, "JSON file for the figures of the run.")
flags.DEFINE_string("metrics_file", None, "File for the engine's metrics in Prometheus' text format.")
_LINES = "; for lines that do not say"
flags.DEFINE_integer("max_tokens", 128, f"Tokens to emit at most{_LINES}.", lower_bound=1)
_MODELS = f"{_LINES}, without it what the model's makers recommend"
flags.DEFINE_float("temperature", None, f"0 always takes the likeliest token{_MODELS}, else 0.", lower_bound=0.0)
flags.DEFINE_integer("top_k", None, f"Draw among the k likeliest tokens, 0: all{_MODELS}, else 0.", lower_bound=0)
flags.DEFINE_float("top_p", None, f"Draw among the fewest likeliest that reach this probability{_MODELS}, else 1.", 0.0, 1.0)
flags.DEFINE_integer("seed", 0, f"With a line's number it makes the line's seed{_LINES}.", lower_bound=0)
flags.DEFINE_integer("num_slots", 8, "Sequences that run at once.", lower_bound=1)
flags.DEFINE_integer("max_tokens_per_slot", 1024, "Room of a prompt and its answer, in tokens.", lower_bound=1)
flags.DEFINE_enum("weights", None, _script.WEIGHTS, "How weights are stored; without it what suits the backend.")
flags.DEFINE_enum("kv_dtype", None, _script.KV_DTYPES, "What keys and values are stored in; without it as the backend likes.")
flags.DEFINE_enum("dtype", None, _script.DTYPES, "Of the operands of large products; without it as --weights wants.")

# Flags that decide the answers: an output goes on only with the same ones.
_DECISIVE = (
    "num_shards", "shard_index", "max_tokens", "temperature", "top_k", "top_p", "seed", "max_tokens_per_slot", "weights", "kv_dtype",
    "dtype",
)  # fmt: skip


def main(terminal) -> None:
    """Runs what the output does not hold yet, then tells how it went."""
    paths = _paths()
    terminal("importing jax")
    import jaxkv
    from jaxkv.serving import batch

    figures = [paths[name] for name in ("summary", "metrics_file") if name in paths]
    own = {_identity(path) for path in batch.beside(paths["output"], *figures)}
    for name, path in paths.items():
        if _identity(path) in own:
            raise ValueError(f"--{name}={path} is a file that this job needs for itself: give another")
    given: dict = {name: FLAGS[name].value for name in ("temperature", "top_k", "top_p") if FLAGS[name].value is not None}
    jaxkv.Sampling(**given)  # what is wrong with them is said before seconds of loading
    with batch.OutputFile(paths["output"]) as output:
        terminal(f"reading {FLAGS.input}")
        with batch.Source(paths["input"], num_shards=FLAGS.num_shards, shard_index=FLAGS.shard_index) as source:
            batch.claim(paths["output"], _job(source.digest), has_records=output.nbytes > 0)
            terminal(f"reading {FLAGS.output}")
            tally, todo = batch.what_is_left(source, output.recover())
            engine, signum = None, 0
            if todo.size:
                engine, read, records = _load(given, terminal)
                job = batch.Job(engine, source, output, read, records, todo=todo, tally=tally, clock=time.monotonic)
                signum = _run(job, terminal)
        if FLAGS.ordered and not signum:
            terminal("sorting")
            output.sort()
    terminal.done()
    _write_figures(tally, engine, paths)
    _end(tally, signum)


def _paths() -> dict[str, Path]:
    """The files of the flags, checked as far as that can be done at once."""
    for name in ("input", "output"):
        if not FLAGS[name].value:
            raise ValueError(f"give --{name} FILE (--help lists the flags)")
    given = {name: FLAGS[name].value for name in ("input", "output", "summary", "metrics_file")}
    paths = {name: Path(path) for name, path in given.items() if path}
    if FLAGS.shard_index >= FLAGS.num_shards:
        raise ValueError(
            f"--shard_index={FLAGS.shard_index} must be in 0 to {FLAGS.num_shards - 1} with --num_shards={FLAGS.num_shards}"
        )
    if "metrics_file" in paths and importlib.util.find_spec("prometheus_client") is None:
        raise ValueError("--metrics_file needs prometheus_client: pip install prometheus-client")
    seen: dict[tuple, str] = {}
    for name, path in paths.items():
        _script.check_file(name)
        if name in ("summary", "metrics_file") and not os.access(path.resolve().parent, os.W_OK):
            raise ValueError(f"--{name}={path}: the folder cannot be written to")
        same = seen.setdefault(_identity(path), name)
        if same != name:
            raise ValueError(f"--{name} and --{same} are the same file, {path}: give two")
    if not paths["input"].exists():
        raise ValueError(f"--input={FLAGS.input}: no such file")
    return paths


def _identity(path: Path) -> tuple:
    """Equal for two names of one file."""
    return (path.stat().st_dev, path.stat().st_ino) if path.exists() else (path.resolve(),)


def _job(digest: str) -> dict[str, Any]:
    """What decides the answers."""
    model = str(Path(FLAGS.model).resolve()) if Path(FLAGS.model).exists() else FLAGS.model
    return {"input_sha256": digest, "model": model} | {name: FLAGS[name].value for name in _DECISIVE}


def _load(given: dict, terminal):
    """(engine, what makes tasks of lines, what makes records of answers)"""
    import jaxkv
    from jaxkv.io.cache import use_compilation_cache
    from jaxkv.serving import batch

    use_compilation_cache()
    model = jaxkv.load_model(FLAGS.model, dtype=FLAGS.dtype, weights=FLAGS.weights, report=terminal)
    config = jaxkv.EngineConfig(num_slots=FLAGS.num_slots, max_tokens_per_slot=FLAGS.max_tokens_per_slot, kv_dtype=FLAGS.kv_dtype)
    terminal("making the engine")
    engine = jaxkv.Engine(model, config)
    sampling = dataclasses.replace(model.sampling, **given)
    terminal.done()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    told = [f"{name} {getattr(sampling, name):g}" for name in names if getattr(sampling, name) != getattr(jaxkv.Sampling(), name)]
    sys.stderr.write(f"[lines that do not say run with {', '.join(told) or 'the likeliest tokens'}]\n")
    read = batch.LineReader(model.tokenizer, batch.Defaults(sampling, FLAGS.max_tokens, FLAGS.seed))
    decode = model.tokenizer.decode if model.tokenizer else lambda ids: ""
    return engine, read, batch.Records(FLAGS.model, decode, time.time)


def _run(job, terminal) -> int:
    """Runs the job; 0, or the signal that stopped it between two steps. A second one ends it in the middle."""
    stopped_by = []

    def stop(signum, frame) -> None:
        if job.stopping:
            raise KeyboardInterrupt
        job.stopping = True
        stopped_by.append(signum)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        job.run(lambda tally: terminal("generating", tally.done / tally.lines, tally.progress()))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return stopped_by[0] if stopped_by else 0


def _write_figures(tally, engine, paths: dict[str, Path]) -> None:
    from jaxkv.serving.batch.output_file import replace

    if "summary" in paths:
        figures = tally.summary() | {"engine": engine.metrics.summary() if engine else None}
        replace(paths["summary"], lambda file: file.write(json.dumps(figures, indent=1).encode() + b"\n"))
    if "metrics_file" in paths:
        text = engine.metrics.text() if engine else "# every line had its record before this run\n"
        replace(paths["metrics_file"], lambda file: file.write(text.encode()))


def _end(tally, signum: int) -> None:
    """One line on how it went, and the exit status."""
    sys.stderr.write(
        f"[{tally.lines:,} lines: {tally.done - tally.all_failed:,} answered, {tally.all_failed:,} failed,"
        f" {tally.lines - tally.done:,} to go; this run {tally.done_now:,} lines, {tally.completion_tokens:,} tokens in"
        f" {tally.elapsed_s:.1f} s, {tally.tokens_per_s:,.1f} tok/s]\n"
    )
    if signum:
        sys.stderr.write("[stopped; the same command goes on from here]\n")
        sys.exit(128 + signum)
    if tally.all_failed:
        first = f"; the first of this run: {tally.first_error}" if tally.first_error else ""
        raise ValueError(
            f"{tally.all_failed:,} of {tally.lines:,} lines failed, see the records with an error in {FLAGS.output}{first}"
        )


if __name__ == "__main__":
    _script.run(main)
