"""scripts/tune_block_sizes.py: what it writes is what kernels find."""

import io
import json

import jax
import pytest
import run_script
from absl.testing import flagsaver

from pallas_kernels import block_sizes
from pallas_kernels.block_sizes import DecodeBlocks
from pallas_kernels.devices import DEVICES
from scripts import tune_block_sizes
from scripts._kernel_cases import Case
from scripts._terminal import Terminal
from scripts.tune_block_sizes import Lookup, recorded_lookups, write_entry

KEY = {"K": 8, "G": 4, "H": 128, "P": 16, "dtype": "bfloat16"}
LOOKUP = Lookup("gpu.some", "h200", json.dumps(KEY), DecodeBlocks)
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="interprets kernels")


def tune(*args, cache):
    return run_script.run("tune_block_sizes.py", *args, cache=cache)


@pytest.fixture
def tuned_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(block_sizes, "TUNED_FOLDER", tmp_path)
    block_sizes._tuned_file.cache_clear()
    yield tmp_path
    block_sizes._tuned_file.cache_clear()


def choose(key):
    rule = DecodeBlocks(tokens_per_block=32, num_stages=2)
    return block_sizes.choose("gpu.some", DEVICES["h200"], key, DecodeBlocks, rule)


def test_a_written_entry_is_found_by_its_key_alone(tuned_folder):
    write_entry(tuned_folder / "h200.json", LOOKUP, {"key": KEY, "blocks": {"num_stages": 4}, "us": 1.0})
    assert choose(KEY) == DecodeBlocks(tokens_per_block=32, num_stages=4)
    assert choose(KEY | {"G": 5}) == DecodeBlocks(tokens_per_block=32, num_stages=2)


def test_an_entry_replaces_that_of_its_key_and_no_other(tmp_path):
    path = tmp_path / "h200.json"
    for stages, group in ((2, 4), (3, 5), (4, 4)):
        write_entry(path, LOOKUP, {"key": KEY | {"G": group}, "blocks": {"num_stages": stages}})
    entries = json.loads(path.read_text())["kernels"]["gpu.some"]
    assert [(e["key"]["G"], e["blocks"]["num_stages"]) for e in entries] == [(5, 3), (4, 4)]
    assert [p.name for p in tmp_path.iterdir()] == ["h200.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "h200.json"
    write_entry(path, LOOKUP, {"key": KEY, "blocks": {}})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_entry(path, LOOKUP, {"key": KEY, "blocks": {}, "us": object()})
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_lookups_are_recorded_once_and_find_nothing(tuned_folder):
    write_entry(tuned_folder / "h200.json", LOOKUP, {"key": KEY, "blocks": {"num_stages": 4}})
    with recorded_lookups() as lookups:
        assert choose(KEY).num_stages == choose(KEY).num_stages == 2
    assert lookups == [LOOKUP]
    assert choose(KEY).num_stages == 4


class FakeBench:
    """A device where 64 tokens and 4 stages are fast, 128 tokens do not compile, and warps make no difference worth keeping."""

    def measure(self, case, hows):
        for how in hows.values():
            block_sizes.tuned("gpu.triton_decode", "h200", KEY, DecodeBlocks)
            rows = {name: self._row(how) for name, how in hows.items()}
        return {"implementations": rows}

    def _row(self, how):
        blocks = how.block_sizes or DecodeBlocks()
        if blocks.tokens_per_block == 128:
            return {"failed": "too much shared memory"}
        us = {None: 100, 64: 80}.get(blocks.tokens_per_block, 110) - 10 * (blocks.num_stages == 4) - (blocks.num_warps == 8)
        return {"us": us, "spread": 0.0, "gb_s": 1.0, "fraction_of_copy": 0.5, "error": 0.0}

    class machine:
        spec = DEVICES["h200"]


@pytest.fixture
def parsed_flags():
    if not tune_block_sizes.FLAGS.is_parsed():
        tune_block_sizes.FLAGS(["tune_block_sizes.py"])


def test_the_best_of_each_field_is_kept_if_it_gains_enough(parsed_flags):
    lookup, entry = tune_block_sizes._tune(FakeBench(), Case("decode", 1, 20, 2, 2, 8, 4, "bfloat16"))
    assert (lookup.kernel, json.loads(lookup.key)) == ("gpu.triton_decode", KEY)
    assert entry["blocks"] == {"tokens_per_block": 64, "num_stages": 4}
    assert (entry["us"], entry["rule_us"]) == (70, 100)
    assert entry["candidates_us"]['{"tokens_per_block": 128}'] == "too much shared memory"


def error_line(result):
    """The last line of stderr: jax may write of its plugins before."""
    status, out, err = result
    assert (status, out) == (1, ""), result
    line = err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    "args, words",
    [
        ([], "nothing to tune on a CPU"),
        (["--interpret"], "name a file with --output"),
        (["--op=encode", "--interpret", "--output=x.json"], "--op: 'encode'"),
    ],
)
def test_user_errors_are_one_line(args, words, cache):
    assert words in error_line(tune(*args, cache=cache))


@pytest.mark.slow  # interprets a kernel with several block sizes
def test_a_trial_writes_a_file_that_a_kernel_would_find(parsed_flags, tmp_path, monkeypatch, capsys):
    path = tmp_path / "trial.json"
    monkeypatch.setattr("jaxkv.io.cache.use_compilation_cache", lambda: None)  # would outlive this test
    monkeypatch.setattr(tune_block_sizes, "_CANDIDATES", {"gpu.triton_decode": {"tokens_per_block": (16, 32)}})
    shape = {
        "batch": [2],
        "context": [20],
        "kv_heads": [2],
        "group": [2],
        "head_dim": [16],
        "page_size": [4],
        "dtype": ["bfloat16"],
    }
    with flagsaver.flagsaver(interpret=True, output=str(path), op=["decode"], repeats=1, cache_mb=1, **shape):
        tune_block_sizes.main(Terminal(io.StringIO()))
    assert str(path) in capsys.readouterr().out
    (entry,) = json.loads(path.read_text())["kernels"]["gpu.triton_decode"]
    assert entry["key"] == {"B": 2, "K": 2, "G": 2, "H": 16, "P": 4, "M": 6, "dtype": "bfloat16"}
    assert set(entry["candidates_us"]) == {"rule", '{"tokens_per_block": 16}', '{"tokens_per_block": 32}'}
    DecodeBlocks(**entry["blocks"])
