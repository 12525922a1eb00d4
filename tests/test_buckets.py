"""The shapes of dispatches: few, large enough, and within the bounds that the pool's indices are checked against."""

from hypothesis import given
from hypothesis import strategies as st

from jaxkv.buckets import (
    CHUNK_TOKENS,
    MAX_PREFILL_TOKENS,
    bucket_rows,
    bucket_tokens,
    most_rows,
    most_written_tokens,
    row_buckets,
)

SLOTS, TOKENS = st.integers(1, 600), st.integers(1, 200_000)


@given(TOKENS)
def test_a_chunk_fits_its_bucket_which_is_less_than_twice_as_long(size):
    assert size <= bucket_tokens(size) < max(2 * size, 17)
    assert bucket_tokens(bucket_tokens(size)) == bucket_tokens(size)


@given(SLOTS)
def test_row_buckets_hold_every_number_of_rows(num_slots):
    buckets = row_buckets(num_slots)
    assert buckets == sorted(set(buckets)) and buckets[0] == 1 and buckets[-1] == num_slots
    for rows in range(1, num_slots + 1):
        assert rows <= bucket_rows(rows, num_slots) < 4 * rows or bucket_rows(rows, num_slots) == 1


@given(SLOTS, TOKENS, TOKENS)
def test_no_dispatch_writes_more_tokens_than_the_pool_was_checked_for(num_slots, slot_tokens, chunk_size):
    """Whatever chunk_size a caller gives: decode, several prompts together, or one long chunk."""
    T = bucket_tokens(min(slot_tokens, chunk_size))
    rows = most_rows(T, num_slots)
    assert bucket_rows(rows, num_slots) == rows  # a full dispatch is not padded
    assert rows == 1 or rows * T <= MAX_PREFILL_TOKENS
    assert max(rows * T, num_slots) <= most_written_tokens(num_slots, slot_tokens)


def test_prompts_of_one_chunk_have_a_bucket_of_their_own():
    assert bucket_tokens(CHUNK_TOKENS) == CHUNK_TOKENS <= MAX_PREFILL_TOKENS
