"""What `generate` gives back: the whole of it (`Output`), or piece by piece (`TextEvent`)."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Timings:
    """Wall time of one generate call, in seconds, and what it processed.

    A step that runs for the first time is traced and compiled first. `ttft_s` and `total_s` hold that, as a caller waits for it;
    `decode_s` and `tpot_s` do not; `compile_s` says how much it was (0 after `warmup`).
    """

    ttft_s: float  # from the call to the first token on the host
    decode_s: float  # from the first token to the last, without compiling; 0 if there was one
    tpot_s: float  # decode_s a token after the first: the mean time between tokens
    total_s: float
    compile_s: float
    prompt_tokens: int  # run through prefill
    new_tokens: int  # emitted, over all rows


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (nats) of one emitted token under the model's own distribution."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the best alternatives, best first


@dataclasses.dataclass(frozen=True)
class Output:
    """What was emitted; one entry a sequence (with n > 1 the samples of one prompt stand together)."""

    tokens: list[np.ndarray]  # i32, a stop token included, a stop string's tokens not
    text: list[str] | None  # None without a tokenizer; special tokens and stop strings left out
    logprobs: list[list[TokenLogprobs] | None] | None  # None where not asked for
    finish_reasons: list[str]  # "stop", "length", "cancelled" (finish() before the end), or "error": logits were NaN or infinite
    rows: list[int]  # the slot of each sequence
    timings: Timings


@dataclasses.dataclass(frozen=True)
class TextEvent:
    """One piece of a stream: a token as it comes, and the text that is now known to be part of the answer.

    The texts of a sequence's events, joined, are `Output.text` (after a cancelled stream, its beginning: what was held back is only
    there). Its tokens, joined, are `Output.tokens` too, unless a stop string ended it: every token is told when it comes, and only
    then can it turn out to hold a part of the stop string. `Output.tokens` then ends before the first token that does, and so does
    the slot's history; the tokens told beyond that are those to drop.
    """

    index: int  # of the sequence in Output
    row: int  # its slot
    tokens: tuple[int, ...]  # one; none when the row ends with "error"
    text: str  # "" while a character is half told, or while a stop string may have begun
    finish_reason: str | None  # as in Output, in the sequence's last event; None before
