"""The audit: how it compares (figures made up, so that each fault can be shown), and the real compilers (marker aot)."""

import dataclasses
import importlib.util
import json
import re
import types
from pathlib import Path

import jax
import pytest

from jaxkv.model.params import Storage, abstract_params
from jaxkv.planning import PRESETS, Chip, Deployment, audit, audit_report, chip, compilers, live_memory, memory, model_shape
from jaxkv.planning.compiled_steps import STEPS, Arrays, CompiledStep, DoesNotFit, laid_out_bytes
from jaxkv.planning.live_memory import Live

LLAMA = model_shape("llama-3.1-8b")
ON_H100 = Deployment(LLAMA, chip("h100"))
LAYER_KEYS = 8 * 128 * 2  # bytes of one token
CPU = Chip("cpu", "cpu", 2**34, 1, 1)
TINY = Path(__file__).parents[1] / "data" / "hf_tiny"
PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")


def step_as_predicted(d, sequences, context, name="decode", **more):
    """What a compiler would say if everything were as predicted. `more` is added to the fields of that name."""
    rows, new_tokens = (4, 512) if name == "prefill" else (sequences, 1)
    weights, kv = memory.weights_bytes(d), audit.kv_bytes(d, sequences, context)
    other = 4 * sequences * context + 4 * sequences * -(-context // d.P)
    sizes = dict(
        argument_bytes=weights + kv + other, temporary_bytes=50_000, output_bytes=1000, live_bytes=51_000, code_bytes=10_000
    )
    sizes = {field: size + more.get(field, 0) for field, size in sizes.items()}
    step = CompiledStep(
        name,
        sequences,
        context,
        rows,
        new_tokens,
        Arrays(weights, weights),
        Arrays(kv, kv),
        Arrays(other, other),
        **sizes,
        compile_s=1.0,
    )
    return dataclasses.replace(step, **{k: v for k, v in more.items() if k not in sizes})


def audited(d=ON_H100, grid=audit.GRID, **fault):
    """An audit in which each step has the fault that `fault(context)` gives by its field."""
    made = lambda name: lambda d, B, T: step_as_predicted(d, B, T, name, **{field: of(T) for field, of in fault.items()})
    return audit.run(d, grid, {"prefill": made("prefill"), "decode": made("decode")})


def layout(tile, order):
    return types.SimpleNamespace(tiling=tile, major_to_minor=order)


@pytest.mark.parametrize(
    "shape, itemsize, tile, order, expected",
    [
        ((3, 100, 200), 4, (), (0, 1, 2), 3 * 100 * 200 * 4),
        ((3, 100, 200), 4, ((8, 128),), (0, 1, 2), 3 * 104 * 256 * 4),
        ((6682, 1, 256, 256), 1, ((32, 128), (4, 1)), (0, 1, 2, 3), 6682 * 256 * 256),
        ((10, 2, 3, 128), 4, ((2, 128),), (0, 2, 1, 3), 10 * 3 * 2 * 128 * 4),
        ((257,), 4, ((512,),), (0,), 512 * 4),
        ((), 4, ((128,),), (), 128 * 4),
    ],
)
def test_bytes_of_a_layout(shape, itemsize, tile, order, expected):
    assert laid_out_bytes(shape, itemsize, layout(tile, order)) == expected


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_weights_are_counted_as_they_are_kept(weights, platform):
    storage = Storage(weights, "float32" if weights == "float32" else "bfloat16", platform)
    for name in PRESETS:
        shape = model_shape(name)
        kept = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(abstract_params(shape.config, storage)))
        assert memory.stored_weights_bytes(shape, weights, platform) == kept, name


def test_nothing_is_flagged_where_the_compiler_agrees():
    found = audited()
    assert not found.flags and len(found.steps) == 4 and len(found.lines) == 16
    for line in found.lines:
        assert line.unexplained_bytes == 0
        assert line.what == "temporaries" or abs(line.error_fraction) < 0.01
    assert "Nothing flagged: weights and KV are within 0.0" in audit_report.describe(found, "a compiler")


