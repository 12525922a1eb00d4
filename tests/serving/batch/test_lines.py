"""A line of the input: both forms, every option, and whatever else a file may hold."""

import json
import time

import fake_serving
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.sampling import Sampling
from jaxkv.serving.batch import BadLine, Defaults, LineReader, Task
from jaxkv.serving.batch.lines import id_of
from jaxkv.serving.batch.records import Records

READ = LineReader(fake_serving.FakeTokenizer(), Defaults(Sampling(temperature=0.5, top_k=7), max_tokens=9, seed=3))
RECORDS = Records("m", fake_serving.FakeTokenizer().decode, lambda: 0.0)
CHAT = [{"role": "user", "content": "hi"}]


def read(line, number=5):
    return READ(number, line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")


def openai(body, url="/v1/completions", **changes):
    return {"custom_id": "x", "method": "POST", "url": url, "body": body} | changes


def chat(**body):
    return openai({"messages": CHAT} | body, "/v1/chat/completions")


def test_a_line_that_says_nothing_gets_the_defaults_and_a_seed_of_its_own():
    task, other, again = read({"prompt": "hi"}), read({"prompt": "hi"}, 6), read({"prompt": "hi"})
    assert isinstance(task, Task) and (task.custom_id, task.form, list(task.request.tokens)) == ("5", "jaxkv", [104, 105])
    sampling = task.request.sampling
    assert (sampling.temperature, sampling.top_k, task.request.max_new_tokens) == (0.5, 7, 9)
    assert sampling.seed == again.request.sampling.seed != other.request.sampling.seed
    changed = LineReader(fake_serving.FakeTokenizer(), Defaults(seed=4))(5, b'{"prompt": "hi"}')
    assert changed.request.sampling.seed != sampling.seed


def test_every_option_arrives():
    options = dict(
        temperature=0.25, top_p=0.5, top_k=3, min_p=0.125, seed=11, n=2, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-1, logprobs=2, ignore_eos=True,
    )  # fmt: skip
    of_request = dict(tenant="t", priority=-2, acl_epoch=4, allow_truncation=True, use_cache=False)
    lists = dict(stop="END", stop_token_ids=[1, 2], logit_bias={"17": -100, "3": 2.5})
    for line in (
        {"tokens": [1, 2], "max_tokens": 4, **options, **of_request, **lists},
        openai({"prompt": [1, 2], "max_tokens": 4, **options, **of_request, **lists}),
    ):
        request = read(line).request
        assert {name: getattr(request.sampling, name) for name in options} == options
        assert {name: getattr(request, name) for name in of_request} == of_request
        assert request.sampling.stop_strings(0, 1) == ("END",) and request.sampling.stop_token_ids == (1, 2)
        assert request.sampling.logit_bias == {17: -100.0, 3: 2.5} and request.max_new_tokens == 4
        assert list(request.tokens) == [1, 2]


def test_chat_requests():
    task = read(chat(max_completion_tokens=3, logprobs=True, top_logprobs=2, model="gpt", user="u", stream=False, stop=None))
    assert (task.form, task.request.max_new_tokens, task.request.sampling.logprobs) == ("chat", 3, 2)
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "name": None}]
    assert list(task.request.tokens) == list(read({"messages": parts}).request.tokens)
    assert read(chat(logprobs=True)).request.sampling.logprobs == 0
    assert read(chat(logprobs=False)).request.sampling.logprobs is None


def test_null_counts_as_absent():
    assert read(openai({"prompt": "x", "seed": None}, method=None)).form == "completion"
    assert read(chat(n=None, max_completion_tokens=None)).request.sampling.n == 1
    plain = read({"prompt": "x"})
    nulls = read({"prompt": "x", "tokens": None, "messages": None, "max_tokens": None, "tenant": None, "custom_id": None})
    assert nulls == plain == read({"prompt": "x", "tempo": None, "method": None, "url": None, "body": None})
    assert isinstance(read({"messages": [CHAT[0] | {"tool_calls": None}]}), Task)


