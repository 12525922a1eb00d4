"""What the engine exports, as data: one row a metric. docs/serving.md holds the same table; a test compares the two.

Names and buckets follow vLLM's V1 metrics where it has the same quantity, under `jaxkv_` instead of `vllm:`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

from jaxkv.serving.tier_counts import FAILURES, MISSES

# Labels have closed sets of values: nothing that a user sends, such as a tenant's name, can become one.
FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("invalid", "too_long", "never_fits", "ladder", "draining")
CONTEXT_REJECTIONS = ("too_long", "never_fits", "ladder")  # those that a shorter request would not have met
TIERS = ("device", "host", "disk")
LOWER_TIERS = TIERS[1:]
HOLD_OUTCOMES = ("delivered", "undelivered", "expired")
PREEMPTIONS = ("swap", "recompute")
PAGE_STATES = ("free", "active", "reusable", "held")

_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
# vLLM's begin at 10 ms; a small model takes less than that for a token.
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


@dataclasses.dataclass(frozen=True)
class Metric:
    """One exported metric. A counter's name is exported with `_total` behind it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()  # of each label; all combinations are exported from the start
    bounds: tuple[float, ...] = ()  # of a histogram's buckets

    @property
    def combinations(self) -> list[tuple[str, ...]]:
        """The labels' values, together; without labels one that is empty."""
        return list(itertools.product(*self.values))


def _counter(name: str, unit: str, meaning: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(name, "counter", unit, meaning, tuple(labels), tuple(labels.values()))


def _gauge(name: str, unit: str, meaning: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(name, "gauge", unit, meaning, tuple(labels), tuple(labels.values()))


def _histogram(name: str, unit: str, meaning: str, bounds: tuple[float, ...]) -> Metric:
    return Metric(name, "histogram", unit, meaning, bounds=bounds)


METRICS = (
    _gauge("num_requests_running", "requests", "that hold a row of the batch"),
    _gauge("num_requests_waiting", "requests", "in the queue, preempted ones included"),
    _gauge("kv_cache_usage_perc", "share, 0 to 1", "active and held pages of all usable pages"),
    _gauge("kv_cache_pages", "pages", "pages in each state; held: a result's delivery is unknown", state=PAGE_STATES),
    _gauge("block_fragmentation", "share, 0 to 1", "unused of the token slots in allocated pages, each physical page once"),
    _gauge("ladder_level", "level, 0 to 3", "rung of the pressure ladder"),
    _gauge("tenants_over_quota", "tenants", "tenants that hold more pages than their quota"),
    _counter("requests_received", "requests", "submitted, rejected ones included"),
    _counter("requests_rejected", "requests", "refused on arrival, by reason", reason=REJECTIONS),
    _counter("requests_admitted", "requests", "started, each once however often it is preempted"),
    _counter("request_success", "requests", "finished, by reason", finished_reason=FINISH_REASONS),
    _counter("num_preemptions", "preemptions", "running requests that were put back in the queue", kind=PREEMPTIONS),
    _counter("prompt_tokens", "tokens", "prompt tokens of admitted requests, cached ones included"),
    _counter("generation_tokens", "tokens", "tokens generated"),
    _counter("prefix_cache_queries", "tokens", "prompt tokens looked up in the prefix cache, once a request"),
    _counter("prefix_cache_hits", "tokens", "prompt tokens found there, in any tier"),
    _counter("cached_tokens", "tokens", "the hits, by the tier they came from", tier=TIERS),
    _counter("evicted_pages", "pages", "reusable pages that were evicted"),
    _counter("holds", "holds", "holds on a sequence's pages that ended, by how", outcome=HOLD_OUTCOMES),
    _gauge("tier_pages", "pages", "pages that a tier below the device holds", tier=LOWER_TIERS),
    _gauge("tier_bytes", "bytes", "their bytes there", tier=LOWER_TIERS),
    _gauge("tier_load_bytes_per_second", "bytes a second", "how fast it gave pages back of late", tier=LOWER_TIERS),
    _counter("tier_stored_pages", "pages", "pages stored there", tier=LOWER_TIERS),
    _counter("tier_loaded_pages", "pages", "pages that came back from there", tier=LOWER_TIERS),
    _counter("tier_evicted_pages", "pages", "pages that left for others' room", tier=LOWER_TIERS),
    _counter("tier_misses", "pages", "pages that it was asked for and did not give", tier=LOWER_TIERS, reason=MISSES),
    _counter("tier_failures", "pages", "pages that it did not keep", tier=LOWER_TIERS, reason=FAILURES),
    _counter("kv_read_bytes", "bytes", "keys and values read by decode steps"),
    _counter("kv_read_seconds", "seconds", "time of those steps"),
    _histogram("time_to_first_token_seconds", "seconds", "from submission to the first token", _TTFT_S),
    _histogram("inter_token_latency_seconds", "seconds", "between two tokens of a sequence", _TOKEN_S),
    _histogram("request_time_per_output_token_seconds", "seconds", "a request's mean time of a token after the first", _TOKEN_S),
    _histogram("e2e_request_latency_seconds", "seconds", "from submission to the end", _LATENCY_S),
    _histogram("request_queue_time_seconds", "seconds", "from submission to admission", _LATENCY_S),
    _histogram("request_decode_time_seconds", "seconds", "from the first token to the last", _LATENCY_S),
    _histogram("request_prompt_tokens", "tokens", "prompt length of a finished request", _TOKENS),
    _histogram("request_generation_tokens", "tokens", "tokens generated by a finished request", _TOKENS),
)