def test_the_parts_of_a_pool_add_up():
    for kv_dtype, context in (("bfloat16", 8192), ("int8", 8200)):
        for row in ("h100", "v5e"):
            d = ON_H100.change(kv_dtype=kv_dtype, chip=chip(row))
            parts = audit.kv_parts(d, 8, context)
            assert sum(parts.values()) == audit.kv_bytes(d, 8, context)
            assert parts["formula"] == 8 * context * LLAMA.kv_bytes_per_token(kv_dtype)
            assert (parts["page rounding"] > 0) == (context % d.P > 0) and (parts["scales and lanes"] > 0) == (kv_dtype == "int8")


def test_tile_padding_is_a_reason():
    kv = audit.kv_bytes(ON_H100, 8, 8192)
    found = audited(
        kv=lambda T: Arrays(audit.kv_bytes(ON_H100, 8, T), audit.kv_bytes(ON_H100, 8, T) + 2**22), argument_bytes=lambda T: 2**22
    )
    line = next(line for line in found.lines if line.what == "KV" and line.context == 8192)
    assert not found.flags and line.reasons == {"tile padding": 2**22} and line.found_bytes == kv + 2**22
    assert "tile padding 4.00 MiB" in audit_report.describe(found, "a compiler")


def test_padding_that_doubles_the_pool_is_explained_and_flagged():
    double = lambda T: Arrays(audit.kv_bytes(ON_H100, 8, T), 2 * audit.kv_bytes(ON_H100, 8, T))
    found = audited(grid=((8, 8192),), kv=double, argument_bytes=lambda T: audit.kv_bytes(ON_H100, 8, T))
    assert len(found.flags) == 2 and all("off the compiler's arguments" in flag for flag in found.flags)


def test_a_pool_of_another_size_is_flagged():
    more = lambda T: Arrays(*[audit.kv_bytes(ON_H100, 8, T) + 2**26] * 2)
    flags = audited(grid=((8, 8192),), kv=more, argument_bytes=lambda T: 2**26).flags
    assert any("KV: +67,108,864 bytes that nothing explains" in flag for flag in flags)
    assert any("arguments: +67,108,864 bytes" in flag for flag in flags)


def test_a_copy_of_one_layers_keys_is_a_fault_of_paging():
    found = audited(live_bytes=lambda T: 8 * T * LAYER_KEYS)
    assert all(growth.live_bytes_per_token == LAYER_KEYS for growth in found.growth)
    growing = [flag for flag in found.flags if "a fault of paging or batching" in flag]
    assert (
        len(growing) == 2
        and "what is alive at once grows by 2,048 bytes for each token of each sequence (0.5 layers of KV)" in growing[0]
    )
    assert audit_report.describe(found, "a compiler").count("FLAGGED") >= 2


def test_copies_of_the_history_and_what_is_set_aside_may_grow():
    assert not audited(live_bytes=lambda T: 3 * 4 * 8 * T).flags
    moved = audited(temporary_bytes=lambda T: 8 * T * LAYER_KEYS)  # off the chip of a TPU, where something else lies now
    assert not [growth.flag for growth in moved.growth if growth.flag]
    assert "copies of the history at most" in audit_report.describe(moved, "a compiler")


def test_what_a_compiler_chooses_differently_once_is_no_growth():
    """On a v6e, jax 0.12 keeps one array more from some context on."""
    found = audited(live_bytes=lambda T: 50_000_000 * (T > 4096))
    assert not found.flags and {growth.contexts for growth in found.growth} == {(2048, 3584, 5120, 8192)}
    assert audit_report.describe(found, "a compiler").count("once, between 3,584 and 5,120: compiled differently") == 2


@pytest.mark.parametrize("other", [0, 8 * 4000 * LAYER_KEYS, 8 * 6000 * LAYER_KEYS])
@pytest.mark.parametrize("jump", [0, 50_000_000])
def test_a_copy_is_seen_beside_what_else_is_alive(other, jump):
    """What is alive at another moment hides it up to some context, and a jump may come on top."""
    found = audited(live_bytes=lambda T: max(other, 8 * T * LAYER_KEYS) + jump * (T > 4096))
    assert len([growth for growth in found.growth if growth.flag]) == 2


def test_arguments_that_grow_beyond_the_prediction_are_flagged():
    found = audited(argument_bytes=lambda T: 8 * T * 100)
    assert [flag for flag in found.flags if "arguments beyond the prediction grow by 100 bytes" in flag]


