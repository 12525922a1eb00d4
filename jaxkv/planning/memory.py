"""What fits: a device's memory divided, the pages of a sequence, and the two questions asked of them.

    kv bytes = 2 * L * K * H * bytes per element * tokens        the formula; K are kv heads, not query heads
    stored   = pages * bytes of a page on a device               what it takes: whole pages, padded lanes, scales, copies of heads

Everything is an exact count of bytes on one jax device, except activations, which are an estimate unless measured.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from jaxkv.buckets import CHUNK_TOKENS
from jaxkv.io.source import expected_shapes
from jaxkv.planning.deployment import Deployment
from jaxkv.planning.shapes import KV_BYTES, WEIGHT_BYTES, ModelShape
from jaxkv.planning.units import GIB
from pallas_kernels.heads import LANES, pool_heads, scales_shape

# Of the new keys and values in f32, on a GPU. Llama 3.1 8B, 2,048 tokens of prompts, by the compiler of jax 0.10.2: temporaries of
# 1.96 GiB on an H200, four times the 0.50 GiB of its 32 layers (69 MB for each of few layers, so that the widest layer comes on top).
_GPU_NEW_KV_COPIES = 4
_SAMPLING_PASSES = 10  # [rows, vocabulary] arrays in f32 or i32 of a decode step, logits among them
_INT8_GROUP = 32  # int8 columns that share a scale on CPU
UNBOUNDED = 1 << 40  # the answer where memory sets no limit, as where every layer forgets what is behind its window


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """One jax device's memory in bytes: the parts add up to `memory_bytes`, and a negative `kv_budget_bytes` means they do not fit."""

    memory_bytes: int
    weights_bytes: int
    activations_bytes: int
    runtime_bytes: int  # what memory_fraction leaves to the runtime and to fragmentation, and the null page
    kv_budget_bytes: int


def device_memory(d: Deployment, sequences: int | None = None) -> DeviceMemory:
    """Returns how the memory of each device is divided with so many sequences on all replicas: without a number, those it holds."""
    memory = d.chip.memory_bytes // d.chip.devices_per_chip
    runtime = memory - int(memory * d.memory_fraction) + null_pages_bytes(d)
    weights, activations = weights_bytes(d), activations_bytes(d, _each(d, sequences or held_sequences(d)))
    return DeviceMemory(memory, weights, activations, runtime, memory - weights - activations - runtime)


def weights_bytes(d: Deployment) -> int:
    """Returns the weights of one device. The projections to keys and values are copied where their heads are."""
    copies = d.model.kv_params * (d.kv_copies - 1) * _bytes_a_weight(d.weights, d.chip.platform, d.model.model_dim)
    return round((stored_weights_bytes(d.model, d.weights, d.chip.platform) + copies) / d.tp)


@functools.cache
def stored_weights_bytes(model: ModelShape, weights: str, platform: str) -> int:
    """Returns the bytes of one copy of all weights as they are kept on a platform (jaxkv/model/params.py).

    Norms, biases and a mixture's router stay in f32. int8 rows have a scale in f32, on CPU one for every 32 columns; and on CPU,
    16-bit and int8 weights other than experts have a second form in bf16.
    """
    if model.config is None:
        return round(model.num_params * bytes_read_a_weight(weights, platform, model.model_dim))
    total = 0.0
    for (name, _), shape in expected_shapes(model.config).items():
        size = math.prod(shape)
        if len(shape) == 1 or name == "router":
            total += 4 * size
        else:
            total += size * _bytes_a_weight(weights, platform, shape[-1], is_expert=name.startswith("experts"))
    return round(total)


def bytes_read_a_weight(weights: str, platform: str, columns: int) -> float:
    """Returns what reading one weight of a matrix with rows of so many columns costs a step, its part of the row's scales included."""
    group = _INT8_GROUP if platform == "cpu" and columns % _INT8_GROUP == 0 else columns
    return WEIGHT_BYTES[weights] + (4 / group if weights == "int8" else 0)


def _bytes_a_weight(weights: str, platform: str, columns: int, is_expert: bool = False) -> float:
    """Returns what it takes to keep one, in every form."""
    has_second = platform == "cpu" and weights != "float32" and not is_expert
    return bytes_read_a_weight(weights, platform, columns) + (2 if has_second else 0)