def test_ids():
    assert read({"custom_id": 17, "prompt": "x"}).custom_id == 17
    assert read({"custom_id": None, "prompt": "x"}).custom_id == "5"
    assert read(b"no JSON").custom_id == "5"
    assert read({"custom_id": "a", "tempo": 1}).custom_id == "a"  # an error is told under the line's own id


def test_bytes_around_a_line():
    assert isinstance(READ(1, b'\xef\xbb\xbf{"prompt": "x"}\r\n'), Task)
    assert isinstance(READ(2, b'{"prompt": "x"}'), Task)
    assert "not JSON" in READ(2, b'\xef\xbb\xbf{"prompt": "x"}\n').message


MISTAKES = [
    ({"prompt": "x", "tempperature": 1}, "unknown key 'tempperature'"),
    (openai({"prompt": "x", "best_of": 2}), "unknown key 'best_of'"),
    (openai({"prompt": "x"}, priority=1), "unknown key 'priority'"),
    (chat(prompt="x"), "unknown key 'prompt'"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "unknown key 'tool_calls'"),
    ({}, "exactly one of prompt, messages, tokens; got none"),
    ({"prompt": "x", "tokens": [1]}, "got prompt, tokens"),
    ({"prompt": ""}, "no tokens"),
    ({"prompt": 7}, "prompt must be a text, got 7"),
    ({"prompt": "\ud800"}, "not valid Unicode"),
    ({"tokens": []}, "got no tokens"),
    ({"tokens": [1, True]}, "got True"),
    ({"tokens": [2**31]}, "got 2147483648"),
    (openai({"prompt": ["one", "two"]}), "one prompt a line; got 'one'"),
    ({"messages": []}, "no messages"),
    ({"messages": "hi"}, "messages must be a list"),
    ({"messages": ["hi"]}, "messages[0] must be an object"),
    ({"messages": [{"role": "user"}]}, "messages[0].content must be a text, got None"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"prompt": "x", "max_tokens": 3.5}, "max_tokens must be a whole number, got 3.5"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens must be a whole number"),
    ({"prompt": "x", "temperature": [0.5, 1]}, "temperature must be one value"),
    ({"prompt": "x", "temperature": "hot"}, "temperature must be in [0, 1e6], 0 for greedy; got 'hot'"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature must be in"),
    ({"prompt": "x", "seed": -1}, "seed must be"),
    ({"prompt": "x", "n": 0}, "n must be at least 1"),
    ({"prompt": "x", "stop": [["a"]]}, "plain list"),
    ({"prompt": "x", "stop": [""]}, "not empty"),
    ({"prompt": "x", "stop": {"a": 1}}, "stop must hold"),
    ({"prompt": "x", "logit_bias": {"cat": 1}}, "logit_bias must map token ids to numbers, got 'cat'"),
    ({"prompt": "x", "logit_bias": {"1": "2"}}, "logit_bias"),
    ({"prompt": "x", "tenant": 3}, "tenant must be a text, got 3"),
    ({"prompt": "x", "priority": "high"}, "priority must be a whole number"),
    ({"prompt": "x", "use_cache": 1}, "use_cache must be true or false"),
    (chat(stream=True), "leave out stream"),
    (chat(max_tokens=1, max_completion_tokens=1), "one of max_tokens, max_completion_tokens"),
    (chat(top_logprobs=2), "top_logprobs needs logprobs: true"),
    (chat(logprobs=2), "logprobs must be true or false"),
    (openai({"prompt": "x"}, "/v1/embeddings"), "url must be /v1/completions or /v1/chat/completions, got '/v1/embeddings'"),
    (openai({"prompt": "x"}, None), "url must be"),
    (openai({"prompt": "x"}, method="GET"), "method must be POST"),
    (openai("x"), "body must be an object"),
    ({"custom_id": "", "prompt": "x"}, "custom_id must be a text or a whole number, got ''"),
    ({"custom_id": [1], "prompt": "x"}, "custom_id must be"),
    (b'{"prompt": "x", "seed": 1, "seed": 2}', "key 'seed' comes twice"),
    (b'{"custom_id": "a", "prompt": "x", "custom_id": "b"}', "key 'custom_id' comes twice"),
    (b'{"prompt": "x", "logit_bias": {"1": 2, "1": 3}}', "key '1' comes twice"),
    (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "key 'content' comes twice"),
    (b'{"url": "/v1/completions", "body": {"prompt": "x", "n": 1, "n": 1}}', "key 'n' comes twice"),
    (b'{"' + b"k" * 200 + b'": 1, "' + b"k" * 200 + b'": 1}', "kkk... comes twice"),
    ([1, 2], "must be a JSON object, got list"),
    (b"", "not JSON"),
    (b"\xff{}", "not UTF-8 at byte 0"),
    (b"[" * 100_000, "not JSON"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"custom_id": 1' + b"0" * 300 + b'.5e9, "prompt": "x"}', "custom_id must be"),
]  # fmt: skip


@pytest.mark.parametrize("line, words", MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_is_named_with_its_line(line, words):
    bad = read(line)
    assert isinstance(bad, BadLine) and bad.code == "invalid_line"
    assert bad.message.startswith("line 5: ") and words in bad.message
    assert len(bad.message) < 500
    record = RECORDS.error(bad)
    assert record["line"] == 5 and record["error"]["message"] == bad.message


def test_a_line_too_long_to_read_and_a_model_without_a_tokenizer():
    assert "too long" in READ(5, None).message
    reader = LineReader(None, Defaults())
    assert "comes without a tokenizer, so prompt cannot" in reader(1, b'{"prompt": "x"}').message
    assert "so messages cannot" in reader(1, b'{"messages": [{"role": "user", "content": "x"}]}').message
    assert isinstance(reader(1, b'{"tokens": [4]}'), Task)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("POST") | st.just("/v1/completions"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "prompt", "7"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_KEYS = [
    "custom_id", "prompt", "messages", "tokens", "method", "url", "body", "max_tokens", "temperature", "top_k", "seed", "stop", "n",
    "stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "tenant", "priority", "use_cache", "nonsense",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_task_or_a_bad_line(raw):
    assert isinstance(READ(1, raw), Task | BadLine)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=6), st.sampled_from([None, "/v1/completions", "/v1/chat/completions"])
)
def test_any_json_is_a_task_or_a_bad_line(fields, url):
    line = fields if url is None else openai(fields, url)
    got = read(json.dumps(line).encode())
    assert isinstance(got, Task | BadLine)
    if isinstance(got, BadLine):
        assert RECORDS.error(got)["error"]["message"].startswith("line 5: ")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(_KEYS), _VALUES), max_size=5), st.integers(0, 2))
def test_keys_that_come_twice_are_named_at_any_depth(pairs, depth):
    raw = "{" + ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in pairs) + "}"
    for _ in range(depth):
        raw = '{"body": [' + raw + "]}"
    got, keys = read(raw.encode()), [key for key, _ in pairs]
    if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
        assert got.message == f"line 5: key '{twice[0]}' comes twice: which one counts?"
        assert got.custom_id == "5" == id_of(5, raw.encode())  # which id is meant is not known either
    else:
        assert got == read(json.loads(raw)) or "NaN" in raw


@pytest.mark.parametrize("count", [1_000, 100_000])
def test_a_line_of_very_many_keys_takes_linear_time(count):
    raw = ("{" + ", ".join(f'"k{i}": {i}' for i in range(count)) + ', "k0": 1}').encode()
    started = time.process_time()
    assert "key 'k0' comes twice" in read(raw).message
    assert time.process_time() - started < 2e-5 * count + 0.1
