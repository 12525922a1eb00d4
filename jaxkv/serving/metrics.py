"""Metrics: what an engine counts and times, as Prometheus text and as a summary.

Recording is plain Python under a lock. prometheus_client is asked only when someone reads (a custom collector), so an engine or a
simulation runs without it, a scrape sees one consistent moment, and a call stays far below 20 us (docs/serving.md).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jaxkv.serving.distribution import Distribution
from jaxkv.serving.metric_table import (
    CONTEXT_REJECTIONS,
    FINISH_REASONS,
    LOWER_TIERS,
    METRICS,
    PAGE_STATES,
    PREEMPTIONS,
    REJECTIONS,
    TIERS,
)

_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_SUMMARISED = {
    "ttft": "time_to_first_token_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "itl": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
}


class WatchedTiers(Protocol):
    """What is read of `Tiers`, each by tier."""

    def counts(self) -> Mapping[str, Mapping[str, Mapping[str, int]]]: ...
    def num_pages(self) -> Mapping[str, int]: ...
    def nbytes(self) -> Mapping[str, int]: ...
    def bytes_per_s(self) -> Mapping[str, float]: ...


class Metrics:
    """One engine's metrics. Times are seconds, counts are requests, tokens or pages as the names say; any thread may read.

    A request for n samples counts as n, each with times of its own; its prompt's tokens count with the first. Every recording
    method raises ValueError for a negative or impossible value or an unknown reason, tier or kind, and then has recorded nothing.
    """

    def __init__(self, registry: Any = None, labels: Mapping[str, str] | None = None):
        """`registry`: the CollectorRegistry to appear in; None: one of its own. `labels`: fixed ones, such as vLLM's model_name."""
        self._lock = threading.Lock()
        self._labels = dict(labels or {})
        # By the values of the labels, joined by commas; "" without labels.
        self._values: dict[str, dict[str, float]] = {
            m.name: {",".join(labels): 0 for labels in m.combinations} for m in METRICS if not m.bounds
        }
        self._distributions = {m.name: Distribution(m.bounds) for m in METRICS if m.bounds}
        self._sums = dict.fromkeys(("steps", "usage", "allocated_slots", "used_slots"), 0.0)  # over all calls of gauges()
        self._peak_usage = 0.0
        self._tiers: WatchedTiers | None = None
        self._holds: Callable[[], Mapping[str, int]] = dict
        self._registry = registry
        if registry is not None:
            registry.register(self)

    def watch(self, tiers: WatchedTiers | None, holds: Callable[[], Mapping[str, int]]) -> None:
        """Says where the counts of tiers and (by outcome) of holds are. They are read when somebody reads these metrics, so that a
        step costs nothing for them.

        Raises:
          ValueError: a tier of another name than LOWER_TIERS.
        """
        for name in tiers.nbytes() if tiers is not None else ():
            _check_label("tier", name, LOWER_TIERS)
        with self._lock:
            self._tiers, self._holds = tiers, holds

    def queued(self, count: int = 1) -> None:
        """Requests were submitted and wait now. A submission is counted here or by `rejected`, not by both."""
        with self._lock:
            self._add("requests_received", count)

    def rejected(self, reason: str, count: int = 1) -> None:
        """Requests were submitted and refused: neither waiting nor ever finished."""
        _check_label("reason", reason, REJECTIONS)
        with self._lock:
            self._add("requests_received", count)
            self._add("requests_rejected", count, reason)

    def admitted(self, queue_s: float, prompt_tokens: int, cached_tokens: Mapping[str, int], queries_tokens: int) -> None:
        """A request started for the first time; not for one that resumes after preemption.

        Args:
          queue_s: seconds since submission.
          prompt_tokens: of the prompt as it runs, after truncation.
          cached_tokens: prompt tokens that need no computing, by tier; a restore that failed is no hit.
          queries_tokens: prompt tokens that were looked up: 0 for a request that does not use the cache.
        """
        hits = sum(cached_tokens.values())
        for tier in cached_tokens:
            _check_label("tier", tier, TIERS)
        if min(cached_tokens.values(), default=0) < 0 or not hits <= queries_tokens <= prompt_tokens:
            raise ValueError(
                f"0 <= hits <= queries <= prompt must hold: {dict(cached_tokens)=}, {queries_tokens=}, {prompt_tokens=}"
            )
        with self._lock:
            self._observe("request_queue_time_seconds", queue_s)
            self._add("requests_admitted")
            self._add("prompt_tokens", prompt_tokens)
            self._add("prefix_cache_queries", queries_tokens)
            self._add("prefix_cache_hits", hits)
            for tier, count in cached_tokens.items():
                self._add("cached_tokens", count, tier)

    def first_token(self, ttft_s: float) -> None:
        """A request's first token is there, `ttft_s` after its submission. (`tokens` counts it.)"""
        with self._lock:
            self._observe("time_to_first_token_seconds", ttft_s)

    def tokens(self, count: int, gaps_s: Sequence[float] = ()) -> None:
        """A step's tokens over all requests, first ones included; each gap is a token's time since the one before it, if any."""
        if not count >= 0:
            raise ValueError(f"{count=} must not be negative")
        with self._lock:
            self._distributions["inter_token_latency_seconds"].extend(gaps_s)
            self._add("generation_tokens", count)

    def finished(self, reason: str, e2e_s: float, prompt_tokens: int, generation_tokens: int, decode_s: float) -> None:
        """A request ended, wherever it was: running or waiting.

        Args:
          reason: one of FINISH_REASONS.
          e2e_s: seconds since submission.
          prompt_tokens, generation_tokens: its own.
          decode_s: seconds from its first token to its last; 0 without any.
        """
        _check_label("reason", reason, FINISH_REASONS)
        if not (math.isfinite(e2e_s + decode_s) and min(e2e_s, prompt_tokens, generation_tokens, decode_s) >= 0):
            raise ValueError(f"{e2e_s=}, {prompt_tokens=}, {generation_tokens=}, {decode_s=}: all must be finite and not negative")
        with self._lock:
            self._observe("e2e_request_latency_seconds", e2e_s)
            self._observe("request_decode_time_seconds", decode_s)
            self._observe("request_prompt_tokens", prompt_tokens)
            self._observe("request_generation_tokens", generation_tokens)
            if generation_tokens > 1:
                self._observe("request_time_per_output_token_seconds", decode_s / (generation_tokens - 1))
            self._add("request_success", 1, reason)

    def preempted(self, kind: str) -> None:
        """A running request went back to the queue, by "swap" or "recompute"."""
        _check_label("kind", kind, PREEMPTIONS)
        with self._lock:
            self._add("num_preemptions", 1, kind)

    def evicted(self, num_pages: int) -> None:
        """Reusable pages were evicted; one that had several entries in the index is one page."""
        with self._lock:
            self._add("evicted_pages", num_pages)

    def kv_read(self, nbytes: int, seconds: float) -> None:
        """Decode steps read so many bytes of keys and values and took so many seconds."""
        if not (0 <= nbytes < math.inf and 0 <= seconds < math.inf):
            raise ValueError(f"{nbytes=} and {seconds=} must be finite and not negative")
        with self._lock:
            self._add("kv_read_bytes", nbytes)
            self._add("kv_read_seconds", seconds)

    def gauges(
        self,
        running: int,
        waiting: int,
        free_pages: int,
        active_pages: int,
        reusable_pages: int,
        held_pages: int,
        allocated_slots: int,
        used_slots: int,
        ladder_level: int = 0,
        over_quota_tenants: int = 0,
        in_step: bool = True,
    ) -> None:
        """The state now; the means of `summary` are over the states after steps (`in_step`). Slots are token slots of active pages,
        each physical page once; a used one holds a token."""
        pages = (free_pages, active_pages, reusable_pages, held_pages)
        if min(running, waiting, ladder_level, over_quota_tenants, *pages) < 0 or not 0 <= used_slots <= allocated_slots:
            counts = f"{running=}, {waiting=}, {pages=}, {used_slots=}, {allocated_slots=}, {ladder_level=}, {over_quota_tenants=}"
            raise ValueError(f"none may be negative, nor more slots used than allocated: {counts}")
        usage = _ratio(active_pages + held_pages, sum(pages)) or 0.0
        with self._lock:
            values, sums = self._values, self._sums
            values["num_requests_running"][""] = running
            values["num_requests_waiting"][""] = waiting
            values["kv_cache_usage_perc"][""] = usage
            values["kv_cache_pages"] = dict(zip(PAGE_STATES, pages, strict=True))
            values["block_fragmentation"][""] = _ratio(allocated_slots - used_slots, allocated_slots) or 0.0
            values["ladder_level"][""] = ladder_level
            values["tenants_over_quota"][""] = over_quota_tenants
            if in_step:
                sums["steps"] += 1
                sums["usage"] += usage
                sums["allocated_slots"] += allocated_slots
                sums["used_slots"] += used_slots
            self._peak_usage = max(self._peak_usage, usage)

    def summary(self) -> dict[str, Any]:
        """Returns the run so far, ready for JSON; None where there was nothing to divide by.

        Quantiles (`ttft_p50_s` ... `queue_p99_s`) are within 0.5 %. `block_fragmentation` and `kv_cache_usage_mean` are means over
        all calls of `gauges`, the former weighted by what was allocated; rates are shares from 0 to 1, GB are 10^9 bytes.
        """
        tiers, holds = self._tiers, self._holds
        with self._lock:
            values, sums = self._values, self._sums
            result: dict[str, Any] = {
                f"{short}_{p}_s": self._distributions[name].quantile(q)
                for short, name in _SUMMARISED.items()
                for p, q in _QUANTILES.items()
            }
            for name in ("requests_received", "requests_admitted", "prompt_tokens", "generation_tokens", "evicted_pages"):
                result[name] = values[name][""]
            for name in ("request_success", "requests_rejected", "num_preemptions", "cached_tokens"):
                result[name] = dict(values[name])
            refused = sum(values["requests_rejected"][reason] for reason in CONTEXT_REJECTIONS)
            read_bytes, read_s = values["kv_read_bytes"][""], values["kv_read_seconds"][""]
            return result | {
                "kv_hit_rate": _ratio(values["prefix_cache_hits"][""], values["prefix_cache_queries"][""]),
                "rejected_context_rate": _ratio(refused, values["requests_received"][""]),
                "block_fragmentation": _ratio(sums["allocated_slots"] - sums["used_slots"], sums["allocated_slots"]),
                "kv_cache_usage_mean": _ratio(sums["usage"], sums["steps"]),
                "kv_cache_usage_peak": self._peak_usage,
                "kv_read_gbps": _ratio(read_bytes / 1e9, read_s),
                "holds": dict(holds()),
                "tiers": {} if tiers is None else tiers.counts(),
            }

    @property
    def registry(self) -> Any:
        """The prometheus_client CollectorRegistry, for a server's /metrics; ImportError without the extra `serve`."""
        if self._registry is None:
            self._registry = _prometheus().CollectorRegistry()
            self._registry.register(self)
        return self._registry

    def text(self) -> str:
        """Returns everything in the registry in Prometheus' text format; ImportError without the extra `serve`."""
        return _prometheus().generate_latest(self.registry).decode()

    def collect(self) -> Iterator[Any]:
        """Returns all metrics of one moment, as a prometheus_client registry asks for them."""
        core = _prometheus().core
        classes = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily, "histogram": core.HistogramMetricFamily}
        names, fixed = list(self._labels), list(self._labels.values())
        families = []
        with self._lock:
            self._read_watched()
            for metric in METRICS:
                meaning, labels = f"{metric.meaning} ({metric.unit})", names + list(metric.labels)
                family = classes[metric.kind](f"jaxkv_{metric.name}", meaning, labels=labels)
                if metric.bounds:
                    seen = self._distributions[metric.name]
                    family.add_metric(fixed, seen.buckets(), seen.sum)
                else:
                    for values in metric.combinations:
                        family.add_metric(fixed + list(values), self._values[metric.name][",".join(values)])
                families.append(family)
        return iter(families)

    describe = collect  # registering a second Metrics in one registry is then refused

    def _read_watched(self) -> None:
        """Takes in what tiers and holds counted themselves."""
        values = self._values
        for outcome, count in self._holds().items():
            values["holds"][outcome] = count
        if self._tiers is None:
            return
        for name, gauge in (
            ("tier_pages", self._tiers.num_pages()),
            ("tier_bytes", self._tiers.nbytes()),
            ("tier_load_bytes_per_second", self._tiers.bytes_per_s()),
        ):
            values[name].update(gauge)
        for tier, counts in self._tiers.counts().items():
            for name, event in (("tier_stored_pages", "store"), ("tier_loaded_pages", "hit"), ("tier_evicted_pages", "evict")):
                values[name][tier] = counts["events"].get(event, 0)
            for name, kind in (("tier_misses", "misses"), ("tier_failures", "failures")):
                for reason, count in counts[kind].items():
                    values[name][f"{tier},{reason}"] = count

    def _add(self, name: str, amount: float = 1, label: str = "") -> None:
        if not amount >= 0:
            raise ValueError(f"{name} can only grow, got {amount}")
        self._values[name][label] += amount

    def _observe(self, name: str, value: float) -> None:
        self._distributions[name].extend((value,))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _check_label(label: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"unknown {label} {value!r}; known are {', '.join(known)}")


def _prometheus() -> Any:
    try:
        import prometheus_client.core
    except ImportError:
        raise ImportError("Prometheus text needs prometheus_client: pip install 'jaxkv[serve]'; summary() works without") from None
    return prometheus_client
