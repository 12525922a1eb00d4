"""The user's half of sampling: `Sampling`, its checks, and the arrays that the device half (`sample_step`) reads."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxkv.sample_step import MAX_BIAS, MAX_LOGPROBS, MAX_STOP, MIN_TEMPERATURE, SamplingArrays
from jaxkv.stop_strings import StopMatcher

__all__ = ["MAX_BIAS", "MAX_LOGPROBS", "MAX_STOP", "Sampling", "SamplingArrays", "StopMatcher", "draw_seeds", "seed_key"]

_INT32_MAX = int(np.iinfo(np.int32).max)
_UINT32_MAX = int(np.iinfo(np.uint32).max)
_FLOAT32_MAX = float(np.finfo(np.float32).max)

# field: kind, valid values in words, whether a value is valid. Bounds keep every option a normal float32.
_RANGES = {
    "temperature": (numbers.Real, "in [0, 1e6], 0 for greedy", lambda x: 0 <= x <= 1e6),
    "top_k": (numbers.Integral, "at least -1, 0 or -1 for off", lambda x: -1 <= x <= _INT32_MAX),
    "top_p": (numbers.Real, "in (0, 1], 1 for off", lambda x: 0 < x <= 1),
    "min_p": (numbers.Real, "in [0, 1], 0 for off", lambda x: 0 <= x <= 1),
    "repetition_penalty": (numbers.Real, "in (0, 1e6], 1 for off", lambda x: 1e-6 <= x <= 1e6),
    "presence_penalty": (numbers.Real, "in [-2, 2], 0 for off", lambda x: -2 <= x <= 2),
    "frequency_penalty": (numbers.Real, "in [-2, 2], 0 for off", lambda x: -2 <= x <= 2),
    "seed": (numbers.Integral, f"in [0, {_UINT32_MAX}], or None", lambda x: 0 <= x <= _UINT32_MAX),
    "ignore_eos": (bool, "True or False", lambda x: True),
    "logprobs": (numbers.Integral, f"in [0, {MAX_LOGPROBS}], or None for off", lambda x: 0 <= x <= MAX_LOGPROBS),
    "max_new_tokens": (numbers.Integral, "at least 0, or None", lambda x: 0 <= x <= _INT32_MAX),
    "n": (numbers.Integral, "at least 1", lambda x: 1 <= x <= _INT32_MAX),
}
# Whole numbers, one a sequence.
Numbers = Sequence[int] | np.ndarray | jax.Array
_OPTIONAL = ("seed", "logprobs", "max_new_tokens")
_LISTS = {"stop_token_ids": numbers.Integral, "stop": str}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Every field but `n` is one value for all rows, or a sequence with one a row.

    Order: bias, penalties, temperature, top_k, top_p, min_p. Among equally likely tokens the lower id comes first.
    Logprobs are the model's own, before any option. With a seed, a row's tokens depend on nothing but its text and it.

    Raises:
      ValueError: a value outside its range; with the field, the value and the range.
    """

    temperature: float | Sequence[float] = 0.0  # 0: greedy
    top_k: int | Sequence[int] = 0  # the k likeliest tokens; 0 or -1: off
    top_p: float | Sequence[float] = 1.0  # the fewest likeliest tokens that reach p together; 1: off
    min_p: float | Sequence[float] = 0.0  # tokens of at least this share of the likeliest's probability; 0: off
    repetition_penalty: float | Sequence[float] = 1.0  # over prompt and output (arXiv:1909.05858); 1: off
    presence_penalty: float | Sequence[float] = 0.0  # taken once from each token in the output; 0: off
    frequency_penalty: float | Sequence[float] = 0.0  # taken as often as the token is in the output; 0: off
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None  # token: added; -inf bans
    seed: int | None | Sequence[int | None] = None  # None: drawn from the state's key
    stop_token_ids: int | Sequence[int] | Sequence[Sequence[int]] = ()  # besides the model's own
    ignore_eos: bool | Sequence[bool] = False  # the model's own stop tokens do not stop
    stop: str | Sequence[str] | Sequence[Sequence[str]] = ()  # stop strings
    logprobs: int | None | Sequence[int | None] = None  # alternatives a token; 0: only the token's own; None: off
    n: int = 1  # samples a row; sample 0 is the one that n=1 gives
    max_new_tokens: int | None | Sequence[int | None] = None

    def __post_init__(self):
        for name, (kind, words, valid) in _RANGES.items():
            value = _plain(getattr(self, name))
            if name == "n" and isinstance(value, tuple):
                raise ValueError(f"n must be one whole number for all rows, got {value!r}")
            for x in value if isinstance(value, tuple) else (value,):
                if not (x is None and name in _OPTIONAL) and not (_is_a(x, kind) and valid(x)):
                    raise ValueError(f"{name} must be {words}; got {x!r}")
            object.__setattr__(self, name, value)
        for name, kind in _LISTS.items():
            object.__setattr__(self, name, _checked_lists(name, _plain(getattr(self, name)), kind))
        object.__setattr__(self, "logit_bias", _checked_bias(_plain(self.logit_bias)))

    @property
    def is_random(self) -> bool:
        """Whether any row draws its tokens."""
        return any(t >= MIN_TEMPERATURE for t in _as_tuple(self.temperature))

    @property
    def needs_seeds(self) -> bool:
        """Whether any row draws its tokens from the state's key."""
        return self.is_random and None in _as_tuple(self.seed)

    @property
    def wants_logprobs(self) -> bool:
        """Whether any row asks for logprobs."""
        return any(x is not None for x in _as_tuple(self.logprobs))

    def stop_strings(self, row: int, num_rows: int) -> tuple[str, ...]:
        """The stop strings of one row of `num_rows`."""
        return self._of_row("stop", row, num_rows)

    def arrays(
        self,
        *,
        num_slots: int,
        rows: Numbers,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seeds: Numbers,
        prompt_lengths: Numbers,
        max_tokens: Numbers | int = _INT32_MAX,
        source: Numbers | None = None,
    ) -> SamplingArrays:
        """Returns the options as fresh numpy arrays with a row for each slot; idle slots are greedy.

        Args:
          num_slots: B.
          rows: the slot of each sequence.
          vocab_size: V.
          eos_token_ids: the model's own stop tokens.
          seeds: u32 of each sequence, used where `seed` is None.
          prompt_lengths: tokens of each sequence that do not count as output.
          max_tokens: history length at which each sequence is full.
          source: which row of the options each sequence follows; None: `n` sequences a row, side by side.

        Raises:
          ValueError: sequences of another length than there are rows, token ids outside the vocabulary or too many.
        """
        followed = [i // self.n for i in range(len(rows))] if source is None else [int(row) for row in source]
        num_rows = max(followed, default=-1) + 1
        arrays = _idle(num_slots)
        slots = np.asarray(rows, int)
        arrays.prompt_lengths[slots] = prompt_lengths
        arrays.max_tokens[slots] = max_tokens
        samples = [followed[:i].count(row) for i, row in enumerate(followed)]
        for slot, row, sample, seed in zip(slots, followed, samples, seeds, strict=True):
            self._fill(arrays, slot, lambda name, row=row: self._of_row(name, row, num_rows), vocab_size, eos_token_ids)
            own = self._of_row("seed", row, num_rows)
            arrays.seeds[slot] = seed if own is None else _sample_seed(own, sample)
        return arrays

    def _fill(self, arrays: SamplingArrays, slot: int, of_row, vocab_size: int, eos_token_ids: Sequence[int]):
        """Writes one slot's options."""
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            getattr(arrays, name)[slot] = of_row(name)
        bias = of_row("logit_bias") or {}
        stop = dict.fromkeys(of_row("stop_token_ids") + (() if of_row("ignore_eos") else tuple(eos_token_ids)))
        for name, ids, most in (("logit_bias", bias, MAX_BIAS), ("stop_token_ids", stop, MAX_STOP)):
            if len(ids) > most:
                raise ValueError(f"{name} has {len(ids)} tokens a row with the model's own; at most {most} fit")
            outside = [token for token in ids if not 0 <= token < vocab_size]
            if outside:
                raise ValueError(f"{name} holds token id {outside[0]}, outside the vocabulary of 0 to {vocab_size - 1}")
        arrays.bias_ids[slot, : len(bias)] = list(bias)
        arrays.bias_values[slot, : len(bias)] = list(bias.values())
        arrays.stop_ids[slot, : len(stop)] = list(stop)
        logprobs = of_row("logprobs")
        arrays.num_logprobs[slot] = -1 if logprobs is None else logprobs

    def _of_row(self, name: str, row: int, num_rows: int):
        value = getattr(self, name)
        per_row = isinstance(value, tuple)
        if name in _LISTS:
            per_row = any(isinstance(x, tuple) for x in value)
        if per_row and len(value) != num_rows:
            raise ValueError(f"{name} has {len(value)} entries for {num_rows} rows: give one value, or one a row")
        return value[row] if per_row else value


def seed_key(seed: int) -> np.ndarray:
    """The key u32[4] of a seed, a whole number of at least 0; ValueError for anything else."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
    return np.random.SeedSequence(int(seed)).generate_state(4, np.uint32)


def draw_seeds(key: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(successor u32[4], seeds u32[count]) of a key u32[4]: Philox (Salmon et al. 2011), whose raw stream numpy keeps stable.

    On the host: a jax key would compile two small programs at the first draw.
    """
    raw = np.random.Philox(key=key.view(np.uint64)).random_raw(2 + count)
    successor = raw[:2].view(np.uint32)
    successor.setflags(write=False)
    return successor, (raw[2:] >> 32).astype(np.uint32)


def _idle(num_slots: int) -> SamplingArrays:
    """Greedy for every slot."""

    def full(value, dtype, *more):
        return np.full((num_slots, *more), value, dtype)

    return SamplingArrays(
        temperature=full(0, np.float32),
        top_k=full(0, np.int32),
        top_p=full(1, np.float32),
        min_p=full(0, np.float32),
        repetition_penalty=full(1, np.float32),
        presence_penalty=full(0, np.float32),
        frequency_penalty=full(0, np.float32),
        bias_ids=full(_INT32_MAX, np.int32, MAX_BIAS),
        bias_values=full(0, np.float32, MAX_BIAS),
        seeds=full(0, np.uint32),
        stop_ids=full(-1, np.int32, MAX_STOP),
        num_logprobs=full(-1, np.int32),
        prompt_lengths=full(0, np.int32),
        max_tokens=full(_INT32_MAX, np.int32),
    )


def _sample_seed(seed: int, sample: int) -> int:
    """Seed of a row's sample-th sequence: its own for sample 0, else mixed (murmur3's finaliser): rows may have s, s+1."""
    if sample == 0:
        return seed
    x = (seed + sample * 0x9E3779B9) & _UINT32_MAX
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _UINT32_MAX
    return x ^ (x >> 16)


def _plain(value):
    """Arrays and lists as tuples, array scalars as Python ones."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, list) else value


def _as_tuple(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _is_a(x, kind) -> bool:
    return isinstance(x, kind) and (kind is bool or not isinstance(x, bool))


def _checked_lists(name: str, value, kind) -> tuple:
    """A tuple for all rows, or a tuple of tuples with one a row."""
    words = "strings that are not empty" if kind is str else "token ids"
    items = tuple(map(_plain, _as_tuple(value)))
    if any(isinstance(x, tuple) for x in items):
        items = tuple(map(_as_tuple, items))
    for x in (x for item in items for x in _as_tuple(item)):
        if not _is_a(x, kind) or x == "":
            raise ValueError(f"{name} must hold {words}, for all rows or one sequence a row; got {x!r}")
    return items


def _checked_bias(value):
    """Copies, with plain ints and floats: None, a dict, or a tuple with one a row."""
    if isinstance(value, tuple):
        return tuple(map(_checked_bias, value))
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, for all rows or one mapping a row; got {value!r}")
    for token, bias in value.items():
        number = _is_a(bias, numbers.Real) and (bias == -math.inf or abs(bias) <= _FLOAT32_MAX)
        if not _is_a(token, numbers.Integral) or not number:
            raise ValueError(f"logit_bias must map token ids to finite numbers or -inf; got {token!r}: {bias!r}")
    return {int(token): float(bias) for token, bias in value.items()}
