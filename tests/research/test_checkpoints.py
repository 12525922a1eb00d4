"""The embedded models: small, as good as their README says, found from a clone and from a wheel, and writing words of their text."""

import re
import tomllib
from pathlib import Path

import pytest

import jaxkv
from jaxkv.io import checkpoint, resolve
from jaxkv.research.quality import bits_per_byte

ROOT = Path(__file__).parents[2]
README = (ROOT / "checkpoints" / "README.md").read_text(encoding="utf-8")
DATA = ROOT / "tests" / "data"
HELD_OUT = (DATA / "kjv_held_out.txt").read_text(encoding="utf-8")
KV_HEADS = {"tiny-mha": 8, "tiny-gqa": 2, "tiny-mqa": 1}


@pytest.fixture(scope="module")
def embedded():
    return {name: jaxkv.load_model(name, weights="float32") for name in KV_HEADS}


@pytest.fixture(scope="module")
def bits(embedded):
    return {name: bits_per_byte(model, HELD_OUT) for name, model in embedded.items()}


def told(name):
    """The figure of the README's table: bits per byte of tests/data/kjv_held_out.txt."""
    row = next(line for line in README.splitlines() if line.startswith(f"| `{name}` |"))
    return float(row.split("|")[-2])


@pytest.mark.parametrize("name", KV_HEADS)
def test_each_is_small_and_as_good_as_its_readme_says(embedded, bits, name):
    folder, config = resolve.resolve(name), embedded[name].config
    assert folder == ROOT / "checkpoints" / name
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 4_000_000
    assert (config.num_q_heads, config.num_kv_heads) == (8, KV_HEADS[name])
    assert bits[name] == pytest.approx(told(name), abs=1e-3)


def test_gqa_is_close_to_mha_and_mqa_is_behind(bits):
    assert abs(bits["tiny-gqa"] / bits["tiny-mha"] - 1) < 0.015
    assert bits["tiny-mqa"] > max(bits["tiny-mha"], bits["tiny-gqa"])


@pytest.mark.parametrize("name", ["tiny-gqa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiny-mha", "tiny-mqa"))])
def test_each_writes_english(embedded, name):
    model = embedded[name]  # compiling is what this costs
    words = set(re.findall(r"[a-z]+", (HELD_OUT + (DATA / "kjv_genesis.txt").read_text(encoding="utf-8")).lower()))
    state = jaxkv.init_state(model, num_slots=1, max_tokens_per_slot=256)
    sampling = jaxkv.Sampling(temperature=0.6, seed=1)  # the likeliest letters of so small a model go round in circles
    _, output = jaxkv.generate(state, [model.tokenizer.encode("And it came to pass")], max_new_tokens=200, sampling=sampling)
    written = re.findall(r"[a-z]+", output.text[0].lower())[1:-1]  # the ends may be parts of words
    assert len(written) > 30 and len(set(written)) > 20
    assert sum(word in words for word in written) > 0.7 * len(written), output.text  # a Bible has names that these pages have not


def test_the_default_model(monkeypatch):
    missing = resolve._Packaged("x", (("no_such_module", "a"),), 1, "", "pip x")
    monkeypatch.setattr(resolve, "KNOWN_MODELS", {"gemma-3-270m": missing})
    assert resolve.default_model() == "tiny-gqa"
    monkeypatch.setattr(resolve, "_EMBEDDED_FOLDERS", ())
    with pytest.raises(ValueError, match="neither default is there: .*pip x; tiny-gqa comes with"):
        resolve.default_model()
    with pytest.raises(ValueError, match="'tiny-mha' comes with a clone"):
        resolve.resolve("tiny-mha")


def test_a_wheel_has_every_file_of_them():
    """As `jaxkv.checkpoints`, where `resolve` looks first."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "jaxkv.checkpoints" in tool["packages"] and tool["package-dir"] == {"jaxkv.checkpoints": "checkpoints"}
    assert resolve._EMBEDDED_FOLDERS[0] == Path(jaxkv.__file__).parent / "checkpoints"
    folder = ROOT / "checkpoints"
    packaged = {path for glob in tool["package-data"]["jaxkv.checkpoints"] for path in folder.glob(glob) if path.is_file()}
    assert packaged == {path for name in KV_HEADS for path in (folder / name).rglob("*") if path.is_file()} and packaged


def test_a_checkpoint_is_written_and_read_at_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    source, generation = checkpoint.open_portable(Path("checkpoints/tiny-gqa"))
    monkeypatch.chdir(tmp_path)
    checkpoint.write_portable(Path("here"), source.config, generation, source.arrays)
    again, _ = checkpoint.open_portable(Path("here"))
    assert again.arrays.keys() == source.arrays.keys() and (again.arrays["q"] == source.arrays["q"]).all()
