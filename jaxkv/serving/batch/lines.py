"""A line of the input becomes a `Task`, or a `BadLine` that says what is wrong with it. Nothing here raises for what a line holds.

Two forms are read: jaxkv's own, one flat object, and OpenAI's batch lines, whose options are in "body". A key whose value is null
counts as absent; a key that nobody reads, or that comes twice, is an error: an option that is silently ignored gives plausible, wrong answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxkv.io.tokenizer import Tokenizer
from jaxkv.sampling import Sampling
from jaxkv.serving.request import Request

Form = Literal["jaxkv", "completion", "chat"]

_INT32_MAX = 2**31 - 1
_URLS: dict[str, Form] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
_ENVELOPE = ("custom_id", "method", "url", "body")
_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "logprobs",
    "n",
)  # fmt: skip
_LISTS = ("stop", "stop_token_ids")
_OF_REQUEST = {"tenant": str, "priority": int, "acl_epoch": int, "allow_truncation": bool, "use_cache": bool}
_COMMON = (*_SCALARS, *_LISTS, "logit_bias", "max_tokens", *_OF_REQUEST)
_KEYS: dict[Form, tuple[str, ...]] = {
    "jaxkv": ("custom_id", "prompt", "messages", "tokens", *_COMMON),
    "completion": ("prompt", "model", "user", "stream", *_COMMON),
    "chat": ("messages", "max_completion_tokens", "top_logprobs", "model", "user", "stream", *_COMMON),
}
_PROMPTS: dict[Form, tuple[str, ...]] = {
    "jaxkv": ("prompt", "messages", "tokens"),
    "completion": ("prompt",),
    "chat": ("messages",),
}


@dataclasses.dataclass(frozen=True)
class Line:
    """Who a record is for, and in which form."""

    number: int  # from 1
    custom_id: str | int
    form: Form

    def bad(self, code: str, message: str) -> BadLine:
        """That this line has no answer, and why; `code` is for programs, `message` for people."""
        return BadLine(self.number, self.custom_id, self.form, code, f"line {self.number}: {message}")


@dataclasses.dataclass(frozen=True)
class Task(Line):
    """A line that can run."""

    request: Request


@dataclasses.dataclass(frozen=True)
class BadLine(Line):
    """A line that has no answer, and why."""

    code: str  # "invalid_line", "duplicate_custom_id", "model_error", "aborted", or the reason of a `RequestRefused`
    message: str


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What a line that says nothing means."""

    sampling: Sampling = Sampling()
    max_tokens: int = 128
    seed: int = 0  # of the job; mixed with a line's number it is the seed of a line that gives none


class LineReader:
    """Makes tasks of lines, with a tokenizer (None: only lines with tokens run) and the job's defaults."""

    def __init__(self, tokenizer: Tokenizer | None, defaults: Defaults):
        self._tokenizer = tokenizer
        self._defaults = defaults

    def __call__(self, number: int, raw: bytes | None) -> Task | BadLine:
        """The task of line `number`, whose bytes are `raw` (None: it is too long to be read)."""
        form: Form = "jaxkv"
        custom_id: str | int = str(number)
        try:
            line = parse(number, raw)
            custom_id = _checked_id(line, number)
            if _is_openai(line):
                form = "completion"
                form = _form(line)
            fields = line if form == "jaxkv" else line["body"]
            _refuse_unknown(fields, _KEYS[form])
            return self._task(number, custom_id, form, {k: v for k, v in fields.items() if v is not None})
        except ValueError as error:
            return Line(number, custom_id, form).bad("invalid_line", str(error))

    def _task(self, number: int, custom_id: str | int, form: Form, fields: dict[str, Any]) -> Task:
        if fields.get("stream"):
            raise ValueError("a batch answers in whole records: leave out stream")
        if form == "chat":
            _unify_chat(fields)
        options = {name: _a(kind, name, fields[name]) for name, kind in _OF_REQUEST.items() if name in fields}
        tokens = self._tokens(form, fields)
        limit = fields.get("max_tokens", self._defaults.max_tokens)
        if _a(int, "max_tokens", limit) < 1:
            raise ValueError(f"max_tokens must be at least 1, got {limit}")
        return Task(number, custom_id, form, Request(tokens, limit, self._sampling(number, fields), **options))

    def _tokens(self, form: Form, fields: dict[str, Any]) -> list[int]:
        given = [name for name in _PROMPTS[form] if name in fields]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(_PROMPTS[form])}; got {', '.join(given) or 'none of them'}")
        name, value = given[0], fields[given[0]]
        if name == "tokens" or (form == "completion" and isinstance(value, list)):
            return _token_ids(name, value)
        if self._tokenizer is None:
            raise ValueError(f"the model comes without a tokenizer, so {name} cannot become tokens: give tokens")
        if name == "messages":
            return self._tokenizer.encode_chat([_message(i, m) for i, m in enumerate(_a(list, name, value))])
        tokens = self._tokenizer.encode(_a(str, name, value))
        if not tokens:
            raise ValueError("the prompt has no tokens: there is nothing to continue")
        return tokens

    def _sampling(self, number: int, fields: dict[str, Any]) -> Sampling:
        """The job's options with the line's over them. A line's draws depend on the line and the job's seed, not on when it runs."""
        given: dict[str, Any] = {"seed": _mix(self._defaults.seed, number)}
        for name in _SCALARS:
            if name in fields:
                if isinstance(fields[name], list):
                    raise ValueError(f"{name} must be one value, got a list")
                given[name] = fields[name]
        for name in _LISTS:
            if name in fields:
                items = fields[name] if isinstance(fields[name], list) else [fields[name]]
                if any(isinstance(item, list) for item in items):
                    raise ValueError(f"{name} must be a plain list, got a list of lists")
                given[name] = items
        if "logit_bias" in fields:
            given["logit_bias"] = _bias(fields["logit_bias"])
        return dataclasses.replace(self._defaults.sampling, **given)


