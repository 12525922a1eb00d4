"""Measures what a KV dtype costs in quality: the mean negative log-likelihood of a
text, or of several, when keys and values are stored in it, against the first of
--kv_dtypes; and with --recall whether facts are still found in it.

The text runs through the model in chunks of --chunk_size tokens, so that every token
but a chunk's own reads keys and values as they are stored. Beside the means it shows
the mean absolute difference of the tokens' log-likelihoods, and the mean of these, in
--bins equal spans of positions, or in every text of --texts_file: an error that grew
with length would show there. --plot draws it.

--recall plants facts ("The secret number of Lisbon is 4711.") at --depths of the text,
cut to each of --contexts, asks for each behind it, and tells the log-probability of the
right answers and how many greedy decoding would give.

  python scripts/kv_quality.py --text_file tests/data/kjv_genesis.txt
  python scripts/kv_quality.py --text_file a.txt --kv_dtypes float32,int8 --json
  python scripts/kv_quality.py --texts_file tests/data/gemma-3-270m.handed.json
  python scripts/kv_quality.py --text_file tests/data/kjv_genesis.txt --recall
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags  # noqa: E402

from scripts import _script  # noqa: E402

FLAGS = flags.FLAGS
# Flags that only the one or the other kind of measurement reads.
_OF_LIKELIHOOD, _OF_RECALL = ("max_tokens", "chunk_size", "bins"), ("contexts", "depths", "trials")


class _Percents(flags.ArgumentParser):
    """Parses whole numbers from 0 to 100, separated by commas, into a list."""

    def parse(self, argument) -> list[int]:
        """The list; ValueError names the part that is no such number."""
        parts = argument if isinstance(argument, list) else argument.split(",")
        for part in parts:
            if not str(part).strip().isdecimal() or int(part) > 100:
                raise ValueError(f"{str(part).strip()!r} is not a whole number from 0 to 100: write 50 or 0,50,100")
        return [int(part) for part in parts]

    def flag_type(self) -> str:
        return "integers"


flags.DEFINE_string(
    "model", None, "A known name, a Hugging Face folder, a .gguf file or a jaxkv checkpoint; without it the default."
)
flags.DEFINE_string("text_file", None, "The text, UTF-8.")
flags.DEFINE_string(
    "texts_file", None, 'Instead of --text_file: JSON, [{"text": ..}, ..]; each starts with empty KV and is a span.'
)
flags.DEFINE_list("kv_dtypes", "float32,bfloat16,int8,float8_e4m3fn", "What to store keys and values in; the first is the base.")
flags.DEFINE_integer("max_tokens", 4000, "Tokens of a text that count.", lower_bound=2)
flags.DEFINE_integer("chunk_size", 64, "Tokens a chunk.", lower_bound=1)
flags.DEFINE_integer("bins", 8, "Spans of positions.", lower_bound=1)
flags.DEFINE_bool("recall", False, "Ask for facts planted in --text_file, instead of its likelihood.")
flags.DEFINE(_script.Integers(), "contexts", "500,1000,2000,4000", "Tokens of the texts of --recall.")
flags.DEFINE(_Percents(), "depths", "10,30,50,70,90", "Where the facts stand, in percent of the text: 0 before it, 100 behind it.")
flags.DEFINE_integer("trials", 8, "Texts of each length, with other places and numbers.", lower_bound=1)
flags.DEFINE_enum("weights", "float32", _script.WEIGHTS, "How weights are stored.")
flags.DEFINE_string("plot", None, "PNG file to draw the error against the position into; needs matplotlib.")
flags.DEFINE_bool("json", False, "One JSON object on stdout instead of the table.")


def main(terminal) -> None:
    """Scores the texts once for each dtype, or asks for the facts, and prints what came out."""
    _check_flags()
    texts = _texts()
    terminal("importing jax")
    if FLAGS.plot:
        from jaxkv.research.plot import pyplot

        pyplot("--plot")  # better told now than after minutes
    import jaxkv
    from jaxkv.io.cache import use_compilation_cache
    from jaxkv.io.resolve import default_model

    use_compilation_cache()
    FLAGS["model"].value = FLAGS.model or default_model()
    model = jaxkv.load_model(FLAGS.model, weights=FLAGS.weights, report=terminal)
    if model.tokenizer is None:
        raise ValueError(f"--model={FLAGS.model} has no tokenizer to read a text with")
    (_recall if FLAGS.recall else _likelihood)(model, texts, terminal)


def _check_flags() -> None:
    """Refuses what is missing or unknown, and what would change nothing."""
    if FLAGS.texts_file and (FLAGS.plot or FLAGS.recall):
        raise ValueError("--plot and --recall are of one text: name it with --text_file")
    for name in _OF_LIKELIHOOD if FLAGS.recall else _OF_RECALL:
        if FLAGS[name].present:
            raise ValueError(f"--{name} does nothing {'with' if FLAGS.recall else 'without'} --recall: leave it out")
    if FLAGS.texts_file and FLAGS["bins"].present:
        raise ValueError("--bins are of one text: with --texts_file every text is a span")
    if not FLAGS.kv_dtypes:
        raise ValueError(f"--kv_dtypes= names none: give one or more of {', '.join(_script.KV_DTYPES)}")
    if unknown := [kind for kind in FLAGS.kv_dtypes if kind not in _script.KV_DTYPES]:
        raise ValueError(f"--kv_dtypes={unknown[0]} is not one of {', '.join(_script.KV_DTYPES)}")
    _script.check_file("plot")


def _likelihood(model, texts: list[str], terminal) -> None:
    import numpy as np

    from jaxkv.research.quality import token_losses
    from jaxkv.research.traffic import stored_kv_bytes_per_token
    from jaxkv.state import init_state

    tokens = [np.asarray(model.tokenizer.encode(text))[: FLAGS.max_tokens] for text in texts]
    for i, row in enumerate(tokens):
        if len(row) < 2:
            raise ValueError(f"a likelihood needs two tokens: text {i} of {FLAGS.text_file or FLAGS.texts_file} has {len(row)}")
    losses, pool_bytes = {}, {}
    for i, kv_dtype in enumerate(FLAGS.kv_dtypes):
        terminal(f"scoring with KV in {kv_dtype}", i / len(FLAGS.kv_dtypes))
        losses[kv_dtype] = np.concatenate([token_losses(model, [row], kv_dtype, FLAGS.chunk_size)[0] for row in tokens])
        pool_bytes[kv_dtype] = stored_kv_bytes_per_token(init_state(model, 1, 1, kv_dtype=kv_dtype).kv)
    terminal.done()
    base = losses[FLAGS.kv_dtypes[0]]
    ends = np.cumsum([len(row) - 1 for row in tokens])[:-1] if FLAGS.texts_file else FLAGS.bins
    rows = [_row(name, loss, base, pool_bytes[name], ends) for name, loss in losses.items()]
    num_tokens = sum(map(len, tokens))
    if FLAGS.plot:
        _plot(losses)
    if FLAGS.json:
        text_file = FLAGS.text_file or FLAGS.texts_file
        print(json.dumps({"model": FLAGS.model, "text_file": text_file, "tokens": num_tokens, "kv_dtypes": rows}))
    else:
        _print_table(rows, num_tokens)


def _recall(model, texts: list[str], terminal) -> None:
    from jaxkv.research import recall

    depths = [depth / 100 for depth in FLAGS.depths]
    rows = recall.measure(model, texts[0], FLAGS.kv_dtypes, FLAGS.contexts, depths, FLAGS.trials, terminal)
    terminal.done()
    if FLAGS.plot:
        recall.draw(FLAGS.plot, rows)
    if FLAGS.json:
        print(json.dumps({"model": FLAGS.model, "text_file": FLAGS.text_file, "recall": rows}))
    else:
        print(recall.describe(rows))


def _texts() -> list[str]:
    if bool(FLAGS.text_file) == bool(FLAGS.texts_file):
        raise ValueError("--text_file or --texts_file names what to score")
    if FLAGS.text_file:
        return [Path(FLAGS.text_file).read_text(encoding="utf-8")]
    raw = Path(FLAGS.texts_file).read_text(encoding="utf-8")
    try:
        texts = [row["text"] for row in json.loads(raw)]
    except (ValueError, TypeError, KeyError):
        texts = []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'--texts_file={FLAGS.texts_file} must be JSON of the form [{{"text": "In the beginning .."}}, ..]')
    return texts


def _row(name: str, loss, base, bytes_per_token: float, ends) -> dict:
    import numpy as np

    by_span = lambda values: [float(span.mean()) for span in np.array_split(values, ends) if span.size]
    return {
        "kv_dtype": name,
        "kv_bytes_per_token": bytes_per_token,
        "mean_nll": float(loss.mean()),
        "relative_to_first": float(loss.mean() / base.mean() - 1),
        "mean_nll_by_span": by_span(loss),
        "mean_abs_difference_by_span": by_span(np.abs(loss - base)),
    }


def _print_table(rows: list[dict], num_tokens: int) -> None:
    by = "text" if FLAGS.texts_file else "position"
    spans = lambda row, key: " ".join(f"{x:.4f}" for x in row[key])
    print(f"{num_tokens} tokens; differences of the log-likelihood to {rows[0]['kv_dtype']}, by {by}\n")
    print(f"{'KV':16}{'bytes/token':>12}{'mean NLL':>10}{'change':>10}   mean absolute difference, first to last span")
    for row in rows:
        change = f"{row['relative_to_first']:+.3%}"
        start = f"{row['kv_dtype']:16}{row['kv_bytes_per_token']:12,.0f}{row['mean_nll']:10.4f}{change:>10}"
        print(f"{start}   {spans(row, 'mean_abs_difference_by_span')}")
    print(f"\n{'KV':16}mean NLL, first to last span")
    for row in rows:
        print(f"{row['kv_dtype']:16}{spans(row, 'mean_nll_by_span')}")


def _plot(losses: dict) -> None:
    import numpy as np

    from jaxkv.research.plot import pyplot

    plt = pyplot("--plot")
    base = losses[FLAGS.kv_dtypes[0]]
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name in FLAGS.kv_dtypes[1:]:
        spans = np.array_split(np.abs(losses[name] - base), 4 * FLAGS.bins)
        centres = np.cumsum([span.size for span in spans]) - [span.size / 2 for span in spans]
        axes.plot(centres, [span.mean() for span in spans], marker=".", label=name)
    axes.set(xlabel="position (tokens)", ylabel=f"mean |NLL difference| to {FLAGS.kv_dtypes[0]}", yscale="log")
    axes.legend()
    figure.savefig(FLAGS.plot, dpi=120)


if __name__ == "__main__":
    _script.run(main)
