"""Every family against logits computed by transformers on the same tiny random weights (tests/data/hf_tiny)."""

from pathlib import Path

import numpy as np
import pytest

from jaxkv.loading import load_model
from jaxkv.verbs import score

FOLDERS = sorted((Path(__file__).parents[1] / "data" / "hf_tiny").iterdir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_logits_equal_transformers(folder):
    model = load_model(folder, weights="float32")
    expected = np.load(folder / "expected.npz")
    logits = np.asarray(score(model, expected["tokens"]))
    np.testing.assert_allclose(logits[:, expected["positions"]], expected["logits"], atol=2e-4, rtol=0)
    assert np.array_equal(logits.argmax(-1), expected["argmax"])
