"""Capacity on paper: how many sequences of what length fit on which chips, and how fast they can be at best.

    d = Deployment(model_shape("llama-3.1-8b"), chip("h100"), context=8192)
    max_sequences(d), max_sequences(d, 131_072), decode_step(d, 32).seconds
    capacity_plan(d).write("plan.yaml")  # the plan the serving engine admits by

Nothing here touches a device. The core does not import this; the serving engine takes `CapacityPlan` from it.
"""

from jaxkv.planning.deployment import Deployment
from jaxkv.planning.devices import CHIPS, Chip, chip
from jaxkv.planning.engine_plan import capacity_plan
from jaxkv.planning.figures import Costs, figures
from jaxkv.planning.knobs import Knob, knobs
from jaxkv.planning.memory import device_memory, fits, max_context, max_sequences
from jaxkv.planning.plan import CapacityPlan, PlanError
from jaxkv.planning.presets import MLA_PRESETS, MODELS, PRESETS, model_shape
from jaxkv.planning.roofline import decode_step, prefill_seconds
from jaxkv.planning.shapes import ModelShape, shape_of

__all__ = [
    "CHIPS",
    "MLA_PRESETS",
    "MODELS",
    "PRESETS",
    "CapacityPlan",
    "Chip",
    "Costs",
    "Deployment",
    "Knob",
    "ModelShape",
    "PlanError",
    "capacity_plan",
    "chip",
    "decode_step",
    "device_memory",
    "figures",
    "fits",
    "knobs",
    "max_context",
    "max_sequences",
    "model_shape",
    "prefill_seconds",
    "shape_of",
]
