"""A request trace through the scheduler on a simulated device: what a policy or a pool size does to real traffic.

A trace names prompts by blocks: equal ids at the head of two lists are equal prefixes (the form that the Mooncake paper published).
One block is one page here; its tokens are its id, repeated (negated, so that no answer's tokens are any block's), so that hashing,
comparing and evicting are those of the real engine.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.sampling import Sampling
from jaxkv.serving.admission import Admission, Refuse
from jaxkv.serving.fingerprint import Fingerprint
from jaxkv.serving.ladder import Ladder, LadderConfig
from jaxkv.serving.metrics import Metrics
from jaxkv.serving.page_cache import PageCache
from jaxkv.serving.page_states import Evicted
from jaxkv.serving.request import Request
from jaxkv.serving.scheduler import Scheduler
from jaxkv.serving.sequence import Sequence as LiveSequence
from jaxkv.serving.sequence import SequenceGroup
from jaxkv.serving.simulate import CostModel, SimulatedClock, SimulatedRestores, SimulatedRunner, SimulatedTier, SimulatedTiers
from jaxkv.stream import Track

_GREEDY = Sampling()


@dataclasses.dataclass(frozen=True)
class TraceRequest:
    """One line of a trace."""

    arrived_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """The device, the pool and the policies of a replay."""

    num_pages: int  # the null page included
    block_tokens: int = 512
    num_slots: int = 64
    prefill_tokens: int = 2048
    policy: str = "lru"
    overcommit: bool = False
    ladder: LadderConfig | None = None
    speedup: float = 1.0  # arrivals come this much faster
    sample_s: float = 10.0  # of the plot over time
    bytes_per_token: int = 131_072
    tiers: tuple[SimulatedTier, ...] = ()


def read_trace(path: str | Path, block_tokens: int = 512) -> list[TraceRequest]:
    """Returns the requests of a JSON-lines file with timestamp (ms), input_length, output_length (tokens) and hash_ids, by arrival.

    Raises:
      ValueError: a line that is not such a request; names it.
    """
    requests = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            blocks = tuple(int(block) for block in fields["hash_ids"])
            request = TraceRequest(
                float(fields["timestamp"]) / 1e3, int(fields["input_length"]), int(fields["output_length"]), blocks
            )
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{path}:{number} is no request with timestamp, input_length, output_length, hash_ids: {error}"
            ) from None
        if not (math.isfinite(request.arrived_s) and request.arrived_s >= 0) or not all(0 <= block < 2**31 for block in blocks):
            raise ValueError(f"{path}:{number}: timestamp must be finite and not negative, hash_ids whole numbers below 2**31")
        if request.input_tokens < 1 or request.output_tokens < 1 or len(blocks) != -(-request.input_tokens // block_tokens):
            raise ValueError(
                f"{path}:{number}: {request.input_tokens} input and {request.output_tokens} output tokens with {len(blocks)} blocks of"
                f" {block_tokens} tokens do not fit together"
            )
        requests.append(request)
    if not requests:
        raise ValueError(f"{path} holds no requests")
    return sorted(requests, key=lambda request: request.arrived_s)


def replay(requests: Sequence[TraceRequest], config: ReplayConfig, costs: CostModel | None = None) -> dict[str, Any]:
    """Returns what the engine would have reported: `Metrics.summary`, block hits, the device's use, and a series over time."""
    return _Replay(config, costs or CostModel()).run(requests)


