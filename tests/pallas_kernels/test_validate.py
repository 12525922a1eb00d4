"""What the ops refuse, by name and with numbers, eagerly and while tracing."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    DEVICES,
    IMPLEMENTATIONS,
    DecodeBlocks,
    PrefillBlocks,
    WriteBlocks,
    check_implementation,
    default_device,
    device_spec,
    dispatch,
    paged_decode,
    paged_prefill,
    present_spec,
    write_kv,
)
from pallas_kernels.block_sizes import choose

B, T, K, G, H, P, M, ROWS = 4, 2, 2, 3, 8, 4, 5, 81


def good():
    """Arguments of paged_prefill that fit together."""
    floats = lambda *shape: np.ones(shape, np.float32)
    whole = lambda *shape: np.ones(shape, np.int32)
    return {
        "q": floats(B, T, K, G, H),
        "k_pages": floats(ROWS, K, P, H),
        "v_pages": floats(ROWS, K, P, H),
        "page_table": whole(B, M),
        "lengths": whole(B),
        "chunk_lengths": whole(B),
        "k_new": floats(B, T, K, H),
        "v_new": floats(B, T, K, H),
        "scale": 1.0,
    }


def bad(**changes):
    """The same with some replaced; a callable changes the good one."""
    args = good()
    return args | {name: new(args[name]) if callable(new) else new for name, new in changes.items()}


EIGHT_BIT = {"k_pages": lambda x: x.astype(np.int8), "v_pages": lambda x: x.astype(np.int8)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": lambda x: x[:, 0]}, ValueError, r"q has shape \(4, 2, 3, 8\), expected .*\[B, T, K, G, H\]"),
        ({"q": lambda x: x.astype(np.int32)}, TypeError, "q must be floating point, got int32"),
        ({"k_pages": lambda x: x[0]}, ValueError, r"k_pages has shape \(2, 4, 8\), expected \[L\*C, K, P, H\]"),
        ({"k_pages": lambda x: x[:, :1]}, ValueError, r"k_pages has shape \(81, 1, 4, 8\), expected \(any, 2, any, 8\)"),
        ({"k_pages": lambda x: x[..., :6]}, ValueError, r"k_pages has shape \(81, 2, 4, 6\), expected \(any, 2, any, 8\)"),
        ({"v_pages": lambda x: x[:, :, :2]}, ValueError, r"v_pages has shape \(81, 2, 2, 8\), expected \(81, 2, 4, 8\)"),
        ({"v_pages": lambda x: x.astype(np.float16)}, TypeError, "k_pages is float32 and v_pages float16"),
        ({"k_pages": lambda x: x.astype(np.int16), "v_pages": lambda x: x.astype(np.int16)}, TypeError, "int16.*one of float32"),
        (EIGHT_BIT, ValueError, r"int8 pool needs kv_scales, f32 \(81, 2, 1, 128\)"),
        (EIGHT_BIT | {"kv_scales": np.ones((81, 2, 2, 128), np.float32)}, ValueError, r"kv_scales has shape .*expected \(81, 2, 1, 128\)"),
        (EIGHT_BIT | {"kv_scales": np.ones((81, 2, 1, 128), np.float16)}, TypeError, "kv_scales must be float32, got float16"),
        ({"kv_scales": np.ones((81, 2, 1, 128), np.float32)}, ValueError, "kv_scales goes with 8-bit pools, and k_pages is float32"),
        ({"sinks": np.ones((3, 2), np.float32)}, ValueError, r"sinks has shape \(3, 2\), expected \(2, 3\)"),
        ({"sinks": np.ones((2, 3), np.int32)}, TypeError, "sinks must be floating point, got int32"),
        ({"k_new": lambda x: x.astype(np.int8)}, TypeError, "k_new must be floating point, got int8"),
        ({"page_table": lambda x: x[:3]}, ValueError, r"page_table has shape \(3, 5\), expected \(4, any\)"),
        ({"page_table": lambda x: x[:, 0]}, ValueError, r"page_table has shape \(4,\), expected \(4, any\)"),
        ({"page_table": lambda x: x.astype(np.uint32)}, TypeError, "page_table must be int32, got uint32"),
        ({"lengths": lambda x: x[:1]}, ValueError, r"lengths has shape \(1,\), expected \(4\)"),
        ({"lengths": lambda x: x.astype(np.int16)}, TypeError, "lengths must be int32, got int16"),
        ({"chunk_lengths": lambda x: x[:, None]}, ValueError, r"chunk_lengths has shape \(4, 1\), expected \(4\)"),
        ({"chunk_lengths": lambda x: x.astype(np.float32)}, TypeError, "chunk_lengths must be int32, got float32"),
        ({"k_new": lambda x: x[:, :1]}, ValueError, r"k_new has shape \(4, 1, 2, 8\), expected \(4, 2, 2, 8\)"),
        ({"v_new": lambda x: x[..., :4]}, ValueError, r"v_new has shape \(4, 2, 2, 4\), expected \(4, 2, 2, 8\)"),
        ({"v_new": None}, ValueError, "paged_prefill needs k_new and v_new"),
        ({"soft_cap": 0.0}, ValueError, r"soft_cap must be positive or None, got 0\.0"),
        ({"soft_cap": -1.5}, ValueError, r"soft_cap must be positive or None, got -1\.5"),
        ({"soft_cap": math.inf}, ValueError, "soft_cap must be finite, got inf"),
        ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
        ({"scale": np.float32(-np.inf)}, ValueError, "scale must be finite, got -inf"),
        ({"window": -3}, ValueError, "window must be 0 .* got -3"),
        ({"window": np.int32(-3)}, ValueError, "window must be 0 .* got -3"),
        ({"window": 2.5}, TypeError, r"window must be one whole number, got float 2\.5"),
        ({"window": True}, TypeError, "window must be one whole number, got bool True"),
        ({"window": np.zeros(4, np.int32)}, TypeError, r"window must be one whole number, got int32 of shape \(4,\)"),
        ({"page_offset": np.zeros(4, np.int32)}, TypeError, r"page_offset must be one whole number, got int32 of shape"),
        ({"scale": np.ones(2)}, TypeError, "scale must be a plain number, got ndarray"),
        ({"soft_cap": "2"}, TypeError, "soft_cap must be a plain number, got str"),
        ({"device": "v5e"}, TypeError, "device must be a DeviceSpec or None, got str"),
        ({"implementation": "cuda"}, ValueError, "implementation 'cuda' is not one of reference, xla, pallas_tpu, pallas_gpu"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name_and_number(changes, error, message):
    with pytest.raises(error, match=message):
        paged_prefill(**bad(**changes))
    with pytest.raises(error, match=message):
        jax.eval_shape(functools.partial(paged_prefill, **bad(**changes)))


def shapes(op, **args):
    return jax.tree.map(lambda a: (a.shape, a.dtype), jax.eval_shape(functools.partial(op, **args)))


EMPTY = {
    "q": [("q", "k_new", "v_new", "page_table", "lengths", "chunk_lengths", 0), ("q", "k_new", "v_new", 1), ("q", 3)],
    "page_table": [("page_table", 1)],
    "k_pages": [("k_pages", "v_pages", 0), ("k_pages", "v_pages", 2)],
}


@pytest.mark.parametrize(("name", "names", "axis"), [(name, x[:-1], x[-1]) for name, rows in EMPTY.items() for x in rows])
def test_an_axis_of_nothing_is_refused(name, names, axis):
    cut = lambda x: np.take(x, [], axis)
    with pytest.raises(ValueError, match=rf"{name} has shape .*: every axis must be at least 1"):
        paged_prefill(**bad(**dict.fromkeys(names, cut)))


def test_what_the_refusals_start_from_is_accepted():
    o = ((B, T, K, G, H), np.float32)
    assert shapes(paged_prefill, **good()) == o
    assert shapes(paged_prefill, **good(), return_lse=True) == (o, ((B, T, K, G), np.float32))
    decode = {name: x[:, 0] if name in ("q", "k_new", "v_new") else x for name, x in good().items() if name != "chunk_lengths"}
    assert shapes(paged_decode, **decode) == ((B, K, G, H), np.float32)
    assert shapes(paged_decode, **decode, return_lse=True) == (((B, K, G, H), np.float32), ((B, K, G), np.float32))


def test_decode_names_its_own_layout():
    case = {k: v for k, v in good().items() if k != "chunk_lengths"}
    with pytest.raises(ValueError, match="k_new and v_new go together"):
        paged_decode(**dict(case, q=case["q"][:, 0], k_new=None))
    with pytest.raises(ValueError, match=r"q has shape \(4, 2, 2, 3, 8\), expected \[B, K, G, H\]"):
        paged_decode(**case)


def test_positions_past_int32_are_refused():
    wide = jax.ShapeDtypeStruct((B, 2**29), np.int32)
    with pytest.raises(ValueError, match="positions past int32: 2,147,483,648 of at most 2,147,483,647"):
        jax.eval_shape(lambda table: paged_prefill(**bad(page_table=table)), wide)


def write_args(**changes):
    names = ("k_pages", "v_pages", "k_new", "v_new", "page_table", "lengths", "chunk_lengths")
    return {name: good()[name] for name in names} | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k_new": np.ones((B, K, H), np.float32)}, ValueError, r"k_new has shape \(4, 2, 8\), expected \[L, B, T, K, H\]"),
        ({"v_new": np.ones((B, T, K, 4), np.float32)}, ValueError, r"v_new has shape .*, expected \(1, 4, 2, 2, 8\)"),
        ({name: np.ones((2, B, T, K, H), np.float32) for name in ("k_new", "v_new")}, ValueError, "81 pages .* the L=2 layers"),
        ({name: np.ones((B, T, 3, H), np.float32) for name in ("k_new", "v_new")}, ValueError, "for 3 heads of 8"),
        ({name: np.ones((B, T, K, H), np.int8) for name in ("k_new", "v_new")}, TypeError, "k_new must be floating point"),
        ({"chunk_lengths": np.ones(B, np.int64)}, TypeError, "chunk_lengths must be int32, got int64"),
        ({"page_offset": 1.0}, TypeError, "page_offset must be one whole number"),
        ({name: np.ones((B, 0, K, H), np.float32) for name in ("k_new", "v_new")}, ValueError, "every axis must be at least 1"),
        ({"page_table": np.ones((B, 0), np.int32)}, ValueError, r"page_table has shape \(4, 0\): every axis must be at least 1"),
        ({"kv_scales": np.ones((81, 2, 1, 128), np.float32)}, ValueError, "kv_scales goes with 8-bit pools"),
    ],
)  # fmt: skip
def test_writes_are_refused_alike(changes, error, message):
    with pytest.raises(error, match=message):
        write_kv(**write_args(**changes))
    with pytest.raises(error, match=message):
        jax.eval_shape(functools.partial(write_kv, **write_args(**changes)))


def test_a_good_write_is_accepted():
    pool = (ROWS, K, P, H), np.float32
    assert shapes(write_kv, **write_args())[:2] == (pool, pool)


def pool(dtype="bfloat16", P=128, K=8, H=128):
    return jax.ShapeDtypeStruct((800, K, P, H), dtype)


V5E, H200 = DEVICES["v5e"], DEVICES["h200"]


@pytest.mark.parametrize(
    ("name", "options", "pages", "message"),
    [
        ("pallas_tpu", {"device": DEVICES["cpu"]}, pool(), "'pallas_tpu' compiles for tpu only, not for cpu: interpret=True runs it"),
        ("pallas_tpu", {"device": H200}, pool(), "'pallas_tpu' compiles for tpu only, not for gpu"),
        ("pallas_gpu", {"device": V5E}, pool(), "'pallas_gpu' compiles for gpu only, not for tpu"),
        ("pallas_gpu", {"device": dataclasses.replace(H200, compute_capability=(7, 5))}, pool(), r"8\.0, and h200 has \(7, 5\)"),
        ("pallas_tpu", {"device": V5E}, pool("float32", P=12), r"page_size 12 of a float32 pool .* multiple of 8 .*\(8, 128\)"),
        ("pallas_tpu", {"device": V5E}, pool(P=8), r"page_size 8 of a bfloat16 pool .* multiple of 16 .*\(16, 128\)"),
        ("pallas_tpu", {"device": V5E}, pool("int8", P=16), r"page_size 16 of a int8 pool .* multiple of 32 .*\(32, 128\)"),
        ("pallas_tpu", {"interpret": True}, pool("float8_e4m3fn", P=16), "page_size 16 of a float8_e4m3fn pool"),
        ("pallas_tpu", {"device": V5E}, pool("int8", P=96), "page_size 96 of a int8 pool must divide 128 or be a multiple of it"),
        ("pallas_tpu", {"device": V5E}, pool(H=64), r"head_dim 64, which must be a multiple of 128 lanes.*pool_heads"),
        ("pallas_tpu", {"device": V5E}, pool("float16"), "takes no float16 pool: .*give it bfloat16"),
        ("pallas_gpu", {"device": H200}, pool("int8", H=81), "head_dim 81 of a int8 pool must be even for 'pallas_gpu'"),
        ("pallas_tpu", {"device": V5E}, pool("uint16"), "no uint16 pool: .*give it bfloat16"),
        ("pallas_gpu", {"device": H200}, pool("uint8"), "no uint8 pool: .*give it float8_e4m3fn"),
        ("xla", {"interpret": True}, pool(), "interpret is for Pallas kernels, and implementation 'xla' has none"),
        ("reference", {"interpret": True}, pool(), "implementation 'reference' has none"),
    ],
)  # fmt: skip
def test_what_cannot_run_says_why(name, options, pages, message):
    with pytest.raises(ValueError, match=message):
        check_implementation(pages, implementation=name, **options)


def call_shapes(M, K=8, G=4, H=128, B=4):
    return jax.ShapeDtypeStruct((B, K, G, H), jnp.bfloat16), jax.ShapeDtypeStruct((B, M), jnp.int32)


def test_tables_and_pages_that_fit_no_memory_are_refused_before_a_call():
    """As the first prefill would, and `init_state` can say so."""
    check = functools.partial(check_implementation, device=V5E)
    check(pool(), *call_shapes(64))
    check(pool(P=16), *call_shapes(230_400))
    with pytest.raises(ValueError, match="a page table of 230401 columns does not fit the 921600 bytes of scalar memory"):
        check(pool(P=16), *call_shapes(230_401))
    check(pool(P=16), *call_shapes(230_401), implementation="xla")
    large = pool("float32", P=256, K=64, H=256)
    with pytest.raises(ValueError, match="bytes of buffers do not fit the 67108864 bytes of VMEM of v5p: use smaller pages"):
        check_implementation(large, *call_shapes(64, K=64, G=1, H=256), device=DEVICES["v5p"])
    check_implementation(large, *call_shapes(64, K=64, G=1, H=256), device=H200)


def test_what_can_run_is_accepted():
    for name in ("v5e", "v5p", "v6e", "tpu7x"):
        for dtype, P in (("float32", 8), ("bfloat16", 16), ("int8", 32), ("float8_e4m3fn", 32)):
            check_implementation(pool(dtype, P), implementation="pallas_tpu", device=DEVICES[name])
    # 8-bit pools of 2 to 4 GiB and of more: kernels read pairs (test_limits.py).
    for pages in (pool("int8", P=16), pool("int8", P=256, K=128), pool("float8_e4m3fn", P=256, K=256), pool(P=256, K=128)):
        check_implementation(pages, implementation="pallas_gpu", device=DEVICES["h100"])
    for pages in (pool(H=80), pool("uint16", H=64), pool("uint8", P=32)):
        check_implementation(pages, implementation="pallas_tpu", interpret=True)
        check_implementation(pages, implementation="pallas_gpu", interpret=True)
        check_implementation(pages, implementation="xla")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU picks")
def test_the_platform_picks():
    assert IMPLEMENTATIONS == ("reference", "xla", "pallas_tpu", "pallas_gpu")
    for device, name in ((None, "xla"), ("cpu", "xla"), ("v6e", "pallas_tpu"), ("a100", "pallas_gpu")):
        chosen = dispatch.choose(None, False, device and DEVICES[device])
        assert chosen.name == name
        assert chosen.device == DEVICES[device or "cpu"]
    assert dispatch.choose("xla", False, V5E).device == V5E
    assert dispatch.choose("pallas_tpu", True, None).device.platform == "tpu"
    assert dispatch.choose("pallas_gpu", True, DEVICES["cpu"]).device.platform == "gpu"


def test_a_backend_that_is_gone_is_named(monkeypatch):
    """Its modules are imported when it is asked for, and not before."""
    gone = dispatch._Backend("pallas_kernels.gone", "pallas_kernels.gone", "pallas_kernels.gone", "tpu")
    monkeypatch.setitem(dispatch._BACKENDS, "pallas_tpu", gone)
    args = {k: v for k, v in good().items() if k not in ("k_new", "v_new", "chunk_lengths")} | {"q": good()["q"][:, 0]}
    args |= {name: np.ones((ROWS, K, 8, H), np.float32) for name in ("k_pages", "v_pages")}
    with pytest.raises(ValueError, match="'pallas_tpu' has no decode .*pallas_kernels.gone: No module named 'pallas_kernels.gone'"):
        paged_decode(**args, implementation="pallas_tpu", interpret=True)
    monkeypatch.setitem(dispatch._BACKENDS, "pallas_tpu", dataclasses.replace(gone, decode="pallas_kernels.xla"))
    assert paged_decode(**args, implementation="pallas_tpu", interpret=True).shape == (B, K, G, H)


def test_devices_go_by_the_names_jax_gives():
    kinds = {
        "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x",
        "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "cpu": "cpu", "h200": "h200",
    }  # fmt: skip
    for kind, name in kinds.items():
        assert device_spec(kind) == DEVICES[name]
    with pytest.raises(ValueError, match="no DeviceSpec for 'Radeon'; known are v5e, .*Pass device=DeviceSpec"):
        device_spec("Radeon")


def present(kind, platform="gpu", **figures):
    """A jax.Device as it describes itself."""
    return types.SimpleNamespace(device_kind=kind, platform=platform, **figures)


def test_a_device_without_a_row_is_what_it_says_or_refused(monkeypatch):
    assert present_spec(present("NVIDIA H200", compute_capability="9.0")) == H200
    small = present_spec(present("NVIDIA GeForce RTX 4090", compute_capability="8.9", core_count=128))
    assert (small.name, small.compute_capability, small.num_cores) == ("nvidia-geforce-rtx-4090", (8, 9), 128)
    assert small.smem_bytes < DEVICES["a100"].smem_bytes
    for device in (present("TPU v4", "tpu"), present("AMD MI300X", compute_capability="gfx942"), present("Radeon")):
        with pytest.raises(ValueError, match=f"no DeviceSpec for '{device.device_kind}'"):
            present_spec(device)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    here = lambda device: monkeypatch.setattr(jax, "devices", lambda *_: [device])
    here(present("NVIDIA H200", compute_capability="9.0"))
    assert dispatch.choose(None, False, None).device == H200
    here(present("Tesla T4", compute_capability="7.5", core_count=40))
    with pytest.raises(ValueError, match=r"needs compute capability 8\.0, and tesla-t4 has \(7, 5\)"):
        dispatch.choose(None, False, None)
    assert dispatch.choose("pallas_gpu", True, DEVICES["cpu"]).device == default_device("gpu")


def test_the_default_devices_have_the_least_of_each_figure():
    for platform in ("tpu", "gpu"):
        rows, least = [x for x in DEVICES.values() if x.platform == platform], default_device(platform)
        for figure in ("hbm_bytes", "hbm_gbps", "matrix_tflops_bf16", "vmem_bytes", "smem_bytes", "num_cores"):
            assert getattr(least, figure) == min(getattr(row, figure) for row in rows), figure
        assert least.name not in DEVICES


BLOCKS = [
    (DecodeBlocks, {"num_splits": 0}),
    (DecodeBlocks, {"tokens_per_block": 0}),
    (DecodeBlocks, {"pages_per_block": -1}),
    (PrefillBlocks, {"queries_per_block": 2.0}),
    (WriteBlocks, {"num_stages": True}),
]


@pytest.mark.parametrize(("kind", "fields"), BLOCKS, ids=str)
def test_block_sizes_are_whole_numbers_of_at_least_one(kind, fields):
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.{name} must be a whole number of at least 1, or None, got {value}"):
        kind(**fields)


@pytest.mark.parametrize(
    ("op", "implementation", "blocks", "error", "message"),
    [
        (paged_decode, "xla", WriteBlocks(), TypeError, "block_sizes of xla must be a DecodeBlocks or None, got WriteBlocks"),
        (paged_decode, "xla", DecodeBlocks(num_stages=2), ValueError, "xla does not read num_stages of block_sizes, but pages_per_block"),
        (paged_decode, "reference", DecodeBlocks(num_stages=2), ValueError, "reference does not read num_stages .* but nothing"),
        (paged_decode, "pallas_gpu", DecodeBlocks(pages_per_block=3), ValueError, "triton_decode does not read pages_per_block"),
        (paged_decode, "pallas_gpu", DecodeBlocks(tokens_per_block=48), ValueError, "tokens_per_block=48 .* a power of two of at least 16"),
        (paged_decode, "pallas_gpu", DecodeBlocks(tokens_per_block=8), ValueError, "tokens_per_block=8 .* a power of two of at least 16"),
        (paged_decode, "pallas_gpu", DecodeBlocks(num_warps=3), ValueError, "num_warps=3 .* a power of two of at most 32"),
        (paged_decode, "pallas_tpu", DecodeBlocks(num_splits=2), ValueError, "tpu.decode does not read num_splits of block_sizes"),
        (paged_prefill, "xla", DecodeBlocks(), TypeError, "must be a PrefillBlocks or None, got DecodeBlocks"),
        (paged_prefill, "pallas_gpu", PrefillBlocks(keys_per_block=24), ValueError, "keys_per_block=24 .* a power of two"),
        (paged_prefill, "pallas_tpu", PrefillBlocks(num_warps=4), ValueError, "tpu.prefill does not read num_warps"),
        (write_kv, "xla", WriteBlocks(num_stages=2), ValueError, "xla does not read num_stages of block_sizes, but nothing"),
    ],
)  # fmt: skip
def test_block_sizes_that_a_kernel_does_not_read_are_refused(op, implementation, blocks, error, message):
    args = good() | {name: np.ones((ROWS, K, 8, H), np.float32) for name in ("k_pages", "v_pages")}
    if op is paged_decode:
        args = {name: x[:, 0] if name == "q" else x for name, x in args.items() if name not in ("k_new", "v_new", "chunk_lengths")}
    if op is write_kv:
        args = write_args()
    with pytest.raises(error, match=message):
        op(**args, implementation=implementation, interpret=implementation.startswith("pallas"), block_sizes=blocks)


def test_block_sizes_are_given_tuned_or_ruled_field_by_field(monkeypatch, tmp_path):
    monkeypatch.setattr("pallas_kernels.block_sizes.TUNED_FOLDER", tmp_path)
    rule = DecodeBlocks(pages_per_block=4, num_splits=2, num_stages=3)
    device = dataclasses.replace(H200, name="somewhere")  # the file of a device is read once
    entry = '{"kernels": {"gpu.x": [{"key": {"K": 8}, "blocks": {"pages_per_block": 16}, "us": 10.5}]}}'
    (tmp_path / "somewhere.json").write_text(entry)
    pick = lambda key, given=None: choose("gpu.x", device, key, DecodeBlocks, rule, given)
    assert pick({"K": 4}) == rule
    assert pick({"K": 8}) == dataclasses.replace(rule, pages_per_block=16)
    assert pick({"K": 8}, DecodeBlocks(num_splits=7)) == dataclasses.replace(rule, pages_per_block=16, num_splits=7)
    assert pick({"K": 8}, DecodeBlocks(pages_per_block=1)).pages_per_block == 1
    with pytest.raises(TypeError, match="block_sizes of gpu.x must be a DecodeBlocks or None, got PrefillBlocks"):
        pick({"K": 8}, PrefillBlocks())


def test_a_pool_of_bits_is_the_same_pool_of_floats():
    floats = jnp.ones((ROWS, K, P, H), jnp.bfloat16)
    args = {k: v for k, v in good().items() if k not in ("k_pages", "v_pages")}
    for pages in (floats, floats.view(jnp.uint16)):
        assert shapes(paged_prefill, **args, k_pages=pages, v_pages=pages) == ((B, T, K, G, H), np.float32)
