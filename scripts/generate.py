"""Continues prompts, or chats, with a model on this machine.

Text streams to stdout; what is slow and how fast it went goes to stderr. There TTFT
is the time from the call to the first token, compiling included; TPOT the mean time
between tokens after it, and tok/s the tokens after each first one in a second of that
time, without compiling.

  python scripts/generate.py --prompt "The capital of France is"
  python scripts/generate.py --model model.gguf --prompt_file prompts.txt --temperature 0.8 --json
  python scripts/generate.py --model hf_folder --chat
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
from pathlib import Path

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags  # noqa: E402

from scripts import _script  # noqa: E402

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "model",
    None,
    "A known name, a Hugging Face folder, a .gguf file or a jaxkv checkpoint; without it gemma-3-270m if installed, else tiny-gqa.",
)
flags.DEFINE_multi_string("prompt", [], "Text to continue; give it several times for several prompts in one batch.")
flags.DEFINE_string("prompt_file", None, "A UTF-8 file with one prompt a line; - reads stdin.")
flags.DEFINE_bool("chat", False, "Talk with the model turn by turn; its KV stays between turns. Turns may come through a pipe.")
flags.DEFINE_integer("max_new_tokens", 128, "Tokens to emit a prompt or turn, at most.", lower_bound=1)
flags.DEFINE_integer("max_tokens", None, "Room of a prompt and its text, or of a chat (4096), in tokens.", lower_bound=1)
_MODELS = "; without it what the model's makers recommend"
flags.DEFINE_float("temperature", None, f"0 always takes the likeliest token{_MODELS}, else 0.", lower_bound=0.0)
flags.DEFINE_integer("top_k", None, f"Draw among the k likeliest tokens, 0: all{_MODELS}, else 0.", lower_bound=0)
flags.DEFINE_float(
    "top_p", None, f"Draw among the fewest likeliest tokens that reach this probability together{_MODELS}, else 1.", 0.0, 1.0
)
flags.DEFINE_integer("seed", None, "Makes draws repeatable; without it every run draws anew.", lower_bound=0)
flags.DEFINE_enum("weights", None, _script.WEIGHTS, "How weights are stored; without it what suits the backend.")
flags.DEFINE_enum("kv_dtype", None, _script.KV_DTYPES, "What keys and values are stored in; without it as the backend likes.")
flags.DEFINE_enum("dtype", None, _script.DTYPES, "Of the operands of large products; without it as --weights wants.")
flags.DEFINE_bool("json", False, "One JSON object a prompt on stdout, instead of text.")

_MAX_ROWS = 32  # prompts of one batch: bounds the KV pool, and larger batches hardly run faster on a CPU
_LEAST_ROOM = 256  # tokens; room grows in powers of two, so that prompts of many lengths share compiled steps


def main(terminal) -> None:
    """Loads the model and runs the prompts or the chat."""
    if FLAGS.json:
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # JSON is, whatever the terminal
    if FLAGS.chat and (FLAGS.prompt or FLAGS.prompt_file or FLAGS.json):
        raise ValueError("--chat reads its text from the terminal: leave out --prompt, --prompt_file and --json")
    prompts = [] if FLAGS.chat else _prompts()
    terminal("importing jax")
    import jaxkv
    from jaxkv.io.cache import use_compilation_cache
    from jaxkv.io.resolve import default_model

    use_compilation_cache()
    FLAGS["model"].value = FLAGS.model or default_model()
    given: dict = {name: FLAGS[name].value for name in ("temperature", "top_k", "top_p") if FLAGS[name].value is not None}
    jaxkv.Sampling(**given)  # what is wrong with them is said before seconds of loading
    model = jaxkv.load_model(FLAGS.model, dtype=FLAGS.dtype, weights=FLAGS.weights, report=terminal)
    if model.tokenizer is None:
        raise ValueError(f"{FLAGS.model} comes without a tokenizer (a tokenizer.json): text cannot become tokens")
    sampling = _sampling(model, given, terminal)
    if FLAGS.chat:
        _chat(model, sampling, terminal)
    else:
        _continue(model, prompts, sampling, terminal)


def _prompts() -> list[str]:
    prompts = list(FLAGS.prompt)
    if FLAGS.prompt_file:
        try:
            data = sys.stdin.buffer.read() if FLAGS.prompt_file == "-" else Path(FLAGS.prompt_file).read_bytes()
            text = data.decode("utf-8-sig")
        except OSError as error:
            raise ValueError(f"--prompt_file={FLAGS.prompt_file}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt_file={FLAGS.prompt_file} is not UTF-8 at byte {error.start}") from None
        prompts += [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise ValueError("nothing to do: give --prompt TEXT, --prompt_file FILE or --chat (--help lists the flags)")
    return prompts


def _sampling(model, given: dict, terminal):
    """The flags where they are given, else what the model's makers recommend, which is then told."""
    import secrets

    import jaxkv

    seed = secrets.randbits(32) if FLAGS.seed is None else FLAGS.seed
    sampling = dataclasses.replace(model.sampling, seed=seed, **given)
    counts = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty") if sampling.temperature else ("repetition_penalty",)
    told = [
        f"{name} {getattr(sampling, name):g}"
        for name in counts
        if name not in given and getattr(sampling, name) != getattr(jaxkv.Sampling(), name)
    ]
    if told:
        terminal.done()
        sys.stderr.write(f"[as the model's makers recommend: {', '.join(told)}; --temperature=0 takes the likeliest tokens]\n")
    return sampling


