"""scripts/replay_trace.py as a user runs it: every flag, what it refuses, and (slow) an hour of real traffic."""

import contextlib
import json
import re
import resource
import threading
import time
from pathlib import Path

import pytest
import run_script
import traces

PAGE_GIB = 512 * 131_072 / 2**30
TRACE = f"--trace={traces.FIRST_160}"
INPUT_TOKENS, OUTPUT_TOKENS, BLOCKS = (0, 0, set())
for line in map(json.loads, traces.FIRST_160.read_text().splitlines()):
    INPUT_TOKENS, OUTPUT_TOKENS = INPUT_TOKENS + line["input_length"], OUTPUT_TOKENS + line["output_length"]
    BLOCKS |= set(line["hash_ids"])


def replay(*args, cache, timeout=120):
    return run_script.run("replay_trace.py", *args, cache=cache, timeout=timeout)


def results(*args, cache, timeout=120):
    """The JSON objects of a run, which must succeed."""
    status, out, err = replay(*args, "--json", cache=cache, timeout=timeout)
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


def check_counts(result, requests, input_tokens, output_tokens):
    """Every request and token is somewhere, once."""
    rejected = sum(result["requests_rejected"].values())  # those longer than the pool, too
    assert result["requests"] == requests == result["requests_received"]
    assert result["requests_admitted"] == sum(result["request_success"].values()) == requests - rejected
    assert (result["input_tokens"], result["output_tokens"]) == (input_tokens, output_tokens)
    if not rejected:
        assert (result["prompt_tokens"], result["generation_tokens"]) == (input_tokens, output_tokens)
    if not sum(result["num_preemptions"].values()):
        assert result["prefill_tokens"] == result["prompt_tokens"] - sum(result["cached_tokens"].values())


@pytest.mark.parametrize(
    "args, words",
    [
        (["--pool_gib=1"], "--trace is missing"),
        ([TRACE], "give either --pool_gib or --pool_share"),
        ([TRACE, "--pool_gib=1", "--pool_share=0.5"], "give either --pool_gib or --pool_share"),
        ([TRACE, "--pool_gib=0.01"], "--pool_gib=0.01 holds 0.16 pages"),
        ([TRACE, "--pool_share=0.5,all"], "--pool_share=all: give shares of the"),
        ([TRACE, "--pool_share=0.5", "--compare", "--policy=fifo"], "--compare runs both policies: leave out --policy=fifo"),
        ([TRACE, "--pool_share=0.5", "--policy=mru"], "policy"),
        ([TRACE, "--pool_share=0.5", "--plot=/nowhere/at/all.png"], "there is no folder /nowhere/at"),
        (["--trace=/nowhere.jsonl", "--pool_gib=1"], "/nowhere.jsonl"),
        ([TRACE, "--pool_gib=1", "--block_tokens=256"], "conversation_trace.jsonl:1"),
    ],
)
def test_user_errors_are_one_line(args, words, cache):
    assert words in run_script.one_line_error(replay(*args, cache=cache))


def test_pools_are_compared_and_counts_add_up(cache):
    found = results(TRACE, "--pool_share=unlimited,0.3", "--compare", "--num_slots=8", cache=cache)
    assert [result["policy"] for result in found] == ["lru", "fifo"] * 2
    pools = [result["pool_pages"] for result in found]
    assert pools == [4 * len(BLOCKS)] * 2 + [int(0.3 * len(BLOCKS))] * 2
    for result in found:
        check_counts(result, 160, INPUT_TOKENS, OUTPUT_TOKENS)
        assert 0 < result["block_hit_rate"] <= result["oracle_block_hit_rate"]
        assert 0 < result["device_busy_share"] <= 1 and 0 < result["block_fragmentation"] < 1
        assert result["ttft_p50_s"] <= result["ttft_p95_s"] <= result["ttft_p99_s"]
        assert result["series"] and result["replay_s"] > 0
    assert found[0]["block_hit_rate"] > found[2]["block_hit_rate"] and found[0]["evicted_pages"] == 0 < found[2]["evicted_pages"]


def test_tiers_bring_back_what_came_long_ago(cache):
    small = (TRACE, f"--pool_gib={200.5 * PAGE_GIB}", "--num_slots=8")
    (plain,) = results(*small, cache=cache)
    assert (plain["pool_pages"], plain["policy"], plain["tier_loaded_pages"]) == (200, "lru", {})
    tiers = ("--host_gib=40", "--host_gbps=40", "--disk_gib=600", "--disk_gbps=20", "--policy=fifo")
    (tiered,) = results(*small, *tiers, cache=cache)
    assert tiered["policy"] == "fifo" and tiered["block_hit_rate"] > plain["block_hit_rate"]
    assert tiered["tier_loaded_pages"]["host"] == 0 < tiered["tier_loaded_pages"]["disk"]  # all that comes again was long ago
    assert tiered["cached_tokens"]["disk"] == 512 * tiered["tier_loaded_pages"]["disk"]
    check_counts(tiered, 160, INPUT_TOKENS, OUTPUT_TOKENS)
    # A disk slower than the device computes (17 ms a page; loading its 67 MB would take 67 ms) is left alone.
    (hosted,) = results(*small, "--host_gib=600", "--disk_gib=600", "--disk_gbps=1", cache=cache)
    assert hosted["tier_loaded_pages"] == {"host": tiered["tier_loaded_pages"]["disk"], "disk": 0}


