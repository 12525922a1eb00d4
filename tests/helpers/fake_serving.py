"""An engine without a model, whose answers follow from the prompt alone, and a tokenizer whose tokens are bytes: for the batch job.

Run as a program it is scripts/batch_generate.py over that engine, run as often as it is told to on stdin.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import resource
import sys
import time
import zlib
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from jaxkv.output import TokenLogprobs  # noqa: E402
from jaxkv.serving.request import Event, Request, RequestRefused, Result, Usage  # noqa: E402

VOCAB = 259  # bytes, and three more that only a chat template writes


class FakeTokenizer:
    """Tokens are bytes."""

    chat_template = "a chat"

    def encode(self, text: str) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: lone surrogate at position {error.start}") from None

    def encode_chat(self, messages) -> list[int]:
        if not messages:
            raise ValueError("the chat template failed: no messages")
        return [256, *self.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages)), 257]

    def decode(self, ids) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def answer(request: Request, index: int) -> tuple[list[int], str]:
    """(tokens, finish_reason) of a sample: bytes a to z, ended by "z" or the limit."""
    seed = zlib.crc32(repr((list(request.tokens), index, request.sampling.temperature and request.sampling.seed)).encode())
    tokens = (np.random.default_rng(seed).integers(0, 26, request.max_new_tokens) + ord("a")).tolist()
    at = tokens.index(ord("z")) if ord("z") in tokens else None
    return (tokens, "length") if at is None else (tokens[: at + 1], "stop")


class FakeMetrics:
    """As many figures as the script writes."""

    def summary(self) -> dict:
        return {"ttft_p50_s": 0.0}

    def text(self) -> str:
        return "jaxkv_num_requests_running 0.0\n"


@dataclasses.dataclass
class _Running:
    id: int
    request: Request
    index: int
    tokens: list[int]
    reason: str
    told: int = 0


class FakeEngine:
    """`jaxkv.Engine` as far as the batch job uses it."""

    def __init__(
        self, num_slots: int = 4, room: int = 512, step_s: float = 0.0, refuse=lambda request: None, end=lambda request: None
    ):
        self.num_slots, self.room, self.step_s = num_slots, room, step_s
        self.refuse, self.end = refuse, end  # a reason to refuse, or to end, a request; None: none
        self.metrics = FakeMetrics()
        self.most_waiting = 0
        self.submitted: list[Request] = []
        self._waiting: collections.deque[_Running] = collections.deque()
        self._running: list[_Running] = []
        self._results: dict[int, list[Result]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> int:
        if reason := self.refuse(request):
            raise RequestRefused(reason, f"refused: {reason}")
        if not all(0 <= token < VOCAB for token in request.tokens):
            raise RequestRefused("invalid", f"token ids must be below {VOCAB}")
        if (needed := len(request.tokens) + request.max_new_tokens) > self.room:
            raise RequestRefused("too_long", f"{needed} tokens, a slot has room for {self.room}")
        id = len(self.submitted)
        self.submitted.append(request)
        for index in range(request.sampling.n):
            self._waiting.append(_Running(id, request, index, *answer(request, index)))
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        return id

    def step(self) -> list[Event]:
        time.sleep(self.step_s)
        while self._waiting and len(self._running) < self.num_slots:
            self._running.append(self._waiting.popleft())
        return [self._advance(one) for one in list(self._running)]

    def collect(self, id: int) -> list[Result]:
        return sorted(self._results.pop(id), key=lambda result: result.index)

    def _advance(self, one: _Running) -> Event:
        token = one.tokens[one.told]
        one.told += 1
        reason = self.end(one.request) or (one.reason if one.told == len(one.tokens) else None)
        if reason is None:
            return Event(one.id, one.index, (token,), chr(token))
        self._running.remove(one)
        tokens = one.tokens[: one.told - bool(one.request.sampling.stop)]  # a stop string is found when it was told
        usage = Usage(len(one.request.tokens), len(tokens), 0)
        logprobs = None
        if one.request.sampling.logprobs is not None:
            top = [(ord("a") + i, -float(i) if i else -np.inf) for i in range(one.request.sampling.logprobs)]
            logprobs = [TokenLogprobs(t, -0.5, tuple(top)) for t in tokens]
        text = "".join(map(chr, tokens))
        result = Result(one.id, one.index, np.array(tokens, np.int32), text, reason, usage, logprobs)
        self._results.setdefault(one.id, []).append(result)
        return Event(one.id, one.index, (token,), chr(token), reason, usage)


def _script_with_this_engine(step_s: float) -> None:
    from jaxkv.sampling import Sampling
    from jaxkv.serving import batch
    from scripts import _script, batch_generate

    def load(given, terminal):
        read = batch.LineReader(FakeTokenizer(), batch.Defaults(Sampling(**given), 16))
        return FakeEngine(step_s=step_s), read, batch.Records("fake", FakeTokenizer().decode, lambda: 0.0)

    batch_generate._load = load
    _script.run(batch_generate.main)


def _fork(command: dict, folder: Path) -> list:
    """[exit status, stdout, stderr] of the script with command["args"].

    With a command["signal"] that is sent after command["after_s"], or when command["file"] has command["records"] lines.
    """
    names = [folder / "out", folder / "err"]
    files = [os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for name in names]
    if not (pid := os.fork()):
        os.dup2(files[0], 1), os.dup2(files[1], 2)
        if limit := command.get("file_bytes"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        sys.argv = ["batch_generate.py", *command["args"]]
        os.chdir(command.get("folder", "."))
        status = 1
        try:
            _script_with_this_engine(command.get("step_s", 0.0))
        except SystemExit as end:
            status = end.code or 0
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    for file in files:
        os.close(file)
    if "signal" in command:
        if "after_s" in command:
            time.sleep(command["after_s"])
        else:
            path = Path(command["file"])
            while not path.exists() or path.read_bytes().count(b"\n") < command["records"]:
                time.sleep(0.002)
        os.kill(pid, command["signal"])
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [status, *(name.read_text() for name in names)]


def main() -> None:
    """Runs the script over this engine, once for each line of stdin: it forks, because importing is nearly all that a run costs."""
    import scripts.batch_generate  # noqa: F401
    from jaxkv.serving import batch  # noqa: F401

    for line in sys.stdin:
        sys.stdout.write(json.dumps(_fork(json.loads(line), Path(sys.argv[1]))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
