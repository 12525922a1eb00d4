"""`Engine`: many requests through one model, as they come."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from jaxkv.inputs import as_rows, check_vocabulary
from jaxkv.loading import Model
from jaxkv.output import TextEvent
from jaxkv.planning.plan import CapacityPlan
from jaxkv.sampling import StopMatcher, draw_seeds, seed_key
from jaxkv.serving.admission import Admission, Refuse
from jaxkv.serving.disk_tier import DiskTier
from jaxkv.serving.fingerprint import Fingerprint, digest_text
from jaxkv.serving.host_tier import HostTier
from jaxkv.serving.ladder import Ladder, LadderConfig
from jaxkv.serving.metrics import Metrics
from jaxkv.serving.page_cache import PageCache
from jaxkv.serving.page_data import PageLayout
from jaxkv.serving.page_states import Evicted
from jaxkv.serving.request import Event, Request, RequestRefused, Result, checked, is_finite, is_whole
from jaxkv.serving.restore import Restores
from jaxkv.serving.runner import ModelRunner
from jaxkv.serving.scheduler import Scheduler
from jaxkv.serving.sequence import Job, Sequence
from jaxkv.serving.tiers import Tier, Tiers
from jaxkv.state import State, init_state
from jaxkv.stream import Track

# Receipts of so many ended requests are kept, and results that nobody has collected where the caller steps by itself.
_KEPT = 1024
_LEAST_SECRET = 16  # bytes


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How an engine serves. Sizes of the pool are as in `jaxkv.init_state`."""

    num_slots: int = 8
    max_tokens_per_slot: int = 1024
    page_size: int | None = None
    num_pages: int | None = None
    kv_dtype: str | None = None
    implementation: str | None = None
    interpret: bool = False
    seed: int = 0  # of the seeds of requests that name none

    prefill_tokens: int = 512  # of prompts, a step; fewer keep decoding rows at a steadier pace
    ageing_s: float = 10.0  # waiting that makes up for one step of priority
    plan: CapacityPlan | None = None  # None: the pool alone limits
    ladder: LadderConfig | None = None  # what is given up under pressure; None: nothing, requests wait
    overcommit: bool = False  # pages as sequences grow, with preemption, instead of all on admission

    prefix_cache: bool = True
    secret: bytes | None = None  # keys the cache's names; None: a random one of this process. At least 16 bytes
    model_revision: str | None = None  # None: the digest of config and weights
    quotas: Mapping[str, int] = dataclasses.field(default_factory=dict)  # tenant: pages it should keep at most
    hold_ttl_s: float = 900.0
    reusable_ttl_s: float | None = None  # None: a page is kept until its room is needed
    host_bytes: int = 0  # of the tier in host memory; 0: none
    host_dtype: Literal["int8"] | None = None  # "int8" halves and quarters it, at a small loss; None: as the pool
    disk_folder: str | Path | None = None
    disk_bytes: int = 0

    def __post_init__(self):
        least = dict(prefill_tokens=1, host_bytes=0, disk_bytes=0)
        for name, low in least.items():
            if not is_whole(getattr(self, name), low):
                raise ValueError(f"{name} must be a whole number of at least {low}, got {getattr(self, name)!r}")
        for name in ("ageing_s", "hold_ttl_s", "reusable_ttl_s"):
            seconds = getattr(self, name)
            if not (seconds is None and name == "reusable_ttl_s") and not (is_finite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")
        if self.secret is not None and not (isinstance(self.secret, bytes) and len(self.secret) >= _LEAST_SECRET):
            raise ValueError(f"secret must be at least {_LEAST_SECRET} bytes (secrets.token_bytes(32)), or None")
        if self.model_revision is not None and not isinstance(self.model_revision, str):
            raise ValueError(f"model_revision must be a text or None, got {self.model_revision!r}")
        if (self.disk_folder is None) != (not self.disk_bytes):
            raise ValueError(f"a disk tier needs both disk_folder and disk_bytes, got {self.disk_folder!r} and {self.disk_bytes}")
        if self.host_dtype is not None and not self.host_bytes:
            raise ValueError(f"host_dtype={self.host_dtype!r} needs host_bytes")
        for tenant, pages in self.quotas.items():
            if not isinstance(tenant, str) or not is_whole(pages, 0):
                raise ValueError(f"quotas map a tenant's name to whole pages, got {tenant!r}: {pages!r}")


class EngineFailed(RuntimeError):
    """A step raised, so that what the engine believes and what the device holds may differ: make a new Engine."""


class Engine:
    """Serves requests with continuous batching and a prefix cache. Not thread-safe: one thread calls it.

    Args:
      model: from `jaxkv.load_model`.
      config: sizes and policies.
      clock: seconds that never go back.
      metrics: None: new ones, in a registry of their own.

    Raises:
      ValueError: sizes that do not fit (`jaxkv.init_state`), a plan that does not add up, a secret that is too short.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig = EngineConfig(),
        *,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
    ):
        self.config, self._model, self._clock = config, model, clock
        self.metrics = metrics or Metrics()
        state = init_state(
            model,
            config.num_slots,
            config.max_tokens_per_slot,
            config.page_size,
            config.num_pages,
            config.kv_dtype,
            implementation=config.implementation,
            interpret=config.interpret,
        )
        num_pages, page_size = state.kv.refcounts.shape[0], state.kv.page_size
        self._kv_dtype = config.kv_dtype or state.kv.k_pages.dtype.name
        self._layout = f"{_page_layout(state)} {state.static.platform}"
        self._page_bytes = state.kv.nbytes // num_pages
        self._windows = collections.Counter(model.config.layer_windows)
        self.runner = ModelRunner(state)
        secret = config.secret if config.secret is not None else secrets.token_bytes(32)
        self.cache = PageCache(
            num_pages,
            page_size,
            secret=secret,
            clock=clock,
            quotas=config.quotas,
            hold_ttl_s=config.hold_ttl_s,
            reusable_ttl_s=config.reusable_ttl_s,
            on_evict=self._on_evict,
        )
        self._tiers = self._make_tiers(secret, _page_layout(state))
        self._restores = Restores(self._tiers, self.cache, self.runner) if self._tiers else None
        self.admission = Admission(
            config.plan,
            num_pages=num_pages,
            page_size=page_size,
            max_tokens_per_slot=config.max_tokens_per_slot,
            bytes_per_page=self._page_bytes,
            num_slots=config.num_slots,
        )
        self._ladder = Ladder(config.ladder, self.admission.rungs, clock) if config.ladder else None
        self.scheduler = Scheduler(
            self.runner,
            self.cache,
            self.admission,
            self.metrics,
            clock,
            lambda one: one.options(model.config.vocab_size, self._eos),
            prefill_tokens=config.prefill_tokens,
            overcommit=config.overcommit,
            ladder=self._ladder,
            restores=self._restores,
            kv_bytes=self._kv_bytes,
        )
        self._eos = _stop_tokens(model)
        self._revision = config.model_revision or weights_digest(model)
        self._key = seed_key(config.seed)
        self._next_id, self._next_owner = 0, 0
        self._draining = False
        self._failure: BaseException | None = None
        self._live: dict[int, list[Sequence]] = {}
        self._events: list[Event] = []  # for `step`, or for a stream that is not open yet
        self._streams: dict[int, collections.deque[Event]] = {}
        self._results: dict[int, list[Result]] = {}
        self._receipts: collections.OrderedDict[int, dict] = collections.OrderedDict()
        self._held: dict[int, list[int]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests (and preempted sequences) without a slot."""
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Slots taken."""
        return self.scheduler.num_running

    def submit(self, request: Request) -> int:
        """Queues a request and returns its id.

        Raises:
          RequestRefused: it can never be served, or not now (`reason`); says why with the numbers. Nothing was queued.
          EngineFailed: a step raised before.
        """
        self._check_alive()
        try:
            return self._submit(request)
        except RequestRefused as refused:
            self.metrics.rejected(refused.reason)
            raise
        except (ValueError, TypeError) as error:
            self.metrics.rejected("invalid")
            raise RequestRefused("invalid", str(error)) from error

    def step(self) -> list[Event]:
        """One step of the scheduler; returns what is new, of all requests but those with an open `stream`.

        Results wait for `collect`, the last 1,024 of them.

        Raises:
          EngineFailed: a step raised before.
        """
        self._advance()
        self._trim()
        events, self._events = self._events, []
        return events

    def run(self) -> dict[int, list[Result]]:
        """Steps until nothing waits or runs; returns the results that were not collected yet, by request.

        Raises:
          RuntimeError: requests wait for pages that are on hold, and nothing runs: `reconcile` what was delivered.
          EngineFailed: a step raised before.
        """
        while not self.scheduler.is_idle:
            self._advance(must_move=True)
            self._events.clear()
        results, self._results = self._results, {}
        return results

    def stream(self, id: int) -> Iterator[Event]:
        """Yields a request's events as they come, stepping the engine meanwhile; other requests' events wait.

        Raises:
          KeyError: no such request, or it ended and its events were collected.
          ValueError: it has an open stream.
          RuntimeError, EngineFailed: as `run`.
        """
        if id in self._streams:
            raise ValueError(f"request {id} has an open stream: close() it first")
        if id not in self._live and not any(event.id == id for event in self._events):
            raise KeyError(f"request {id} is not known, or its events were collected already")
        mine = self._streams[id] = collections.deque(event for event in self._events if event.id == id)
        self._events = [event for event in self._events if event.id != id]
        try:
            while True:
                while mine:
                    yield mine.popleft()
                if id not in self._live:
                    return
                self._advance(must_move=True)
                self._trim()
        finally:
            self._events += mine
            self._streams.pop(id, None)

    def collect(self, id: int) -> list[Result]:
        """The results of a request that has ended, once.

        Raises:
          KeyError: it has not ended, is not known, or was collected already.
        """
        if id in self._live:
            raise KeyError(f"request {id} has not ended")
        return self._results.pop(id)

    def abort(self, id: int) -> None:
        """Ends a request wherever it is, with finish_reason "abort". Ids that are not known, or have ended, are ignored."""
        now = self._clock()
        for one in self.scheduler.abort(id):
            one.track.finish_reason = "abort"
            decode_s = now - one.first_token_at if one.first_token_at is not None else 0.0
            self.metrics.finished("abort", now - one.arrived_at, one.prompt.size, len(one.track.tokens), decode_s)
            self._take(one, TextEvent(one.index, -1, (), "", "abort"))
        self.scheduler.observe()

    def drain(self) -> dict[int, list[Result]]:
        """Refuses new requests, serves what was submitted, and returns as `run` does."""
        self._draining = True
        return self.run()

    def close(self) -> None:
        """Ends every request, takes no more, and waits for transfers to finish."""
        self._draining = True
        for id in list(self._live):
            self.abort(id)
        if self._tiers:
            self._tiers.close()

    def reconcile(self, id: int, delivered: bool = True) -> None:
        """Ends the hold on a request's pages: its result was delivered, or will be asked for anew. Of one that ran out, or that was
        never held: nothing."""
        for owner in self._held.pop(id, ()):
            if self.cache.is_held(owner):
                self.cache.reconcile(owner, delivered)

    def receipt(self, id: int) -> dict:
        """What was reused for a request and why not more, as a JSON-able dict; known from its first admission on.

        Raises:
          KeyError: not admitted yet, or so long ago that it was forgotten.
        """
        live = self._live.get(id)
        if live and live[0].receipt is not None:
            return _receipt(live[0])
        return self._receipts[id]

    def publish(self, tokens, system_prompt: str | None = None, adapter: str | None = None) -> None:
        """Makes the full pages of a prompt reusable by every tenant; the operator's decision. Runs the engine until it is done.

        Raises:
          RequestRefused: as `submit`.
        """
        self._check_alive()
        request = Request(tokens, max_new_tokens=1, system_prompt=system_prompt, adapter=adapter)
        id = self._submit(request, public=True)
        for _ in self.stream(id):
            pass
        del self._results[id]

    def revoke(self, tenant: str, acl_epoch: int | None) -> int:
        """Forgets what is cached for a tenant under other access rules than these; returns how many pages. (Requests under a new
        epoch match nothing older anyway.)"""
        old = lambda fingerprint: fingerprint.tenant == tenant and fingerprint.acl_epoch != acl_epoch
        if self._tiers:
            self._tiers.drop_where(old)
        return self.cache.drop(old)

    def swap_weights(self, model: Model, model_revision: str | None = None) -> None:
        """Takes other weights of the same architecture. Nothing cached before is matched after.

        Args:
          model_revision: as in EngineConfig.

        Raises:
          ValueError: another architecture, or answers have begun with the old weights: `run()` first.
        """
        if model.config != self._model.config or model.storage != self._model.storage:
            raise ValueError("the new weights have another config or storage: make a new Engine")
        live = [one for sequences in self._live.values() for one in sequences]
        begun = sum(one.row >= 0 or bool(one.track.tokens) for one in live)
        if begun:
            raise ValueError(f"{begun} sequences have begun with the old weights: run() first")
        if model_revision == self._revision:
            raise ValueError(f"{model_revision=} is that of the weights before: what was cached with them would be matched")
        self._model, self._revision = model, model_revision or weights_digest(model)
        self._eos = _stop_tokens(model)
        self.runner.swap_params(model.params)
        old = lambda fingerprint: fingerprint.model_revision != self._revision
        self.cache.drop(old)
        if self._tiers:
            self._tiers.drop_where(old)
        for one in live:
            one.fingerprint = dataclasses.replace(one.fingerprint, model_revision=self._revision)

    def warmup(self) -> None:
        """Compiles all that can come; nothing is traced after it."""
        if self.num_running:
            raise ValueError(f"{self.num_running} sequences hold slots: warm up before the first step")
        self.runner.warmup(min(self.config.prefill_tokens, self.config.max_tokens_per_slot))

    # Inside

    def _submit(self, request: Request, public: bool = False) -> int:
        if self._draining:
            raise RequestRefused("draining", "the engine is draining and takes no more requests")
        request = checked(request)
        request = dataclasses.replace(request, use_cache=request.use_cache and self.config.prefix_cache)
        prompt = self._prompt(request)
        self.scheduler.update_ladder()
        n, ladder = request.sampling.n, self._ladder
        verdict = self.admission.check(
            prompt.size, request.max_new_tokens, n, request.allow_truncation, ladder.level if ladder else 0
        )
        if isinstance(verdict, Refuse):
            raise RequestRefused(verdict.reason, verdict.message)
        prompt = prompt[prompt.size - verdict.prompt_tokens :]
        seeds = [0] * n
        if request.sampling.needs_seeds:
            self._key, drawn = draw_seeds(self._key, n)
            seeds = drawn.tolist()
        now, id = self._clock(), self._next_id
        order = now + request.priority * self.config.ageing_s
        fingerprint = self._fingerprint(request, id, public)
        sequences = []
        for index in range(n):
            track = self._track(request, prompt, index)
            sequences.append(Sequence(self._next_owner + index, id, request, prompt, fingerprint, track, seeds[index], now, order))
        sequences[0].options(self._model.config.vocab_size, self._eos)  # raises for options that do not fit the model
        self._next_id, self._next_owner = id + 1, self._next_owner + n
        self._live[id] = sequences
        self.metrics.queued(n)
        self.scheduler.add(Job(list(sequences), order))
        self.scheduler.observe()
        return id

    def _prompt(self, request: Request) -> np.ndarray:
        rows = as_rows(request.tokens)
        if len(rows) != 1 or not rows[0].size:
            raise ValueError(f"a request has one prompt of at least one token, got {len(rows)} of {[row.size for row in rows]}")
        check_vocabulary(self._model.config, rows)
        return rows[0].astype(np.int32)

    def _track(self, request: Request, prompt: np.ndarray, index: int) -> Track:
        tokenizer, stop = self._model.tokenizer, request.sampling.stop_strings(0, 1)
        if stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer; this model has none")
        return Track(
            index,
            -1,
            request.max_new_tokens,
            tokenizer.stream(prompt) if tokenizer else None,
            StopMatcher(stop) if stop else None,
            request.sampling.wants_logprobs,
        )

    def _fingerprint(self, request: Request, id: int, public: bool) -> Fingerprint:
        tokenizer = self._model.tokenizer
        if not request.use_cache:
            tenant: str | None = f"\0request {id}"  # nobody can name it
        else:
            tenant = None if public else request.tenant
        return Fingerprint(
            model_revision=self._revision,
            tokenizer_revision=tokenizer.revision if tokenizer else None,
            position_encoding=repr((self._model.config.ropes, self._model.config.layer_ropes)),
            adapter=request.adapter,
            system_prompt=None if request.system_prompt is None else digest_text(request.system_prompt),
            tenant=tenant,
            acl_epoch=None if public else request.acl_epoch,
            kv_dtype=self._kv_dtype,
            layout=self._layout,
            page_size=self.cache.page_size,
        )

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(f"a step raised {self._failure!r}: what was running is lost, make a new Engine") from self._failure

    def _advance(self, must_move: bool = False) -> None:
        """One step. With `must_move`, raises if nothing runs and nothing can start."""
        self._check_alive()
        try:
            events = self.scheduler.step()
        except BaseException as error:  # Ctrl-C too: it may have hit between a decision and its dispatch
            self._failure = error
            raise
        for one, event in events:
            self._take(one, event)
        if must_move and not events and not self.num_running and self.num_waiting:
            raise RuntimeError(
                f"{self.num_waiting} requests wait and nothing runs: {self.cache.held_pages} pages are on hold; reconcile() what was"
                f" delivered, or call again when hold_ttl_s={self.config.hold_ttl_s:g} are over"
            )

    def _trim(self) -> None:
        """Forgets the oldest results beyond those that are kept for `collect`."""
        old = set([id for id in self._results if id not in self._live][:-_KEPT])
        if old:
            self._results = {id: results for id, results in self._results.items() if id not in old}
            self._events = [event for event in self._events if event.id not in old]

    def _take(self, one: Sequence, event: TextEvent) -> None:
        ended = event.finish_reason is not None
        usage = one.usage if ended else None
        waiting = self._streams.get(one.id, self._events)
        waiting.append(Event(one.id, one.index, event.tokens, event.text, event.finish_reason, usage))
        if not ended:
            return
        track = one.track
        assert track.finish_reason is not None
        text = None if self._model.tokenizer is None else track.text
        tokens = np.asarray(track.tokens, np.int32)
        logprobs = track.logprobs if track.wants_logprobs else None
        self._results.setdefault(one.id, []).append(
            Result(one.id, one.index, tokens, text, track.finish_reason, one.usage, logprobs)
        )
        if one.request.hold and event.finish_reason != "abort":
            self._held.setdefault(one.id, []).append(one.owner)
            for id in [id for id, owners in self._held.items() if not any(map(self.cache.is_held, owners))]:
                del self._held[id]  # ran out
        if one.receipt:
            self._receipts[one.id] = _receipt(one)
            while len(self._receipts) > _KEPT:
                self._receipts.popitem(last=False)
        live = self._live[one.id]
        live.remove(one)
        if not live:
            del self._live[one.id]
            self._results[one.id].sort(key=lambda result: result.index)

    def _kv_bytes(self, stored: int) -> int:
        """Bytes of keys and values that a decode step reads for a row: a layer with a window reads no more than that."""
        of_layer = self._page_bytes // (self.cache.page_size * self._model.config.num_layers)
        return of_layer * sum(count * (min(stored, window) if window else stored) for window, count in self._windows.items())

    def _on_evict(self, evicted: Many[Evicted]) -> None:
        self.metrics.evicted(len(evicted))
        if self._restores is not None:
            self._restores.on_evict(evicted)

    def _make_tiers(self, secret: bytes, layout: PageLayout) -> Tiers | None:
        config = self.config
        tiers: list[Tier] = []
        if config.host_bytes:
            tiers.append(HostTier(config.host_bytes, config.host_dtype))
        if config.disk_folder is not None:
            tiers.append(DiskTier(config.disk_folder, config.disk_bytes, secret))
        return Tiers(tiers, layout) if tiers else None


def _receipt(one: Sequence) -> dict:
    assert one.receipt is not None
    cached = sum(one.cached.values())
    tiers = {"cached_tokens": dict(one.cached), "reusable_tokens": cached, "suffix_tokens": one.prompt.size - cached}
    return one.receipt.to_json() | tiers


def _stop_tokens(model: Model) -> tuple[int, ...]:
    """Configs name stop tokens that their vocabulary lacks; what cannot be emitted stops nothing."""
    return tuple(i for i in model.eos_token_ids if i < model.config.vocab_size)


def weights_digest(model: Model) -> str:
    """SHA-256 of config, storage and every weight, as hex: about a second a GB."""
    digest = hashlib.sha256(repr((model.config, model.storage)).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _page_layout(state: State) -> PageLayout:
    """How a page of this pool lies when it is elsewhere."""
    L, scales = state.static.model.num_layers, state.kv.kv_scales
    _, K, P, H = state.kv.k_pages.shape
    scales_shape = None if scales is None else (L, 2, scales.shape[2], scales.shape[3])
    return PageLayout((L, K, P, H), state.kv.k_pages.dtype.name, scales_shape)
