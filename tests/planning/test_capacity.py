"""What fits: properties over many deployments, page bytes against real pools, splits, and user errors."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxkv.io.resolve import EMBEDDED_MODELS, resolve
from jaxkv.kv.state import default_page_size, empty_pools
from jaxkv.planning import (
    CHIPS,
    PRESETS,
    Costs,
    Deployment,
    capacity_plan,
    chip,
    figures,
    knobs,
    model_shape,
    plot,
    report,
    what_if,
)
from jaxkv.planning.deployment import can_split
from jaxkv.planning.devices import Chip
from jaxkv.planning.kernel_limits import refusal
from jaxkv.planning.knobs import chips_for
from jaxkv.planning.memory import (
    UNBOUNDED,
    device_memory,
    fits,
    layer_page_bytes,
    max_context,
    max_sequences,
    pool_bytes,
    step_bytes,
    unpadded_page,
    weights_bytes,
)
from jaxkv.planning.roofline import attended_tokens, decode_step, prefill_seconds
from jaxkv.planning.shapes import KV_BYTES, shape_of
from jaxkv.planning.units import GB, GIB

SHAPES = {
    name: model_shape(name) for name in ("llama-3.1-8b", "qwen2.5-7b", "gemma-3-1b", "mistral-7b", "mixtral-8x7b", "deepseek-v3")
}
BIG = Chip("big", "gpu", 2000 * GB, 3350, 989)


@st.composite
def deployments(draw, chips=CHIPS):
    model = draw(st.sampled_from(list(SHAPES.values())))
    row = draw(st.sampled_from([*chips.values(), BIG]))
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if can_split(model, n) and n % row.devices_per_chip == 0]))
    context = draw(st.integers(1, 200_000))
    shared = draw(st.integers(0, context - 1)) * draw(st.booleans())
    return Deployment(
        model,
        row,
        chips=tp // row.devices_per_chip * draw(st.integers(1, 3)),
        tensor_parallel=tp,
        context=context,
        weights=draw(st.sampled_from(["bfloat16", "int8"])),
        kv_dtype=draw(st.sampled_from(list(KV_BYTES))),
        page_size=draw(st.sampled_from([None, 16, 128])),
        sequences=draw(st.none() | st.integers(1, 5000)),
        memory_fraction=draw(st.floats(0.5, 1)),
        activations_gib=draw(st.none() | st.floats(0, 8)),
        low_watermark_gib=draw(st.floats(0, 2)),
        shared_tokens=shared,
        sharers=draw(st.integers(0, 5)) if shared else 0,
        free_window_pages=draw(st.booleans()),
    )


some = settings(max_examples=60, deadline=None)


@some
@given(deployments())
def test_the_parts_are_the_memory_in_both_units(d):
    memory = device_memory(d)
    assert memory.memory_bytes == memory.weights_bytes + memory.activations_bytes + memory.runtime_bytes + memory.kv_budget_bytes
    f = figures(d, Costs())
    for key, value in f.items():
        if "_gib" in key and (other := key.replace("_gib", "_gb")) in f:
            assert value * GIB == pytest.approx(f[other] * GB), key


@some
@given(deployments())
def test_the_boundary_fits_and_one_more_does_not(d):
    most = max_sequences(d)
    assert most % d.replicas == 0
    assert most == max_sequences(d.change(sequences=None)) == max_sequences(d.change(sequences=most or None))
    if most < UNBOUNDED:
        assert (not most or fits(d, most, d.context)) and not fits(d, most + 1, d.context)
    longest = max_context(d, 3)
    if longest < UNBOUNDED:
        assert (not longest or fits(d, 3, longest)) and not fits(d, 3, longest + 1)


@some
@given(deployments(), st.integers(1, 100_000), st.integers(1, 50))
def test_longer_contexts_and_more_sequences_never_take_less(d, more, n):
    assert pool_bytes(d, n, d.context) <= pool_bytes(d, n, d.context + more)
    assert pool_bytes(d, n, d.context) <= pool_bytes(d, n + 1, d.context)
    assert max_sequences(d) >= max_sequences(d, d.context + more)


@some
@given(deployments())
def test_more_chips_never_hold_fewer_sequences(d):
    d = d.change(page_size=16)
    assert max_sequences(d.change(chips=2 * d.chips)) >= 2 * max_sequences(d)  # replicas
    if can_split(d.model, 2 * d.tp):
        assert max_sequences(d.change(chips=2 * d.chips, tensor_parallel=2 * d.tp)) >= max_sequences(d)


@some
@given(deployments())
def test_sharing_freeing_and_smaller_values_never_take_more(d):
    n = 7
    plain = d.change(shared_tokens=0, sharers=0)
    assert pool_bytes(d, n, d.context) <= pool_bytes(plain, n, d.context)
    assert pool_bytes(d.change(free_window_pages=True), 1, d.context) <= pool_bytes(d.change(free_window_pages=False), 1, d.context)
    small, large = d.change(kv_dtype="int8"), d.change(kv_dtype="bfloat16")
    assert layer_page_bytes(small) < layer_page_bytes(large) < layer_page_bytes(d.change(kv_dtype="float32"))


@some
@given(deployments())
def test_a_plan_of_what_fits_adds_up_and_admits_just_that(d):
    d = d.change(free_window_pages=False, page_size=None, kv_dtype="bfloat16", tensor_parallel=1)
    most = max_sequences(d)
    wanted = d.sequences or most
    assume(0 < wanted <= most and d.model.config is not None)
    plan = capacity_plan(d).check()
    assert plan.max_active_sequences == -(-wanted // d.replicas)
    assert plan.largest_active_sequences * d.replicas <= most
    if not d.shared_tokens:  # a shared prefix is spread over the reserves of those who share it
        assert plan.largest_active_sequences * d.replicas == most
        assert d.activations_gib is None or plan.unassigned_gib == pytest.approx(0, abs=1e-6)


def test_sequences_count_with_the_activations_of_their_own_steps():
    d = Deployment(SHAPES["gemma-3-1b"], chip("h100"), context=1024)
    logits = 10 * 4 * 262_144  # bytes a row of sampling's arrays
    assert device_memory(d, 1841).activations_bytes - device_memory(d, 1840).activations_bytes > logits
    assert max_sequences(d) == 1840 and max_sequences(d.change(sequences=2542)) == 1840
    assert max_sequences(d.change(activations_gib=0)) > 2500
    assert device_memory(d) == device_memory(d, 1840) == device_memory(d.change(sequences=2542))  # of what is held
    plan = capacity_plan(d)
    assert plan.largest_active_sequences == 1840 and fits(d, 1840, 1024) and not fits(d, 1841, 1024)


def test_decode_figures_are_of_rows_that_fit():
    d = Deployment(SHAPES["llama-3.1-8b"], chip("h100"), context=32_768)
    asked = lambda n: figures(d.change(sequences=n), Costs())
    assert [asked(n)["decode_sequences"] for n in (5, 12, 32, None)] == [5, 12, 12, 12]
    assert asked(32)["tpot_lower_bound_ms"] == asked(12)["tpot_lower_bound_ms"]
    assert "A decode step of 12 sequences, as many as fit (" in report.describe(d.change(sequences=32), asked(32))
    none = d.change(model=model_shape("llama-3.1-405b"))
    f = figures(none, Costs())
    assert "A decode step of 1 sequence, which does not fit (" in report.describe(none, f)
    told = report.compare(d, asked(None), none, f, "model=llama-3.1-405b")
    assert re.search(r"TPOT, at least +19\.9 +-  ms\n  tokens/s in all, at most +604 +-\n", told)


def test_8_bit_kv_that_saves_nothing_never_breaks_even():
    config = dataclasses.replace(SHAPES["llama-3.1-8b"].config, num_kv_heads=1, head_dim=32)
    d = Deployment(shape_of(config, "small"), chip("h100"))
    f = figures(d, Costs(kv8_extra_us=100))
    assert (f["kv8_cost_fraction"], f["kv8_cost_source"], f["kv8_break_even_tokens_per_step"]) == (1, "stored", None)
    assert "breaks even   never" in report.describe(d, f)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"model": SHAPES["deepseek-v3"]}, "jaxkv does not run deepseek-v3, .*: choose another model"),
        ({"free_window_pages": True}, "keeps pages behind windows, .*: leave out free_window_pages"),
        ({"tensor_parallel": 4}, "runs on one device, so it cannot hold a plan of tensor_parallel=4: give tensor_parallel=1"),
        ({"page_size": 24}, "the kernels of v5p take no such pool: page_size 24 .*; change page_size or kv_dtype"),
    ],
)
def test_a_plan_that_the_engine_cannot_hold_is_refused(options, words):
    d = Deployment(SHAPES["gemma-3-1b"], chip("v5p"), chips=8, tensor_parallel=1)
    assert capacity_plan(d)
    with pytest.raises(ValueError, match=words):
        capacity_plan(d.change(**({"tensor_parallel": 8 if "model" in options else 1, "weights": "int8"} | options)))


@some
@given(deployments())
def test_knobs_gain_what_they_say(d):
    now = max_sequences(d)
    for knob in knobs(d):
        assert knob.sequences == now + knob.gained
        assert knob.gained >= 0 or knob.name == "chips"  # another page size on TPU


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("kv_dtype", KV_BYTES)
@pytest.mark.parametrize("K, H", [(1, 64), (4, 64), (2, 80), (1, 256), (8, 128)])
def test_page_bytes_are_those_of_a_real_pool(platform, kv_dtype, K, H):
    config = dataclasses.replace(
        model_shape("gemma-3-1b").config,
        num_layers=2,
        num_q_heads=8,
        num_kv_heads=K,
        head_dim=H,
        layer_windows=(0, 0),
        layer_ropes=(0, 0),
    )
    d = Deployment(shape_of(config, "small"), Chip("c", platform, 80 * GB, 1, 1), kv_dtype=kv_dtype)
    assert d.P == default_page_size(config, platform)
    pools = empty_pools(config, 3, d.P, kv_dtype, platform)
    assert 2 * 3 * layer_page_bytes(d) == sum(pool.nbytes for pool in pools if pool is not None)


def test_fewer_heads_than_devices_are_copied_and_counted():
    one, eight, sixteen = (Deployment(SHAPES["llama-3.1-8b"], BIG, chips=n, page_size=16) for n in (1, 8, 16))
    assert layer_page_bytes(eight) == layer_page_bytes(one) / 8  # one head a device
    assert layer_page_bytes(sixteen) == layer_page_bytes(eight)  # no less, however many devices
    assert (one.kv_copies, eight.kv_copies, sixteen.kv_copies) == (1, 1, 2)
    extra = SHAPES["llama-3.1-8b"].kv_params * 2  # bytes of bf16, once more
    assert weights_bytes(sixteen) * 16 == weights_bytes(one) + extra
    assert decode_step(sixteen, 1).kv_bytes == 2 * decode_step(one, 1).kv_bytes


def test_windows_limit_what_is_read_and_if_asked_what_is_kept():
    gemma = SHAPES["gemma-3-1b"]
    assert gemma.layer_windows.count(0) == 4 and set(gemma.layer_windows) == {0, 512}
    d = Deployment(gemma, chip("h100"), context=32_768)
    assert attended_tokens(d, d.context) == 4 * 32_768 + 22 * 512
    assert pool_bytes(d, 1, d.context) == 26 * 32_768 * 1024
    kept = d.change(free_window_pages=True)
    assert pool_bytes(kept, 1, d.context) == (4 * 32_768 + 22 * 33 * 16) * 1024  # 512 tokens lie on at most 33 pages of 16
    assert max_context(Deployment(SHAPES["mistral-7b"], chip("h100"), free_window_pages=True)) == UNBOUNDED


def test_a_shared_prefix_counts_once_a_group():
    d = Deployment(SHAPES["llama-3.1-8b"], chip("h100"), context=8192, shared_tokens=4100)
    page = 32 * layer_page_bytes(d)
    assert pool_bytes(d, 10, 8192) == (10 * 512 - 9 * 256) * page  # 4,100 tokens are 256 full pages
    assert pool_bytes(d.change(sharers=5), 10, 8192) == (10 * 512 - 8 * 256) * page


def test_the_fewest_chips_for_a_wish():
    d = Deployment(model_shape("llama-3.1-70b"), chip("h100"))
    assert max_sequences(d) == 0
    chips, tp = chips_for(d, 1)
    assert (chips, tp) == (4, 4) and fits(d.change(chips=4), 1, d.context) and not fits(d.change(chips=2), 1, d.context)
    chips, tp = chips_for(d, 500)
    assert fits(d.change(chips=chips, tensor_parallel=tp), 500, d.context)
    gemma = Deployment(SHAPES["gemma-3-1b"], chip("h100"), sequences=2000)
    assert chips_for(gemma, 2000) == (7, 1)  # each replica has the activations of its own rows
    assert [max_sequences(gemma.change(chips=n, tensor_parallel=1)) for n in (6, 7)] == [6 * 305, 7 * 305]
    tiny = Chip("tiny", "gpu", 1000, 1, 1)
    assert chips_for(d.change(chip=tiny), 1) is None


def test_prefill_time_is_flop_over_peak():
    d = Deployment(SHAPES["llama-3.1-8b"], chip("h100"))
    shape, T = d.model, d.context
    flop = 2 * T * shape.body_params + 2 * shape.head_params + 32 * 4 * 32 * 128 * T * (T + 1) // 2
    assert prefill_seconds(d) == pytest.approx(flop / 989e12)
    assert prefill_seconds(d, cached=4096) < prefill_seconds(d)
    assert prefill_seconds(d, tokens=1) == pytest.approx(2 * (shape.num_params - shape.embed_params) / 3350e9)  # reading weights


def test_a_decode_step_is_no_faster_than_any_part_of_it():
    for name, shape in SHAPES.items():
        d = Deployment(shape, chip("h100"))
        steps = [decode_step(d, B) for B in (1, 8, 64, 512)]
        assert all(x.seconds <= y.seconds for x, y in zip(steps, steps[1:], strict=False)), name
        for B, step in zip((1, 8, 64, 512), steps, strict=True):
            assert step.weights_s >= 2 * B * (shape.active_body_params + shape.head_params) / 989e12
            assert step.weights_bytes <= 2 * shape.num_params * (1 + 1e-12)
            assert max(step.weights_s, step.attention_s) <= step.seconds <= (step.weights_s + step.attention_s) * (1 + 1e-12)


def test_a_decode_step_is_bound_by_all_its_bytes_or_all_its_arithmetic():
    """Both parts bandwidth-bound: their sum. Weights compute-bound and attention not: all bytes at full bandwidth here."""
    d = Deployment(SHAPES["llama-3.1-8b"], chip("h100"))
    both = decode_step(d, 32)
    assert both.seconds == pytest.approx(both.weights_s + both.attention_s)
    one = decode_step(d, 1024, 1024)
    read = one.weights_bytes - one.lookup_bytes
    assert one.weights_s == pytest.approx(one.weights_flop / 989e12) and one.weights_s > read / 3350e9
    assert one.seconds == pytest.approx((read + one.kv_bytes) / 3350e9)
    assert one.seconds < 0.95 * (one.weights_s + one.attention_s)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"chips": 0}, "chips must be at least 1, got 0"),
        ({"context": -5}, "context must be at least 1, got -5"),
        (
            {"chips": 3},
            "chips=3 .3 jax devices. cannot split num_q_heads=28 .* may be 1, 2, 4, 28, and more chips then hold replicas",
        ),
        ({"chips": 4, "tensor_parallel": 3}, "tensor_parallel=3 must divide the 4 jax devices"),
        ({"memory_fraction": 1.2}, "memory_fraction must be above 0 and at most 1, got 1.2"),
        ({"memory_fraction": math.nan}, "memory_fraction must be above 0"),
        ({"activations_gib": math.inf}, "activations_gib must be 0 or more, got inf"),
        ({"kv_dtype": "int4"}, "kv_dtype='int4' is not one of float32, bfloat16"),
        ({"weights": "fp4"}, "weights='fp4' is not one of"),
        ({"shared_tokens": 8192}, "shared_tokens=8192 must be less than context=8192"),
        ({"sharers": 4}, "sharers=4 share nothing: give shared_tokens"),
    ],
)
def test_impossible_deployments_say_what_is_possible(options, words):
    with pytest.raises(ValueError, match=words):
        Deployment(SHAPES["qwen2.5-7b"], chip("h100"), **options)


def test_a_plan_of_too_much_is_refused_with_what_fits():
    d = Deployment(SHAPES["llama-3.1-8b"], chip("h100"), sequences=60)
    with pytest.raises(
        ValueError,
        match="60 sequences of 8,192 tokens do not fit on 1 h100: 49 sequences fit, and at 60 the longest context is 6,784 tokens",
    ):
        capacity_plan(d)
    with pytest.raises(ValueError, match="1 sequence of 8,192 tokens does not fit .* 0 sequences fit"):
        capacity_plan(Deployment(model_shape("llama-3.1-405b"), chip("h100")))


def test_what_if_changes_what_it_names():
    d = Deployment(SHAPES["llama-3.1-8b"], chip("h100"))
    changed = what_if.apply(d, "context=128K, kv_dtype=int8,chips=2,device=h200,num_kv_heads=4")
    assert (changed.context, changed.kv_dtype, changed.chips, changed.chip.name) == (131_072, "int8", 2, "h200")
    assert changed.model.num_kv_heads == 4
    assert what_if.apply(d, "context=1M").context == 2**20
    assert what_if.apply(d, "model=gemma-3-1b,free_window_pages=true,memory_fraction=0.8").free_window_pages
    for text, words in [
        ("contxt=3", "'contxt=3' is no change; write KEY=VALUE with a KEY of model, device"),
        ("context", "'context' is no change"),
        ("context=x", "'x' is no count of tokens: write 131072 or 128K"),
        ("context=1K,context=2K", "context is given twice"),
        ("chips=1.5", "'1.5' is not a whole number"),
        ("memory_fraction=much", "'much' is not a number"),
        ("free_window_pages=maybe", "neither true nor false"),
        ("device=h1000", "no row for device 'h1000'"),
        ("context=0", "context must be at least 1"),
        ("", "'' is no change"),
    ]:
        with pytest.raises(ValueError, match=f"--what_if={text}: .*{words}"):
            what_if.apply(d, text)


def test_models_come_by_name_folder_or_file(tmp_path):
    tiny = Path(__file__).parents[1] / "data" / "hf_tiny" / "qwen3_moe"
    assert model_shape(str(tiny)) == model_shape(str(tiny / "config.json"))
    assert model_shape(str(tiny)).num_experts > 1
    with pytest.raises(ValueError, match="no model 'llama-9': did you mean llama-2-7b .*give the path .* llama-2-7b"):
        model_shape("llama-9")
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match="'mamba' is not supported"):
        model_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(ValueError, match="does not run deepseek_v3; its shape is the preset deepseek-v3"):
        model_shape(str(tmp_path))
    (tmp_path / "gemma27.json").write_text((tiny / "config.json").read_text())
    assert (model_shape(str(tmp_path / "gemma27.json")).name, model_shape(str(tiny)).name) == ("gemma27", "qwen3_moe")
    with pytest.raises(ValueError, match="absent/config.json: there is no such file"):
        model_shape(str(tmp_path / "absent" / "config.json"))
    with pytest.raises(ValueError, match="does not apply to deepseek-v3"):
        SHAPES["deepseek-v3"].with_kv_heads(4)


def test_models_that_come_with_jaxkv_and_its_folders_plan(tmp_path):
    shapes = {name: model_shape(name) for name in EMBEDDED_MODELS}
    assert {name: shape.num_kv_heads for name, shape in shapes.items()} == {"tiny-mha": 8, "tiny-gqa": 2, "tiny-mqa": 1}
    assert model_shape(str(resolve("tiny-gqa"))) == shapes["tiny-gqa"] and shapes["tiny-gqa"].name == "tiny-gqa"
    for text in ("{}", '{"config": {}}', '{"config": {"ropes": [{"spin": 1}]}}'):
        (tmp_path / "jaxkv.json").write_text(text)
        with pytest.raises(ValueError, match="jaxkv.json: not a description of a model"):
            model_shape(str(tmp_path))


def test_padding_of_scales_is_told_and_a_larger_page_offered():
    d = Deployment(model_shape("tiny-gqa"), chip("h100"), kv_dtype="int8", context=4096)
    told = lambda d: report.describe(d, figures(d, Costs()))
    assert "scales, padded to rows of 128" in told(d) and "page_size 64: scales without padding" in told(d)
    assert "a scale a token and head" in told(d.change(page_size=64)) and "without padding" not in told(d.change(page_size=64))
    assert "8-bit KV with page_size 64, for long" in told(d.change(kv_dtype="bfloat16"))
    for page in (16, 32, 64, 128):
        scales = layer_page_bytes(d.change(page_size=page)) - 2 * 2 * page * 16
        assert (scales > 2 * 2 * page * 4) == bool(page % unpadded_page(d))


def test_a_side_that_does_not_fit_says_why():
    d = Deployment(SHAPES["llama-3.1-8b"], chip("h100"))
    big = d.change(model=model_shape("llama-3.1-405b"))
    f, g = figures(d, Costs()), figures(big, Costs())
    reason = "  nothing is left for KV\n  not 1 sequence of 8,192 tokens: 16 h100 with tensor_parallel 16 do\n"
    assert f"\n\nThen\n{reason}" in report.compare(d, f, big, g, "") and f"\n\nNow\n{reason}" in report.compare(big, g, d, f, "")
    assert "Then" not in report.compare(d, f, d, f, "")
    many = d.change(sequences=100)
    told = report.compare(many, figures(many, Costs()), many, figures(many, Costs()), "")
    assert told.count("not 100 sequences of 8,192 tokens") == 2 and "To hold 100" not in told


def test_a_plot_begins_behind_the_shared_prefix_and_says_what_it_is_of(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    d = Deployment(SHAPES["llama-3.1-8b"], chip("h100"), context=65_536, shared_tokens=32_768)
    assert [tokens for tokens, _ in plot.curve(d)] == [65_536, 131_072, 262_144]
    assert plot.curve(d.change(shared_tokens=0))[0][0] == 1024
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert plot.draw(tmp_path / "plot.svg", [("now", d)])
    text = (tmp_path / "plot.svg").read_text()
    assert "llama-3.1-8b on 1 h100, KV bfloat16" in text and "made for 131,072" in text


def test_presets_are_about_fifteen_and_all_plan():
    assert len(PRESETS) >= 15
    needed = {name: chips_for(Deployment(model_shape(name), chip("b200"), weights="int8", context=1024), 1) for name in PRESETS}
    assert {name: chips for name, chips in needed.items() if chips != (1, 1)} == {"llama-3.1-405b": (4, 4)}  # 406 GB on 180 GB each


def test_the_page_says_what_activations_are_made_of():
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    (paragraph,) = re.findall(r"^The estimate of activations comes from .*?\n\n", page, re.M | re.S)
    new_kv, layer, logits = 4 * 2048 * 2 * 32 * 8 * 128, 2048 * 10 * (14_336 + 4096), 2 * 4 * 4 * 128_256
    d = Deployment(SHAPES["llama-3.1-8b"], chip("h100"))
    assert re.findall(r"([\d.]+)\sGiB", paragraph) == [f"{size / GIB:.2f}" for size in (new_kv, layer, step_bytes(d, 4, 512))]
    assert step_bytes(d, 4, 512) == 4 * new_kv + layer + logits
    assert step_bytes(d.change(chip=chip("v6e")), 4, 512) == new_kv + layer + logits


def test_a_pool_that_kernels_refuse_is_told_in_their_words():
    d = Deployment(SHAPES["qwen2.5-7b"], chip("v6e"), page_size=24)
    assert refusal(d, 1).startswith("page_size 24 of a bfloat16 pool must be a multiple of 16 for 'pallas_tpu'")
    assert figures(d, Costs())["kernels_refuse"] == refusal(d, 1)
    assert refusal(d.change(page_size=None), 1) is None and refusal(d.change(chip=chip("h100")), 1) is None
    for sequences in (1, 8, 40):  # GPU kernels take 8-bit pools of any size
        assert refusal(Deployment(SHAPES["llama-3.1-8b"], chip("h100"), kv_dtype="int8"), sequences) is None
    assert refusal(Deployment(SHAPES["deepseek-v3"], chip("h200"), chips=16), 1) is None
