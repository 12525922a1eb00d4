"""The loop over an engine: every line once, whatever the engine does and wherever the run is cut."""

import collections
import json

import pytest
from fake_serving import FakeEngine, FakeTokenizer, answer
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.serving.batch import Defaults, Job, LineReader, OutputFile, Records, Source, Tally, what_is_left
from jaxkv.serving.request import RequestRefused

READ = LineReader(FakeTokenizer(), Defaults(max_tokens=6))


def lines(count):
    stop = {0: {"stop": "z"}}
    return [
        {"custom_id": f"r{i}", "prompt": f"prompt {i}", "n": 1 + (i % 7 == 0)} | stop.get(i % 9, {}) for i in range(1, count + 1)
    ]


def write(path, items):
    path.write_bytes(b"".join(i if isinstance(i, bytes) else json.dumps(i).encode() + b"\n" for i in items))
    return path


class Clock:
    """Every look at it takes 10 ms."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.01
        return self.now


def run(folder, engine, *, report=None, read=READ, shards=(1, 0)):
    """(tally, whether it came to the end) of one run over in -> out of `folder`. `report` gets (tally, job)."""
    with (
        OutputFile(folder / "out") as output,
        Source(folder / "in", num_shards=shards[0], shard_index=shards[1]) as source,
    ):
        tally, todo = what_is_left(source, output.recover())
        job = Job(
            engine, source, output, read, Records("m", FakeTokenizer().decode, lambda: 0.0), todo=todo, tally=tally, clock=Clock()
        )
        return tally, job.run((lambda tally: report(tally, job)) if report else lambda tally: None)


def results(folder):
    return [json.loads(line) for line in (folder / "out").read_text().splitlines()]


def test_every_line_has_its_answer(tmp_path):
    write(tmp_path / "in", lines(50))
    tally, ended = run(tmp_path, FakeEngine())
    records = {record["custom_id"]: record for record in results(tmp_path)}
    assert ended and len(records) == tally.lines == tally.done == tally.succeeded == 50
    for i, line in enumerate(lines(50), 1):
        request = READ(i, json.dumps(line).encode()).request
        choices = records[f"r{i}"]["choices"]
        whole = [answer(request, s) for s in range(request.sampling.n)]
        wanted = [(tokens[: len(tokens) - ("stop" in line)], reason) for tokens, reason in whole]
        assert [(c["tokens"], c["finish_reason"]) for c in choices] == wanted
        assert all(c["text"] == "".join(map(chr, c["tokens"])) for c in choices)
        count = sum(len(c["tokens"]) for c in choices)
        assert records[f"r{i}"]["usage"] == {"prompt_tokens": len(request.tokens), "completion_tokens": count, "cached_tokens": 0}
        assert records[f"r{i}"]["error"] is None and records[f"r{i}"]["line"] == i
    assert tally.completion_tokens == sum(r["usage"]["completion_tokens"] for r in records.values())
    assert tally.prompt_tokens == sum(r["usage"]["prompt_tokens"] for r in records.values())


def test_openai_records(tmp_path):
    body = {"model": "asked", "max_tokens": 4, "logprobs": 1, "n": 2, "prompt": "hi", "seed": 1}
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    bad = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "echo": True}}
    write(
        tmp_path / "in",
        [
            {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body},
            {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            bad,
        ],
    )
    run(tmp_path, FakeEngine())
    a, b, c = sorted(results(tmp_path), key=lambda record: record["line"])
    assert (a["id"], a["custom_id"], a["response"]["status_code"], a["response"]["request_id"]) == (
        "batch_req_1",
        "a",
        200,
        "req_1",
    )
    body, choice = a["response"]["body"], a["response"]["body"]["choices"][1]
    assert (body["object"], body["model"], body["created"], len(body["choices"])) == ("text_completion", "m", 0, 2)
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    logprobs = choice["logprobs"]
    assert (choice["index"], "".join(logprobs["tokens"])) == (1, choice["text"])
    assert logprobs["token_logprobs"][0] == -0.5 and logprobs["top_logprobs"][0] == {"a": -9999.0}
    assert logprobs["text_offset"] == list(range(len(choice["text"])))
    choice = b["response"]["body"]["choices"][0]
    assert (b["response"]["body"]["object"], choice["message"]["role"]) == ("chat.completion", "assistant")
    assert "".join(t["token"] for t in choice["logprobs"]["content"]) == choice["message"]["content"]
    assert [len(t["top_logprobs"]) for t in choice["logprobs"]["content"]] == [2] * len(choice["message"]["content"])
    assert c["response"] is None and c["error"]["code"] == "invalid_line" and "unknown key 'echo'" in c["error"]["message"]


def test_lines_without_an_answer_are_records_and_stop_nothing(tmp_path):
    items = [
        {"custom_id": "good", "prompt": "x"},
        b"not JSON\n",
        {"custom_id": "good", "prompt": "y"},
        {"custom_id": "long", "prompt": "x", "max_tokens": 10**6},
        {"custom_id": "vocabulary", "tokens": [10**6]},
        {"custom_id": "nan", "prompt": "nan"},
        {"custom_id": "gone", "prompt": "gone"},
        {"custom_id": "last", "prompt": "x"},
    ]
    write(tmp_path / "in", items)
    ends = {"nan": "error", "gone": "abort"}
    engine = FakeEngine(end=lambda request: ends.get(bytes(request.tokens).decode()))
    tally, ended = run(tmp_path, engine)
    errors = {record["line"]: record["error"] for record in results(tmp_path)}
    assert ended and sorted(errors) == list(range(1, 9))
    codes = [None, "invalid_line", "duplicate_custom_id", "too_long", "invalid", "model_error", "aborted", None]
    assert [errors[i] and errors[i]["code"] for i in range(1, 9)] == codes
    assert "line 3: line 1 has the custom_id 'good' too" in errors[3]["message"]
    assert (tally.succeeded, tally.all_failed, tally.summary()["errors_of_this_run"]["too_long"]) == (2, 6, 1)
    assert tally.first_error.startswith("line 2: not JSON")
    again, _ = run(tmp_path, FakeEngine())
    assert (again.done_before, again.done_now, again.all_failed, again.first_error) == (8, 0, 6, None)


def test_the_engine_is_kept_fed_and_the_rest_stays_in_the_file(tmp_path):
    write(tmp_path / "in", [*lines(600), *[b"bad\n"] * 500, *[line | {"custom_id": f"s{i}"} for i, line in enumerate(lines(300))]])
    engine, seen = FakeEngine(num_slots=8), []
    run(tmp_path, engine, report=lambda tally, job: seen.append((engine.num_waiting, tally.done)))
    assert engine.most_waiting <= 65  # 64 and the second sample of a line
    busy = [waiting for waiting, done in seen if done < 500]
    assert min(busy) > 0  # there is always one to take a slot
    assert len(results(tmp_path)) == 1400


def test_a_line_refused_under_pressure_waits_for_it_to_ease(tmp_path):
    write(tmp_path / "in", lines(30))
    engine = FakeEngine(num_slots=2)
    engine.refuse = lambda request: "ladder" if engine.num_waiting > 3 else None
    tally, ended = run(tmp_path, engine)
    assert ended and tally.succeeded == 30
    engine = FakeEngine(refuse=lambda request: "ladder")  # pressure that nothing of this job can ease
    (tmp_path / "out").unlink()
    tally, ended = run(tmp_path, engine)
    assert ended and tally.failed == {"ladder": 30}


def test_an_engine_that_drains_ends_the_run_and_loses_nothing(tmp_path):
    write(tmp_path / "in", lines(30))
    engine = FakeEngine()
    engine.refuse = lambda request: "draining" if len(engine.submitted) > 9 else None
    with pytest.raises(RequestRefused):
        run(tmp_path, engine)
    tally, ended = run(tmp_path, FakeEngine())
    assert ended and tally.done == 30 == len(results(tmp_path))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 400)), max_size=6), st.integers(1, 3))
def test_runs_cut_anywhere_answer_each_line_once(tmp_path_factory, cuts, num_shards):
    folder = tmp_path_factory.mktemp("cut")
    items = lines(40)
    items[7], items[20] = b"broken\n", items[3]
    write(folder / "in", items)
    records = []
    for shard in range(num_shards):
        for steps, torn in cuts:  # a run of so many steps, then so many bytes are lost

            def stop(tally, job, left=[steps]):  # noqa: B006
                left[0] -= 1
                job.stopping = left[0] <= 0

            run(folder, FakeEngine(), report=stop, shards=(num_shards, shard))
            content = (folder / "out").read_bytes()
            (folder / "out").write_bytes(content[: max(0, len(content) - torn)])
        tally, ended = run(folder, FakeEngine(), shards=(num_shards, shard))
        assert ended and tally.done == tally.lines
        records += results(folder)
        (folder / "out").unlink()
    assert sorted(record["line"] for record in records) == list(range(1, 41))
    assert collections.Counter(record["custom_id"] for record in records if record["error"] is None) == {
        f"r{i}": 1 for i in range(1, 41) if i not in (8, 21)
    }


def test_records_that_answer_no_line_are_kept_and_not_counted(tmp_path):
    """Added by hand: for a line that there is not, and for one that has another id."""
    write(tmp_path / "in", [*lines(5), b"broken\n"])
    error = {"code": "mine", "message": ""}
    strange = [
        {"custom_id": "mine", "line": 99, "error": error},
        {"custom_id": "mine", "line": 2, "error": error},
        {"line": 6, "error": None},
        {"custom_id": "r4", "line": 3, "error": None},
    ]
    write(tmp_path / "out", [{"custom_id": "r1", "line": 1, "error": error}, *strange])
    before = (tmp_path / "out").read_bytes()
    tally, ended = run(tmp_path, FakeEngine())
    assert ended and (tally.lines, tally.done_before, tally.done, tally.all_failed) == (6, 1, 6, 2)
    assert (tmp_path / "out").read_bytes().startswith(before)
    again, _ = run(tmp_path, FakeEngine())
    assert (again.done_now, again.all_failed) == (0, 2)
    with OutputFile(tmp_path / "out") as output:
        output.sort()
    assert [(record["line"], record.get("custom_id")) for record in results(tmp_path)] == [
        (1, "r1"), (2, "mine"), (2, "r2"), (3, "r4"), (3, "r3"), (4, "r4"), (5, "r5"), (6, None), (6, "6"), (99, "mine"),
    ]  # fmt: skip


def test_progress():
    tally = Tally(lines=1000, done_before=400)
    assert tally.progress() == "400/1,000 lines, 0 tok/s"
    tally.elapsed_s, tally.succeeded, tally.completion_tokens = 50.0, 90, 123_456
    tally.failed["invalid_line"] = 10
    assert tally.progress() == "500/1,000 lines, 2,469 tok/s, ETA 0:04:10"
    assert tally.summary()["tokens_per_s"] == 2469.12 and tally.summary()["succeeded"] == 490


def test_two_answers_of_one_line_are_refused_and_two_notes_of_none_are_not(tmp_path):
    write(tmp_path / "in", lines(3))
    run(tmp_path, FakeEngine())
    whole = (tmp_path / "out").read_bytes()
    notes = b'{"line": 9, "error": null, "note": 1}\n{"line": 9, "error": null, "note": 2}\n{"line": 1, "error": null}\n'
    (tmp_path / "out").write_bytes(whole + notes)
    assert run(tmp_path, FakeEngine())[0].done == 3
    (tmp_path / "out").write_bytes(whole + whole)
    with pytest.raises(ValueError, match="answers line 1 of its input twice"):
        run(tmp_path, FakeEngine())