def _continue(model, prompts, sampling, terminal) -> None:
    """Runs the prompts, _MAX_ROWS at a time."""
    import jaxkv

    tokens = [model.tokenizer.encode(prompt) for prompt in prompts]
    for prompt, ids in zip(prompts, tokens, strict=True):
        if not ids:
            raise ValueError(f"prompt {prompt!r} has no tokens: there is nothing to continue")
    room = _room(max(map(len, tokens)), model.config.max_positions)
    state = jaxkv.init_state(model, num_slots=min(len(prompts), _MAX_ROWS), max_tokens_per_slot=room, kv_dtype=FLAGS.kv_dtype)
    for first in range(0, len(prompts), _MAX_ROWS):
        rows = slice(first, first + _MAX_ROWS)
        state = jaxkv.release(state, range(state.num_slots))
        state, output = _run(model, state, prompts[rows], tokens[rows], sampling, terminal)
        _report(state, output)
        if "error" in output.finish_reasons:
            raise ValueError("the model's logits are NaN or infinite: its weights are broken, or too large for this --dtype")


def _room(longest: int, limit: int) -> int:
    """Tokens a slot: --max_tokens, or what the longest prompt and its text need, within the model's limit.

    Raises:
      ValueError: they do not fit; says which flag to change.
    """
    needed = longest + FLAGS.max_new_tokens
    asked = f"the longest prompt has {longest} tokens and --max_new_tokens={FLAGS.max_new_tokens} asks for as many more, {needed} in all"
    _check_max_tokens(limit)
    if needed > limit:
        raise ValueError(f"{asked}, but the model takes at most {limit}: shorten the prompt, or give fewer --max_new_tokens")
    if FLAGS.max_tokens and needed > FLAGS.max_tokens:
        raise ValueError(f"--max_tokens={FLAGS.max_tokens} is too small: {asked}; give more of it, or fewer --max_new_tokens")
    return FLAGS.max_tokens or min(max(_LEAST_ROOM, 1 << (needed - 1).bit_length()), limit)


def _check_max_tokens(limit: int) -> None:
    if FLAGS.max_tokens and FLAGS.max_tokens > limit:
        raise ValueError(f"--max_tokens={FLAGS.max_tokens} is more than the {limit} tokens that the model takes: give at most that")


def _run(model, state, prompts, tokens, sampling, terminal):
    """One batch: its text as it comes if it is one prompt, else when all are done."""
    import jaxkv

    terminal("compiling, and reading the prompt")
    stream = jaxkv.generate(state, tokens, max_new_tokens=FLAGS.max_new_tokens, sampling=sampling, stream=True)
    alone = len(FLAGS.prompt) == 1 and not FLAGS.prompt_file and not FLAGS.json
    # As decoded, the prompt and its continuation are one text; special tokens do not show.
    echo = [model.tokenizer.stream().feed(ids) for ids in tokens]
    if alone:
        _show(stream, terminal, echo[0])
        return stream.finish()
    for count, _ in enumerate(stream):
        terminal("generating", count / (len(tokens) * FLAGS.max_new_tokens))
    state, output = stream.finish()
    terminal.done()
    for i, prompt in enumerate(prompts):
        if FLAGS.json:
            tokens, reason = output.tokens[i].tolist(), output.finish_reasons[i]
            fields = {"prompt": prompt, "text": output.text[i], "tokens": tokens, "finish_reason": reason}
            sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")
        else:
            sys.stdout.write(f"{echo[i]}{output.text[i]}\n\n")
    sys.stdout.flush()
    return state, output


