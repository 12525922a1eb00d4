"""Kernel x KV dtype x head dim x target, through the public ops and the vendors' compilers, on a machine that has neither chip.

`python tests/pallas_kernels/test_compile_matrix.py` prints the table of docs/kernels.md.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # as a script, too

import gpu_aot  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import pytest  # noqa: E402
import tpu_aot  # noqa: E402

from pallas_kernels import DEVICES, has_scales, paged_decode, paged_prefill, pool_heads, scales_shape, write_kv  # noqa: E402
from pallas_kernels.block_sizes import gpu_decode_blocks, gpu_prefill_blocks  # noqa: E402

B, M, K, G, T, LAYERS = 16, 32, 8, 4, 256, 2
DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")
HEAD_DIMS = (64, 80, 96, 128, 256)
TPUS, GPUS = tuple(tpu_aot.TOPOLOGIES), tuple(gpu_aot.TARGETS)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One compilation."""

    kernel: str
    dtype: str
    head_dim: int
    target: str

    @property
    def device(self):
        return DEVICES[self.target]

    def arguments(self) -> dict:
        """Abstract arguments by name."""
        platform = self.device.platform
        page_size = 128 if platform == "tpu" else 16
        heads, dim = pool_heads(K, self.head_dim, platform)
        rows = LAYERS * (B * M + 1)
        array = jax.ShapeDtypeStruct
        q = jnp.float32 if self.dtype == "float32" else jnp.bfloat16
        pool = array((rows, heads, page_size, dim), self.dtype)
        out = {
            "k_pages": pool,
            "v_pages": pool,
            "page_table": array((B, M), jnp.int32),
            "lengths": array((B,), jnp.int32),
            "page_offset": array((), jnp.int32),
        }
        if has_scales(self.dtype):
            out["kv_scales"] = array(scales_shape(rows, heads, page_size), jnp.float32)
        if self.kernel == "decode":
            return out | {"q": array((B, K, G, self.head_dim), q), "window": array((), jnp.int32)}
        new = array((B, T, K, self.head_dim), q)
        out |= {"k_new": new, "v_new": new, "chunk_lengths": array((B,), jnp.int32)}
        if self.kernel == "prefill":
            return out | {"q": array((B, T, K, G, self.head_dim), q), "window": array((), jnp.int32)}
        return out

    def compile(self) -> dict:
        """What the compiler says: bytes of temporaries and of aliased pools, and for a GPU registers, spills and shared memory."""
        op = {"decode": paged_decode, "prefill": paged_prefill, "write": write_kv}[self.kernel]
        scale = {} if self.kernel == "write" else {"scale": 0.125}
        donated = ("k_pages", "v_pages", "kv_scales") if self.kernel == "write" else ()
        arguments = self.arguments()
        pools = {name: arguments.pop(name) for name in donated if name in arguments}
        function = lambda pools, rest: op(**pools, **rest, **scale, device=self.device)
        if self.device.platform == "tpu":
            memory = tpu_aot.compile_for(self.target, function, pools, arguments, donate=(0,)).memory_analysis()
            return {"temp": memory.temp_size_in_bytes, "alias": memory.alias_size_in_bytes}
        spec = lambda a: gpu_aot.spec(self.target, a.shape, a.dtype)
        report = gpu_aot.compile_for(self.target, function, *jax.tree.map(spec, (pools, arguments)), donate_argnums=(0,))
        out = {"temp": report.memory.temp_size_in_bytes, "alias": report.memory.alias_size_in_bytes}
        kernels = [k for k in report.kernels if k.name.startswith("paged")]
        if kernels:
            main = max(kernels, key=lambda k: k.shared_bytes)
            out |= {"registers": main.registers, "shared": main.shared_bytes, "waits": max(main.waits, default=0)}
            out["spills"] = sum(k.spill_bytes for k in kernels)
        return out

    def check(self, got: dict) -> None:
        """Raises AssertionError where a pool is copied, a register spilled, or a GPU kernel does not copy ahead."""
        arguments = self.arguments()
        pool = arguments["k_pages"]
        pool_bytes = pool.size * pool.dtype.itemsize
        activations = sum(4 * arguments[name].size for name in ("q", "k_new", "v_new") if name in arguments)
        assert got["temp"] < 8 * activations + 2**22, got
        if self.kernel == "write":
            assert got["alias"] >= 2 * pool_bytes, got
        if "spills" in got:
            assert got["spills"] == 0 and got["waits"] > 0 and got["shared"] >= self.two_stages(), (got, self.two_stages())

    def two_stages(self) -> int:
        """Bytes of shared memory that two steps of keys and of values take on a GPU."""
        itemsize, operand = jnp.dtype(self.dtype).itemsize, "float32" if self.dtype == "float32" else "bfloat16"
        if self.kernel == "decode":
            tokens = gpu_decode_blocks(G, self.head_dim, itemsize, operand).tokens_per_block
        else:
            tokens = gpu_prefill_blocks(T * G, self.head_dim, itemsize, operand).keys_per_block
        return 2 * 2 * tokens * self.head_dim * itemsize


def cells():
    """Everything on one device of a kind; the others with the head dim of most models. Prefill compiles longest: fewer dtypes."""
    for kernel, dtype, H, target in itertools.product(("decode", "prefill", "write"), DTYPES, HEAD_DIMS, (*TPUS, *GPUS)):
        usual = H == 128 and (target in ("v5e", "h200") or kernel != "prefill" or dtype in ("bfloat16", "int8"))
        if usual or (target in ("v5e", "h200") and (kernel != "prefill" or dtype in ("bfloat16", "int8"))):
            yield Cell(kernel, dtype, H, target)


@pytest.mark.aot
@tpu_aot.needs_libtpu
@pytest.mark.parametrize(
    "cell", [c for c in cells() if c.target in TPUS], ids=lambda c: f"{c.kernel}-{c.dtype}-{c.head_dim}-{c.target}"
)
def test_compiles_for_tpu(cell):
    cell.check(cell.compile())


@pytest.mark.aot
@pytest.mark.parametrize(
    "cell", [c for c in cells() if c.target in GPUS], ids=lambda c: f"{c.kernel}-{c.dtype}-{c.head_dim}-{c.target}"
)
def test_compiles_for_gpu(cell):
    if reason := gpu_aot.missing():
        pytest.skip(reason)
    cell.check(cell.compile())


def main() -> None:
    """Prints the matrix as Markdown."""
    print("| kernel | KV | H | target | temporaries | registers | shared memory |\n|---|---|---|---|---|---|---|")
    for cell in cells():
        got = cell.compile()
        kib = lambda name, got=got: f"{got[name] / 1024:,.0f} KiB" if name in got else ""
        print(
            f"| {cell.kernel} | {cell.dtype} | {cell.head_dim} | {cell.target} | {kib('temp')} | {got.get('registers', '')} |"
            f" {kib('shared')} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
