"""The state that every verb takes and returns, and the verbs that only free pages: release and truncate.

A verb that runs the model donates the pages and the history, so the state it was given is spent: using it again raises
`StaleStateError`. What a user must know to decide (lengths, page table, refcounts) lives on the host as read-only numpy, so no
verb waits for the device to find out whether it can run.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.inputs import Integers, as_integers, check_rows
from jaxkv.kv import integrity, pages
from jaxkv.kv.pages import Ownership
from jaxkv.kv.state import KVState, default_page_size, empty_kv
from jaxkv.model.decoder import Kernels
from jaxkv.sampling import seed_key
from pallas_kernels import check_implementation, pool_heads

if TYPE_CHECKING:
    from jaxkv.io.tokenizer import Tokenizer
    from jaxkv.loading import Model


class StaleStateError(RuntimeError):
    """A state was used after a verb had consumed it."""


@dataclasses.dataclass(frozen=True)
class Static:
    """What is fixed about a state: part of every trace, never an array."""

    model: ModelConfig
    dtype: str  # operands of large products
    kernels: Kernels

    @property
    def platform(self) -> str:
        """The jax backend that the steps are compiled for."""
        return self.kernels.device.platform


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "kv", "history", "pending", "key"],
    meta_fields=["static", "max_tokens_per_slot", "tokenizer", "eos_token_ids"],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class State:
    """Weights, KV pages and token history of B slots. Immutable; a verb consumes it and returns its successor.

    A slot's history is every token it was given or emitted. The keys and values of a token just emitted are not stored until
    the next one is asked for: it is `pending`, and the next verb runs it first.
    """

    params: dict
    kv: KVState
    history: jax.Array  # i32[B, S] tokens of each slot, S = M * P
    pending: np.ndarray  # i32[B] token emitted but not stored yet; -1: none
    key: np.ndarray  # u32[4] on the host: the seeds of rows that name none are drawn from it
    static: Static
    max_tokens_per_slot: int  # the longest history a slot may hold, at most S
    tokenizer: Tokenizer | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __repr__(self) -> str:
        own = self.kv.own
        spent = ", spent" if self.history.is_deleted() else ""
        return (
            f"State({self.static.model.architecture}, {self.num_slots} slots of {self.max_tokens_per_slot} tokens, holding"
            f" {self.num_tokens.tolist()}; {pages.pages_in_use(own)} of {own.refcounts.shape[0] - 1} pages in use{spent})"
        )

    @property
    def num_slots(self) -> int:
        """B."""
        return self.history.shape[0]

    @property
    def num_tokens(self) -> np.ndarray:
        """i32[B]: tokens in each slot's history, the pending one included."""
        return np.asarray(self.kv.lengths) + (self.pending >= 0)

    def tokens(self, row: int) -> np.ndarray:
        """The history of one slot, i32[num_tokens[row]], copied to the host; waits for the device.

        Raises:
          StaleStateError: a verb has consumed the state.
          IndexError: no such slot.
        """
        require_live(self)
        return np.asarray(self.history)[row, : self.num_tokens[row]].copy()


