"""What is asked of the serving engine and what comes back."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence

import numpy as np

from jaxkv.output import TokenLogprobs
from jaxkv.sampling import Sampling

MOST_PRIORITY = 1_000_000


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
    priority: float = 0  # lower goes first; waiting makes up for it (EngineConfig.ageing_s)
    allow_truncation: bool = False  # a prompt that is too long loses its beginning instead of being refused
    hold: bool = False  # its pages stay as they are until `Engine.reconcile`: its delivery must be confirmed

    tenant: str = ""
    system_prompt: str | None = None  # only its digest is kept
    adapter: str | None = None  # digest of an adapter's weights
    acl_epoch: int | None = None  # of the tenant's access rules
    use_cache: bool = True  # False: neither reads cached pages nor leaves any


def checked(request: Request) -> Request:
    """The request, its numbers plain ones.

    Raises:
      TypeError, ValueError: a field of the wrong kind, or out of range; names it.
    """
    if not isinstance(request, Request):
        raise TypeError(f"expected a Request, got {type(request).__name__}")
    if not isinstance(request.sampling, Sampling):
        raise TypeError(f"sampling must be a jaxkv.Sampling, got {type(request.sampling).__name__}")
    if request.sampling.max_new_tokens is not None:
        raise ValueError("a request's limit is Request.max_new_tokens: leave Sampling.max_new_tokens out")
    if isinstance(request.tokens, bytes | bytearray | memoryview | set | frozenset | dict):
        raise TypeError(f"tokens must be a list or an array of token ids, got {type(request.tokens).__name__}")
    if not is_whole(request.max_new_tokens, 1):
        raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {request.max_new_tokens!r}")
    if not is_finite(request.priority) or abs(request.priority) > MOST_PRIORITY:
        raise ValueError(f"priority must be a number from {-MOST_PRIORITY:,} to {MOST_PRIORITY:,}, got {request.priority!r}")
    if not isinstance(request.tenant, str) or "\0" in request.tenant:  # None is the operator's; names with \0 are the engine's
        raise ValueError(f"tenant must be a text without NUL, got {request.tenant!r}")
    for name in ("system_prompt", "adapter"):
        if not isinstance(getattr(request, name), str | None):
            raise ValueError(f"{name} must be a text or None, got {getattr(request, name)!r}")
    if request.acl_epoch is not None and not (is_whole(request.acl_epoch, 0) and int(request.acl_epoch) < 1 << 63):
        kind = "a larger one" if is_whole(request.acl_epoch, 0) else repr(request.acl_epoch)
        raise ValueError(f"acl_epoch must be a whole number of at least 0 and below 2**63, or None, got {kind}")
    for name in ("allow_truncation", "hold", "use_cache"):
        if not isinstance(getattr(request, name), bool):
            raise ValueError(f"{name} must be True or False, got {getattr(request, name)!r}")
    epoch = None if request.acl_epoch is None else int(request.acl_epoch)
    return dataclasses.replace(request, max_new_tokens=int(request.max_new_tokens), acl_epoch=epoch)


def is_whole(value: object, least: int) -> bool:
    """Whether a value is a whole number (no bool) of at least `least`."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


def is_finite(value: object) -> bool:
    """Whether a value is a finite number (no bool)."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


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
