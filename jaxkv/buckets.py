"""The shapes a dispatch may have: prompts are padded to a few of them, so that few shapes are traced."""

from __future__ import annotations

# A chunk is padded to the next of these; past the last, which only a larger `chunk_size` reaches, to the next power of two.
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 512)
# Tokens of one row that a dispatch takes unless told otherwise: longer prompts go through in chunks of so many.
CHUNK_TOKENS = TOKEN_BUCKETS[-1]
# Tokens of one prefill dispatch over all its rows: bounds its temporaries; more rows go in several dispatches.
MAX_PREFILL_TOKENS = 2048


def bucket_tokens(size: int) -> int:
    """The bucket a chunk of `size` tokens is padded to."""
    for bucket in TOKEN_BUCKETS:
        if size <= bucket:
            return bucket
    return 1 << (size - 1).bit_length()


def row_buckets(num_slots: int) -> list[int]:
    """How many rows a prefill dispatch can be padded to: powers of four, and all slots."""
    buckets = [1]
    while buckets[-1] * 4 < num_slots:
        buckets.append(buckets[-1] * 4)
    return buckets if num_slots == 1 else [*buckets, num_slots]


def bucket_rows(size: int, num_slots: int) -> int:
    """The bucket a dispatch of `size` rows is padded to."""
    return next(bucket for bucket in row_buckets(num_slots) if size <= bucket)


def most_rows(T: int, num_slots: int) -> int:
    """Rows of T tokens that one dispatch takes at most: a whole bucket within MAX_PREFILL_TOKENS."""
    return max(bucket for bucket in row_buckets(num_slots) if bucket == 1 or bucket * T <= MAX_PREFILL_TOKENS)


def most_written_tokens(num_slots: int, slot_tokens: int) -> int:
    """Tokens that one dispatch writes at most, padding included.

    Either a token of every slot (decode), or several prompts (MAX_PREFILL_TOKENS bounds them), or one chunk of one slot, which a
    caller's `chunk_size` may make as long as the slot.
    """
    return max(num_slots, MAX_PREFILL_TOKENS, bucket_tokens(slot_tokens))
