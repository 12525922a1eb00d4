"""Compares head layouts (MHA, GQA, MQA) on this machine: what the keys and values of a
token take, how long a decode step lasts, what bandwidth that is, and bits per byte.

Each of --models, with every choice of --page_size, --kv_dtype, --batch and --context, is
a row; T is the longest a row's history gets. Rounds run all rows in turn, so that what
slows the machine for a while slows all; figures are medians, with the least and the
largest round. Columns called x compare with the first model, in the same rounds. Whether
a row is bound by bandwidth follows from the read bandwidth measured in every round.
Quality is that of --text_file, read through the cache in each --kv_dtype.

--shape NAME --num_kv_heads 32,8,1 compares layouts of a public shape with random weights,
without quality. On a small machine give --num_layers: the first so many layers alone.

--output DIR writes layouts.md, layouts.json and layouts.png; --against takes the
layouts.json of another run and says which rows agree with it.

  python scripts/compare_layouts.py
  python scripts/compare_layouts.py --batch 1,8 --context 1000,4096 --kv_dtype float32,int8 --output runs/layouts
  python scripts/compare_layouts.py --shape llama-3.1-8b --num_kv_heads 32,8,1 --num_layers 2 --context 4096
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags  # noqa: E402

from scripts import _script  # noqa: E402

FLAGS = flags.FLAGS
_TEXT = Path(__file__).resolve().parents[1] / "tests" / "data" / "kjv_held_out.txt"

flags.DEFINE_list("models", "tiny-mha,tiny-gqa,tiny-mqa", "Names or paths of what to compare; the first is the base.")
flags.DEFINE_string("shape", None, "Instead of --models: a public shape (llama-3.1-8b, ..), a config.json or a folder with one.")
flags.DEFINE(_script.Integers(), "num_kv_heads", None, "KV heads of the layouts of --shape; the first is the base.")
flags.DEFINE_integer("num_layers", None, "The first so many layers of --shape alone.", lower_bound=1)
flags.DEFINE(_script.Integers(), "page_size", None, "Tokens a page; without it the backend's.")
flags.DEFINE_list("kv_dtype", [], "What keys and values are stored in; without it the backend's.")
flags.DEFINE(_script.Integers(), "batch", "8", "Rows decoded together.")
flags.DEFINE(_script.Integers(), "context", "512,4096", "Tokens of the longest history of a row.")
flags.DEFINE_integer("new_tokens", 32, "Tokens a measured call emits.", lower_bound=2)
flags.DEFINE_integer("repeats", 7, "Rounds that count.", lower_bound=1)
flags.DEFINE_enum("weights", None, _script.WEIGHTS, "How weights are stored; without it what suits the backend.")
flags.DEFINE_string("text_file", str(_TEXT), "What bits per byte are of, UTF-8; empty: none are measured.")
flags.DEFINE_string("output", None, "Folder for layouts.md, layouts.json and layouts.png; the last needs matplotlib.")
flags.DEFINE_string("against", None, "layouts.json of another run to compare with.")
flags.DEFINE_bool("json", False, "One JSON object on stdout instead of Markdown.")


def main(terminal) -> None:
    """Measures, tells, writes."""
    _check_flags()
    text = None if FLAGS.shape or not FLAGS.text_file else Path(FLAGS.text_file).read_text(encoding="utf-8")
    terminal("importing jax")
    from jaxkv.research import layout_report

    others = layout_report.read_run(FLAGS.against) if FLAGS.against else None
    if FLAGS.output:
        from jaxkv.research.plot import pyplot

        pyplot("--output")  # better told now than after minutes
        Path(FLAGS.output).mkdir(parents=True, exist_ok=True)
    result = _measure(text, others, terminal)
    terminal.done()
    if FLAGS.output:
        _write(Path(FLAGS.output), result)
    print(json.dumps(result) if FLAGS.json else layout_report.describe(result))


def _check_flags() -> None:
    """Refuses what is missing or twice, and what would change nothing."""
    if bool(FLAGS.shape) != bool(FLAGS.num_kv_heads):
        raise ValueError("--shape=NAME and --num_kv_heads=32,8,1 go together: a shape, and the layouts of it to compare")
    if FLAGS.num_layers and not FLAGS.shape:
        raise ValueError("--num_layers is of a --shape: models are compared whole")
    for name in ("models", "text_file"):
        if FLAGS.shape and FLAGS[name].present and FLAGS[name].value:
            raise ValueError(f"--{name} and --shape do not go together: a shape's layouts are made anew and have no quality")
    if not FLAGS.shape and not all(FLAGS.models or [""]):
        raise ValueError(f"--models={','.join(FLAGS.models)}: name one or more, separated by commas")
    for name in ("models", "num_kv_heads", "page_size", "kv_dtype", "batch", "context"):
        given = FLAGS[name].value or []
        if len(set(given)) < len(given):
            raise ValueError(f"--{name}={','.join(map(str, given))} names one twice")
    if unknown := [kind for kind in FLAGS.kv_dtype if kind not in _script.KV_DTYPES]:
        raise ValueError(f"--kv_dtype={unknown[0]} is not one of {', '.join(_script.KV_DTYPES)}")


def _measure(text: str | None, others: list[dict[str, Any]] | None, terminal) -> dict[str, Any]:
    """Everything of a run, `against` others where there are."""
    import jax

    from jaxkv.io.cache import use_compilation_cache
    from jaxkv.research import layout_report
    from jaxkv.research import layouts as study
    from jaxkv.research.traffic import Reader

    use_compilation_cache()
    layouts, whole_layers = _layouts(terminal)
    cases = study.cases_of(FLAGS.page_size or [], FLAGS.kv_dtype, FLAGS.batch, FLAGS.context)
    if others is not None:
        layout_report.in_common(study.on_paper(layouts, cases), others)  # raises where nothing could be compared
    reader = Reader(_script.num_cores())
    model = layouts[0].model
    result = {
        "backend": f"{model.storage.platform}, {_script.num_cores()} cores, jax {jax.__version__}",
        "weights": model.storage.weights,
        "num_layers": model.config.num_layers,
        "whole_layers": whole_layers,
    }
    result |= study.measure(layouts, cases, reader.gb_s, repeats=FLAGS.repeats, new_tokens=FLAGS.new_tokens, report=terminal)
    if others is not None:
        result["against"] = {"file": FLAGS.against} | layout_report.compare_runs(result["rows"], others)
    if text is not None:
        result |= {"text": Path(FLAGS.text_file).name, "quality": study.quality(layouts, FLAGS.kv_dtype, text, terminal)}
    return result


def _layouts(terminal) -> tuple[list, int]:
    """(the layouts, layers of the whole model)."""
    import jaxkv
    from jaxkv.loading import choose_storage
    from jaxkv.research.layouts import Layout
    from jaxkv.research.random_models import random_models

    if FLAGS.shape:
        terminal(f"making random weights of {FLAGS.shape}")
        models, whole = random_models(FLAGS.shape, FLAGS.num_kv_heads, choose_storage(None, FLAGS.weights), FLAGS.num_layers)
        return [Layout(f"{FLAGS.shape}, K {m.config.num_kv_heads}", m) for m in models], whole
    models = [jaxkv.load_model(name, weights=FLAGS.weights, report=terminal) for name in FLAGS.models]
    return [Layout(name, m) for name, m in zip(FLAGS.models, models, strict=True)], models[0].config.num_layers


def _write(folder: Path, result: dict[str, Any]) -> None:
    from jaxkv.research import layout_report

    (folder / "layouts.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / "layouts.md").write_text(layout_report.describe(result) + "\n", encoding="utf-8")
    layout_report.draw(folder / "layouts.png", result)


if __name__ == "__main__":
    _script.run(main)
