"""Trace replay: counts that add up exactly, and hit rates against an independent count.

tests/data/conversation_trace.jsonl: the first 160 requests of the conversation trace published with Mooncake (FAST'25, Apache-2.0).
"""

import json
from pathlib import Path

import pytest

from jaxkv.serving.ladder import LadderConfig
from jaxkv.serving.replay import ReplayConfig, TraceRequest, distinct_blocks, oracle_hit_rate, read_trace, replay
from jaxkv.serving.simulate import SimulatedTier

TRACE = Path(__file__).parents[1] / "data" / "conversation_trace.jsonl"


@pytest.fixture(scope="module")
def requests():
    return read_trace(TRACE)


def naive_hit_rate(requests, num_pages):
    """Belady by looking ahead each time; quadratic."""
    accesses = [block for request in requests for block in request.blocks]
    cached, hits, position = set(), 0, 0
    for request in requests:
        run = True
        for block in request.blocks:
            run = run and block in cached
            hits += run
            cached.add(block)
            position += 1
            if num_pages is not None and len(cached) > num_pages:
                ahead = accesses[position:]
                next_use = {b: ahead.index(b) if b in ahead else len(accesses) for b in cached}
                cached.remove(max(sorted(next_use), key=lambda b: next_use[b]))
    return hits / len(accesses)


def test_the_unlimited_hit_rate_is_the_ideal_one(requests):
    result = replay(requests, ReplayConfig(num_pages=4 * distinct_blocks(requests)))
    ideal = oracle_hit_rate(requests, None)
    assert ideal == naive_hit_rate(requests, None)
    # The last block of a prompt is often partial, and one token of each prompt is computed whatever is cached.
    assert ideal - 0.02 < result["block_hit_rate"] <= ideal


def test_counts_add_up(requests):
    for config in (ReplayConfig(800), ReplayConfig(300, policy="fifo"), ReplayConfig(300, overcommit=True)):
        result = replay(requests, config)
        assert result["requests"] == result["requests_received"] == sum(result["request_success"].values()) == 160
        assert result["input_tokens"] == result["prompt_tokens"] == sum(r.input_tokens for r in requests)
        assert result["output_tokens"] == result["generation_tokens"] == sum(r.output_tokens for r in requests)
        if not config.overcommit:
            assert result["prefill_tokens"] == result["prompt_tokens"] - sum(result["cached_tokens"].values())
        assert 0 < result["device_busy_share"] <= 1


def test_smaller_pools_hit_less_and_never_more_than_the_oracle(requests):
    distinct = distinct_blocks(requests)
    rates = []
    for share in (1.0, 0.3, 0.1):
        pages = int(share * distinct)
        rates.append(replay(requests, ReplayConfig(pages + 1, num_slots=8))["block_hit_rate"])
        assert rates[-1] <= oracle_hit_rate(requests, pages)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("num_pages", [1, 5, 20])
def test_the_oracle_is_beladys(requests, num_pages):
    some = requests[:12]
    assert oracle_hit_rate(some, num_pages) == naive_hit_rate(some, num_pages)


def test_a_host_tier_brings_hits_back(requests):
    small = ReplayConfig(num_pages=200, num_slots=8)
    tiered = ReplayConfig(num_pages=200, num_slots=8, tiers=(SimulatedTier("host", 100_000, 50e9),))
    without, with_tier = replay(requests, small), replay(requests, tiered)
    assert with_tier["block_hit_rate_by_tier"]["host"] > 0
    assert with_tier["block_hit_rate"] > without["block_hit_rate"]


def test_the_ladder_rejects_long_contexts(requests):
    config = ReplayConfig(num_pages=150, num_slots=16, ladder=LadderConfig(up=(0.5, 0.9, 1.5), down=(0.4, 0.8, 1.4)))
    result = replay(requests, config)
    assert result["requests_rejected"]["ladder"] > 0
    assert result["requests_received"] == 160


def test_replays_are_deterministic(requests):
    config = ReplayConfig(num_pages=200, num_slots=8)
    assert replay(requests, config) == replay(requests, config)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1}),
        json.dumps({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}),
        json.dumps({"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}),
        '{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 1e400, "output_length": 1, "hash_ids": [1]}',
        json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [2**40]}),
        json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}),
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"trace.jsonl:2"):
        read_trace(path)


@pytest.mark.parametrize("block", [1, 2])
def test_an_answer_is_no_block_of_a_prompt(block):
    requests = [TraceRequest(0.0, 512, 1100, (5,)), TraceRequest(100.0, 1025, 1, (5, block, 7))]
    assert replay(requests, ReplayConfig(num_pages=40))["block_hit_rate"] == 0.25


def test_arrivals_are_sorted(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": t, "input_length": 5, "output_length": 1, "hash_ids": [1]} for t in (2000, 1000)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_trace(path) == [TraceRequest(1.0, 5, 1, (1,)), TraceRequest(2.0, 5, 1, (1,))]
