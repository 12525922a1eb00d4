"""What is asked of the serving engine and what comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv.output import TokenLogprobs
from jaxkv.sampling import Sampling


class RequestRefused(ValueError):
    """A request that will not be served; nothing of it was queued.

    `reason` is "invalid", "too_long" (than a slot or the plan's context), "never_fits" (more pages than the pool has), "ladder" (a
    long context under pressure) or "draining".
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it. What decides who may share its pages is in the second group."""

    tokens: Sequence[int] | np.ndarray
    max_new_tokens: int = 128
    sampling: Sampling = Sampling()  # one value an option; n samples share the prompt's pages
    priority: int = 0  # lower goes first; waiting makes up for it (EngineConfig.ageing_s)
    allow_truncation: bool = False  # a prompt that is too long loses its beginning instead of being refused
    hold: bool = False  # its pages stay as they are until `Engine.reconcile`: its delivery must be confirmed

    tenant: str = ""
    system_prompt: str | None = None  # only its digest is kept
    adapter: str | None = None  # digest of an adapter's weights
    acl_epoch: int | None = None  # of the tenant's access rules
    use_cache: bool = True  # False: neither reads cached pages nor leaves any


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of one sequence, as an invoice counts them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, not computed for this request


@dataclasses.dataclass(frozen=True)
class Event:
    """A sequence's next token, or its end."""

    id: int  # of the request
    index: int  # of the sample, 0 to n - 1
    tokens: tuple[int, ...]  # one; none where a sequence ends without
    text: str  # what is now known to be part of the answer
    finish_reason: str | None = None  # in the last event: "stop", "length", "abort" or "error" (logits were NaN or infinite)
    usage: Usage | None = None  # in the last event


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished sequence, whole."""

    id: int
    index: int
    tokens: np.ndarray  # i32, a stop token included, a stop string's tokens not
    text: str | None  # None without a tokenizer
    finish_reason: str
    usage: Usage
    logprobs: list[TokenLogprobs] | None
