"""One run from weights to a folder: train, measure, store, draw."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.io import checkpoint
from jaxkv.io.cache import atomic_write
from jaxkv.io.generation import GenerationDefaults
from jaxkv.progress import Report, silent
from jaxkv.research.byte_tokenizer import byte_tokenizer
from jaxkv.research.plot import draw_losses
from jaxkv.research.text import Text
from jaxkv.research.train import OnStep, Progress, Recipe, begin, evaluate, latest, train, unheard
from jaxkv.research.weights import Weights, for_storage

RECIPE_FLAGS = tuple(field.name for field in dataclasses.fields(Recipe) if field.name not in ("weight_decay", "clip"))
# Greedy text of a small model goes in circles; drawn at this temperature it wanders like the text it learned.
_SAMPLING = GenerationDefaults(do_sample=True, temperature=0.7, top_p=0.95)


def run(
    config: ModelConfig, weights: Weights, given: dict[str, Any], text: Text, output: Path,
    *, eval_context: int = 1024, resume: bool = False, save_every: int = 0, stop_after: int | None = None, plot: bool = True,
    report: Report = silent, on_step: OnStep = unheard,
) -> dict[str, Any]:  # fmt: skip
    """Trains weights as the recipe of `given` says and returns the figures; `output` gets state/, model/, history.json, loss.png.

    Args:
      given: fields of `Recipe`.
      resume: go on with what `output` holds of this run; else nothing may be there.
      stop_after: steps done after which to stop early; model/ is then not written.

    Raises:
      ValueError: what `output` holds is of another run.
    """
    recipe = Recipe(**given)
    start = (latest(output / "state", config, recipe, text) if resume else None) or begin(recipe, weights)
    report("measuring the held-out text", None)
    before = evaluate(config, weights, text, eval_context, recipe.dtype)
    stop = lambda step: stop_after is not None and step >= stop_after
    end = train(config, recipe, text, start, folder=output / "state", save_every=save_every, stop=stop, on_step=on_step)
    report("measuring the held-out text", None)
    figures = _figures(config, recipe, end) | {
        "bits_per_byte_before": before,
        "bits_per_byte": evaluate(config, end.weights, text, eval_context, recipe.dtype),
        "eval_context": eval_context,
        "held_out_bytes": int(text.held_out.size),
        "text_sha256": text.sha256,
    }
    if end.step == recipe.steps and not (output / "model").exists():
        checkpoint.write_portable(output / "model", config, _SAMPLING, for_storage(end.weights), byte_tokenizer())
    history = figures | {"recipe": dataclasses.asdict(recipe), "losses_nats": [round(float(x), 5) for x in end.losses]}
    with atomic_write(output / "history.json") as out:
        out.write(json.dumps(history).encode())
    if plot:
        told = f"{config.num_q_heads} query heads, {config.num_kv_heads} KV heads"
        draw_losses(output / "loss.png", end.losses, {0: before, end.step: figures["bits_per_byte"]}, told)
    return figures


def _figures(config: ModelConfig, recipe: Recipe, end: Progress) -> dict[str, Any]:
    return {
        "parameters": sum(array.size for array in end.weights.values()),
        "num_q_heads": config.num_q_heads,
        "num_kv_heads": config.num_kv_heads,
        "steps": recipe.steps,
        "steps_done": end.step,
        "tokens": sum(math.prod(recipe.shape(i)) for i in range(end.step)),
        "final_loss_nats": float(end.losses[-50:].mean()) if end.step else None,
    }
