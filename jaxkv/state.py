"""The state that every verb takes and returns, and the verbs that only free pages: release and truncate.

A verb that runs the model donates the pages and the history, so the state it was given is spent: using it again raises
`StaleStateError`. What a user must know to decide (lengths, page table, refcounts) lives on the host as read-only numpy, so no
verb waits for the device to find out whether it can run.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.kv import pages
from jaxkv.kv.state import KVState, empty_kv
from pallas_kernels import IMPLEMENTATIONS


class StaleStateError(RuntimeError):
    """A state was used after a verb had consumed it."""


@dataclasses.dataclass(frozen=True)
class Static:
    """What is fixed about a state: part of every trace, never an array."""

    model: ModelConfig
    platform: str  # jax backend the steps are compiled for
    dtype: str  # operands of large products
    implementation: str | None = None  # of paged attention; None: by platform


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
    key: jax.Array  # seeds of rows that name none
    static: Static
    max_tokens_per_slot: int  # the longest history a slot may hold, at most S
    tokenizer: object | None = None
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
        """The history of one slot, i32[num_tokens[row]]; waits for the device."""
        require_live(self)
        return np.asarray(self.history[row])[: self.num_tokens[row]]


def init_state(
    model,
    num_slots: int,
    max_tokens_per_slot: int,
    page_size: int = 16,
    num_pages: int | None = None,
    kv_dtype: str | None = None,
    seed: int = 0,
    implementation: str | None = None,
) -> State:
    """Returns a state of empty slots for `model` (from `load_model`).

    Args:
      model: a `Model`.
      num_slots: rows of the static batch, B.
      max_tokens_per_slot: the longest history of one slot; its pages hold a whole number of page_size tokens.
      page_size: tokens a page, P.
      num_pages: pages of one layer's pool, the null page included; None: enough to fill every slot.
      kv_dtype: "float32", "bfloat16" or "float16"; None: float32 on CPU, the model's dtype elsewhere.
      seed: of the key from which rows that name no seed draw one.
      implementation: of paged attention; None picks by platform.

    Raises:
      ValueError: a size below 1, more tokens than the model's positions, a pool that int32 cannot index, an unknown kv_dtype or
        implementation.
    """
    config = model.config
    sizes = dict(num_slots=num_slots, max_tokens_per_slot=max_tokens_per_slot, page_size=page_size)
    for name, value in (sizes | ({} if num_pages is None else {"num_pages": num_pages})).items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if max_tokens_per_slot > config.max_positions:
        raise ValueError(
            f"{max_tokens_per_slot=} is more than the model's max_positions={config.max_positions}; ask for at most that"
        )
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"{implementation=} is not one of {known} (or None: pick by platform)")
    pages_per_slot = -(-max_tokens_per_slot // page_size)
    num_pages = num_slots * pages_per_slot + 1 if num_pages is None else num_pages
    kv_dtype = kv_dtype or ("float32" if model.storage.platform == "cpu" else model.storage.dtype)
    kv = empty_kv(config, num_slots, pages_per_slot, page_size, num_pages, kv_dtype, model.storage.platform)
    return State(
        params=model.params,
        kv=kv,
        history=jnp.zeros((num_slots, pages_per_slot * page_size), jnp.int32),
        pending=frozen(np.full(num_slots, -1, np.int32)),
        key=jax.random.key(seed),
        static=Static(config, model.storage.platform, model.storage.dtype, implementation),
        max_tokens_per_slot=int(max_tokens_per_slot),
        tokenizer=model.tokenizer,
        # Configs name stop tokens that their vocabulary lacks; what cannot be emitted stops nothing.
        eos_token_ids=tuple(i for i in model.eos_token_ids if i < config.vocab_size),
    )


def release(state: State, rows) -> State:
    """Returns the state with these slots empty; their pages are free unless a fork still holds them."""
    require_live(state)
    own = pages.release(state.kv.own, rows)
    return _with_own(state, own, np.where(own.lengths == 0, -1, state.pending))


def truncate(state: State, rows, lengths) -> State:
    """Returns the state with the history of each of `rows` cut back to `lengths` tokens (each at most what it holds)."""
    require_live(state)
    rows, lengths = check_rows(state, rows), as_integers(lengths, "lengths")
    if rows.shape != lengths.shape:
        raise ValueError(f"truncate needs one length a row, got {len(rows)} rows and {len(lengths)} lengths")
    held = state.num_tokens
    for row, length in zip(rows, lengths, strict=True):
        if not 0 <= length <= held[row]:
            raise ValueError(f"slot {row} holds {held[row]} tokens and cannot be truncated to {length}")
    total = held.copy()
    total[rows] = lengths
    own = pages.truncate(state.kv.own, np.minimum(total, state.kv.lengths).astype(np.int32))
    return _with_own(state, own, np.where(total > own.lengths, state.pending, -1))


def check_integrity(state: State) -> None:
    """Raises `jaxkv.kv.pages.IntegrityError` unless ownership, lengths and array shapes of the state agree."""
    require_live(state)
    pages.check_integrity(state.kv.own)
    B, M = state.kv.page_table.shape
    C = state.kv.refcounts.shape[0]
    expected = (state.static.model.num_layers * C, state.static.model.num_kv_heads, state.kv.page_size, state.static.model.head_dim)
    for name, got, want in (
        ("k_pages", state.kv.k_pages.shape, expected),
        ("v_pages", state.kv.v_pages.shape, expected),
        ("history", state.history.shape, (B, M * state.kv.page_size)),
        ("pending", state.pending.shape, (B,)),
    ):
        if tuple(got) != want:
            raise pages.IntegrityError(f"{name} has shape {tuple(got)}, expected {want}")
    if (state.num_tokens > state.max_tokens_per_slot).any():
        raise pages.IntegrityError(f"a slot holds {state.num_tokens.max()} tokens of at most {state.max_tokens_per_slot}")


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


def as_integers(values, name: str) -> np.ndarray:
    """The values as one axis of integers; TypeError if they are anything else."""
    array = np.atleast_1d(np.asarray(values))
    array = array if array.size else array.astype(np.int32)  # numpy takes [] for floats
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be a flat list of whole numbers, got {array.dtype} of shape {array.shape}")
    return array


def check_rows(state: State, rows) -> np.ndarray:
    """The rows as an array; raises ValueError unless they are distinct slot numbers of this state, TypeError if no integers."""
    rows = as_integers(rows, "rows")
    for row in rows:
        if not 0 <= row < state.num_slots:
            raise ValueError(f"row {row} is not a slot: this state has {state.num_slots} slots, 0 to {state.num_slots - 1}")
    if len(set(rows.tolist())) != len(rows):
        raise ValueError(f"rows name a slot twice: {rows.tolist()}")
    return rows


def frozen(array: np.ndarray) -> np.ndarray:
    """The array, read-only."""
    array.setflags(write=False)
    return array


def _with_own(state: State, own, pending) -> State:
    return dataclasses.replace(state, kv=dataclasses.replace(state.kv, own=own), pending=frozen(np.asarray(pending, np.int32)))