def _show(stream, terminal, text: str = "", stopped=lambda: False) -> None:
    """Writes `text`, then what the stream brings, then a line end."""
    for event in stream:
        terminal.done()
        sys.stdout.write(text + event.text)
        sys.stdout.flush()
        if stopped():
            break
        if not terminal.midline:
            terminal.midline = True
            terminal("compiling the decode step")
        text = ""
    terminal.done()
    terminal.midline = False
    sys.stdout.write("\n")
    sys.stdout.flush()


def _chat(model, sampling, terminal) -> None:
    """Reads turns until an empty line or the end of input. Only what is new since the last turn is run."""
    import jaxkv

    tokenizer = model.tokenizer
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{FLAGS.model} has no chat template, so it only continues text: use --prompt instead of --chat, or --model with a"
            " model that is tuned to chat"
        )
    _check_max_tokens(model.config.max_positions)
    room = FLAGS.max_tokens or min(4096, model.config.max_positions)
    state = jaxkv.init_state(model, num_slots=1, max_tokens_per_slot=room, kv_dtype=FLAGS.kv_dtype)
    messages: list[dict[str, str]] = []
    terminal.done()
    if sys.stdin.isatty():
        sys.stderr.write("An empty line or Ctrl-D ends the chat; Ctrl-C stops an answer.\n")
    while text := _read_turn():
        messages.append({"role": "user", "content": text})
        state, output = _answer(state, tokenizer.encode_chat(messages), room, sampling, terminal)
        messages.append({"role": "assistant", "content": output.text[0]})
        _report(state, output)


def _answer(state, whole: list[int], room: int, sampling, terminal):
    """Runs what `whole`, the conversation so far, has beyond the slot's history, and shows the answer."""
    import jaxkv

    if len(whole) >= room:
        raise ValueError(
            f"the conversation has {len(whole)} tokens and there is room for {room}: start again with more --max_tokens"
        )
    kept = _common_prefix(state.tokens(0), whole)
    state = jaxkv.truncate(state, [0], [kept])
    terminal("compiling, and reading the turn")
    with _CtrlC() as ctrl_c:
        limit = min(room - len(whole), FLAGS.max_new_tokens)
        stream = jaxkv.generate(state, [whole[kept:]], max_new_tokens=limit, sampling=sampling, stream=True)
        _show(stream, terminal, stopped=lambda: ctrl_c.pressed)
        return stream.finish()


class _CtrlC:
    """Notes the first Ctrl-C instead of raising in the middle of a step, which would lose the state; the second one raises."""

    def __enter__(self):
        self.pressed = False
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *error):
        signal.signal(signal.SIGINT, self._before)

    def _press(self, signum, frame):
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


def _read_turn() -> str:
    """The next line of the user; "" at the end."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # editing and history for input()
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _common_prefix(held, whole: list[int]) -> int:
    """How many tokens of the slot's history the conversation begins with; at least one of the conversation is left to run."""
    same = 0
    for a, b in zip(held.tolist(), whole[:-1], strict=False):
        if a != b:
            break
        same += 1
    return same


def _report(state, output) -> None:
    """One line on stderr: time to the first token and a token, rate, KV in use."""
    from jaxkv.kv.pages import pages_in_use

    t = output.timings
    used = state.kv.nbytes * int(pages_in_use(state.kv.own)) / state.kv.refcounts.shape[0]
    rate = (t.new_tokens - len(output.rows)) / t.decode_s if t.decode_s else 0.0
    compiled = f" without the {t.compile_s:.1f} s of compiling" if t.compile_s >= 0.05 else ""
    sys.stderr.write(
        f"[{t.prompt_tokens} prompt + {t.new_tokens} new tokens; TTFT {t.ttft_s * 1e3:.0f} ms, TPOT {t.tpot_s * 1e3:.1f} ms,"
        f" {rate:.1f} tok/s{compiled}; KV {used / 2**20:.1f} of {state.kv.nbytes / 2**20:.1f} MiB in use]\n"
    )
    sys.stderr.flush()


if __name__ == "__main__":
    _script.run(main)
