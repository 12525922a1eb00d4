"""Replays a request trace through the serving engine's own scheduler, admission, prefix
cache and tiers on a simulated device, and reports what its users would have seen.

--trace is a JSON-lines file: timestamp (ms), input_length, output_length (tokens) and
hash_ids, one id a block of --block_tokens; equal ids at the head of two lists are equal
prefixes. One block is one page. Defaults of the cost flags are those of Llama 3.1 8B in
bfloat16 on one H100, from data sheets (docs/serving.md): measure yours with
scripts/bench.py.

  python scripts/replay_trace.py --trace trace.jsonl --pool_gib 40
  python scripts/replay_trace.py --trace trace.jsonl --pool_share 0.5,0.1,0.02 --compare
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags  # noqa: E402

from scripts import _script  # noqa: E402

FLAGS = flags.FLAGS

flags.DEFINE_string("trace", None, "The trace.")
flags.DEFINE_integer("block_tokens", 512, "Tokens of one hash id.", lower_bound=1)
flags.DEFINE_integer("max_requests", None, "Only the first so many.", lower_bound=1)
flags.DEFINE_float("pool_gib", None, "KV pool of the device in GiB.", lower_bound=0)
flags.DEFINE_list("pool_share", [], "Or pools of such shares of the trace's distinct blocks; unlimited: room for everything.")
flags.DEFINE_enum("policy", None, ["lru", "fifo"], "Which reusable page goes first; without it the least recently used.")
flags.DEFINE_bool("compare", False, "Each pool with both policies, beside an oracle that knows the future.")
flags.DEFINE_integer("num_slots", 64, "Rows of the batch.", lower_bound=1)
flags.DEFINE_integer("prefill_tokens", 2048, "Prompt tokens a step.", lower_bound=1)
flags.DEFINE_bool("overcommit", False, "Take pages as sequences grow, and preempt.")
flags.DEFINE_bool("ladder", False, "Give up long contexts under pressure.")
flags.DEFINE_float("speedup", 1.0, "Requests arrive this much faster.", lower_bound=1e-6)
flags.DEFINE_float("prefill_us_per_token", None, "Cost of a prompt's token.", lower_bound=0)
flags.DEFINE_float("decode_ms_per_step", None, "Cost of a decode step without KV.", lower_bound=0)
flags.DEFINE_float("kv_ns_per_token", None, "Cost of reading one cached token.", lower_bound=0)
flags.DEFINE_integer("kv_bytes_per_token", 131_072, "Keys and values of a token, all layers.", lower_bound=1)
flags.DEFINE_float("host_gib", 0.0, "A tier in host memory.", lower_bound=0)
flags.DEFINE_float("host_gbps", 50.0, "Its link in GB/s.", lower_bound=1e-6)
flags.DEFINE_float("disk_gib", 0.0, "A tier on disk.", lower_bound=0)
flags.DEFINE_float("disk_gbps", 5.0, "Its bandwidth in GB/s.", lower_bound=1e-6)
flags.DEFINE_bool("json", False, "One JSON object a pool instead of the report.")
flags.DEFINE_string("plot", None, "PNG file of running, waiting and pages over time; needs matplotlib.")

_COLUMNS = (
    ("pool", lambda r: f"{r['pool_pages']:,}"),
    ("policy", lambda r: r["policy"]),
    ("block hits", lambda r: f"{r['block_hit_rate']:.4f}"),
    ("oracle", lambda r: f"{r['oracle_block_hit_rate']:.4f}" if "oracle_block_hit_rate" in r else ""),
    ("TTFT p50/p95/p99 s", lambda r: " ".join(_seconds(r[f"ttft_{p}_s"]) for p in ("p50", "p95", "p99"))),
    ("TPOT p50/p95/p99 ms", lambda r: " ".join(_millis(r[f"tpot_{p}_s"]) for p in ("p50", "p95", "p99"))),
    ("device busy", lambda r: f"{r['device_busy_share']:.3f}"),
    ("fragmentation", lambda r: _share(r["block_fragmentation"])),
    ("evicted pages", lambda r: f"{r['evicted_pages']:,}"),
    ("rejected", lambda r: f"{sum(r['requests_rejected'].values()):,}"),
    ("preempted", lambda r: f"{sum(r['num_preemptions'].values()):,}"),
)


def main(terminal) -> None:
    """Replays the trace once for each pool and policy."""
    if not FLAGS.trace:
        raise ValueError("--trace is missing: a JSON-lines file with timestamp, input_length, output_length and hash_ids")
    if FLAGS.compare and FLAGS.policy:
        raise ValueError(f"--compare runs both policies: leave out --policy={FLAGS.policy}")
    terminal("importing jax")
    from jaxkv.serving import replay, replay_plot

    if FLAGS.plot:  # before minutes of replay, not after
        _script.check_file("plot")
        replay_plot.pyplot()
    terminal("reading the trace")
    requests = replay.read_trace(FLAGS.trace, FLAGS.block_tokens)[: FLAGS.max_requests]
    results = []
    for num_pages in _pools(replay.distinct_blocks(requests)):
        for policy in ("lru", "fifo") if FLAGS.compare else (FLAGS.policy or "lru",):
            terminal(f"replaying {len(requests)} requests, {num_pages:,} pages, {policy}")
            started = time.perf_counter()
            result = replay.replay(requests, _config(replay, num_pages, policy), _costs())
            result["replay_s"] = time.perf_counter() - started
            if FLAGS.compare:
                result["oracle_block_hit_rate"] = replay.oracle_hit_rate(requests, num_pages - 1)
            results.append(result)
    terminal.done()
    if FLAGS.plot:
        replay_plot.draw(FLAGS.plot, results)
    _report(results)


def _pools(distinct: int) -> list[int]:
    """Pages of each pool, the null page included."""
    page_bytes = FLAGS.block_tokens * FLAGS.kv_bytes_per_token
    if (FLAGS.pool_gib is None) == (not FLAGS.pool_share):
        raise ValueError("give either --pool_gib or --pool_share")
    if FLAGS.pool_gib is not None:
        pages = FLAGS.pool_gib * 2**30 / page_bytes
        if not 1 <= pages < 2**31:
            raise ValueError(f"--pool_gib={FLAGS.pool_gib} holds {pages:g} pages of {page_bytes:,} bytes: give a pool of some")
        return [int(pages) + 1]
    pools = []
    for share in FLAGS.pool_share:
        if share == "unlimited":
            pools.append(4 * distinct + 1)
            continue
        try:
            pages = int(float(share) * distinct)
            if pages < 1:
                raise ValueError
        except (ValueError, OverflowError):
            raise ValueError(
                f"--pool_share={share}: give shares of the {distinct:,} distinct blocks, such as 0.5, or unlimited"
            ) from None
        pools.append(pages + 1)
    return pools


def _config(replay, num_pages: int, policy: str):
    from jaxkv.serving.ladder import LadderConfig
    from jaxkv.serving.simulate import SimulatedTier

    page_bytes = FLAGS.block_tokens * FLAGS.kv_bytes_per_token
    tiers = [
        SimulatedTier(name, int(gib * 2**30 / page_bytes), gbps * 1e9)
        for name, gib, gbps in (("host", FLAGS.host_gib, FLAGS.host_gbps), ("disk", FLAGS.disk_gib, FLAGS.disk_gbps))
        if gib
    ]
    return replay.ReplayConfig(
        num_pages=num_pages,
        block_tokens=FLAGS.block_tokens,
        num_slots=FLAGS.num_slots,
        prefill_tokens=FLAGS.prefill_tokens,
        policy=policy,
        overcommit=FLAGS.overcommit,
        ladder=LadderConfig() if FLAGS.ladder else None,
        speedup=FLAGS.speedup,
        bytes_per_token=FLAGS.kv_bytes_per_token,
        tiers=tuple(tiers),
    )


def _costs():
    from jaxkv.serving.simulate import CostModel

    given = {
        "s_per_prefill_token": (FLAGS.prefill_us_per_token, 1e-6),
        "s_per_decode_step": (FLAGS.decode_ms_per_step, 1e-3),
        "s_per_cached_token": (FLAGS.kv_ns_per_token, 1e-9),
    }
    return CostModel(**{name: value * unit for name, (value, unit) in given.items() if value is not None})


def _report(results: list[dict[str, Any]]) -> None:
    if FLAGS.json:
        for result in results:
            sys.stdout.write(json.dumps(result) + "\n")
        return
    first = results[0]
    sys.stdout.write(
        f"{first['requests']:,} requests, {first['input_tokens']:,} prompt and {first['output_tokens']:,} new tokens;"
        f" replayed in {sum(r['replay_s'] for r in results):.0f} s\n"
    )
    table = [[name for name, _ in _COLUMNS], *([show(result) for _, show in _COLUMNS] for result in results)]
    widths = [max(len(row[i]) for row in table) for i in range(len(_COLUMNS))]
    for row in table:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _millis(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.0f}"


if __name__ == "__main__":
    _script.run(main)
