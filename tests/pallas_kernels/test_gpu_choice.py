"""Which GPU decode kernel a call runs: Triton's unless Mosaic's was measured to be faster for it, or is all that there is."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import block_sizes
from pallas_kernels.devices import DEVICES
from pallas_kernels.gpu import decode, mosaic_decode, triton_decode

pytestmark = pytest.mark.skipif(mosaic_decode.available() is not None, reason=str(mosaic_decode.available()))
B, K, G, H, P, M = 4, 8, 4, 128, 16, 64


def chosen(*, q="bfloat16", pool="bfloat16", device="h200", batch=B):
    array = jax.ShapeDtypeStruct
    pages = array((M * B + 1, K, P, H), jnp.dtype(pool))
    table = array((batch, M), jnp.int32)
    return decode.choose_kernel(array((batch, K, G, H), jnp.dtype(q)), pages, None, table, False, DEVICES[device])


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Writes tuned/h200.json: microseconds by kernel, of the call above."""
    monkeypatch.setattr(block_sizes, "TUNED_FOLDER", tmp_path)
    block_sizes._tuned_file.cache_clear()

    def write(**us):
        key = {"B": B, "K": K, "G": G, "H": H, "P": P, "M": M, "dtype": "bfloat16"}
        kernels = {f"gpu.{name}_decode": [{"key": key, "blocks": {}, "us": time}] for name, time in us.items()}
        (tmp_path / "h200.json").write_text(json.dumps({"kernels": kernels}))
        block_sizes._tuned_file.cache_clear()

    yield write
    block_sizes._tuned_file.cache_clear()


def test_triton_unless_mosaic_was_measured_to_be_faster(tuned):
    assert chosen() is triton_decode
    for measured, kernel in (
        ({"mosaic": 90.0, "triton": 100.0}, mosaic_decode),
        ({"mosaic": 100.0, "triton": 90.0}, triton_decode),
        ({"mosaic": 90.0}, triton_decode),  # nobody knows what Triton's takes
        ({"triton": 90.0}, triton_decode),
    ):
        tuned(**measured)
        assert chosen() is kernel, measured


def test_a_measurement_counts_for_its_own_call_only(tuned):
    tuned(mosaic=90.0, triton=100.0)
    assert chosen(batch=B + 1) is triton_decode
    assert chosen(device="h100") is triton_decode
    assert chosen(q="float32") is triton_decode  # what the key does not tell apart, and the kernel refuses


def test_without_triton_mosaic_runs_or_says_why_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "pallas_kernels.gpu.triton_decode", None)
    assert chosen() is mosaic_decode
    with pytest.raises(ValueError, match="no decode kernel for this call: .*triton_decode.*16 bits"):
        chosen(pool="int8")
    with pytest.raises(ValueError, match=r"no decode kernel for this call: .*capability 9\.0"):
        chosen(device="a100")
