"""How much of its work a kernel holds at a time: what a caller may set, what was measured, and a rule for the rest.

`block_sizes=None` asks, in this order: tuned/<device>.json, written by scripts/tune_block_sizes.py on that device; the kernel's rule.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import numbers
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from pallas_kernels.devices import DeviceSpec

_MIB = 2**20
TUNED_FOLDER = Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Whole numbers of at least 1, or None: the kernel decides. A kernel refuses what it does not read."""

    def __post_init__(self):
        for name, value in _given_fields(self).items():
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"{type(self).__name__}.{name} must be a whole number of at least 1, or None, got {value!r}")


@dataclasses.dataclass(frozen=True)
class DecodeBlocks(_Blocks):
    """One step of a decode kernel's loop, and how many programs share a row."""

    pages_per_block: int | None = None  # TPU and xla
    tokens_per_block: int | None = None  # GPU
    num_splits: int | None = None  # the most parts of one row (GPU)
    num_stages: int | None = None  # blocks in memory, in use or on their way; not xla
    num_warps: int | None = None  # Triton


@dataclasses.dataclass(frozen=True)
class PrefillBlocks(_Blocks):
    """One tile of a prefill kernel."""

    queries_per_block: int | None = None  # TPU: tokens of the chunk; GPU: query rows, of T*G
    pages_per_block: int | None = None  # TPU and xla
    keys_per_block: int | None = None  # GPU
    num_stages: int | None = None  # GPU
    num_warps: int | None = None  # GPU


@dataclasses.dataclass(frozen=True)
class WriteBlocks(_Blocks):
    """One step of a write kernel."""

    num_stages: int | None = None  # TPU


Blocks = TypeVar("Blocks", DecodeBlocks, PrefillBlocks, WriteBlocks)


def choose(
    kernel: str,
    device: DeviceSpec,
    key: dict,
    kind: type[Blocks],
    rule: Blocks,
    given: Blocks | None = None,
    also: Iterable[str] = (),
) -> Blocks:
    """Returns block sizes field by field: what was `given`, else what was tuned, else the kernel's `rule`.

    Args:
      kernel: name of the kernel's module below this package, such as "tpu.decode".
      key: what the choice may depend on, such as {"K": 8, "G": 4, "H": 128, "P": 128, "dtype": "bfloat16"}.
      also: fields that the kernel reads beside those that its rule names.

    Raises:
      TypeError, ValueError: as `check_given`.
    """
    check_given(kernel, kind, given, (*_given_fields(rule), *also))
    sources = [source for source in (given, tuned(kernel, device.name, key, kind)) if source is not None]
    sizes = dataclasses.asdict(rule)
    for source in reversed(sources):
        sizes |= _given_fields(source)
    return kind(**sizes)


def check_given(kernel: str, kind: type, given, reads: Iterable[str]) -> None:
    """Checks block sizes that a caller gave a kernel that reads these fields.

    Raises:
      TypeError: they are of another op.
      ValueError: one is of another kernel.
    """
    if given is None:
        return
    if not isinstance(given, kind):
        raise TypeError(f"block_sizes of {kernel} must be a {kind.__name__} or None, got {type(given).__name__}")
    if unread := [name for name in _given_fields(given) if name not in reads]:
        raise ValueError(f"{kernel} does not read {', '.join(unread)} of block_sizes, but {', '.join(reads) or 'nothing'}")


def _given_fields(blocks) -> dict:
    return {name: value for name, value in vars(blocks).items() if value is not None}


def tuned(kernel: str, device_name: str, key: dict, kind: type[Blocks]) -> Blocks | None:
    """Returns what was measured to be best for exactly this key, or None.

    A file is {"kernels": {kernel: [{"key": {..}, "blocks": {..}, ..}]}}; other fields (times, versions) are for readers.
    """
    entry = _tuned_entry(kernel, device_name, key)
    return None if entry is None else kind(**entry["blocks"])


def tuned_us(kernel: str, device_name: str, key: dict) -> float | None:
    """Returns how many microseconds this key took with its best sizes, or None where nobody measured it."""
    entry = _tuned_entry(kernel, device_name, key)
    return None if entry is None else entry.get("us")


def decode_key(q, k_pages, page_table) -> dict:
    """Returns what the sizes of a GPU decode kernel may depend on: q `[B, K, G, H]`, pages `[L*C, K, P, H]`, table `[B, M]`."""
    (B, K, G, H), P = q.shape, k_pages.shape[2]
    return {"B": B, "K": K, "G": G, "H": H, "P": P, "M": page_table.shape[1], "dtype": str(k_pages.dtype)}


def _tuned_entry(kernel: str, device_name: str, key: dict) -> dict | None:
    entries = _tuned_file(device_name).get("kernels", {}).get(kernel, ())
    return next((entry for entry in entries if entry["key"] == key), None)


