"""Other libraries behind one small face, for `bench.py`: `run(prompts, new_tokens)` does what one round of jaxkv does.

transformers  torch on CPU, float32, sdpa, its own KV cache, greedy token by token
llama.cpp     llama-cpp-python on the same GGUF file, batch 1, a bare eval loop: no sampling, tokens fed are arbitrary
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import time
import warnings
from pathlib import Path

from scripts._script import num_cores

# What each needs, and how to get it.
PEERS = {
    "transformers": (("torch", "transformers", "gguf"), "pip install torch==2.13.0 transformers gguf"),
    "llama.cpp": (("llama_cpp",), "pip install llama-cpp-python"),
}


def open_peer(kind: str, model: str, batch: int, max_tokens: int, report):
    """The peer, loaded with the same weights; None for "none".

    Raises:
      ValueError: it is not installed, cannot read this model, or cannot run this batch; says what to do.
    """
    if kind == "none":
        return None
    modules, install = PEERS[kind]
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        raise ValueError(f"--peer={kind} needs {', '.join(missing)}, not installed here: {install}")
    if kind == "llama.cpp" and batch != 1:
        raise ValueError(f"--peer=llama.cpp runs one row: use --batch=1, not {batch}")
    from jaxkv.io.checkpoint import is_checkpoint
    from jaxkv.io.resolve import resolve

    path = resolve(model)
    if is_checkpoint(path) or (kind == "llama.cpp" and path.is_dir()):
        wanted = "a .gguf file" if kind == "llama.cpp" else "a .gguf file or a Hugging Face folder"
        raise ValueError(f"--peer={kind} cannot read {path}: --model must be {wanted}")
    report(f"loading {path.name} into {kind}")
    # To be set before either is imported. Threads that spin between their turns would slow down the other library's; progress is
    # the script's business.
    for name, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("KMP_BLOCKTIME", "0"), ("TQDM_DISABLE", "1")):
        os.environ.setdefault(name, value)
    return _Transformers(path) if kind == "transformers" else _LlamaCpp(path, max_tokens)


class _Transformers:
    name = "transformers"

    def __init__(self, path: Path):
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(num_cores())
        self._torch = torch
        folder, file = (path, None) if path.is_dir() else (path.parent, path.name)
        try:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            ).eval()
        except (ImportError, OSError, ValueError) as error:
            raise ValueError(f"--peer=transformers cannot load {path}: {error}") from error

    def describe(self) -> str:
        threads = self._torch.get_num_threads()
        return f"transformers {_version('transformers')}, torch {self._torch.__version__}, float32, {threads} threads"

    def run(self, prompts, new_tokens: int):
        """(prefill seconds, seconds a decode step, tokens [B, new_tokens])."""
        with self._torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the cache's argument is about to change its name
            return self._greedy(self._torch.from_numpy(prompts.astype("int64")), new_tokens)

    def generate(self, prompts, limits) -> None:
        """One static batch of prompts of any length, greedy: padded on the left, until the longest answer is done."""
        torch, longest = self._torch, max(map(len, prompts))
        tokens = torch.zeros((len(prompts), longest), dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = torch.as_tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model.generate(
                tokens, attention_mask=mask, max_new_tokens=max(limits), min_new_tokens=max(limits), do_sample=False, pad_token_id=0
            )

    def _greedy(self, tokens, new_tokens: int):
        started = time.perf_counter()
        out = self._model(input_ids=tokens, use_cache=True, logits_to_keep=1)
        emitted = [out.logits[:, -1].argmax(-1, keepdim=True)]
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            out = self._model(input_ids=emitted[-1], past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            emitted.append(out.logits[:, -1].argmax(-1, keepdim=True))
        ended = time.perf_counter()
        return first - started, (ended - first) / (new_tokens - 1), self._torch.cat(emitted, 1).tolist()


class _LlamaCpp:
    name = "llama.cpp"

    def __init__(self, path: Path, max_tokens: int):
        import llama_cpp

        threads = num_cores()
        try:
            self._model = llama_cpp.Llama(
                str(path),
                n_ctx=max_tokens,
                n_threads=threads,
                n_threads_batch=threads,
                swa_full=False,
                logits_all=False,
                verbose=False,
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"--peer=llama.cpp cannot load {path}: {error}") from error

    def describe(self) -> str:
        return f"llama-cpp-python {_version('llama-cpp-python')}, {num_cores()} threads"

    def run(self, prompts, new_tokens: int):
        """(prefill seconds, seconds a decode step, None: nothing is sampled)."""
        prompt = prompts[0].tolist()
        self._model.reset()
        started = time.perf_counter()
        self._model.eval(prompt)
        first = time.perf_counter()
        for i in range(new_tokens - 1):
            self._model.eval([prompt[i % len(prompt)]])
        ended = time.perf_counter()
        return first - started, (ended - first) / (new_tokens - 1), None


def _version(package: str) -> str:
    return importlib.metadata.version(package)
