"""Runs a script as a user would, and makes a tiny model with a tokenizer and a chat template for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

# What jax's CUDA plugin, where it is installed without a driver, writes before anybody can ask it not to.
_LOGS = ("cudart_stub.cc", "All log messages before absl::InitializeLog()")
ROOT = Path(__file__).parents[2]
HF_TINY = ROOT / "tests" / "data" / "hf_tiny"
_SPECIAL = ["<s>", "<|user|>", "</s>", "<|assistant|>", "<|end|>"]
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def start(script: str, *args: str, cache: Path, **options) -> subprocess.Popen:
    """The script under way, its three streams as pipes."""
    env = {**os.environ, "JAXKV_CACHE_DIR": str(cache), "COLUMNS": "100"}
    command = [sys.executable, str(ROOT / "scripts" / script), *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, text=True, encoding="utf-8", **options)


def run(script: str, *args: str, cache: Path, stdin: str = "", timeout: float = 120) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    with start(script, *args, cache=cache) as process:
        try:
            out, err = process.communicate(stdin, timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, "".join(line for line in err.splitlines(True) if not any(log in line for log in _LOGS))


def one_line_error(result: tuple[int, str, str]) -> str:
    """The message of a script that failed as it should: status 1, nothing on stdout, one line after what was reported."""
    status, out, err = result
    lines = [line for line in err.splitlines() if not line.endswith(" ...")]
    assert (status, out, len(lines)) == (1, "", 1), result
    assert lines[0].startswith("error: "), result
    return lines[0].removeprefix("error: ")


def make_chat_model(folder: Path) -> Path:
    """A tiny llama whose every token is some text that encodes to it again, so that chats can be told token by token."""
    shutil.copytree(HF_TINY / "llama_mha", folder)
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {text: i for i, text in enumerate(_SPECIAL + letters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken(f"<x{i}>", normalized=False) for i in range(len(vocabulary), 130)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