class _Replay:
    def __init__(self, config: ReplayConfig, costs: CostModel):
        self.config = config
        self.clock = SimulatedClock()
        self.metrics = Metrics()
        self.runner = SimulatedRunner(config.num_slots, self.clock, costs)
        self.cache = PageCache(
            config.num_pages,
            config.block_tokens,
            secret=b"replay",
            clock=self.clock,
            policy=config.policy,  # type: ignore[arg-type]
            on_evict=self._on_evict,
        )
        self.tiers = SimulatedTiers(config.tiers, config.block_tokens * config.bytes_per_token, self.clock)
        self.restores = SimulatedRestores(self.tiers, self.cache, self.runner) if config.tiers else None  # type: ignore[arg-type]
        slot_tokens = (config.num_pages - 1) * config.block_tokens
        self.admission = Admission(
            None,
            num_pages=config.num_pages,
            page_size=config.block_tokens,
            max_tokens_per_slot=slot_tokens,
            bytes_per_page=config.block_tokens * config.bytes_per_token,
            num_slots=config.num_slots,
        )
        self.ladder = Ladder(config.ladder, self.admission.rungs, self.clock) if config.ladder else None
        self.scheduler = Scheduler(
            self.runner,
            self.cache,
            self.admission,
            self.metrics,
            self.clock,
            lambda one: one.track.limit - len(one.track.tokens),
            prefill_tokens=config.prefill_tokens,
            overcommit=config.overcommit,
            ladder=self.ladder,
            restores=self.restores,
        )
        self.fingerprint = Fingerprint(
            model_revision="replay", tokenizer_revision=None, position_encoding=None, adapter=None, system_prompt=None, tenant="",
            acl_epoch=None, kv_dtype="", layout="", page_size=config.block_tokens,
        )  # fmt: skip
        self.hit_blocks = {"device": 0, **{tier.name: 0 for tier in config.tiers}}
        self.looked_up_blocks = 0
        self.series: list[dict[str, float]] = []

    def run(self, requests: Sequence[TraceRequest]) -> dict[str, Any]:
        arrivals = collections.deque(enumerate(requests))
        sampled_at = 0.0
        while arrivals or not self.scheduler.is_idle:
            if arrivals and self.scheduler.is_idle:
                self.clock.advance_to(arrivals[0][1].arrived_s / self.config.speedup)
            while arrivals and arrivals[0][1].arrived_s / self.config.speedup <= self.clock():
                self._submit(*arrivals.popleft())
            for one, event in self.scheduler.step():
                if event.finish_reason is not None:
                    for tier, tokens in one.cached.items():
                        self.hit_blocks[tier] += tokens // self.config.block_tokens
            if self.clock() >= sampled_at:
                self._sample()
                sampled_at = self.clock() + self.config.sample_s
        return self._result(requests)

    def _submit(self, id: int, line: TraceRequest) -> None:
        verdict = self.admission.check(line.input_tokens, line.output_tokens, 1, False, self.ladder.level if self.ladder else 0)
        if isinstance(verdict, Refuse):
            self.metrics.rejected(verdict.reason)
            return
        self.metrics.queued()
        self.looked_up_blocks += len(line.blocks)
        tokens = np.repeat(-np.asarray(line.blocks, np.int32), self.config.block_tokens)[: line.input_tokens]
        arrived = line.arrived_s / self.config.speedup
        request = Request((), line.output_tokens, _GREEDY)
        track = Track(0, -1, line.output_tokens, None, None, False)
        one = LiveSequence(id, id, request, tokens, self.fingerprint, track, 0, arrived, arrived)
        self.scheduler.add(SequenceGroup([one], arrived))

    def _on_evict(self, evicted: Sequence[Evicted]) -> None:
        self.metrics.evicted(len({one.page for one in evicted}))
        if self.restores is not None:
            self.restores.on_evict(evicted)

    def _sample(self) -> None:
        cache = self.cache
        usable = cache.num_pages - 1
        self.series.append(
            {
                "time_s": self.clock(),
                "running": self.scheduler.num_running,
                "waiting": self.scheduler.num_waiting,
                "active_share": cache.active_pages / usable,
                "reusable_share": cache.reusable_pages / usable,
                "ladder_level": self.ladder.level if self.ladder else 0,
            }
        )

    def _result(self, requests: Sequence[TraceRequest]) -> dict[str, Any]:
        runner, summary, end_s = self.runner, self.metrics.summary(), self.clock()
        return {
            "requests": len(requests),
            "input_tokens": sum(request.input_tokens for request in requests),
            "output_tokens": sum(request.output_tokens for request in requests),
            "pool_pages": self.config.num_pages - 1,
            "policy": self.config.policy,
            "block_hit_rate": sum(self.hit_blocks.values()) / max(self.looked_up_blocks, 1),
            "block_hit_rate_by_tier": {tier: hits / max(self.looked_up_blocks, 1) for tier, hits in self.hit_blocks.items()},
            "tier_loaded_pages": self.tiers.loaded_pages,
            "simulated_s": end_s,
            "device_busy_share": runner.busy_s / max(end_s, 1e-9),
            "prefill_tokens": runner.prefill_tokens,
            "decode_steps": runner.decode_steps,
            "decode_batch_mean": runner.decode_tokens / max(runner.decode_steps, 1),
            **summary,
            "series": self.series,
        }


def distinct_blocks(requests: Iterable[TraceRequest]) -> int:
    """How many different blocks a trace names: a pool of so many pages never needs to evict a prompt."""
    return len({block for request in requests for block in request.blocks})


def oracle_hit_rate(requests: Sequence[TraceRequest], num_pages: int | None) -> float:
    """Block hit rate of a cache that knows the future (Belady): it evicts what is used last. None: without a limit.

    An independent count: requests one after the other, each of whose blocks are looked up from the first until one is missing, then
    all stored. No slots, no time, no pages in use.
    """
    uses: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
    for position, block in enumerate(_accesses(requests)):
        uses[block].append(position)
    never = 1 << 60
    cached: dict[int, int] = {}  # block: its next use
    farthest: list[tuple[int, int]] = []  # (-next use, block); entries that no longer hold are skipped
    hits = total = 0
    for request in requests:
        run = True
        total += len(request.blocks)
        for block in request.blocks:
            uses[block].popleft()
            run = run and block in cached
            hits += run
            cached[block] = uses[block][0] if uses[block] else never
            heapq.heappush(farthest, (-cached[block], block))
            while num_pages is not None and len(cached) > num_pages:
                next_use, victim = heapq.heappop(farthest)
                if cached.get(victim) == -next_use:
                    del cached[victim]
    return hits / max(total, 1)


def _accesses(requests: Iterable[TraceRequest]) -> Iterator[int]:
    for request in requests:
        yield from request.blocks
