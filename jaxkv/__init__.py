"""jaxkv: a JAX/Pallas inference engine whose KV cache is an explicit, immutable, paged value.

    model = jaxkv.load_model("gemma-3-270m")
    state = jaxkv.init_state(model, num_slots=1, max_tokens_per_slot=1024)
    state, output = jaxkv.generate(state, [model.tokenizer.encode("The capital of France is")])

Every verb takes a state and returns its successor; the state it was given is spent.
"""

from jaxkv.generate import generate, warmup
from jaxkv.loading import Model, load_model, save_checkpoint
from jaxkv.output import Output, TextEvent, Timings, TokenLogprobs
from jaxkv.sampling import Sampling
from jaxkv.serving.engine import Engine
from jaxkv.serving.engine_config import EngineConfig
from jaxkv.serving.request import Event, Request, RequestRefused, Result, Usage
from jaxkv.state import StaleStateError, State, check_integrity, init_state, release, truncate
from jaxkv.steps import trace_counts
from jaxkv.stream import Stream
from jaxkv.verbs import decode, fork, prefill, score

__all__ = [
    "Engine",
    "EngineConfig",
    "Event",
    "Model",
    "Output",
    "Request",
    "RequestRefused",
    "Result",
    "Sampling",
    "StaleStateError",
    "State",
    "Stream",
    "TextEvent",
    "Timings",
    "TokenLogprobs",
    "Usage",
    "check_integrity",
    "decode",
    "fork",
    "generate",
    "init_state",
    "load_model",
    "prefill",
    "release",
    "save_checkpoint",
    "score",
    "trace_counts",
    "truncate",
    "warmup",
]
