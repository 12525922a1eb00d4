"""Training: the engine's decoder without cache, AdamW, checkpoints that a killed run goes on from as if nothing had happened.

What a step reads follows from the recipe's seed and the step's number alone (`text.batch`), so the position in the data is the number
of steps done. A checkpoint holds weights, optimizer state and the losses so far; everything is f32 and every step is the same compiled
program, and so a resumed run ends with the very bits of one that was never stopped.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxkv.config import ModelConfig
from jaxkv.io import checkpoint
from jaxkv.research.text import Text, batch, rows_of
from jaxkv.research.weights import Weights, mean_loss

_STATE = "train.json"
_EVALUATED_BYTES = 8192  # a dispatch: bounds the logits
# As in steps.py: XLA:CPU uses half of the vector registers' width unless told.
_COMPILER_OPTIONS = {"cpu": {"xla_cpu_prefer_vector_width": 512}}

# (steps done, of how many, the last one's loss in nats a token)
OnStep = Callable[[int, int, float], None]


def unheard(done: int, steps: int, loss: float) -> None:
    """Tells nobody."""
    del done, steps, loss


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained. Learning rates rise over `warmup` steps and then fall to a tenth along a cosine.

    A step reads `batch_tokens` tokens in rows of `context`, or one row where that is longer; every `long_every`th (0: none) does so with
    `long_context`, so that the model knows longer texts too at little cost.
    """

    steps: int
    batch_tokens: int = 4096
    context: int = 256
    long_context: int = 0
    long_every: int = 0
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0  # of the gradient's norm
    seed: int = 0
    dtype: str = "float32"  # of the operands of products

    def __post_init__(self):
        for name in ("steps", "batch_tokens", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if bool(self.long_every) != bool(self.long_context):
            raise ValueError(f"long_context={self.long_context} and long_every={self.long_every} go together")

    def shape(self, step: int) -> tuple[int, int]:
        """(rows, tokens of a row) of a step."""
        is_long = self.long_every and step % self.long_every == self.long_every - 1
        length = self.long_context if is_long else self.context
        return max(1, self.batch_tokens // length), length

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW on clipped gradients; vectors (norms, biases) do not decay."""
        peak, warmup = self.learning_rate, min(self.warmup, self.steps)
        rate = optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, max(self.steps, warmup + 1), peak / 10)
        matrices = lambda weights: {name: not name.endswith(("norm", "bias")) for name in weights}
        adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=self.weight_decay, mask=matrices)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """A run after some steps; `losses` f32[steps done] in nats a token."""

    weights: Weights
    optimizer: Any
    losses: np.ndarray

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)


def begin(recipe: Recipe, weights: Weights) -> Progress:
    """A run that has done nothing yet, from weights that stay the caller's."""
    return Progress(jax.tree.map(jnp.array, weights), recipe.optimizer.init(weights), np.zeros(0, np.float32))


def train(
    config: ModelConfig, recipe: Recipe, text: Text, progress: Progress,
    *, folder: Path | None = None, save_every: int = 0, stop: Callable[[int], bool] = lambda step: False, on_step: OnStep = unheard,
) -> Progress:  # fmt: skip
    """Runs the steps that are left and returns where it ended; `progress` is spent.

    Args:
      folder: where checkpoints go, every `save_every` steps (0: none) and when it stops.
      stop: called with the number of steps done; True ends the run there.
      on_step: called after each step.

    Raises:
      ValueError: a loss is no longer finite.
    """
    step = _step(config, recipe)
    weights, optimizer, losses = progress.weights, progress.optimizer, list(progress.losses)
    now = lambda: Progress(weights, optimizer, np.asarray(losses, np.float32))
    while len(losses) < recipe.steps and not stop(len(losses)):
        rows, length = recipe.shape(len(losses))
        tokens = batch(text, recipe.seed, len(losses), rows, length + 1)
        weights, optimizer, loss = step(weights, optimizer, tokens)
        losses.append(np.float32(loss))
        if not math.isfinite(losses[-1]):
            raise ValueError(f"the loss of step {len(losses)} is {losses[-1]}: lower the learning rate")
        on_step(len(losses), recipe.steps, float(losses[-1]))
        if folder and save_every and len(losses) % save_every == 0:
            save(folder, config, recipe, text, now())
    if folder:
        save(folder, config, recipe, text, now())
    return now()


def evaluate(config: ModelConfig, weights: Weights, text: Text, context: int, dtype: str = "float32") -> float:
    """Bits per byte of the held-out text, read in rows of `context` bytes, each alone; a row's first byte is given."""
    rows = rows_of(text.held_out, context)
    size = max(1, _EVALUATED_BYTES // rows.shape[1])
    loss = _loss(config, dtype)
    total = 0.0
    for start in range(0, len(rows), size):
        some = rows[start : start + size].astype(np.int32)
        total += float(loss(weights, some)) * len(some)
    return total / len(rows) / math.log(2)


def save(folder: Path, config: ModelConfig, recipe: Recipe, text: Text, progress: Progress) -> None:
    """Keeps `progress` in `folder`; the checkpoint before goes only when this one is whole."""
    target = folder / f"step-{progress.step:08d}"
    if target.exists():
        return
    arrays = {
        "weights": progress.weights,
        "optimizer": {f"{i:04d}": leaf for i, leaf in enumerate(jax.tree.leaves(progress.optimizer))},
        "losses": progress.losses if progress.step else np.zeros(1, np.float32),  # Orbax stores no empty array
    }
    checkpoint.write_arrays(target, _STATE, _identity(config, recipe, text) | {"step": progress.step}, arrays)
    for other in _saved(folder):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)


def latest(folder: Path, config: ModelConfig, recipe: Recipe, text: Text) -> Progress | None:
    """The latest checkpoint of this very run in `folder`, or None.

    Raises:
      ValueError: it is of another run; says what differs.
    """
    saved = _saved(folder)
    if not saved:
        return None
    description, arrays = checkpoint.read_arrays(saved[-1], _STATE)
    if differing := _differences(description, _identity(config, recipe, text)):
        raise ValueError(f"{saved[-1]} is of another run ({differing}): give the same flags, or another folder")
    weights = {name: jnp.asarray(array) for name, array in arrays["weights"].items()}
    shape = jax.tree.structure(jax.eval_shape(recipe.optimizer.init, weights))
    leaves = [jnp.asarray(array) for _, array in sorted(arrays["optimizer"].items())]
    return Progress(weights, jax.tree.unflatten(shape, leaves), arrays["losses"][: description["step"]])


def _identity(config: ModelConfig, recipe: Recipe, text: Text) -> dict:
    """What makes a run this one, in the form JSON gives back."""
    identity = {"config": dataclasses.asdict(config), "recipe": dataclasses.asdict(recipe), "text_sha256": text.sha256}
    return json.loads(json.dumps(identity))


def _differences(there: dict, here: dict) -> str:
    """What of `here` is not so `there`, in words; "" where all is."""
    told = []
    for key, wanted in here.items():
        found = there.get(key)
        if isinstance(wanted, dict) and isinstance(found, dict):
            told += [f"{k}={found.get(k)!r} there, {v!r} here" for k, v in wanted.items() if found.get(k) != v]
        elif found != wanted:
            told.append(f"another {key}")
    return "; ".join(told)


def _saved(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).is_file())


def _jit(function, **options):
    return jax.jit(function, compiler_options=_COMPILER_OPTIONS.get(jax.default_backend()), **options)


def _step(config: ModelConfig, recipe: Recipe):
    """(weights, optimizer, tokens i32[B, T + 1]) -> the same after a step, and the loss before it; the first two are donated."""
    optimizer = recipe.optimizer

    def step(weights, state, tokens):
        loss, gradients = jax.value_and_grad(lambda w: mean_loss(config, w, tokens, recipe.dtype))(weights)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    return _jit(step, donate_argnums=(0, 1))


def _loss(config: ModelConfig, dtype: str):
    return _jit(partial(mean_loss, config, dtype=dtype))
