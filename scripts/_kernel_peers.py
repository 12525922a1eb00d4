"""Other libraries' attention beside ours in `kernel_bench.py`: PyTorch's and FlashInfer's, where they are installed.

Each peer has a `name` and `prepare(case, data, layers)`, which returns (once, many): `once()` gives o as numpy f32, in the shape of
ours, for the last layer; `many(n)` gives the seconds that n calls take, each on another layer than the one before. Calls are made from
Python and waited for together: under about 20 us a call they measure Python.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantise import has_scales
from scripts._kernel_cases import Case, Data
from scripts._kernel_check import dense

Prepared = tuple[Callable[[], np.ndarray], Callable[[int], float]]


def find_peers(platform: str) -> tuple[list, dict[str, str]]:
    """Returns the peers that can run here, and why the others cannot, by name."""
    found, missing = [], {}
    for peer in (TorchSdpa, FlashInfer):
        reason = peer.missing(platform)
        if reason is None:
            found.append(peer(platform))
        else:
            missing[peer.name] = reason
    return found, missing


class TorchSdpa:
    """`torch.nn.functional.scaled_dot_product_attention` on keys and values in one piece a row: no pages to follow."""

    name = "torch sdpa"

    @staticmethod
    def missing(platform: str) -> str | None:
        """Why it cannot run here, or None."""
        if platform not in ("cpu", "gpu"):
            return f"torch does not run on this {platform}"
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed"
        import torch

        return "this torch sees no GPU" if platform == "gpu" and not torch.cuda.is_available() else None

    def __init__(self, platform: str):
        import torch

        self._torch, self._on_gpu = torch, platform == "gpu"

    def prepare(self, case: Case, data: Data, layers: int) -> Prepared:
        if case.op == "write" or case.window or case.soft_cap or case.sinks or case.own:
            raise ValueError(f"it has no {case}")
        torch = self._torch
        B, T, N, H = case.batch, case.tokens, case.kv_heads * case.group, case.head_dim
        caches = [self._cache(case, data, layer) for layer in range(layers)]
        q = torch.from_dlpack(data.q).reshape(B, T, N, H).transpose(1, 2)
        mask = None
        if case.op == "prefill":
            mask = torch.ones(T, case.context + T, dtype=torch.bool, device=q.device).tril(case.context)

        def attend(layer: int):
            k, v = caches[layer]
            options = {"attn_mask": mask, "scale": H**-0.5, "enable_gqa": case.group > 1}
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

        once = lambda: attend(layers - 1).transpose(1, 2).reshape(data.q.shape).float().cpu().numpy()
        return once, lambda n: _seconds(torch, self._on_gpu, lambda i: attend(i % layers), n)

    def _cache(self, case: Case, data: Data, layer: int):
        k, v = dense(case, data, layer * case.pages)
        if data.k_new is not None and data.v_new is not None:
            k, v = (jnp.concatenate([x, jnp.swapaxes(new, 1, 2)], 2) for x, new in ((k, data.k_new), (v, data.v_new)))
        return self._torch.from_dlpack(k), self._torch.from_dlpack(v)


class FlashInfer:
    """FlashInfer's batch decode over the very pages of our pool."""

    name = "flashinfer"

    @staticmethod
    def missing(platform: str) -> str | None:
        """Why it cannot run here, or None."""
        if platform != "gpu":
            return f"flashinfer runs on NVIDIA GPUs, not on {platform}"
        return "flashinfer is not installed" if importlib.util.find_spec("flashinfer") is None else TorchSdpa.missing(platform)

    def __init__(self, platform: str):
        import flashinfer
        import torch

        self._torch, self._flashinfer = torch, flashinfer

    def prepare(self, case: Case, data: Data, layers: int) -> Prepared:
        if case.op != "decode" or case.window or case.soft_cap or case.sinks or case.own:
            raise ValueError(f"it has no {case}")
        if has_scales(data.k_pages.dtype) or case.dtype == "float32":
            raise ValueError(f"it has no {case.dtype} pages with a scale a vector")
        torch = self._torch
        k_pages, v_pages, q = (torch.from_dlpack(x) for x in (data.k_pages, data.v_pages, data.q))
        lengths = np.asarray(data.lengths)
        pages = -(-lengths // case.page_size)
        table = np.asarray(data.page_table)
        indices = np.concatenate([table[b, : pages[b]] for b in range(case.batch)])
        on_gpu = lambda x: torch.tensor(np.asarray(x, np.int32), device="cuda")
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=case.group >= 4)
        wrapper.plan(
            on_gpu(np.concatenate([[0], np.cumsum(pages)])), on_gpu(indices), on_gpu((lengths - 1) % case.page_size + 1),
            case.kv_heads * case.group, case.kv_heads, case.head_dim, case.page_size,
            q_data_type=q.dtype, kv_data_type=k_pages.dtype, sm_scale=case.head_dim**-0.5,
        )  # fmt: skip
        q, C = q.reshape(case.batch, -1, case.head_dim), case.pages

        def attend(layer: int):
            layer_pages = slice(layer * C, (layer + 1) * C)
            return wrapper.run(q, (k_pages[layer_pages], v_pages[layer_pages]))

        once = lambda: attend(layers - 1).reshape(data.q.shape).float().cpu().numpy()
        return once, lambda n: _seconds(torch, True, lambda i: attend(i % layers), n)


def _seconds(torch, on_gpu: bool, call: Callable[[int], object], n: int) -> float:
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    with torch.inference_mode():
        wait()
        started = time.perf_counter()
        for i in range(n):
            call(i)
        wait()
    return time.perf_counter() - started
