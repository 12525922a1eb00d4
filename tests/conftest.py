"""Models shared by all tests of a session, so that each is compiled once; and the helper module importable."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "helpers"))  # pytest's importlib mode does not put tests on the path

import engine  # noqa: E402


@pytest.fixture(scope="session")
def model():
    """The tiny float32 model nearly every engine test uses."""
    return engine.make_model()


@pytest.fixture(scope="session")
def hf_tiny():
    """Loads a model of tests/data/hf_tiny by name, in float32, once."""
    import jaxkv

    loaded = {}

    def load(name):
        if name not in loaded:
            loaded[name] = jaxkv.load_model(engine.HF_TINY / name, weights="float32")
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def long_text(model):
    """A prompt longer than the window and its next 24 greedy tokens."""
    return engine.prompt(40), engine.greedy(model, engine.prompt(40), 24)
