"""Trains a small model over bytes on a text, or gives one fewer KV heads and uptrains it.

It runs the engine's own decoder without cache. --output DIR gets state/ while it trains,
which --resume goes on from to the very same end, and then model/ (a checkpoint that every
script loads as --model DIR/model), history.json and loss.png.

--from_checkpoint starts from a model instead of from nothing: with --convert its KV heads
are pooled to --num_kv_heads first (arXiv:2305.13245) and it is trained for
--uptrain_fraction of --steps; without, for --steps. Bits per byte are those of 2 % of the
text, which are held out.

  python scripts/train.py --text_file kjv.txt --output runs/mha
  python scripts/train.py --text_file kjv.txt --output runs/mha --resume
  python scripts/train.py --text_file kjv.txt --from_checkpoint runs/mha/model --convert mean \\
      --num_kv_heads 2 --output runs/gqa
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags  # noqa: E402

from scripts import _script  # noqa: E402

FLAGS = flags.FLAGS

flags.DEFINE_string("text_file", None, "What to train on; any bytes.")
flags.DEFINE_string("output", None, "Folder for everything the run makes.")
flags.DEFINE_bool("resume", False, "Go on with the run that --output holds; the other flags as they were.")
flags.DEFINE_string(
    "from_checkpoint", None, "A portable checkpoint (model/ of a run) or a Hugging Face folder over 256 bytes to start from."
)
flags.DEFINE_enum("convert", None, ["mean", "first", "random"], "How --num_kv_heads heads come from those of --from_checkpoint.")
flags.DEFINE_float("uptrain_fraction", None, "After --convert: so much of --steps (default: 0.05).", 0.0, 1.0)
# None unless given, so that one that would change nothing is refused.
_KV_HEADS, _UPTRAIN_FRACTION = 8, 0.05
_SIZES = {"num_q_heads": 8, "model_dim": 128, "num_layers": 4, "mlp_dim": 384, "max_positions": 4096}
_NEW = " of a new model (default: {})."
flags.DEFINE_integer(
    "num_kv_heads", None, f"KV heads, a divisor of the query heads{_NEW.format(_KV_HEADS)} With --convert: a divisor of those there are.",
    lower_bound=1,
)  # fmt: skip
for _name, _what in (
    ("num_q_heads", "Query heads"),
    ("model_dim", "Width, which the heads share,"),
    ("num_layers", "Layers"),
    ("mlp_dim", "Hidden width of the MLPs"),
    ("max_positions", "The longest text that engines let it read, in bytes,"),
):
    flags.DEFINE_integer(_name, None, _what + _NEW.format(_SIZES[_name]), lower_bound=1)
flags.DEFINE_integer("steps", 2000, "Steps of a whole training.", lower_bound=1)
flags.DEFINE_integer("batch_tokens", 4096, "Bytes a step.", lower_bound=1)
flags.DEFINE_integer("context", 256, "Bytes a row.", lower_bound=1)
flags.DEFINE_integer("long_context", 0, "Bytes a row of every --long_every-th step, 0: none is longer.", lower_bound=0)
flags.DEFINE_integer("long_every", 0, "How often rows are long, 0: never.", lower_bound=0)
flags.DEFINE_integer("eval_context", 1024, "Bytes a row of the held-out text, each row read alone.", lower_bound=2)
flags.DEFINE_float("learning_rate", 3e-3, "At its peak.", lower_bound=0.0)
flags.DEFINE_integer("warmup", 50, "Steps until then.", lower_bound=0)
flags.DEFINE_integer("seed", 0, "Of new weights, random heads and the places in the text.", lower_bound=0)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the operands of products.")
flags.DEFINE_integer("save_every", 200, "Steps between checkpoints, 0: only at the end.", lower_bound=0)
flags.DEFINE_integer("stop_after", None, "Stop, as if killed after a checkpoint, when so many steps are done.", lower_bound=1)
flags.DEFINE_bool("plot", True, "Draw loss.png; needs matplotlib.")
flags.DEFINE_bool("json", False, "One JSON object with every figure on stdout instead of the summary.")


def main(terminal) -> None:
    """Trains and tells how it went."""
    _check_flags()
    output = Path(FLAGS.output)
    if output.exists() and any(output.iterdir()) and not FLAGS.resume:
        raise ValueError(f"--output={output} is not empty: give --resume to go on with its run, or another folder")
    terminal("importing jax")
    from jaxkv.research.text import split_text

    text = split_text(Path(FLAGS.text_file).read_bytes())
    figures = _train(text, output, terminal)
    terminal.done()
    if FLAGS.json:
        print(json.dumps(figures))
    else:
        _summary(figures, output)


def _check_flags() -> None:
    """Refuses what is missing, and what would change nothing."""
    if not FLAGS.text_file or not FLAGS.output:
        raise ValueError("give --text_file FILE to train on and --output DIR for what comes out (--help lists the flags)")
    if not Path(FLAGS.text_file).is_file():
        raise ValueError(f"--text_file={FLAGS.text_file}: there is no such file")
    if FLAGS.convert:
        if not FLAGS.from_checkpoint:
            raise ValueError(f"--convert={FLAGS.convert} needs --from_checkpoint: a model whose heads are to be pooled")
        if FLAGS.num_kv_heads is None:
            raise ValueError(f"--convert={FLAGS.convert} needs --num_kv_heads: how many heads are to be left")
    elif FLAGS.uptrain_fraction is not None:
        raise ValueError("--uptrain_fraction is of a --convert: without it give --steps alone")
    if not FLAGS.from_checkpoint:
        return
    if FLAGS.num_kv_heads is not None and not FLAGS.convert:
        raise ValueError(f"--num_kv_heads={FLAGS.num_kv_heads} of a --from_checkpoint needs --convert=mean, first or random")
    if given := [f"--{name}" for name in _SIZES if FLAGS[name].value is not None]:
        raise ValueError(f"{', '.join(given)}: only a new model has sizes to choose, those of --from_checkpoint are its own")


def _train(text, output: Path, terminal) -> dict[str, Any]:
    from jaxkv.io.cache import use_compilation_cache
    from jaxkv.research import study

    use_compilation_cache()
    config, weights = _start()
    given = {name: FLAGS[name].value for name in study.RECIPE_FLAGS}
    if FLAGS.convert:
        given["steps"] = max(1, round(FLAGS.steps * _fraction()))
    on_step = lambda done, steps, loss: terminal(
        f"training {steps:,} steps", done / steps, f"step {done:,}, {loss / math.log(2):.3f} bits per byte"
    )
    before = time.perf_counter()
    run = study.run(
        config, weights, given, text, output, eval_context=FLAGS.eval_context, resume=FLAGS.resume, save_every=FLAGS.save_every,
        stop_after=FLAGS.stop_after, plot=FLAGS.plot, report=terminal, on_step=on_step,
    )  # fmt: skip
    return run | {"seconds": round(time.perf_counter() - before, 1)}


def _start():
    """(config, weights) to begin with: new ones, or a checkpoint's with its heads pooled."""
    from jaxkv.research import heads, weights

    if not FLAGS.from_checkpoint:
        sizes = {name: default if FLAGS[name].value is None else FLAGS[name].value for name, default in _SIZES.items()}
        config = weights.byte_config(_KV_HEADS if FLAGS.num_kv_heads is None else FLAGS.num_kv_heads, **sizes)
        return config, weights.init_weights(config, FLAGS.seed)
    config, read = weights.read_weights(FLAGS.from_checkpoint)
    if FLAGS.convert:
        return heads.convert_heads(config, read, FLAGS.num_kv_heads, FLAGS.convert, FLAGS.seed)
    return config, read


def _share_of_steps() -> str:
    return f" ({_fraction():.4g} of --steps={FLAGS.steps:,})" if FLAGS.convert else ""


def _fraction() -> float:
    return _UPTRAIN_FRACTION if FLAGS.uptrain_fraction is None else FLAGS.uptrain_fraction


def _summary(figures: dict[str, Any], output: Path) -> None:
    print(
        f"{figures['parameters']:,} parameters, {figures['num_q_heads']} query heads, {figures['num_kv_heads']} KV heads:"
        f" {figures['steps_done']:,} of {figures['steps']:,} steps{_share_of_steps()} ({figures['tokens']:,} bytes)"
        f" in {figures['seconds']:.0f} s, compiling included"
    )
    print(f"held out: {figures['bits_per_byte_before']:.4f} bits per byte before, {figures['bits_per_byte']:.4f} now")
    if figures["steps_done"] < figures["steps"]:
        print(f"stopped: the same command with --resume goes on from {output / 'state'}")
    else:
        print(f"python scripts/generate.py --model {output / 'model'} --prompt 'And it came to pass'")


if __name__ == "__main__":
    _script.run(main)
