"""What the engine builds kernels for: the device that is there, and never another's figures."""

import types

import jax
import pytest

from jaxkv.model.decoder import Kernels
from pallas_kernels import DEVICES


def test_kernels_are_built_for_the_present_device(monkeypatch):
    here = lambda **device: monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(**device)])
    here(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", compute_capability="9.0")
    assert Kernels.here("gpu").device == DEVICES["h100"]
    here(device_kind="Tesla T4", platform="gpu", compute_capability="7.5", core_count=40)
    assert Kernels.here("gpu").device.compute_capability == (7, 5)  # which `check_implementation` refuses
    here(device_kind="TPU v4", platform="tpu")
    with pytest.raises(ValueError, match="no DeviceSpec for 'TPU v4'.*implementation='xla' runs without"):
        Kernels.here("tpu")
    assert Kernels.here("tpu", "xla").device.platform == "tpu"
