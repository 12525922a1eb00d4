"""Every implementation of attention gives the same greedy tokens through whole generations, whatever the KV dtype."""

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxkv

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="compares interpret mode with CPU's own")
KV_DTYPES = ["float32", "bfloat16", "int8", "float8_e4m3fn"]
slow = pytest.mark.slow  # minutes, most of them in interpret mode


@pytest.fixture(autouse=True, scope="module")
def hardly_optimised():
    """Compiling interpreted kernels takes nearly all of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def model():
    """Windows, two ropes, norms on both sides, one KV head: gemma3 has the most of what a kernel must get right."""
    return jaxkv.load_model(Path(__file__).parent / "data" / "hf_tiny" / "gemma3", weights="float32")


def generated(model, kv_dtype, **options):
    """Tokens of two turns, past a page and past the window: the likeliest, then drawn ones, which any change of the logits moves."""
    state = jaxkv.init_state(model, num_slots=2, max_tokens_per_slot=96, page_size=32, kv_dtype=kv_dtype, **options)
    prompts = [[1, 5, 9, 22, 7] * 3, [3, 4]]
    state, first = jaxkv.generate(state, prompts, max_new_tokens=12, sampling=jaxkv.Sampling(ignore_eos=True))
    sampling = jaxkv.Sampling(ignore_eos=True, temperature=1.0, seed=[3, 4])
    state, second = jaxkv.generate(state, [[8, 2], []], max_new_tokens=12, sampling=sampling)
    jaxkv.check_integrity(state)
    return [[*a.tolist(), *b.tolist()] for a, b in zip(first.tokens, second.tokens, strict=True)]


@pytest.mark.parametrize("kv_dtype", [pytest.param(d, marks=() if d == "int8" else slow) for d in KV_DTYPES])
@pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("pallas_tpu", marks=slow), pytest.param("pallas_gpu", marks=slow)]
)
def test_generations_agree(model, implementation, kv_dtype):
    options = {"implementation": implementation, "interpret": implementation.startswith("pallas")}
    got = generated(model, kv_dtype, **options)
    assert got == generated(model, kv_dtype)
    assert len(set(got[0])) > 8, "tokens that are all the same say little"


def test_what_cannot_run_here_says_so_at_once(model):
    with pytest.raises(ValueError, match="'pallas_tpu' compiles for tpu only, not for cpu: interpret=True runs it here"):
        jaxkv.init_state(model, 1, 64, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="page_size 16 of a int8 pool must be a multiple of 32"):
        jaxkv.init_state(model, 1, 64, page_size=16, kv_dtype="int8", implementation="pallas_tpu", interpret=True)


@pytest.mark.parametrize("implementation", ["reference", "pallas_tpu", "pallas_gpu"])
def test_scores_agree(model, implementation):
    tokens = [[5, 3, 9, 1], [7]]
    got = jaxkv.score(model, tokens, implementation=implementation, interpret=implementation.startswith("pallas"))
    np.testing.assert_allclose(got[0], jaxkv.score(model, tokens)[0], atol=1e-4)