def init_state(
    model: Model,
    num_slots: int,
    max_tokens_per_slot: int,
    page_size: int | None = None,
    num_pages: int | None = None,
    kv_dtype: str | None = None,
    seed: int = 0,
    implementation: str | None = None,
    interpret: bool = False,
) -> State:
    """Returns a state of empty slots for `model` (from `load_model`).

    Args:
      model: a `Model`.
      num_slots: rows of the static batch, B.
      max_tokens_per_slot: the longest history of one slot; its pages hold a whole number of page_size tokens.
      page_size: tokens a page, P; None: 16, on TPU 128 (256 where a page holds one head).
      num_pages: pages of one layer's pool, the null page included; None: enough to fill every slot.
      kv_dtype: "float32", "bfloat16", "float16", "int8" or "float8_e4m3fn" (the last two with a scale per token and head:
        docs/quantisation.md); None: float32 on CPU, the model's dtype elsewhere.
      seed: of the key from which rows that name no seed draw one; a whole number of at least 0.
      implementation: of paged attention, one of pallas_kernels.IMPLEMENTATIONS; None picks by platform.
      interpret: run a Pallas implementation in interpret mode, on any backend: right and slow.

    Raises:
      ValueError: a size below 1, a negative seed, more tokens than the model's positions, a pool that int32 cannot index, an
        unknown kv_dtype or implementation, or one that cannot run here or on such pages.
    """
    config, platform = model.config, model.storage.platform
    page_size = default_page_size(config, platform) if page_size is None else page_size
    sizes = dict(num_slots=num_slots, max_tokens_per_slot=max_tokens_per_slot, page_size=page_size)
    for name, value in (sizes | ({} if num_pages is None else {"num_pages": num_pages})).items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if max_tokens_per_slot > config.max_positions:
        raise ValueError(
            f"{max_tokens_per_slot=} is more than the model's max_positions={config.max_positions}; ask for at most that"
        )
    pages_per_slot = -(-max_tokens_per_slot // page_size)
    num_pages = num_slots * pages_per_slot + 1 if num_pages is None else num_pages
    kv_dtype = kv_dtype or ("float32" if platform == "cpu" else model.storage.dtype)
    kernels = Kernels.here(platform, implementation, interpret)
    make = lambda: empty_kv(config, num_slots, pages_per_slot, page_size, num_pages, kv_dtype, platform)
    shapes, G = jax.eval_shape(make), config.num_q_heads // config.num_kv_heads
    q = jax.ShapeDtypeStruct((num_slots, config.num_kv_heads, G, config.head_dim), model.storage.dtype)
    check_implementation(shapes.k_pages, q, shapes.page_table, **kernels.options)
    kv = make()
    return State(
        params=model.params,
        kv=kv,
        history=jnp.zeros((num_slots, pages_per_slot * page_size), jnp.int32),
        pending=frozen(np.full(num_slots, -1, np.int32)),
        key=frozen(seed_key(seed)),
        static=Static(config, model.storage.dtype, kernels),
        max_tokens_per_slot=int(max_tokens_per_slot),
        tokenizer=model.tokenizer,
        # Configs name stop tokens that their vocabulary lacks; what cannot be emitted stops nothing.
        eos_token_ids=tuple(i for i in model.eos_token_ids if i < config.vocab_size),
    )


def release(state: State, rows: Integers) -> State:
    """Returns the state with these slots empty; their pages are free unless a fork still holds them.

    No data moves; the state given stays usable until a verb that runs the model consumes either.

    Args:
      state: stays usable.
      rows: slot numbers, or bool[B].

    Raises:
      TypeError: rows that are neither whole numbers nor a mask.
      ValueError: a slot out of range.
      StaleStateError: the state was already consumed.
    """
    require_live(state)
    own = pages.release(state.kv.own, rows)
    return _with_own(state, own, np.where(own.lengths == 0, -1, state.pending))


def truncate(state: State, rows: Integers, lengths: Integers) -> State:
    """Returns the state with the history of each of `rows` cut back to `lengths` tokens; pages behind them are free.

    Args:
      state: stays usable, as with `release`.
      rows: slot numbers, i32[n].
      lengths: i32[n] tokens, each at most what the slot holds.

    Raises:
      TypeError: rows or lengths that are not whole numbers.
      ValueError: a slot out of range or named twice, a length below 0 or above what the slot holds.
      StaleStateError: the state was already consumed.
    """
    require_live(state)
    slots, wanted = check_rows(state, rows), as_integers(lengths, "lengths")
    if slots.shape != wanted.shape:
        raise ValueError(f"truncate needs one length a row, got {len(slots)} rows and {len(wanted)} lengths")
    held = state.num_tokens
    for slot, length in zip(slots, wanted, strict=True):
        if not 0 <= length <= held[slot]:
            raise ValueError(f"slot {slot} holds {held[slot]} tokens and cannot be truncated to {length}")
    total = held.copy()
    total[slots] = wanted
    own = pages.truncate(state.kv.own, np.minimum(total, state.kv.lengths).astype(np.int32))
    return _with_own(state, own, np.where(total > own.lengths, state.pending, -1))


def check_integrity(state: State) -> None:
    """Raises `jaxkv.kv.integrity.IntegrityError` unless ownership, lengths and array shapes of the state agree.

    For tests and debugging: O(pool pages) on the host.

    Raises:
      StaleStateError: the state was already consumed.
    """
    require_live(state)
    integrity.check_integrity(state.kv.own)
    B, M = state.kv.page_table.shape
    C = state.kv.refcounts.shape[0]
    config = state.static.model
    heads, head_dim = pool_heads(config.num_kv_heads, config.head_dim, state.static.platform)
    expected = (config.num_layers * C, heads, state.kv.page_size, head_dim)
    for name, got, want in (
        ("k_pages", state.kv.k_pages.shape, expected),
        ("v_pages", state.kv.v_pages.shape, expected),
        ("history", state.history.shape, (B, M * state.kv.page_size)),
        ("pending", state.pending.shape, (B,)),
    ):
        if tuple(got) != want:
            raise integrity.IntegrityError(f"{name} has shape {tuple(got)}, expected {want}")
    if (state.num_tokens > state.max_tokens_per_slot).any():
        raise integrity.IntegrityError(f"a slot holds {state.num_tokens.max()} tokens of at most {state.max_tokens_per_slot}")


def require_live(state: State) -> None:
    """Raises StaleStateError if a verb has consumed this state."""
    if not isinstance(state, State):
        raise TypeError(f"expected a jaxkv State (from init_state), got {type(state).__name__}")
    if state.kv.k_pages.is_deleted() or state.history.is_deleted():
        raise StaleStateError(
            "this state was consumed by an earlier prefill, decode, fork or generate: its pages moved into the state which that"
            " call returned. Keep the returned one: `state, out = jaxkv.generate(state, tokens)`; for two futures of one past,"
            " use `jaxkv.fork(state, src, dst)` first."
        )


def frozen(array: np.ndarray) -> np.ndarray:
    """The array, read-only."""
    array.setflags(write=False)
    return array


def _with_own(state: State, own: Ownership, pending: np.ndarray) -> State:
    return dataclasses.replace(state, kv=dataclasses.replace(state.kv, own=own), pending=frozen(np.asarray(pending, np.int32)))
