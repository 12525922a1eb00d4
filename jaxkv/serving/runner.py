"""What carries the scheduler's decisions out: the protocol, and the runner that has a model.

A runner executes in the order it is asked, and returns before it is done: the scheduler plans the next step meanwhile. Rows are the
slots of the static batch. Who holds which page is the scheduler's business; a runner is told the page table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.buckets import bucket_tokens, most_rows, row_buckets
from jaxkv.dispatch import collect, copy, dispatch_prefill
from jaxkv.kv.pages import Ownership
from jaxkv.sample_step import SamplingArrays
from jaxkv.sampling import Sampling
from jaxkv.serving.page_data import PageData
from jaxkv.state import State
from jaxkv.steps import Emitted, Loop, Pools, step
from jaxkv.stream import start_loop

# Pages that one dispatch reads or writes for a tier: more go in several.
TRANSFER_PAGES = 16
# Rows of at least so many tokens fill a CPU's matrix units alone: a bucket of four with one row empty would only add padding.
_ALONE_ON_CPU = 64


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of one row's prompt."""

    row: int
    start: int  # tokens of the row stored before
    tokens: np.ndarray  # i32
    samplers: tuple[int, ...] = ()  # rows that will sample from its last token's logits; none unless the prompt ends here


class Runner(Protocol):
    """The device, as the scheduler sees it."""

    num_slots: int

    def seat(self, row: int, pages: Sequence[int], options: Any, cached: np.ndarray) -> None:
        """Gives `row` its pages, its options (None: those that it has) and the tokens (i32) that it finds stored."""

    def set_pages(self, row: int, pages: Sequence[int], first: int) -> None:
        """Gives a row more pages, from logical page `first` on."""

    def clear(self, row: int) -> None:
        """The row runs no further; it owns no pages from here on."""

    def prefill(self, chunks: Sequence[Chunk]) -> Any:
        """Stores chunks of prompts; returns what `read_prefill` takes."""

    def read_prefill(self, ticket: Any) -> Sequence[bool]:
        """Waits for what a ticket stands for: which chunks are free of NaN and infinity."""

    def copy_pages(self, src: Sequence[int], dst: Sequence[int], row_src: Sequence[int], row_dst: Sequence[int]) -> None:
        """Copies pages, and the token history of rows, for samples that share a prompt."""

    def begin(self, rows: Sequence[int], lengths: Sequence[int]) -> Any:
        """Samples first tokens of rows that hold `lengths` tokens, from their prompts' logits; returns what `read` takes."""

    def decode(self) -> Any:
        """Emits one token for every row that has begun and not ended; returns what `read` takes."""

    def read(self, ticket: Any) -> Emitted:
        """Waits for what a ticket stands for: Emitted of numpy arrays with one step."""

    def read_pages(self, pages: Sequence[int]) -> Any:
        """Copies pages out; returns what `page_data` takes. The pages may be given away at once."""

    def page_data(self, ticket: Any) -> list[PageData]:
        """Waits for copied pages."""

    def write_pages(self, pages: Sequence[int], data: Sequence[PageData]) -> None:
        """Copies pages in."""


