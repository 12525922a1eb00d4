"""Models shared by all tests of a session, so that each is compiled once; and the helper module importable."""

import gc
import os
import sys
from pathlib import Path

# Compiling is most of what the tests cost: workers, scripts in processes of their own and later runs share what was compiled.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

sys.path.append(str(Path(__file__).parent / "helpers"))  # pytest's importlib mode does not put tests on the path

import engine  # noqa: E402

# Linux gives a process 65,530 memory maps, and XLA:CPU takes a few for each function it compiles; past them it crashes.
_MOST_MAPS = 30_000


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Drops what was compiled when a process has compiled very much."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def no_cache_of_other_devices(request):
    """What was compiled for a device that is not here cannot be loaded again."""
    if request.node.get_closest_marker("aot") is None:
        yield
        return
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it looks at the setting once
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


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