def test_costs_and_policies_do_something(cache):
    pool = f"--pool_gib={200.5 * PAGE_GIB}"
    costs = ("--prefill_us_per_token=5", "--decode_ms_per_step=50", "--kv_ns_per_token=1", "--kv_bytes_per_token=65536")
    more = ("--max_requests=20", "--prefill_tokens=512", "--overcommit", "--speedup=0.001")
    (costly,) = results(TRACE, pool, *costs, *more, "--num_slots=4", cache=cache)
    assert costly["requests"] == 20 and costly["tpot_p50_s"] > 0.05 and costly["pool_pages"] == 401
    arrivals_s = [json.loads(line)["timestamp"] / 1e3 for line in traces.FIRST_160.read_text().splitlines()]
    assert costly["simulated_s"] > 1000 * arrivals_s[19] > 0
    (pressed,) = results(TRACE, pool, "--ladder", "--num_slots=16", cache=cache)
    assert pressed["requests_rejected"]["ladder"] > 0
    check_counts(pressed, 160, INPUT_TOKENS, OUTPUT_TOKENS)


def test_the_report_and_the_plot(cache, tmp_path):
    args = (TRACE, "--pool_share=0.3", "--max_requests=60", "--compare", f"--plot={tmp_path / 'hour.png'}")
    status, out, err = replay(*args, cache=cache)
    assert status == 0, err
    head, titles, *rows = out.splitlines()
    assert head.startswith("60 requests, ") and len(rows) == 2
    for title in (
        "block hits",
        "oracle",
        "TTFT p50/p95/p99 s",
        "TPOT p50/p95/p99 ms",
        "fragmentation",
        "evicted pages",
        "rejected",
    ):
        assert title in titles
    assert [row.split()[1] for row in rows] == ["lru", "fifo"]
    assert (tmp_path / "hour.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_refused_before_the_replay(cache, tmp_path, monkeypatch):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = replay(TRACE, "--pool_share=0.3", f"--plot={tmp_path / 'hour.png'}", cache=cache)
    assert "pip install matplotlib" in run_script.one_line_error(result)
    assert "reading" not in result[2] and "replaying" not in result[2]


class PeakMemory(threading.Thread):
    """Watches a process's resident set; ru_maxrss of a child would begin with that of the process it was forked from."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self._status, self._kib = Path(f"/proc/{pid}/status"), 0
        self.start()

    def run(self):
        with contextlib.suppress(OSError):  # it has ended
            while found := re.search(r"VmHWM:\s+(\d+) kB", self._status.read_text()):
                self._kib = max(self._kib, int(found[1]))
                time.sleep(0.2)

    def kib(self) -> int:
        self.join()
        return self._kib


def watched(*args, cache):
    """(The JSON objects of a run, its peak in KiB)."""
    with run_script.start("replay_trace.py", *args, "--json", cache=cache) as process:
        peak = PeakMemory(process.pid)
        out, err = process.communicate(timeout=3600)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()], peak.kib()


@pytest.fixture(scope="module")
def hour(tmp_path_factory):
    return traces.write_hour(tmp_path_factory.mktemp("trace") / "hour.jsonl")


@pytest.mark.slow
def test_an_hour_of_traffic_meets_its_figures(hour, cache):
    """The ideal hit rate is 0.3664 (counted independently). Two of the four pools of the table in docs/serving.md: a replay takes 40 s."""
    lines = [json.loads(line) for line in hour.read_text().splitlines()]
    blocks = {block for line in lines for block in line["hash_ids"]}
    assert (len(lines), len(blocks)) == (traces.HOUR_REQUESTS, traces.HOUR_BLOCKS)
    sizes = [sum(line[name] for line in lines) for name in ("input_length", "output_length")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    (unlimited,), most_kib = watched(f"--trace={hour}", "--pool_share=unlimited", cache=cache)
    (lru, fifo), small_kib = watched(f"--trace={hour}", "--pool_share=0.02", "--compare", cache=cache)
    found = (unlimited, lru, fifo)
    for result in found:
        check_counts(result, traces.HOUR_REQUESTS, *sizes)
        print(result["pool_pages"], result["policy"], result["block_hit_rate"], round(result["replay_s"]))
    assert [r["policy"] for r in found] == ["lru", "lru", "fifo"]
    assert [r["pool_pages"] for r in found] == [4 * traces.HOUR_BLOCKS, *[int(0.02 * traces.HOUR_BLOCKS)] * 2]
    assert 0.35 <= unlimited["block_hit_rate"] <= 0.3664
    best = lru["oracle_block_hit_rate"]
    assert fifo["block_hit_rate"] <= lru["block_hit_rate"] <= best <= unlimited["block_hit_rate"]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = (used.ru_utime - before.ru_utime) / len(found)  # of one core; the machine's other work does not count
    print(f"{cpu_s:.0f} s of CPU a replay, {most_kib / 2**20:.2f} GiB")
    assert cpu_s < 300 and 0 < min(small_kib, most_kib) and max(small_kib, most_kib) < 3 * 2**20