def test_growth_is_told_of_steps_that_differ_in_context_alone():
    found = audited(grid=((8, 2048), (8, 8192), (1, 8192)), live_bytes=lambda T: 5 * T)
    assert [(growth.sequences, growth.contexts) for growth in found.growth] == [(8, (2048, 8192))] * 2


def test_temporaries_beyond_the_plan_are_flagged():
    found = audited(grid=((8, 8192),), temporary_bytes=lambda T: 2**33)
    assert len(found.flags) == 2 and all("the plan sets" in flag for flag in found.flags)


def fits_layers(most):
    def compiled(d, sequences, context):
        if d.model.num_layers > most:
            raise DoesNotFit(f"out of memory with {d.model.num_layers} layers")
        return step_as_predicted(d, sequences, context)

    return {"decode": compiled}


def test_a_model_that_does_not_fit_is_audited_with_fewer_layers():
    found = audit.run(ON_H100, steps=fits_layers(8))
    assert not found.flags and (found.num_layers, found.deployment.model.num_layers) == (32, 8)
    assert found.refused == "out of memory with 32 layers"
    assert "Audited with 8 of its 32 layers, because all of them were refused:\n  out of memory with 32" in audit_report.describe(
        found, "a compiler"
    )
    with pytest.raises(DoesNotFit, match="with 1 layers"):
        audit.run(ON_H100, steps=fits_layers(0))


@pytest.mark.parametrize("name", ["gemma-3-1b", "mixtral-8x7b"])
def test_a_cut_model_is_its_first_layers(name):
    d = Deployment(model_shape(name), chip("h200"))
    half = audit.cut(d, 4).model
    assert half.num_layers == 4 and half.layer_windows == d.model.layer_windows[:4] and half.embed_params == d.model.embed_params


def test_what_cannot_be_audited_says_why():
    with pytest.raises(ValueError, match="jaxkv does not run deepseek-v3"):
        audit.run(Deployment(model_shape("deepseek-v3"), chip("h100")))
    with pytest.raises(ValueError, match="one device: leave out chips=2 and tensor_parallel=2"):
        audit.run(ON_H100.change(chips=2))
    assert audit.one_device(Deployment(LLAMA, chip("tpu7x"))).tp == 1


def test_every_figure_has_its_unit():
    names = set()

    def keys(value):
        for key, inner in value.items() if isinstance(value, dict) else ():
            names.add((key, type(inner)))
            keys(inner)
        for inner in value if isinstance(value, list) else ():
            keys(inner)

    figures = audit.figures(dataclasses.replace(audited(), live=tuple(live_memory.compare_live(ON_H100, live(ON_H100)))))
    keys({k: v for k, v in figures.items() if k != "steps"} | {"steps": [s | {"kv_parts_bytes": 0} for s in figures["steps"]]})
    for key, kind in names:
        assert kind is not float or key.endswith(("_bytes", "_per_token", "_fraction", "_s")), key
    assert json.loads(json.dumps(figures)) == figures


def live(d, **more):
    history = 4 * 8 * 2048
    fields = dict(weights_bytes=memory.weights_bytes(d), state_bytes=audit.kv_bytes(d, 8, 2048) + history, left_bytes=0)
    return Live(8, 2048, **{name: size + more.get(name, 0) for name, size in fields.items()}, device_bytes=more.get("device_bytes"))


def test_live_memory_is_compared_alike():
    flags = lambda **more: [line.flag for line in live_memory.compare_live(ON_H100, live(ON_H100, **more)) if line.flag]
    assert not flags() and not flags(device_bytes=2**35)
    assert "KV: +1,073,741,824 bytes that nothing explains" in flags(state_bytes=2**30)[0]
    assert "leave 2,097,152 bytes behind" in flags(left_bytes=2**21)[0]


def test_a_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    compilers._tpu_mesh.cache_clear()
    compilers._gpu.cache_clear()
    for device in ("v5p", "h100"):
        assert compilers.missing(device).endswith("pip install 'jaxkv[aot]' brings the compilers of TPUs and GPUs")
    assert "there are some for v5e" in compilers.missing("b200")


