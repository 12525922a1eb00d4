"""The figures a planner must get right, each with its unit. GiB is 2^30 bytes, GB is 10^9."""

import pytest

from jaxkv.planning import CHIPS, PRESETS, CapacityPlan, Deployment, PlanError, chip, decode_step, model_shape
from jaxkv.planning.memory import (
    bytes_read_a_weight,
    device_memory,
    max_sequences,
    mean_length_for_waste,
    pool_bytes,
    waste_tokens,
    weights_bytes,
)
from jaxkv.planning.roofline import compute_bound_rows, kv8_break_even_tokens, kv8_saved_s_per_token, offload, prefill_seconds
from jaxkv.planning.shapes import KV_BYTES, ModelShape
from jaxkv.planning.units import GB, GIB, KIB, MIB

LLAMA8, LLAMA70 = model_shape("llama-3.1-8b"), model_shape("llama-3.1-70b")


def on_h100(model=LLAMA8, **options) -> Deployment:
    return Deployment(model, chip("h100"), **options)


def attention_only(L: int, K: int, H: int) -> ModelShape:
    """A model of which only the cache counts."""
    return ModelShape(
        "cache", 1, L, K, K, H, 1, 1 << 20, (0,) * L, 1, num_params=1, embed_params=1, tied=True, kv_params=1
    )  # fmt: skip


def kv_bytes(model: ModelShape, *lengths: int, kv_dtype="bfloat16") -> int:
    return sum(model.kv_bytes_per_token(kv_dtype) * T for T in lengths)


@pytest.mark.parametrize(
    "model, bytes_per_token, kib",
    [(LLAMA8, 131_072, 128), (LLAMA70, 327_680, 320), (attention_only(40, 32, 128), 655_360, 640), (model_shape("llama-2-13b"), 819_200, 800)],
)  # fmt: skip
def test_kv_bytes_per_token(model, bytes_per_token, kib):
    assert model.kv_bytes_per_token("bfloat16") == bytes_per_token == kib * KIB


@pytest.mark.parametrize(
    "model, lengths, size",
    [
        (LLAMA8, [4096], 512 * MIB),
        (LLAMA8, [8192], GIB),
        (LLAMA8, [131_072], 16 * GIB),
        (LLAMA8, [8192] * 4, 4 * GIB),
        (LLAMA8, [32_768] * 4, 16 * GIB),
        (LLAMA8, [8192] * 8, 8 * GIB),
        (LLAMA70, [131_072], 40 * GIB),
        (attention_only(40, 32, 128), [4096], 2.5 * GIB),
        (attention_only(40, 32, 128), [4096] * 8, 20 * GIB),
    ],
)
def test_kv_bytes_of_sequences(model, lengths, size):
    assert kv_bytes(model, *lengths) == size
    d = on_h100(model, page_size=16)
    assert pool_bytes(d, len(lengths), lengths[0]) == size  # whole pages of 16-bit KV on a GPU: nothing but the formula


def test_gib_and_gb_differ():
    assert kv_bytes(LLAMA8, 8192) / GIB == 1
    assert kv_bytes(LLAMA8, 8192) / GB == pytest.approx(1.074, abs=5e-4)


def test_more_kv_heads_cost_in_proportion():
    assert LLAMA8.with_kv_heads(32).kv_bytes_per_token("bfloat16") == 4 * 131_072
    assert LLAMA70.with_kv_heads(64).kv_bytes_per_token("bfloat16") == 8 * 327_680


def test_compression_is_query_heads_over_kv_heads():
    assert (LLAMA8.compression, LLAMA70.compression) == (4, 8)
    assert LLAMA8.with_kv_heads(1).compression == LLAMA8.num_q_heads == 32
    assert LLAMA8.with_kv_heads(32).compression == 1


def test_mla_stores_one_latent_and_one_rope_key():
    mla = model_shape("deepseek-v3")
    assert mla.kv_elements_per_token_and_layer == 512 + 64
    assert mla.kv_elements_per_token_and_layer / (2 * 128) == 2.25  # kv heads of 128
    assert 2 * 8 * 128 / mla.kv_elements_per_token_and_layer == pytest.approx(3.56, abs=5e-3)


