"""From a request to sequences that can wait: its prompt, its seeds, its stop strings, and whose pages it may find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxkv.inputs import as_rows, check_vocabulary
from jaxkv.loading import Model
from jaxkv.sampling import StopMatcher, draw_seeds, seed_key
from jaxkv.serving.admission import Admission, Refuse
from jaxkv.serving.fingerprint import Fingerprint, digest_text
from jaxkv.serving.request import Request, RequestRefused, checked
from jaxkv.serving.sequence import Sequence, SequenceGroup
from jaxkv.stream import Track


class Intake:
    """Checks requests and turns them into groups of sequences; every refusal leaves it as it was.

    Args:
      base: fingerprint of what is the same for all requests of this engine; the others are its copies.
      seed: of the seeds of requests that name none.
      ageing_s: waiting that makes up for one step of priority.
      prefix_cache: requests may find and leave pages.

    Attributes:
      model: whose requests these are; may be replaced by other weights of the same architecture, with `base`.
    """

    def __init__(
        self,
        model: Model,
        base: Fingerprint,
        admission: Admission,
        clock: Callable[[], float],
        *,
        seed: int,
        ageing_s: float,
        prefix_cache: bool,
    ):
        self.model, self.base = model, base
        self._admission, self._clock, self._ageing_s, self._prefix_cache = admission, clock, ageing_s, prefix_cache
        self._key = seed_key(seed)
        self._next_id = self._next_owner = 0

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Configs name stop tokens that their vocabulary lacks; what cannot be emitted stops nothing."""
        return tuple(i for i in self.model.eos_token_ids if i < self.model.config.vocab_size)

    def group(self, request: Request, ladder_level: int, public: bool = False) -> SequenceGroup:
        """The sequences of a request, with ids of their own.

        Args:
          public: its pages are the operator's, for every tenant.

        Raises:
          RequestRefused: it does not fit, or not now.
          ValueError, TypeError: it makes no sense, or not for this model.
        """
        request = checked(request)
        request = dataclasses.replace(request, use_cache=request.use_cache and self._prefix_cache)
        prompt, n = self._prompt(request), request.sampling.n
        verdict = self._admission.check(prompt.size, request.max_new_tokens, n, request.allow_truncation, ladder_level)
        if isinstance(verdict, Refuse):
            raise RequestRefused(verdict.reason, verdict.message)
        prompt = prompt[prompt.size - verdict.prompt_tokens :]
        key, seeds = self._key, [0] * n
        if request.sampling.needs_seeds:
            key, drawn = draw_seeds(self._key, n)
            seeds = drawn.tolist()
        now, id = self._clock(), self._next_id
        order = now + request.priority * self._ageing_s
        fingerprint = self._fingerprint(request, id, public)
        sequences = [
            Sequence(self._next_owner + i, id, request, prompt, fingerprint, self._track(request, prompt, i), seeds[i], now, order)
            for i in range(n)
        ]
        sequences[0].options(self.model.config.vocab_size, self.stop_tokens)  # raises for options that do not fit the model
        self._key, self._next_id, self._next_owner = key, id + 1, self._next_owner + n
        return SequenceGroup(sequences, order)

    def _prompt(self, request: Request) -> np.ndarray:
        rows = as_rows(request.tokens)
        if len(rows) != 1 or not rows[0].size:
            raise ValueError(f"a request has one prompt of at least one token, got {len(rows)} of {[row.size for row in rows]}")
        check_vocabulary(self.model.config, rows)
        return rows[0].astype(np.int32)

    def _track(self, request: Request, prompt: np.ndarray, index: int) -> Track:
        tokenizer, stop = self.model.tokenizer, request.sampling.stop_strings(0, 1)
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
        if not request.use_cache:
            tenant: str | None = f"\0request {id}"  # nobody can name it
        else:
            tenant = None if public else request.tenant
        return dataclasses.replace(
            self.base,
            adapter=request.adapter,
            system_prompt=None if request.system_prompt is None else digest_text(request.system_prompt),
            tenant=tenant,
            acl_epoch=None if public else request.acl_epoch,
        )
