"""How fast it can be at best: what a step reads and computes against what the chips can do.

Lower bounds: peak arithmetic and full bandwidth, nothing else counted: no communication, no launch, no sampling. A product is
bandwidth-bound below the ridge of the chip (FLOP per byte), compute-bound above. Weights and attention are told apart, because
batching helps only the first:

    weights      2 FLOP a weight and row: B FLOP/byte with 16-bit weights, so above the ridge from B = ridge on
    attention    4 * N * H FLOP a key: G = N / K FLOP/byte with 16-bit KV, 2 * G with 8-bit KV, whatever B is
"""

from __future__ import annotations

import dataclasses
import math

from jaxkv.planning.deployment import Deployment
from jaxkv.planning.memory import bytes_read_a_weight, layer_page_bytes, pool_bytes
from jaxkv.planning.shapes import KV_BYTES

# "The State of FP8 KV-Cache and Attention Quantization in vLLM" (2026), Llama 3.1 8B: what a cached token costs a decode step with
# fp8 KV against bf16, and the context from which that made up for the fixed cost there.
PUBLISHED_KV8_COST_RATIO, PUBLISHED_KV8_BREAK_EVEN_TOKENS = 0.54, 7000


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """One token for each of `rows` sequences of one replica."""

    rows: int
    weights_bytes: float  # every weight once: of experts those routed to
    lookup_bytes: float  # of them an untied table, of which only `rows` rows are read: no part of the time
    kv_bytes: float  # all that every sequence attends to, as it is stored
    weights_flop: float
    attention_flop: float
    weights_flop_per_byte: float
    attention_flop_per_byte: float  # of the values alone
    weights_s: float  # the least time of the weights' products alone
    attention_s: float  # and of attention alone
    seconds: float  # of both: where one waits for memory and the other for arithmetic they may overlap

    @property
    def kv_fraction(self) -> float:
        """The part of the traffic that is KV."""
        return self.kv_bytes / (self.kv_bytes + self.weights_bytes)


def attended_tokens(d: Deployment, tokens: int) -> int:
    """Returns the cached tokens one query sees, summed over layers: a windowed layer reads its window alone."""
    return sum(min(tokens, w) if w else tokens for w in d.model.layer_windows)