class _Twice(Exception):
    """A key that an object has twice; JSON does not say which one counts."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise _Twice(name)
        fields[name] = value
    return fields


def parse(number: int, raw: bytes | None) -> dict[str, Any]:
    """The JSON object of a line; ValueError when it is anything else."""
    if raw is None:
        raise ValueError("too long to be one request")
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        value = json.loads(text, object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except _Twice as error:
        raise ValueError(f"key {short(error.args[0])} comes twice: which one counts?") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {type(value).__name__}")
    return value


def id_of(number: int, raw: bytes | None) -> str:
    """The id that must be a line's own in its file, as text: 7 and "7" are the same one."""
    try:
        return str(_checked_id(parse(number, raw), number))
    except ValueError:
        return str(number)


def hash_of(custom_id: str) -> int:
    """64 bits of an id."""
    return int.from_bytes(hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _checked_id(line: dict[str, Any], number: int) -> str | int:
    custom_id = line.get("custom_id")
    if custom_id is None:
        return str(number)
    if not isinstance(custom_id, str | int) or isinstance(custom_id, bool) or custom_id == "":
        raise ValueError(f"custom_id must be a text or a whole number, got {short(custom_id)}")
    return custom_id


def _is_openai(line: dict[str, Any]) -> bool:
    return any(line.get(name) is not None for name in _ENVELOPE[1:])


def _form(line: dict[str, Any]) -> Form:
    _refuse_unknown(line, _ENVELOPE)
    if line.get("method") not in (None, "POST"):
        raise ValueError(f"method must be POST, got {short(line['method'])}")
    url = line.get("url")
    if not isinstance(url, str) or url not in _URLS:
        raise ValueError(f"url must be {' or '.join(_URLS)}, got {short(url)}")
    _a(dict, "body", line.get("body"))
    return _URLS[url]


def _refuse_unknown(fields: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [name for name, value in fields.items() if name not in known and value is not None]
    if unknown:
        raise ValueError(f"unknown key {short(unknown[0])}; known are {', '.join(known)}")


def _unify_chat(fields: dict[str, Any]) -> None:
    """What chat requests name otherwise: max_completion_tokens, and logprobs as a bool beside top_logprobs."""
    if "max_completion_tokens" in fields:
        if "max_tokens" in fields:
            raise ValueError("give one of max_tokens, max_completion_tokens")
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    wanted, top = _a(bool, "logprobs", fields.pop("logprobs", False)), fields.pop("top_logprobs", None)
    if wanted:
        fields["logprobs"] = 0 if top is None else top
    elif top is not None:
        raise ValueError("top_logprobs needs logprobs: true")


def _message(i: int, message: Any) -> dict[str, str]:
    """One turn of a conversation; content given in parts is joined."""
    where = f"messages[{i}]"
    message = _a(dict, where, message)
    _refuse_unknown(message, ("role", "content", "name"))
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f'{where}.content: only parts {{"type": "text", "text": ...}} are read, got {short(part)}')
        content = "".join(part["text"] for part in content)
    turn = {"role": _a(str, f"{where}.role", message.get("role")), "content": _a(str, f"{where}.content", content)}
    return turn | ({"name": _a(str, f"{where}.name", message["name"])} if message.get("name") is not None else {})


def _token_ids(name: str, value: Any) -> list[int]:
    ids = _a(list, name, value)
    wrong = [x for x in ids if not isinstance(x, int) or isinstance(x, bool) or not 0 <= x <= _INT32_MAX]
    if wrong or not ids:
        raise ValueError(f"{name} must be a list of token ids, one prompt a line; got {short(wrong[0]) if wrong else 'no tokens'}")
    return ids


def _bias(value: Any) -> dict[int, float]:
    """JSON's keys are texts, token ids are numbers."""
    bias = _a(dict, "logit_bias", value)
    wrong = [key for key in bias if not (key.isascii() and key.isdecimal() and len(key) <= 10)]
    if wrong:
        raise ValueError(f"logit_bias must map token ids to numbers, got {short(wrong[0])}")
    return {int(key): number for key, number in bias.items()}


def _a(kind: type, name: str, value: Any) -> Any:
    """`value`, if it is one of `kind`; a bool is no number."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {str: "a text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}[kind]
        raise ValueError(f"{name} must be {words}, got {short(value)}")
    return value


def short(value: Any) -> str:
    """`value` for a message: strangers' lines can hold anything of any length, even numbers too long to print."""
    try:
        text = repr(value)
    except ValueError:
        return "a very large number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _mix(seed: int, number: int) -> int:
    """A u32 of a job's seed and a line's number; neighbours' are unrelated."""
    return int.from_bytes(hashlib.sha256(b"%d/%d" % (seed, number)).digest()[:4], "little")
