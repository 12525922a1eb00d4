"""Continues prompts, or chats, with a model on this machine.

Text streams to stdout; what is slow and how fast it went goes to stderr. Examples:

  python scripts/generate.py --model gemma-3-270m --prompt "The capital of France is"
  python scripts/generate.py --model path/to/model.gguf --prompt_file prompts.txt --temperature 0.8 --json
  python scripts/generate.py --model path/to/hf_folder --chat
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import app, flags  # noqa: E402

from scripts._terminal import Terminal  # noqa: E402

FLAGS = flags.FLAGS

flags.DEFINE_string("model", "gemma-3-270m", "A known name, a Hugging Face folder, a .gguf file, or a jaxkv checkpoint.")
flags.DEFINE_multi_string("prompt", [], "Text to continue; give it several times for several prompts in one batch.")
flags.DEFINE_string("prompt_file", None, "A UTF-8 file with one prompt a line; '-' reads stdin.")
flags.DEFINE_bool("chat", False, "Talk with the model, turn by turn, keeping its KV between turns.")
flags.DEFINE_integer("max_new_tokens", 128, "Tokens to emit per prompt or turn, at most.", lower_bound=1)
flags.DEFINE_integer("max_tokens", None, "Longest history of one row, prompt included; default: what the prompts need (chat: 4096).", lower_bound=1)
flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
flags.DEFINE_integer("top_k", 0, "Sample among the k likeliest tokens; 0: all.", lower_bound=0)
flags.DEFINE_float("top_p", 1.0, "Sample among the likeliest tokens of this total probability.", lower_bound=0.0, upper_bound=1.0)
flags.DEFINE_integer("seed", None, "Makes sampling repeatable; default: another text each run.")
flags.DEFINE_enum("dtype", None, ["float32", "bfloat16", "float16"], "Of the operands of large products; default: as --weights wants.")
flags.DEFINE_enum("weights", None, ["float32", "bfloat16", "int8"], "How weights are stored; default: bfloat16.")
flags.DEFINE_bool("json", False, "One JSON object a prompt on stdout instead of text.")


def main(argv):
    """Loads the model and runs the prompts or the chat."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: prompts go into --prompt")
    if FLAGS.chat and (FLAGS.prompt or FLAGS.prompt_file or FLAGS.json):
        raise app.UsageError("--chat takes its text from the terminal: leave out --prompt, --prompt_file and --json")
    prompts = [] if FLAGS.chat else _prompts()
    terminal = Terminal()
    terminal("importing jax")
    import jaxkv
    from jaxkv.io.cache import use_compilation_cache

    use_compilation_cache()
    try:
        model = jaxkv.load_model(FLAGS.model, dtype=FLAGS.dtype, weights=FLAGS.weights, report=terminal)
        (_chat if FLAGS.chat else _continue)(model, prompts, terminal)
    except ValueError as error:
        terminal.done()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _prompts() -> list[str]:
    prompts = list(FLAGS.prompt)
    if FLAGS.prompt_file:
        try:
            text = sys.stdin.read() if FLAGS.prompt_file == "-" else Path(FLAGS.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise app.UsageError(f"--prompt_file: {error}") from None
        prompts += [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise app.UsageError("nothing to do: give --prompt TEXT, --prompt_file FILE, or --chat")
    return prompts


def _sampling():
    import jaxkv

    seed = FLAGS.seed
    if seed is None and FLAGS.temperature > 0:
        seed = int.from_bytes(__import__("os").urandom(4), "little")
    return jaxkv.Sampling(temperature=FLAGS.temperature, top_k=FLAGS.top_k, top_p=FLAGS.top_p, seed=seed)


def _continue(model, prompts, terminal) -> None:
    import jaxkv

    tokens = [_encode(model, prompt) for prompt in prompts]
    longest = FLAGS.max_tokens or max(len(t) for t in tokens) + FLAGS.max_new_tokens
    state = jaxkv.init_state(model, num_slots=len(prompts), max_tokens_per_slot=longest)
    terminal("compiling and reading the prompt")
    stream = jaxkv.generate(state, tokens, max_new_tokens=FLAGS.max_new_tokens, sampling=_sampling(), stream=True)
    show = len(prompts) == 1 and not FLAGS.json
    if show:
        sys.stdout.write(prompts[0])
    for event in stream:
        terminal.done()
        if show:
            sys.stdout.write(event.text)
            sys.stdout.flush()
    state, output = stream.finish()
    terminal.done()
    if show:
        sys.stdout.write("\n")
    elif not FLAGS.json:
        for prompt, text in zip(prompts, output.text, strict=True):
            print(f"{prompt}{text}\n")
    else:
        _print_json(prompts, output)
    _report(state, output)


def _print_json(prompts, output) -> None:
    for prompt, text, tokens, reason in zip(prompts, output.text, output.tokens, output.finish_reasons, strict=True):
        print(json.dumps({"prompt": prompt, "text": text, "tokens": tokens.tolist(), "finish_reason": reason}, ensure_ascii=False))


def _chat(model, prompts, terminal) -> None:
    """Reads turns until end of input; only the new turn is ever prefilled."""
    import jaxkv

    del prompts
    tokenizer = _tokenizer(model)
    if tokenizer.chat_template is None:
        raise ValueError(f"{FLAGS.model} has no chat template, it only continues text: use --prompt")
    limit = FLAGS.max_tokens or min(4096, model.config.max_positions)
    state = jaxkv.init_state(model, num_slots=1, max_tokens_per_slot=limit)
    messages: list[dict[str, str]] = []
    terminal.done()
    print("Empty line or Ctrl-D ends; Ctrl-C stops an answer.", file=sys.stderr)
    while text := _read_turn():
        messages.append({"role": "user", "content": text})
        whole = tokenizer.encode_chat(messages)
        kept = _common_prefix(state.tokens(0), whole)
        state = jaxkv.truncate(state, [0], [kept])
        room = limit - len(whole)
        if room < 1:
            raise ValueError(f"the conversation is {len(whole)} tokens long and --max_tokens is {limit}")
        terminal("compiling and reading the turn")
        stream = jaxkv.generate(state, [whole[kept:]], max_new_tokens=min(room, FLAGS.max_new_tokens), sampling=_sampling(), stream=True)
        try:
            for event in stream:
                terminal.done()
                sys.stdout.write(event.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass
        state, output = stream.finish()
        terminal.done()
        print(flush=True)
        messages.append({"role": "assistant", "content": output.text[0]})
        _report(state, output)


def _read_turn() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _common_prefix(held, whole) -> int:
    """How many tokens of the history the new prompt begins with; at least one token is left to run."""
    same = 0
    for a, b in zip(held.tolist(), whole[:-1], strict=False):
        if a != b:
            break
        same += 1
    return same


def _encode(model, prompt: str) -> list[int]:
    tokens = _tokenizer(model).encode(prompt)
    if not tokens:
        raise ValueError(f"prompt {prompt!r} has no tokens")
    return tokens


def _tokenizer(model):
    if model.tokenizer is None:
        raise ValueError(f"{FLAGS.model} comes without a tokenizer: text cannot become tokens")
    return model.tokenizer


def _report(state, output) -> None:
    """One line on stderr: time to first token, time per token, rate, KV in use."""
    from jaxkv.kv.pages import pages_in_use

    t = output.timings
    page_bytes = state.kv.nbytes / state.kv.refcounts.shape[0]
    used = page_bytes * int(pages_in_use(state.kv.own))
    rate = t.new_tokens / t.total_s if t.total_s else 0.0
    print(
        f"[{t.prompt_tokens} prompt + {t.new_tokens} new tokens; TTFT {t.ttft_s * 1e3:.0f} ms, TPOT {t.tpot_s * 1e3:.1f} ms,"
        f" {rate:.1f} tok/s; KV {used / 2**20:.1f} of {state.kv.nbytes / 2**20:.1f} MiB in use]",
        file=sys.stderr,
    )


if __name__ == "__main__":
    app.run(main)