def test_weights_of_the_8b_shape():
    assert LLAMA8.num_params == pytest.approx(8.03e9, rel=1e-3)
    assert weights_bytes(on_h100()) / GB == pytest.approx(16.06, abs=5e-3)
    assert weights_bytes(on_h100()) / GIB == pytest.approx(14.96, abs=5e-3)


def test_an_80_gb_card_and_sixteen_times_the_length():
    d = on_h100(memory_fraction=1, activations_gib=6)
    memory = device_memory(d)
    assert memory.memory_bytes / GB == 80
    assert memory.memory_bytes / GIB == pytest.approx(74.5, abs=0.05)
    assert memory.weights_bytes / GIB == pytest.approx(14.96, abs=5e-3)
    assert memory.kv_budget_bytes / GIB == pytest.approx(53.6, abs=0.06)
    assert (max_sequences(d, 8192), max_sequences(d, 131_072)) == (53, 3)
    assert 53 // 16 == 3


def test_decode_traffic_at_b_32_and_32768_tokens():
    step = decode_step(on_h100(context=32_768), 32)
    assert step.kv_bytes == 128 * GIB
    assert step.weights_bytes / GIB == pytest.approx(15, abs=0.05)
    assert step.kv_fraction == pytest.approx(0.895, abs=5e-4)


def test_the_ridge_and_who_is_bound_by_what():
    assert chip("h100").ridge_flop_per_byte == pytest.approx(295, abs=0.5)
    assert compute_bound_rows(on_h100()) == pytest.approx(295, abs=0.5)
    for B in (1, 32, 512):
        step = decode_step(on_h100(), B)
        assert step.weights_flop_per_byte == pytest.approx(B)
        assert step.attention_flop_per_byte == LLAMA8.num_q_heads / LLAMA8.num_kv_heads == 4  # whatever B is
        assert decode_step(on_h100(kv_dtype="int8"), B).attention_flop_per_byte == 2 * 4
    assert decode_step(on_h100(LLAMA70), 1).attention_flop_per_byte == 8


def test_8_bit_kv_is_half_the_bytes_and_breaks_even():
    for kv_dtype in ("int8", "float8_e4m3fn"):
        assert LLAMA8.kv_bytes_per_token(kv_dtype) == LLAMA8.kv_bytes_per_token("bfloat16") / 2
    assert kv8_break_even_tokens(126e-6, 18e-9) == pytest.approx(7000)  # T* = extra fixed time / time saved per token
    assert on_h100().kv_dtype == "bfloat16"  # off by default


def test_8_bit_kv_saves_what_was_published_and_no_more_than_it_stores_less():
    # 131,072 B at 3,350 GB/s are 39.126 ns; at 54 % of that cost 17.998 ns less.
    assert kv8_saved_s_per_token(on_h100()) == pytest.approx(17.998e-9, rel=1e-4)
    assert kv8_saved_s_per_token(on_h100(), 0.75) == pytest.approx(9.7815e-9, rel=1e-4)
    # One head of 256 in pages of 16: 8,192 B of values and 1,024 B of scales instead of 16,384 B, so 56.25 %, not 54 %. A token is
    # 26,624 B in windows of 512: 7.9475 ns.
    gemma = on_h100(model_shape("gemma-3-1b"), context=512)
    assert kv8_saved_s_per_token(gemma) == pytest.approx(0.4375 * 7.9475e-9, rel=1e-4)
    # One head of 32: 1,024 B of values and as much of scales, which saves nothing.
    assert kv8_saved_s_per_token(on_h100(attention_only(1, 1, 32))) == 0


def test_int8_weights_are_read_with_the_scales_of_their_platform():
    rows = LLAMA8.model_dim
    assert bytes_read_a_weight("int8", "gpu", rows) == 1 + 4 / rows  # a scale a row
    assert bytes_read_a_weight("int8", "cpu", rows) == 1 + 4 / 32
    step = decode_step(on_h100(weights="int8"), 1)
    assert step.weights_bytes / LLAMA8.num_params == pytest.approx(1.001, abs=1e-4)
    assert compute_bound_rows(on_h100(weights="int8")) == pytest.approx(295 / 2, abs=0.5)


