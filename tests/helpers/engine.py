"""Small models, states and a fake tokenizer for tests of the whole engine, and what `score` says a state should do.

Compiling is what these tests cost, so nearly all of them use one model shape and one state shape (`new_state`).
"""

from pathlib import Path

import jax
import numpy as np

import jaxkv
from jaxkv.config import ModelConfig, RopeConfig
from jaxkv.io.detokenize import DecodeStream, decode
from jaxkv.io.generation import GenerationDefaults
from jaxkv.loading import Model
from jaxkv.model.params import Storage, init_params

HF_TINY = Path(__file__).parents[1] / "data" / "hf_tiny"

V = 130
B, P = 4, 8  # slots, tokens a page
S = 96  # tokens a slot
C = 33  # pages, the null page included: fewer than B * S / P, so that a pool can be full
SMALL = 13  # pages of an engine's small pool: the longest text fits alone
WINDOW = 20  # of layer 0; layer 1 sees all
ATOL = 2e-4


def tiny_config(**changes) -> ModelConfig:
    """Two layers, one with a window, GQA, untied: its greedy text does not repeat one token."""
    given = dict(
        architecture="llama",
        vocab_size=V,
        model_dim=64,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_dim=96,
        max_positions=512,
        query_scale=0.25,
        layer_windows=(WINDOW, 0),
        layer_ropes=(0, 0),
        ropes=(RopeConfig(),),
    )
    return ModelConfig(**(given | changes))


MOE = dict(moe_layers=(False, True), num_experts=4, experts_per_token=2, expert_mlp_dim=32)


def make_model(config=None, weights="float32", seed=0, tokenizer=None, eos=(), platform=None) -> Model:
    """A random model, the same for the same arguments."""
    dtype = "float32" if weights == "float32" else "bfloat16"
    storage = Storage(weights=weights, dtype=dtype, platform=platform or jax.default_backend())
    config = config or tiny_config()
    return Model(config, init_params(config, jax.random.key(seed), storage), storage, tokenizer, GenerationDefaults(eos))


def new_state(model, **changes) -> jaxkv.State:
    """An empty state of the one shape."""
    return jaxkv.init_state(model, **(dict(num_slots=B, max_tokens_per_slot=S, page_size=P, num_pages=C, seed=7) | changes))


def new_engine(model, clock=None, **changes) -> jaxkv.Engine:
    """An engine of the one shape, with the pool that all its slots can fill."""
    config = jaxkv.EngineConfig(**(dict(num_slots=B, max_tokens_per_slot=S, page_size=P) | changes))
    return jaxkv.Engine(model, config, **({} if clock is None else {"clock": clock}))


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens, the same for the same arguments."""
    return np.random.default_rng((seed, length)).integers(0, V, length).tolist()


def oracle(model, tokens) -> np.ndarray:
    """Logits f32[len(tokens), V] without a cache. One trace a model: every text is padded to S."""
    padded = np.zeros((1, S), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(jaxkv.score(model, padded, np.array([len(tokens)])))[0, : len(tokens)]


def greedy(model, tokens, count: int) -> list[int]:
    """The next `count` greedy tokens, each from a forward pass over the whole history."""
    history = list(tokens)
    for _ in range(count):
        history.append(int(oracle(model, history)[-1].argmax()))
    return history[len(tokens) :]


def tokens_of(output) -> list[list[int]]:
    """The tokens of each sequence of an Output."""
    return [t.tolist() for t in output.tokens]


def log_softmax(x):
    """In float64."""
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_all_pages_return(state) -> None:
    """Releases every slot, one after the other, and checks that the pool is empty then."""
    for row in range(state.num_slots):
        state = jaxkv.release(state, [row])
        jaxkv.check_integrity(state)
    assert not state.kv.refcounts.any()
    assert not state.num_tokens.any()


class FakeTokenizer:
    """Token t is the bytes spelled[t], or two letters; like `jaxkv.io.tokenizer.Tokenizer` as far as generate looks."""

    strip_first_space = False
    eos_token_ids: tuple[int, ...] = ()
    revision = "fake"

    def __init__(self, spelled: dict[int, bytes] | None = None, special=()):
        self._spelled, self._special = spelled or {}, special

    def token_bytes(self, token: int) -> bytes:
        return self._spelled.get(token, b"%c%c" % (97 + token // 12, 97 + token % 12))

    def is_special(self, token: int) -> bool:
        return token in self._special

    def stream(self, prompt_ids=()) -> DecodeStream:
        return DecodeStream(self, [int(i) for i in prompt_ids])

    def decode(self, ids) -> str:
        return decode(self, [int(i) for i in ids])


def restores_pay(engine: jaxkv.Engine) -> None:
    """Bringing pages back from a tier is faster than computing them, whatever else this machine does."""
    engine._restores.recompute_s_per_token = 10.0
    engine.scheduler._measure = lambda *measured: None


def wait_for_stores(engine: jaxkv.Engine) -> None:
    """Waits until the tiers have what they were given."""
    for lane in engine._tiers._lanes.values():
        lane.stores.submit(lambda: None).result()
