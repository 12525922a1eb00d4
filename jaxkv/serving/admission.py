"""Admission: what may be queued at all, and what may start now. Decisions without state, so that anyone can repeat them.

Units never mix: requests and contexts are counted in tokens of ONE sequence, the pool and what is taken from it in pages. The one
bridge is `pages_for`.

A request that is accepted can start on an idle engine: `check` refuses whatever `may_start` would refuse with nothing running and
all pages available. So nothing waits for what cannot come.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxkv.kv.pages import num_pages_needed
from jaxkv.planning.plan import CapacityPlan, PlanError
from jaxkv.planning.units import GIB
from jaxkv.serving.ladder import Rung, default_rungs


@dataclasses.dataclass(frozen=True)
class Accept:
    """May be queued, with the last `prompt_tokens` of its prompt's tokens: all of them unless it allows truncation."""

    prompt_tokens: int


@dataclasses.dataclass(frozen=True)
class Refuse:
    """Is refused at once. `message` has the numbers and the way out."""

    reason: str  # "invalid", "too_long", "never_fits" or "ladder"
    message: str


class Admission:
    """The rules of one engine: its plan, or without one the pool alone.

    Attributes:
      usable_pages: pages of the pool, without the null page.
      max_context_tokens: the most that prompt + max_new_tokens of one sequence may be.
      max_active_sequences: the most that may run, a request's n samples being n; None: no limit but the pool's.
      reserve_pages: the least that is set aside for a sequence when it starts.
      low_watermark_pages: pages that stay available when something starts, for sequences that grow beyond their reserve.
      rungs: what the ladder's levels mean here.
    """

    def __init__(
        self,
        plan: CapacityPlan | None,
        *,
        num_pages: int,
        page_size: int,
        max_tokens_per_slot: int,
        bytes_per_page: int,
        num_slots: int | None = None,
        rungs: Sequence[Rung] | None = None,
    ):
        """Checks the plan against itself and against the pool.

        Args:
          plan: of one device; None: the pool alone decides.
          num_pages: pages of one layer's pool, the null page included.
          page_size: tokens a page.
          max_tokens_per_slot: the longest history of one slot.
          bytes_per_page: keys and values of one page in all layers, on one device.
          num_slots: rows of the batch; None: another limits them.
          rungs: None: `default_rungs` of the longest context.

        Raises:
          ValueError: a size is too small.
          PlanError: the plan does not add up, or the pool is larger than its KV budget or too small for its sequences.
        """
        given = dict(
            page_size=page_size, max_tokens_per_slot=max_tokens_per_slot, bytes_per_page=bytes_per_page, num_slots=num_slots
        )
        for name, value in (given | {"num_pages - 1 (page 0 is never used)": num_pages - 1}).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.page_size = page_size
        self.usable_pages = num_pages - 1
        self.max_context_tokens = max_tokens_per_slot
        self.max_active_sequences = num_slots
        self.reserve_pages = self.low_watermark_pages = 0
        if plan is not None:
            self._follow(plan.check(), bytes_per_page)
        self.rungs = tuple(rungs) if rungs is not None else default_rungs(self.max_context_tokens)

    def pages_for(self, prompt_tokens: int, max_new_tokens: int, n: int = 1) -> int:
        """Returns the pages of a whole request: n samples share the prompt's full pages, each has a copy of the partial one."""
        shared = prompt_tokens // self.page_size
        return shared + n * (num_pages_needed(prompt_tokens + max_new_tokens, self.page_size) - shared)

    def may_start(self, active_sequences: int, pages_wanted: int, available_pages: int, new_sequences: int = 1) -> bool:
        """Returns whether sequences may start now.

        Args:
          active_sequences: that run already.
          pages_wanted: that would leave `available_pages`: `pages_for` the request, less those of its prefix that others hold.
          available_pages: free and reusable ones.
          new_sequences: the request's samples.
        """
        if self.max_active_sequences is not None and active_sequences + new_sequences > self.max_active_sequences:
            return False
        set_aside = max(pages_wanted, new_sequences * self.reserve_pages)
        return set_aside + self.low_watermark_pages <= available_pages

    def check(
        self, prompt_tokens: int, max_new_tokens: int, n: int = 1, allow_truncation: bool = False, ladder_level: int = 0
    ) -> Accept | Refuse:
        """Returns whether a request may be queued, whatever runs or waits now; its sizes are tokens of one sequence.

        A prompt that is too long loses as few tokens from its beginning as possible, if the request allows it and one is left.
        """
        if min(prompt_tokens, max_new_tokens, n) < 1:
            return Refuse("invalid", f"{prompt_tokens=}, {max_new_tokens=} and {n=} must each be at least 1")
        kept = prompt_tokens
        refusal = self._never(kept, max_new_tokens, n)
        if refusal is not None and allow_truncation:
            kept = self._longest_prompt(prompt_tokens, max_new_tokens, n)
            refusal = self._never(kept, max_new_tokens, n) if kept else refusal
        if refusal is not None:
            way_out = "even one prompt token is too many" if allow_truncation else "or allow_truncation"
            message = f"{refusal.message}: shorten the prompt, ask for fewer new tokens or samples, {way_out}"
            return dataclasses.replace(refusal, message=message)
        rung = self.rungs[ladder_level]
        longest = rung.longest_context_tokens
        if longest is not None and kept + max_new_tokens > longest:
            return Refuse(
                "ladder",
                f"pages are short (ladder level {ladder_level}, {rung.name}): new contexts are limited to {longest} tokens, and prompt {kept} +"
                f" max_new_tokens {max_new_tokens} is {kept + max_new_tokens}; try again later, or with fewer",
            )
        return Accept(kept)

    def _never(self, prompt_tokens: int, max_new_tokens: int, n: int) -> Refuse | None:
        """Why a request could not start on an idle engine; None: it could."""
        total_tokens = prompt_tokens + max_new_tokens
        if total_tokens > self.max_context_tokens:
            return Refuse(
                "too_long",
                f"prompt {prompt_tokens} + max_new_tokens {max_new_tokens} is {total_tokens} tokens, more than the"
                f" {self.max_context_tokens} of a context",
            )
        pages = self.pages_for(prompt_tokens, max_new_tokens, n)
        if self.may_start(0, pages, self.usable_pages, n):
            return None
        if self.max_active_sequences is not None and n > self.max_active_sequences:
            return Refuse(
                "never_fits", f"{n=} samples are more than the {self.max_active_sequences} sequences that may run at once"
            )
        return Refuse(
            "never_fits",
            f"prompt {prompt_tokens} + max_new_tokens {max_new_tokens} tokens for {n=} samples take {pages} pages of {self.page_size}"
            f" tokens (at least {self.reserve_pages} a sample), more than the {self.usable_pages} of the pool less a low watermark"
            f" of {self.low_watermark_pages}",
        )

    def _longest_prompt(self, prompt_tokens: int, max_new_tokens: int, n: int) -> int:
        """The most tokens of a prompt with which the request fits; 0 if it never does."""
        most_pages = self.usable_pages - self.low_watermark_pages
        most_tokens = min(prompt_tokens, self.max_context_tokens - max_new_tokens)
        longest = 0
        # A prompt of a page more takes a page more. Within a page it is not so simple: when a partial page, of which each sample
        # has a copy, becomes full, they share it, and the request takes fewer pages.
        for partial in range(self.page_size):
            full = min(most_pages - self.pages_for(partial, max_new_tokens, n), (most_tokens - partial) // self.page_size)
            if full >= 0:
                longest = max(longest, full * self.page_size + partial)
        return longest

    def _follow(self, plan: CapacityPlan, bytes_per_page: int) -> None:
        """Takes a plan's limits over, in tokens and whole pages; PlanError if the pool is not the plan's."""
        pages = lambda gib: math.floor(gib * GIB / bytes_per_page + 1e-6)
        budget = pages(plan.kv_budget_gib)
        if self.usable_pages > budget:
            raise PlanError(
                f"the pool's {self.usable_pages} pages of {bytes_per_page} bytes are"
                f" {self.usable_pages * bytes_per_page / GIB:.2f} GiB, more than the plan's KV budget of {plan.kv_budget_gib} GiB:"
                f" num_pages may be at most {budget + 1}",
                "num_pages",
                budget + 1,
            )
        self.reserve_pages, self.low_watermark_pages = max(1, pages(plan.reserve_per_sequence_gib)), pages(plan.low_watermark_gib)
        committed = plan.max_active_sequences * self.reserve_pages + self.low_watermark_pages
        if committed > self.usable_pages:
            largest = max(0, self.usable_pages - self.low_watermark_pages) // self.reserve_pages
            raise PlanError(
                f"the plan's {plan.max_active_sequences} sequences with {self.reserve_pages} pages each and the low watermark of"
                f" {self.low_watermark_pages} take {committed} pages, more than the {self.usable_pages} of the pool: at most"
                f" {largest} sequences are admissible, or num_pages {committed + 1}",
                "max_active_sequences",
                largest,
            )
        slots = self.max_active_sequences
        self.max_active_sequences = plan.max_active_sequences if slots is None else min(plan.max_active_sequences, slots)
        self.max_context_tokens = min(plan.max_context_tokens, self.max_context_tokens)
