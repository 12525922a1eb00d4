"""`Engine`: many requests through one model, as they come."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many

from jaxkv.loading import Model
from jaxkv.output import TextEvent
from jaxkv.serving.admission import Admission
from jaxkv.serving.assembly import base_fingerprint, kv_bytes_read, make_tiers, page_layout, weights_digest
from jaxkv.serving.delivery import Delivery
from jaxkv.serving.engine_config import EngineConfig, check_quota
from jaxkv.serving.intake import Intake
from jaxkv.serving.ladder import Ladder
from jaxkv.serving.metrics import Metrics
from jaxkv.serving.page_cache import PageCache
from jaxkv.serving.page_states import Evicted
from jaxkv.serving.request import Event, Request, RequestRefused, Result
from jaxkv.serving.restore import Restores
from jaxkv.serving.runner import ModelRunner
from jaxkv.serving.scheduler import Scheduler
from jaxkv.state import init_state


class EngineFailed(RuntimeError):
    """A step raised, so that what the engine believes and what the device holds may differ: make a new Engine."""


class Engine:
    """Serves requests with continuous batching and a prefix cache. Not thread-safe: one thread calls it.

    Args:
      model: from `jaxkv.load_model`.
      config: sizes and policies; None: the defaults.
      clock: seconds that never go back.
      metrics: None: new ones, in a registry of their own.

    Raises:
      ValueError: sizes that do not fit (`jaxkv.init_state`), a plan that does not add up, a secret that is too short.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
    ):
        config = config or EngineConfig()
        self.config, self._clock = config, clock
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
        page_bytes, layout = state.kv.nbytes // num_pages, page_layout(state)
        base = base_fingerprint(model, config, state, layout)
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
        self._tiers = make_tiers(config, secret, layout)
        self._restores = Restores(self._tiers, self.cache, self.runner, secret, clock) if self._tiers else None
        self.metrics.watch(self._tiers, lambda: self.cache.hold_outcomes)
        self.admission = Admission(
            config.plan,
            num_pages=num_pages,
            page_size=page_size,
            max_tokens_per_slot=config.max_tokens_per_slot,
            bytes_per_page=page_bytes,
            num_slots=config.num_slots,
        )
        self._ladder = Ladder(config.ladder, self.admission.rungs, clock) if config.ladder else None
        self._intake = Intake(
            model,
            base,
            self.admission,
            clock,
            seed=config.seed,
            ageing_s=config.ageing_s,
            prefix_cache=config.prefix_cache,
        )
        self.scheduler = Scheduler(
            self.runner,
            self.cache,
            self.admission,
            self.metrics,
            clock,
            lambda one: one.options(model.config.vocab_size, self._intake.stop_tokens),
            prefill_tokens=config.prefill_tokens,
            overcommit=config.overcommit,
            ladder=self._ladder,
            restores=self._restores,
            kv_bytes=kv_bytes_read(model, page_bytes // page_size),
        )
        self._delivery = Delivery(self.cache.is_held, model.tokenizer is not None)
        self._draining = False
        self._failure: BaseException | None = None

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
        return self._submit(request)

    def step(self) -> list[Event]:
        """One step of the scheduler; returns what is new, of all requests but those with an open `stream`.

        Results wait for `collect`: those of the last 1,024 requests that have ended and whose events were all told.

        Raises:
          EngineFailed: a step raised before.
        """
        self._advance()
        return self._delivery.events()

    def run(self) -> dict[int, list[Result]]:
        """Steps until nothing waits or runs; returns the results that were not collected yet, by request.

        Raises:
          RuntimeError: requests wait for pages that are on hold, and nothing runs: `reconcile` what was delivered.
          EngineFailed: a step raised before.
        """
        while not self.scheduler.is_idle:
            self._advance(must_move=True)
        return self._delivery.results()

    def stream(self, id: int) -> Iterator[Event]:
        """Yields a request's events as they come, stepping the engine meanwhile; other requests' events wait.

        Raises:
          KeyError: no such request, or it ended and its events were collected.
          ValueError: it has an open stream.
          RuntimeError, EngineFailed: as `run`.
        """
        return self._delivery.stream(id, lambda: self._advance(must_move=True))

    def collect(self, id: int) -> list[Result]:
        """The results of a request that has ended, once.

        Raises:
          KeyError: it has not ended, is not known, or was collected already.
        """
        return self._delivery.collect(id)

    def abort(self, id: int) -> None:
        """Ends a request wherever it is, with finish_reason "abort". Ids that are not known, or have ended, are ignored."""
        now = self._clock()
        for one in self.scheduler.abort(id):
            text = one.track.close("abort")
            decode_s = now - one.first_token_at if one.first_token_at is not None else 0.0
            self.metrics.finished("abort", now - one.arrived_at, one.prompt.size, len(one.track.tokens), decode_s)
            self._delivery.take(one, TextEvent(one.index, -1, (), text, "abort"))
        self.scheduler.observe()

    def drain(self) -> dict[int, list[Result]]:
        """Refuses new requests, serves what was submitted, and returns as `run` does."""
        self._draining = True
        return self.run()

    def close(self) -> None:
        """Ends every request, takes no more, and waits for transfers to finish."""
        self._draining = True
        for id in self._delivery.live_ids():
            self.abort(id)
        if self._tiers:
            self._tiers.close()

    def reconcile(self, id: int, delivered: bool = True) -> None:
        """Ends the hold on a request's pages: its result was delivered, or will be asked for anew. Of one that ran out, or that was
        never held: nothing."""
        for owner in self._delivery.take_held(id):
            self.cache.reconcile(owner, delivered)

    def receipt(self, id: int) -> dict:
        """What was reused for a request and why not more, as a JSON-able dict; known from its first admission on.

        Raises:
          KeyError: not admitted yet, or so long ago that it was forgotten.
        """
        return self._delivery.receipt(id)

    def publish(self, tokens, system_prompt: str | None = None, adapter: str | None = None) -> None:
        """Makes the full pages of a prompt reusable by every tenant; the operator's decision. Runs the engine until it is done.

        Raises:
          ValueError: the engine has no prefix cache.
          RequestRefused: as `submit`.
          RuntimeError, EngineFailed: as `run`. Nothing of the prompt is left queued.
        """
        if not self.config.prefix_cache:
            raise ValueError("prefix_cache=False: an engine without a prefix cache has nothing to publish into")
        request = Request(tokens, max_new_tokens=1, system_prompt=system_prompt, adapter=adapter)
        id = self._submit(request, public=True)
        try:
            self._discard(id)
        except RuntimeError:
            if self._failure is None:
                self.abort(id)
                self._discard(id)
            raise

    def revoke(self, tenant: str, acl_epoch: int | None) -> int:
        """Forgets what is cached for a tenant under other access rules than these; returns how many pages. (Requests under a new
        epoch match nothing older anyway.)"""
        old = lambda fingerprint: fingerprint.tenant == tenant and fingerprint.acl_epoch != acl_epoch
        if self._tiers:
            self._tiers.drop_where(old)
        return self.cache.drop(old)

    def set_quota(self, tenant: str, pages: int | None) -> None:
        """Sets how many pages a tenant keeps when others need them; None ends its quota.

        Raises:
          ValueError: no name, or no whole pages.
        """
        if pages is not None:
            check_quota(tenant, pages)
        self.cache.set_quota(tenant, pages)

    def swap_weights(self, model: Model, model_revision: str | None = None) -> None:
        """Takes other weights of the same architecture. Nothing cached before is matched after.

        Args:
          model_revision: as in EngineConfig.

        Raises:
          ValueError: another architecture, or answers have begun with the old weights: `run()` first.
        """
        before, base = self._intake.model, self._intake.base
        for kind in ("config", "storage"):
            new, old = dataclasses.asdict(getattr(model, kind)), dataclasses.asdict(getattr(before, kind))
            if other := [f"{kind}.{name} {old[name]!r} -> {new[name]!r}" for name in new if new[name] != old[name]]:
                raise ValueError(f"the new weights are of another architecture ({', '.join(other)}): make a new Engine")
        live = self._delivery.live()
        begun = sum(one.row >= 0 or bool(one.track.tokens) for one in live)
        if begun:
            raise ValueError(f"{begun} sequences have begun with the old weights: run() first")
        if model_revision == base.model_revision:
            raise ValueError(f"{model_revision=} is that of the weights before: what was cached with them would be matched")
        revision = model_revision or weights_digest(model)
        self._intake.model, self._intake.base = model, dataclasses.replace(base, model_revision=revision)
        self.runner.swap_params(model.params)
        is_old = lambda fingerprint: fingerprint.model_revision != revision
        self.cache.drop(is_old)
        if self._tiers:
            self._tiers.drop_where(is_old)
        for one in live:
            one.fingerprint = dataclasses.replace(one.fingerprint, model_revision=revision)

    def warmup(self) -> None:
        """Compiles all that can come; nothing is traced after it."""
        if self.num_running:
            raise ValueError(f"{self.num_running} sequences hold slots: warm up before the first step")
        self.runner.warmup(min(self.config.prefill_tokens, self.config.max_tokens_per_slot))

    # Inside

    def _discard(self, id: int) -> None:
        """Steps until a request has ended, and forgets what came of it."""
        for _ in self.stream(id):
            pass
        self.collect(id)

    def _submit(self, request: Request, public: bool = False) -> int:
        self._check_alive()
        try:
            if self._draining:
                raise RequestRefused("draining", "the engine is draining and takes no more requests")
            self.scheduler.update_ladder()
            group = self._intake.group(request, self._ladder.level if self._ladder else 0, public)
        except RequestRefused as refused:
            self.metrics.rejected(refused.reason)
            raise
        except (ValueError, TypeError) as error:
            self.metrics.rejected("invalid")
            raise RequestRefused("invalid", str(error)) from error
        if self._restores is not None:
            self._restores.look()
        self.metrics.queued(len(group.sequences))
        self.scheduler.add(group)
        self.scheduler.observe()
        return self._delivery.expect(group)

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
            self._delivery.take(one, event)
        if must_move and not events and not self.num_running and self.num_waiting:
            raise RuntimeError(
                f"{self.num_waiting} requests wait and nothing runs: {self.cache.held_pages} pages are on hold; reconcile() what was"
                f" delivered, or call again when hold_ttl_s={self.config.hold_ttl_s:g} are over"
            )

    def _on_evict(self, evicted: Many[Evicted]) -> None:
        self.metrics.evicted(len({one.page for one in evicted}))
        if self._restores is not None:
            self._restores.on_evict(evicted)