def test_offload_is_kv_bytes_over_link_bandwidth_and_loses_below_one():
    d = on_h100()
    assert offload(d, 50).restore_s == GIB / 50e9
    edge = offload(d, 50).break_even_gbps
    assert edge == pytest.approx(GIB / prefill_seconds(d) / 1e9)
    assert offload(d, 1.01 * edge).better == "restore" and offload(d, 0.99 * edge).better == "recompute"


def test_offload_moves_what_is_stored():
    moved = lambda **options: round(offload(on_h100(**options), 50).restore_s * 50e9)
    assert moved(kv_dtype="int8") == GIB / 2 + 32 * 512 * 1024  # 1,024 B of scales a page and layer
    assert moved(chips=16) == 2 * GIB  # two copies of each head
    gemma = model_shape("gemma-3-1b")
    assert moved(model=gemma, context=32_768, free_window_pages=True) == (4 * 32_768 + 22 * 33 * 16) * 1024


def test_pages_waste_at_most_p_minus_1_tokens():
    assert waste_tokens(16) == (15, 7.5)
    assert mean_length_for_waste(16, 0.04) == pytest.approx(180)


PLAN = CapacityPlan(
    memory_gib=80, weights_gib=42, activations_gib=8, runtime_and_fragmentation_gib=6, kv_budget_gib=20,
    max_context_tokens=32_768, max_active_sequences=24, reserve_per_sequence_gib=0.75, low_watermark_gib=3,
)  # fmt: skip


def test_a_plan_that_does_not_add_up_is_rejected_with_22():
    assert (PLAN.available_gib, PLAN.unassigned_gib, PLAN.committed_gib) == (24, 4, 21)
    with pytest.raises(
        PlanError, match=r"24 \* 0.75 GiB = 18 GiB.*low watermark of 3 GiB 21 GiB.*KV budget of 20 GiB.*at most 22 seq"
    ) as error:
        PLAN.check()
    assert (error.value.field, error.value.largest) == ("max_active_sequences", 22)
    assert PLAN.largest_active_sequences == 22


@pytest.mark.parametrize(
    "name, gbps, tflops, gb",
    [
        ("v5e", 819, 197, 16),
        ("v5p", 2765, 459, 95),
        ("v6e", 1640, 918, 32),
        ("tpu7x", 7370, 2307, 192),
        ("a100", 2039, 312, 80),
        ("h100", 3350, 989, 80),
        ("h200", 4800, 989, 141),
        ("b200", 8000, 2250, 180),
    ],
)
def test_hardware_rows(name, gbps, tflops, gb):
    row = CHIPS[name]
    assert (row.hbm_gbps, row.matrix_tflops_bf16, row.memory_bytes) == (gbps, tflops, gb * GB)


# Total and active parameters as published: model cards, and the safetensors totals of the Hugging Face hub.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_241_732_096,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-27b": 27_009_346_304,  # text; 27.4e9 with the vision tower
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_published(name):
    assert model_shape(name).num_params == PUBLISHED[name]


@pytest.mark.parametrize(
    "name, total, active", [("mixtral-8x7b", 46.7e9, 12.9e9), ("qwen3-30b-a3b", 30.5e9, 3.35e9), ("deepseek-v3", 671e9, 37.5e9)]
)
def test_active_parameters_of_mixtures(name, total, active):
    shape = model_shape(name)
    assert shape.num_params == pytest.approx(total, rel=2e-3)
    assert shape.active_params == pytest.approx(active, rel=3e-3)
    if name == "deepseek-v3":  # its makers count 36.6e9 without the table that is only looked up
        assert shape.active_params - shape.embed_params == pytest.approx(36.6e9, rel=2e-3)


def test_kv_dtypes_are_those_of_the_engine():
    from jaxkv.kv.state import KV_DTYPES

    assert set(KV_BYTES) == set(KV_DTYPES)