class ModelRunner:
    """A runner over the jitted steps of one model.

    Args:
      state: an empty state: its weights, its pool, its shapes. Consumed.
    """

    def __init__(self, state: State):
        B, C = state.num_slots, state.kv.refcounts.shape[0]
        self.num_slots = B
        self._state = state
        self._platform = state.static.platform
        self._table = np.zeros(state.kv.page_table.shape, np.int32)
        self._options = idle_options(state)
        self._halt = np.ones(B, bool)  # rows that must not run; the device stops the others itself
        self._table_changed = self._options_changed = True  # since the device saw them
        self._device_options: SamplingArrays = self._options
        self._logits: jax.Array | None = (
            None  # f32[B, V]: of the last tokens of prompts that ended, at the rows that sample from them
        )
        # Every page counts as held once: the steps then neither take pages nor copy them, for all is decided on the host.
        own = Ownership(self._table.copy(), np.zeros(B, np.int32), np.ones(C, np.int32), state.kv.page_size)
        pools = Pools(state.kv.k_pages, state.kv.v_pages, state.kv.kv_scales, state.history)
        self._loop = start_loop(pools, own, np.ones(B, bool))

    def seat(self, row: int, pages: Sequence[int], options: SamplingArrays | None, cached: np.ndarray) -> None:
        self._table[row] = 0
        self.set_pages(row, pages, 0)
        if options is not None:
            self._options_changed = True
            for field in dataclasses.fields(options):
                getattr(self._options, field.name)[row] = getattr(options, field.name)[0]
        if cached.size:
            history = np.zeros(self._loop.pools.history.shape[1], np.int32)
            history[: cached.size] = cached
            self._pools(step("set_history", self._platform)(self._loop.pools, np.int32(row), history))

    def set_pages(self, row: int, pages: Sequence[int], first: int) -> None:
        self._table[row, first : first + len(pages)] = pages
        self._table_changed = True

    def clear(self, row: int) -> None:
        self._table[row] = 0
        self._table_changed = True
        self._halt[row] = True

    def prefill(self, chunks: Sequence[Chunk]) -> list[tuple[list[int], jax.Array]]:
        own = dataclasses.replace(self._loop.own, page_table=self._table)
        tickets = []
        for T, places in self._batches(chunks):
            batch = [chunks[i] for i in places]
            rows = np.array([chunk.row for chunk in batch], np.int32)
            starts = np.array([chunk.start for chunk in batch], np.int32)
            tokens = [chunk.tokens for chunk in batch]
            pools, logits, sound = dispatch_prefill(self._state, self._loop.pools, own, rows, tokens, starts, T)
            self._pools(pools)
            samplers = [(row, place) for place, chunk in enumerate(batch) for row in chunk.samplers]
            if samplers or self._logits is None:
                self._logits = collect(self._state, self._logits, logits, [r for r, _ in samplers], [p for _, p in samplers])
            tickets.append((places, sound))
        return tickets

    def read_prefill(self, ticket: list[tuple[list[int], jax.Array]]) -> list[bool]:
        found: dict[int, bool] = {}
        for places, sound in ticket:
            found.update(zip(places, jax.device_get(sound).tolist(), strict=False))  # padded rows come last
        return [found[i] for i in range(len(found))]

    def copy_pages(self, src: Sequence[int], dst: Sequence[int], row_src: Sequence[int], row_dst: Sequence[int]) -> None:
        B = self.num_slots
        for i in range(0, max(len(src), len(row_src)), B):
            part = slice(i, i + B)
            self._pools(copy(self._state, self._loop.pools, src[part], dst[part], row_src[part], row_dst[part]))

    def begin(self, rows: Sequence[int], lengths: Sequence[int]) -> Emitted:
        starting, stored = np.zeros(self.num_slots, bool), np.zeros(self.num_slots, np.int32)
        starting[list(rows)], stored[list(rows)] = True, lengths
        self._halt[list(rows)] = False
        loop = self._with_host_side()
        self._loop, emitted = step("first_tokens", self._platform)(loop, self._logits, self._device_options, starting, stored)
        return emitted

    def decode(self) -> Emitted:
        loop, halt = self._with_host_side(), self._halt.copy()  # the device may read its argument after this returns
        self._loop, emitted = step("decode_many", self._platform)(
            self._state.params, loop, self._device_options, halt, np.int32(1), static=self._state.static, looped=False
        )
        return emitted

    def read(self, ticket: Emitted) -> Emitted:
        return jax.device_get(ticket)

    def read_pages(self, pages: Sequence[int]) -> list[tuple[int, tuple]]:
        tickets = []
        for i in range(0, len(pages), TRANSFER_PAGES):
            some = np.zeros(TRANSFER_PAGES, np.int32)
            some[: len(pages[i : i + TRANSFER_PAGES])] = pages[i : i + TRANSFER_PAGES]
            arrays = step("read_pages", self._platform)(self._loop.pools, some, num_layers=self._num_layers)
            tickets.append((len(pages[i : i + TRANSFER_PAGES]), arrays))
        return tickets

    def page_data(self, ticket: list[tuple[int, tuple]]) -> list[PageData]:
        data = []
        for count, arrays in ticket:
            k, v, scales = jax.device_get(arrays)
            for i in range(count):
                data.append(PageData(k[:, i].copy(), v[:, i].copy(), None if scales is None else scales[:, i].copy()))
        return data

    def write_pages(self, pages: Sequence[int], data: Sequence[PageData]) -> None:
        C = self._state.kv.refcounts.shape[0]
        for i in range(0, len(pages), TRANSFER_PAGES):
            some = data[i : i + TRANSFER_PAGES]
            to = np.full(TRANSFER_PAGES, C, np.int32)
            to[: len(some)] = pages[i : i + TRANSFER_PAGES]

            def stacked(name, some=some):
                first = getattr(some[0], name)
                if first is None:
                    return None
                array = np.zeros((first.shape[0], TRANSFER_PAGES, *first.shape[1:]), first.dtype)
                for j, one in enumerate(some):
                    array[:, j] = getattr(one, name)
                return array

            self._pools(
                step("write_pages", self._platform)(
                    self._loop.pools, to, stacked("k"), stacked("v"), stacked("scales"), num_layers=self._num_layers
                )
            )

    def swap_params(self, params: dict) -> None:
        """Takes other weights of the same shapes; whatever is stored was computed with the old ones."""
        self._state = dataclasses.replace(self._state, params=params)

    def warmup(self, max_prompt_tokens: int) -> None:
        """Compiles every step for every shape that can come; nothing of it is seen: idle rows store nothing."""
        longest = bucket_tokens(max_prompt_tokens)
        for T in sorted({bucket_tokens(size) for size in range(1, longest + 1)}):
            for R in self._row_buckets(T):
                self.prefill_shape(R, T)
        self.copy_pages((), (), (0,), (self.num_slots,))
        self.read(self.begin((), ()))
        self.read(self.decode())
        self.write_pages([self._state.kv.refcounts.shape[0]], self.page_data(self.read_pages([0])))
        self._pools(
            step("set_history", self._platform)(
                self._loop.pools, np.int32(0), np.zeros(self._loop.pools.history.shape[1], np.int32)
            )
        )

    def prefill_shape(self, R: int, T: int) -> None:
        """Runs a prefill of R empty rows of T tokens: compiles it."""
        own = dataclasses.replace(self._loop.own, page_table=self._table)
        nothing = [np.zeros(0, np.int32)] * R
        pools, logits, _ = dispatch_prefill(
            self._state, self._loop.pools, own, np.zeros(R, np.int32), nothing, np.zeros(R, np.int32), T
        )
        self._pools(pools)
        self._logits = collect(self._state, self._logits, logits, [], [])

    @property
    def _num_layers(self) -> int:
        return self._state.static.model.num_layers

    def _batches(self, chunks: Sequence[Chunk]) -> list[tuple[int, list[int]]]:
        """Which chunks go together, by bucket, in batches that a dispatch takes without a row of padding where that would cost."""
        by_bucket: dict[int, list[int]] = {}
        for i, chunk in enumerate(chunks):
            by_bucket.setdefault(bucket_tokens(chunk.tokens.size), []).append(i)
        batches = []
        for T, alike in by_bucket.items():
            sizes, whole = self._row_buckets(T), self._platform == "cpu" and T >= _ALONE_ON_CPU
            while alike:
                size = max(size for size in sizes if size <= len(alike)) if whole else sizes[-1]
                batches.append((T, alike[:size]))
                alike = alike[size:]
        return batches

    def _row_buckets(self, T: int) -> list[int]:
        return [R for R in row_buckets(self.num_slots) if R <= most_rows(T, self.num_slots)]

    def _with_host_side(self) -> Loop:
        """The loop with the page table as it is now; the options are sent if a row's have changed."""
        if self._options_changed:
            self._device_options = jax.tree.map(lambda a: jnp.asarray(a.copy()), self._options)
            self._options_changed = False
        if not self._table_changed:
            return self._loop
        self._table_changed = False
        return dataclasses.replace(self._loop, own=dataclasses.replace(self._loop.own, page_table=jnp.asarray(self._table.copy())))

    def _pools(self, pools: Pools) -> None:
        self._loop = dataclasses.replace(self._loop, pools=pools)


def idle_options(state: State) -> SamplingArrays:
    """Options of B idle rows, as numpy arrays to write into."""
    return Sampling().arrays(
        num_slots=state.num_slots,
        rows=(),
        vocab_size=state.static.model.vocab_size,
        eos_token_ids=(),
        seeds=(),
        prompt_lengths=(),
    )
