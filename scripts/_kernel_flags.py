"""Flags of the scripts that measure kernels: lists, whose combinations are the cases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from absl import flags

from scripts import _script

FLAGS = flags.FLAGS
OPS = ["decode", "prefill", "write"]
DTYPES = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]

flags.DEFINE_list("op", None, f"What to run, of {', '.join(OPS)}; without it the first two.")
flags.DEFINE(_script.Integers(), "batch", None, "Rows.")
flags.DEFINE(_script.Integers(), "context", None, "Tokens a row has in its pages.")
flags.DEFINE(_script.Integers(), "kv_heads", None, "Heads of keys and values.")
flags.DEFINE(_script.Integers(), "group", None, "Query heads per head of keys and values.")
flags.DEFINE(_script.Integers(), "head_dim", None, "Numbers a head.")
flags.DEFINE(_script.Integers(), "page_size", None, "Tokens a page; without it 128 on a TPU, else 16.")
flags.DEFINE_list("dtype", None, f"Of keys and values, of {', '.join(DTYPES)}.")
flags.DEFINE_integer("chunk", 512, "New tokens a row in prefill.", lower_bound=1)
flags.DEFINE_integer("write_tokens", 1, "New tokens a row in write.", lower_bound=1)
flags.DEFINE_integer("cache_mb", None, "MiB of the device's last-level cache; without it what is known of it.", lower_bound=1)


def cases(platform: str, lists: dict[str, list], chunk: int | None = None) -> list:
    """Returns the cases of all combinations of the flags' lists; `lists` holds those of flags that were not given."""
    from scripts._kernel_cases import Case

    chosen = {name: getattr(FLAGS, name) or values for name, values in lists.items()}
    chosen["page_size"] = FLAGS.page_size or [128 if platform == "tpu" else 16]
    tokens = {"decode": 1, "prefill": chunk or FLAGS.chunk, "write": FLAGS.write_tokens}
    rows = [dict(zip(chosen, values, strict=True)) for values in itertools.product(*chosen.values())]
    return [Case(tokens=tokens[row["op"]], **row) for row in rows]


def check() -> None:
    """Raises ValueError for an op or dtype that does not exist, before anything slow is imported."""
    check_names("op", FLAGS.op or (), OPS)
    check_names("dtype", FLAGS.dtype or (), DTYPES)


def check_names(flag: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raises ValueError unless every name is known."""
    for name in names:
        if name not in known:
            raise ValueError(f"--{flag}: {name!r} is not one of {', '.join(known)}")