def activations_bytes(d: Deployment, rows: int) -> int:
    """Returns the working set of a device, given or estimated: of a prefill of `step_tokens` or a decode step of `rows` sequences
    of a replica, whichever needs more.
    """
    if d.activations_gib is not None:
        return round(d.activations_gib * GIB)
    prompts = -(-d.step_tokens // CHUNK_TOKENS)
    return max(step_bytes(d, prompts, -(-d.step_tokens // prompts)), step_bytes(d, rows, 1))


def step_bytes(d: Deployment, rows: int, new_tokens: int) -> int:
    """Returns an estimate of what a step of `rows` sequences with `new_tokens` each needs besides its arguments.

    It counts what the compilers were seen to keep (`--audit`, docs/planning.md):
      the new keys and values of all layers in f32: on a GPU four times, because every layer hands out its own, and these, their
      concatenation and what the scatter takes are alive together;
      the widest layer: the residual stream in f32 and as an operand, with both halves of a gated MLP in f32 and their product as an
      operand, or the same of attention;
      logits in f32, and sampling's passes over them.
    """
    m, T = d.model, rows * new_tokens
    operand = 4 if d.weights == "float32" else 2
    queries = m.num_q_heads * m.head_dim // d.tp
    kv = m.kv_elements_per_token_and_layer if m.latent else 2 * d.kv_heads_per_device * m.head_dim
    new_kv = 4 * T * m.num_layers * kv
    gated = (2 * 4 + operand) * (m.mlp_width // d.tp)
    attention = (2 * 4 + operand) * queries + 4 * kv
    layer = T * (max(gated, attention) + (2 * 4 + operand) * m.model_dim)
    logits = (_SAMPLING_PASSES if new_tokens == 1 else 2) * 4 * rows * m.vocab_size // d.tp
    return new_kv * (1 if d.chip.platform == "tpu" else _GPU_NEW_KV_COPIES) + layer + logits


def layer_page_bytes(d: Deployment) -> int:
    """Returns the bytes of one page of one layer on one device, in the form the kernels store it."""
    size = KV_BYTES[d.kv_dtype]
    if d.model.latent:  # one vector for keys and values, on every device
        lanes = LANES if d.chip.platform == "tpu" else 1
        width = -(-d.model.kv_elements_per_token_and_layer // lanes) * lanes
        return d.P * width * size + (4 * d.P if size == 1 else 0)
    heads, dim = pool_heads(d.kv_heads_per_device, d.model.head_dim, d.chip.platform)
    _, two, rows, lanes = scales_shape(1, heads, d.P)
    return 2 * heads * d.P * dim * size + (4 * two * rows * lanes if size == 1 else 0)


def unpadded_page(d: Deployment) -> int:
    """Returns the fewest tokens of a page whose 8-bit scales fill their rows of 128; so do those of any multiple."""
    heads = LANES if d.model.latent else pool_heads(d.kv_heads_per_device, d.model.head_dim, d.chip.platform)[0]
    return LANES // math.gcd(heads, LANES)


def null_pages_bytes(d: Deployment) -> int:
    """Returns the bytes of the page in every layer that nobody owns, on one device."""
    return d.model.num_layers * layer_page_bytes(d)


def stored_bytes_per_token(d: Deployment) -> float:
    """Returns what a token takes in full pages, on all devices of a replica together."""
    return d.model.num_layers * layer_page_bytes(d) / d.P * d.tp


def pages_of(d: Deployment, tokens: int, shared_tokens: int = 0) -> tuple[int, int]:
    """Returns the pages, over all layers, that a sequence of so many tokens holds, and how many of them are of a shared prefix.

    Only full pages are shared, and never the one of a sequence's last token.
    """
    pages, full = -(-tokens // d.P), min(shared_tokens, tokens - 1) // d.P
    if not d.free_window_pages:
        return d.model.num_layers * pages, d.model.num_layers * full
    held = shared = 0
    for w in d.model.layer_windows:
        # The last w tokens lie on at most ceil((w - 1) / P) + 1 pages, wherever they end.
        kept = min(pages, -(-(w - 1) // d.P) + 1) if w else pages
        held += kept
        shared += max(0, full - (pages - kept))
    return held, shared


def pool_bytes(d: Deployment, sequences: int, tokens: int) -> int:
    """Returns what so many sequences of so many tokens hold on one device of their replica; a shared prefix counts once a group."""
    held, shared = pages_of(d, tokens, d.shared_tokens)
    groups = -(-sequences // d.sharers) if d.sharers else min(1, sequences)
    return (sequences * (held - shared) + groups * shared) * layer_page_bytes(d)


def fits(d: Deployment, sequences: int, tokens: int) -> bool:
    """Whether so many sequences of so many tokens fit on all replicas together, with the activations of a step of so many."""
    kv = pool_bytes(d, _each(d, sequences), tokens) + round(d.low_watermark_gib * GIB)
    return kv <= device_memory(d, sequences).kv_budget_bytes


def _each(d: Deployment, sequences: int) -> int:
    """Sequences of the fullest replica."""
    return -(-sequences // d.replicas)


def max_sequences(d: Deployment, tokens: int | None = None) -> int:
    """Returns how many sequences of `tokens` (the context) fit on all replicas together, however many are asked for."""
    return d.replicas * _largest(lambda n: fits(d, n * d.replicas, tokens or d.context))


def held_sequences(d: Deployment) -> int:
    """Returns the sequences asked for, or as many of them as fit; 1 where none does."""
    most = max_sequences(d)
    return min(d.sequences or most, most) or 1


def max_context(d: Deployment, sequences: int | None = None) -> int:
    """Returns how many tokens each of `sequences` may have, whatever the model was made for; a plain 1 if nobody asked for more."""
    return _largest(lambda tokens: fits(d, sequences or d.sequences or 1, tokens))


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest n for which holds(n), of a property that is lost once and for all; 0 where none is."""
    low, high = 0, 1
    while holds(high):
        if high >= UNBOUNDED:
            return UNBOUNDED
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def waste_tokens(page_size: int) -> tuple[int, float]:
    """Returns the tokens that the last page of a sequence wastes: at most, and on average."""
    return page_size - 1, (page_size - 1) / 2


def mean_length_for_waste(page_size: int, fraction: float) -> float:
    """Returns the mean length above which pages waste less than `fraction` of what they take."""
    mean = waste_tokens(page_size)[1]
    return mean / fraction - mean