def test_the_present_device_is_compared_with_live_memory():
    """A real step and a real state on CPU; the decode step, which takes longest to compile, runs through its verb alone."""
    d = Deployment(model_shape(str(TINY / "llama_gqa_llama3rope")), CPU, kv_dtype="bfloat16")
    found = live_memory.with_live(audit.run(d, ((2, 32),), {"prefill": STEPS["prefill"]}))
    assert live_memory.is_here(d) and not live_memory.is_here(ON_H100)
    assert [line.what for line in found.live] == ["weights", "KV", "left by steps"]
    assert not [line.flag for line in found.live if line.flag]
    assert not [line.flag for line in found.lines if line.what in ("weights", "KV") and line.flag]


def block_of_the_page():
    """(arguments, lines) of the audit that docs/planning.md shows."""
    (block,) = re.findall(r"```sh\npython scripts/plan_capacity.py (--audit [^\n]*)\n```\n\n```text\n(.*?)```", PAGE, re.S)
    return dict(re.findall(r"--(\w+)[ =](?!--)(\S+)", block[0])), block[1].splitlines()


def test_the_page_shows_what_the_planner_predicts():
    args, lines = block_of_the_page()
    d = audit.one_device(Deployment(model_shape(args["model"]), chip(args["device"])))
    shown = {}
    for line in lines:
        if where := re.match(r"  (\w+) (\d+) x (\d+), (\d+) x ([\d,]+) tokens ", line):
            name, rows, new_tokens, sequences, context = (x.replace(",", "") for x in where.groups())
        if row := re.search(r" (weights|KV|arguments|temporaries) +([\d.]+) +[\d.]+ ", line):
            shown[name, int(rows), int(new_tokens), int(sequences), int(context), row[1]] = float(row[2])
    assert len(shown) == 16
    for (name, rows, new_tokens, sequences, context, what), size in shown.items():
        kv, weights = audit.kv_bytes(d, sequences, context), memory.weights_bytes(d)
        aside = memory.step_bytes(d, rows, new_tokens)
        expected = {"weights": weights, "KV": kv, "arguments": weights + kv, "temporaries": aside}[what]
        assert size == pytest.approx(expected / 2**30, abs=6e-4), (name, context, what)


def check_the_page(found, device):
    """The compiler still says what the page shows; temporaries and the compiler's version may change."""
    args, lines = block_of_the_page()
    assert (found.deployment.model.name, device) == (args["model"], args["device"])
    printed = audit_report.describe(found, "a compiler").splitlines()
    stable = lambda lines: [line for line in lines[1:] if "temporaries" not in line]
    assert stable(printed) == stable(lines)


def check(model, device, kv_dtype="bfloat16", steps=STEPS):
    reason = compilers.missing(device)
    if reason:
        pytest.skip(reason)
    found = audit.run(Deployment(model_shape(model), chip(device), kv_dtype=kv_dtype), steps=steps)
    assert not found.flags, audit_report.describe(found, device)
    for line in found.lines:
        assert line.what != "arguments" or abs(line.error_fraction) < 0.01
    return found


@pytest.mark.aot
@pytest.mark.parametrize("device", ["v5e", "h200"])
def test_gemma_by_the_real_compilers(device):
    found = check("gemma-3-1b", device)
    assert not found.refused
    if device == "v5e":
        check_the_page(found, device)


@pytest.mark.aot
@pytest.mark.parametrize(
    "model, device, kv_dtype, step",
    [
        ("llama-3.1-8b", "h200", "int8", "prefill"),  # copied all scales: they were written before the last layer had read them
        ("llama-3.1-8b", "v5e", "int8", "decode"),  # took all scales to the chip and back
        ("gemma-3-1b", "v6e", "bfloat16", "prefill"),  # `temp_size_in_bytes` is half as much again as what is set aside
    ],
)
def test_steps_that_were_flagged(model, device, kv_dtype, step):
    check(model, device, kv_dtype, {step: STEPS[step]})


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("device", ["v5p", "v6e", "tpu7x", "h100"])
def test_gemma_by_the_other_compilers(device):
    check("gemma-3-1b", device)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("device", ["v5e", "v5p", "v6e", "tpu7x", "h100", "h200"])
def test_llama_by_every_compiler(device, kv_dtype):
    found = check("llama-3.1-8b", device, kv_dtype)
    assert bool(found.refused) == (device == "v5e")  # 16 GB do not hold 16 GB of weights
