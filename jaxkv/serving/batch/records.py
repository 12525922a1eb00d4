"""The records of the output: what answers a line, in the form the line was asked in. docs/batch.md shows them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxkv.output import TokenLogprobs
from jaxkv.serving.batch.lines import BadLine, Line, Task
from jaxkv.serving.request import Result, Usage

_LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has no number for


@dataclasses.dataclass(frozen=True)
class Records:
    """Makes records.

    Args:
      model: the name that answers in OpenAI's form give.
      decode: the text of token ids, for logprobs in that form.
      now: seconds since 1970.
    """

    model: str
    decode: Callable[[Iterable[int]], str]
    now: Callable[[], float]

    def answer(self, task: Task, results: Sequence[Result]) -> dict[str, Any]:
        """The record of a line that was answered."""
        usage = total_usage(results)
        if task.form == "jaxkv":
            return _head(task) | {"choices": [*map(_choice, results)], "usage": dataclasses.asdict(usage), "error": None}
        chat = task.form == "chat"
        choice = self._chat_choice if chat else self._completion_choice
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{task.number}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(self.now()),
            "model": self.model,
            "choices": [choice(result) for result in results],
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
        }
        return _head(task) | {"response": {"status_code": 200, "request_id": f"req_{task.number}", "body": body}, "error": None}

    def error(self, bad: BadLine) -> dict[str, Any]:
        """The record of a line without an answer."""
        nothing: dict[str, Any] = {"choices": [], "usage": None} if bad.form == "jaxkv" else {"response": None}
        return _head(bad) | nothing | {"error": {"code": bad.code, "message": bad.message}}

    def _chat_choice(self, result: Result) -> dict[str, Any]:
        logprobs = None
        if result.logprobs is not None:
            logprobs = {
                "content": [
                    self._chat_token(t.token, t.logprob) | {"top_logprobs": [self._chat_token(*other) for other in t.top]}
                    for t in result.logprobs
                ]
            }
        message = {"role": "assistant", "content": result.text}
        return {"index": result.index, "message": message, "logprobs": logprobs, "finish_reason": result.finish_reason}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token])
        return {"token": text, "logprob": _number(logprob), "bytes": [*text.encode()]}

    def _completion_choice(self, result: Result) -> dict[str, Any]:
        logprobs = None
        if result.logprobs is not None:
            texts = [self.decode([t.token]) for t in result.logprobs]
            logprobs = {
                "tokens": texts,
                "token_logprobs": [_number(t.logprob) for t in result.logprobs],
                "top_logprobs": [{self.decode([other]): _number(x) for other, x in t.top} for t in result.logprobs],
                "text_offset": [*itertools.accumulate(map(len, texts[:-1]), initial=0)],
            }
        return {"index": result.index, "text": result.text, "logprobs": logprobs, "finish_reason": result.finish_reason}


def total_usage(results: Sequence[Result]) -> Usage:
    """The usage of all samples of one prompt, which counts once."""
    usages = [result.usage for result in results]
    completion = sum(usage.completion_tokens for usage in usages)
    return Usage(usages[0].prompt_tokens, completion, max(usage.cached_tokens for usage in usages))


def _head(line: Line) -> dict[str, Any]:
    head: dict[str, Any] = {"custom_id": line.custom_id, "line": line.number}
    return head if line.form == "jaxkv" else {"id": f"batch_req_{line.number}", **head}


def _choice(result: Result) -> dict[str, Any]:
    choice = {
        "index": result.index,
        "text": result.text,
        "tokens": [int(token) for token in result.tokens],
        "finish_reason": result.finish_reason,
    }
    return choice if result.logprobs is None else choice | {"logprobs": [*map(_token, result.logprobs)]}


def _token(t: TokenLogprobs) -> dict[str, Any]:
    return {"token": t.token, "logprob": _number(t.logprob), "top": [[other, _number(x)] for other, x in t.top]}


def _number(logprob: float) -> float:
    return max(float(logprob), _LEAST_LOGPROB)