@functools.cache
def _tuned_file(device_name: str) -> dict:
    path = TUNED_FOLDER / f"{device_name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def gpu_decode_blocks(G: int, H: int, itemsize: int, operand: str) -> DecodeBlocks:
    """Returns the rule of the Triton decode kernel: a step's keys and values are 32 KiB, and three stages hold two steps.

    So a program has 32 KiB in flight while it computes, and three programs fit a Hopper core: 96 KiB in flight, where a core's share
    of 4.8 TB/s needs 29 KiB at 0.8 us. Many query heads hold more in registers (65,536 a core): fewer tokens, or twice the warps.
    """
    rows, width = max(16, 1 << (G - 1).bit_length()), max(16, 1 << (H - 1).bit_length())
    tokens = max(16, min(128, 2**15 // (2 * width * itemsize), 4096 // rows, 2**19 // (rows * width)))
    if operand == "float32":  # no tensor core: products are unrolled, at most 2048 multiply-adds a thread
        tokens = max(16, min(tokens, 2**12 // width, 2**17 // (rows * width)))
    return DecodeBlocks(tokens_per_block=tokens, num_stages=3, num_warps=8 if rows * width > 4096 else 4)


def gpu_decode_items(device: DeviceSpec, B: int, K: int, tiles: int) -> int:
    """Returns into how many items of work to split the rows beyond one each, at most; `tiles` is the most tiles of one row.

    Eight programs a core, of which three run at a time: cores that finish early take more, and the last round is short. Items of
    one tile would be all prologue. 0 where no row can be split.
    """
    return min(-(-8 * device.num_cores // K), B * (tiles // 2)) if tiles >= 4 else 0


def tpu_decode_blocks(K: int, G: int, H: int, P: int, M: int, itemsize: int, device: DeviceSpec) -> DecodeBlocks:
    """Returns the rule of the Mosaic decode kernel.

    A block is what a core's memory delivers in 1 us (about a copy's latency), at least 256 tokens (a block of 128 costs 1.3 times
    the bundles a token, static schedule of v5e) and at most 1,024 or what 32 registers hold of one bundle's scores. Then as many
    stages as fit a fixed share of VMEM, up to 4: short rows fill a block only in part, and more of them are on their way.
    """
    budget = (16 if device.vmem_bytes >= 64 * _MIB and device.hbm_gbps >= 1500 * device.num_cores else 8) * _MIB
    token_bytes = 2 * K * H * itemsize
    wanted = device.hbm_gbps * 1e3 / device.num_cores / token_bytes
    tokens = max(256, 1 << max(0, round(wanted) - 1).bit_length())
    tokens = min(tokens, 1024, 32 * 128 // max(1, -(-G // 8)), max(P, budget // (2 * token_bytes)))
    pages = max(1, min(tokens // P, M))
    stages = max(2, min(4, budget // (pages * P * token_bytes)))
    return DecodeBlocks(pages_per_block=pages, num_stages=stages)


def tpu_prefill_blocks(T: int, G: int, P: int, device: DeviceSpec, vmem: Callable[[int, int], int]) -> PrefillBlocks:
    """Returns the rule of the Mosaic prefill kernel: 512 rows of q a kv head, 512 keys a block, less where VMEM is short.

    512 rows a key give 512 FLOPs a byte of bf16 keys, about what v6e needs (560) and twice what v5e does (240). 512 keys keep the
    running maximum, sum and output (a load, two operations and a store each) at a sixth of the vector work; with 1024, the
    scores of 128 rows spill.

    Args:
      vmem: what (queries_per_block, pages_per_block) take of it, in bytes. A quarter is left for what spills and for XLA.
    """
    fits = [n for n in range(1, 512 // P + 1) if n * P % 128 == 0]
    pages = fits[-1] if fits else max(1, 512 // P)
    down, up = 1 << ((512 // G).bit_length() - 1), 1 << (T - 1).bit_length()  # powers of two
    queries = max(16, min(down, up))
    while vmem(queries, pages) > device.vmem_bytes * 3 // 4 and (queries > 16 or pages > 1):
        if queries > 16 and (queries * G > 128 or pages == 1):
            queries //= 2
        else:
            pages = max(1, pages // 2)
    return PrefillBlocks(queries_per_block=queries, pages_per_block=pages)


def gpu_prefill_blocks(rows: int, H: int, itemsize: int, operand: str) -> PrefillBlocks:
    """Returns the rule of the Triton prefill kernel; `rows` is T * G, and `queries_per_block` counts such rows.

    128 rows read a step's keys once for 128 queries, past the ridge of every target. Eight warps share their f32 sums: 64 registers
    a thread. Keys of 8 bits are converted in registers, which leaves room for half the rows.
    """
    width = max(16, 1 << (H - 1).bit_length())
    most, keys = min(128, 2**14 // width), min(64, 2**13 // width)
    if operand == "float32":  # no tensor core: products are unrolled
        most, keys = 32, 16
    elif itemsize == 1:
        most //= 2
    block = min(most, max(16, 1 << (rows - 1).bit_length()))
    return PrefillBlocks(queries_per_block=block, keys_per_block=keys, num_stages=3, num_warps=8 if block * width > 4096 else 4)


def tpu_write_blocks(buffer_bytes: int) -> WriteBlocks:
    """Returns the rule of the Mosaic write kernel: buffers of 4 MiB in all, at most 32 of them; half are being read, half written."""
    return WriteBlocks(num_stages=max(2, min(32, 4 * _MIB // buffer_bytes)))