def decode_step(d: Deployment, sequences: int, tokens: int | None = None) -> DecodeStep:
    """Returns the traffic, intensity and least time of a decode step with `sequences` over all replicas."""
    m, rows, seen = d.model, -(-sequences // d.replicas), attended_tokens(d, tokens or d.context)
    copies = m.kv_params * (d.kv_copies - 1)
    read = (m.read_params(rows) + copies) * _bytes_a_weight(d)
    lookup = 0 if m.tied else m.embed_params * _bytes_a_weight(d)
    kv = rows * seen * layer_page_bytes(d) / d.P * d.tp
    flop = 2 * rows * (m.active_body_params + m.head_params + copies)
    attention_flop = rows * seen * m.decode_flop_per_key
    chips = d.tp / d.chip.devices_per_chip
    least = lambda size, work: max(size / (d.chip.hbm_gbps * 1e9), work / (d.chip.matrix_tflops_bf16 * 1e12)) / chips
    return DecodeStep(
        rows=rows,
        weights_bytes=read + lookup,
        lookup_bytes=lookup,
        kv_bytes=kv,
        weights_flop=flop,
        attention_flop=attention_flop,
        weights_flop_per_byte=flop / read,
        attention_flop_per_byte=m.decode_flop_per_key / (m.kv_elements_per_token_and_layer * KV_BYTES[d.kv_dtype] * d.kv_copies),
        weights_s=least(read, flop),
        attention_s=least(kv, attention_flop),
        seconds=least(read + kv, flop + attention_flop),
    )


def compute_bound_rows(d: Deployment) -> float:
    """Returns the rows a replica from which the products with dense weights are compute-bound: the ridge, for 16-bit weights."""
    return d.chip.ridge_flop_per_byte * _bytes_a_weight(d) / 2


def _bytes_a_weight(d: Deployment) -> float:
    """What a step reads of one: nearly all matrices have rows of model_dim, the others longer ones."""
    return bytes_read_a_weight(d.weights, d.chip.platform, d.model.model_dim)


def prefill_seconds(d: Deployment, tokens: int | None = None, cached: int = 0) -> float:
    """Returns the least time to the first token of one prompt, alone on its replica, of which `cached` tokens are stored already."""
    m, total = d.model, tokens or d.context
    new = total - cached
    flop = 2 * new * m.active_body_params + 2 * m.head_params
    flop += m.prefill_flop_per_key * sum(_pairs(total, w) - _pairs(cached, w) for w in m.layer_windows)
    read = m.read_params(new) * _bytes_a_weight(d)
    per_device = d.chip.devices_per_chip / d.tp
    return max(flop / (d.chip.matrix_tflops_bf16 * 1e12), read / (d.chip.hbm_gbps * 1e9)) * per_device


def _pairs(tokens: int, window: int) -> int:
    """How many (query, key) pairs a causal layer has."""
    w = min(tokens, window or tokens)
    return w * (w + 1) // 2 + (tokens - w) * w


def kv8_break_even_tokens(extra_s_per_step: float, saved_s_per_token: float) -> float:
    """Returns the cached tokens a step must read for 8-bit KV to pay: extra fixed time a step / time saved a token."""
    if not 0 <= extra_s_per_step < math.inf or not saved_s_per_token > 0:
        raise ValueError(
            f"{extra_s_per_step=} must be 0 or more and {saved_s_per_token=} positive: 8-bit KV that saves nothing never pays"
        )
    return extra_s_per_step / saved_s_per_token


def kv8_stored_ratio(d: Deployment) -> float:
    """Returns what a token is stored in with 8-bit KV, scales and lanes included, over that with 16-bit KV."""
    return layer_page_bytes(d.change(kv_dtype="int8")) / layer_page_bytes(d.change(kv_dtype="bfloat16"))


def kv8_saved_s_per_token(d: Deployment, cost_ratio: float = PUBLISHED_KV8_COST_RATIO) -> float:
    """Returns the time one cached token less costs a step: its 16-bit bytes at full bandwidth, times 1 - cost_ratio.

    A cost below that of the bytes stored cannot be: then it is those; and 0 where 8-bit KV takes no fewer.
    """
    if not 0 < cost_ratio < 1:
        raise ValueError(f"kv8_cost_ratio must lie between 0 and 1, got {cost_ratio}: at 1 or more 8-bit KV never pays")
    plain = d.change(kv_dtype="bfloat16")
    layers = attended_tokens(d, d.context) / d.context
    seconds = layers * layer_page_bytes(plain) / d.P * d.chip.devices_per_chip / (d.chip.hbm_gbps * 1e9)
    return seconds * (1 - min(1, max(cost_ratio, kv8_stored_ratio(d))))


@dataclasses.dataclass(frozen=True)
class Offload:
    """Bringing a sequence's KV back over a link as it is stored, against computing it again."""

    restore_s: float
    recompute_s: float
    break_even_gbps: float  # below this link bandwidth recomputing wins

    @property
    def better(self) -> str:
        """Which takes less time."""
        return "restore" if self.restore_s < self.recompute_s else "recompute"


def offload(d: Deployment, link_gbps: float) -> Offload:
    """Returns the times for one sequence of the context; `link_gbps` (10^9 bytes/s) is of all of a replica's links together."""
    if not 0 < link_gbps < math.inf:
        raise ValueError(f"link_gbps must be positive, got {link_gbps}")
    stored = pool_bytes(d, 1, d.context) * d.tp
    recompute = prefill_seconds(d)
    return Offload(stored / (link_gbps * 1e9), recompute, stored / recompute / 1e9)
