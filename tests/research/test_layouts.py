"""The layout study counts bytes exactly, says what is bound by bandwidth, and keeps to the rounds; and random models of public shapes."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from engine import MOE, make_model, tiny_config

import jaxkv
from jaxkv.loading import choose_storage
from jaxkv.model.params import check_params
from jaxkv.planning.presets import PRESETS
from jaxkv.planning.shapes import first_layers, shape_of
from jaxkv.research import layout_report
from jaxkv.research import layouts as study
from jaxkv.research.byte_tokenizer import byte_tokenizer
from jaxkv.research.layouts import Case, Figure, Layout, cases_of, holding, measure
from jaxkv.research.quality import bits_per_byte
from jaxkv.research.random_models import random_models
from jaxkv.research.traffic import experts_used, weight_bytes

MHA, MQA = (dataclasses.replace(tiny_config(), num_kv_heads=K, layer_windows=(0, 0)) for K in (4, 1))
CASES = [Case(8, "float32", 2, 60)]


@pytest.fixture(scope="module")
def layouts():
    return [Layout("mha", make_model(MHA)), Layout("mqa", make_model(MQA))]


@pytest.fixture(scope="module")
def result(layouts):
    """A study on a machine that reads nearly nothing a second: every step is bound by it."""
    found = measure(layouts, CASES, lambda: 1e-9, repeats=3, new_tokens=4)
    about = {"backend": "cpu", "weights": "float32", "num_layers": 2, "whole_layers": 2}
    quality = [
        {"layout": "mha", "kv_dtype": "float32", "kv_bytes_per_token": 1024, "bits_per_byte": 1.5, "bits_per_byte_over_base": 0.0},
        {
            "layout": "mqa",
            "kv_dtype": "float32",
            "kv_bytes_per_token": 256,
            "bits_per_byte": 1.6,
            "bits_per_byte_over_base": 0.0667,
        },
    ]
    return about | found | {"quality": quality, "text": "a.txt"}


def test_bytes_are_exact_whatever_the_clock_says(result):
    rows = result["rows"]
    assert [(r["layout"], r["page_size_tokens"], r["kv_dtype"]) for r in rows] == [("mha", 8, "float32"), ("mqa", 8, "float32")]
    L, H, f32 = 2, 16, 4
    for row, K in zip(rows, (4, 1), strict=True):
        assert row["kv_bytes_per_token"] == row["kv_bytes_per_token_stored"] == 2 * L * K * H * f32
        assert row["kv_bytes_over_base"] == K / 4
        assert row["step_kv_bytes"] == 2 * (row["context_tokens"] - 2) * row["kv_bytes_per_token"]  # B 2, 4 new tokens
        pages = 2 * -(-row["context_tokens"] // row["page_size_tokens"]) + 1
        assert row["pool_bytes"] == pages * row["page_size_tokens"] * row["kv_bytes_per_token"]
        assert row["pool_use_fraction"] == 2 * row["context_tokens"] / (pages * row["page_size_tokens"])


def test_figures_follow_from_each_other(result):
    for row in result["rows"]:
        step_s, total = row["step_ms"]["median"] / 1e3, row["step_weight_bytes"] + row["step_kv_bytes"]
        assert row["tok_s"] == pytest.approx(2 / step_s) and row["gb_s"] == pytest.approx(total / step_s / 1e9)
        assert row["fraction_of_read"]["median"] == pytest.approx(row["gb_s"] / 1e-9)
        assert row["step_ms"]["low"] <= row["step_ms"]["median"] <= row["step_ms"]["high"]
    assert result["rows"][0]["step_over_base"] == {"median": 1, "low": 1, "high": 1}


def test_what_is_bound_by_bandwidth_follows_from_the_machine(result, layouts):
    assert all(row["bandwidth_bound"] for row in result["rows"])
    told = layout_report.describe(result)
    assert "mha float32 B 2 T 60 P 8" in told and "**Not**" not in told and "a cache holds part" in told
    fast = result | measure(layouts[:1], CASES[:1], lambda: 1e9, repeats=1, new_tokens=4)
    assert not fast["rows"][0]["bandwidth_bound"]
    told = layout_report.describe(fast)
    assert "none of these rows" in told and "**Not**: mha float32 B 2 T 60 P 8 (0%). Most of their time goes to other work" in told


def test_slots_hold_what_a_step_reads(layouts):
    state = holding(layouts[0].model, Case(8, "float32", 2, 64), 59)
    jaxkv.check_integrity(state)
    assert state.kv.lengths.tolist() == [59, 59] and state.max_tokens_per_slot == 64
    with pytest.raises(ValueError, match="context of 5 tokens has no room for new_tokens=4"):
        measure(layouts, [Case(8, None, 1, 5)], lambda: 1.0, new_tokens=4)


def test_what_a_model_cannot_have_is_told_before_anything_runs(layouts):
    never = lambda: pytest.fail("measured")
    for case, words in ((Case(8, None, 1, 600), "max_positions=512"), (Case(8, "int5", 1, 60), "int5")):
        with pytest.raises(ValueError, match=words):
            measure(layouts, [*CASES, case], never, new_tokens=4)


def test_rows_of_a_step_go_on_from_different_tokens(layouts, monkeypatch):
    """Rows that are alike choose the same experts, and more were counted than are read."""
    given, run = [], study.generate
    monkeypatch.setattr(study, "generate", lambda state, tokens, **options: given.append(tokens) or run(state, tokens, **options))
    measure(layouts[:1], CASES, lambda: 1.0, repeats=1, new_tokens=4)
    assert given and all(tokens == [[0], [65]] for tokens in given)  # of a vocabulary of 130


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_experts_are_counted_as_the_planner_counts_them(rows):
    config = tiny_config(**MOE)  # 2 of 4 experts
    assert experts_used(config, rows) == pytest.approx(1 - 0.5**rows)
    read = shape_of(config, "a").read_params(rows)
    # The planner's table of embeddings is looked up without being read; its f32 rows are read here.
    assert weight_bytes(make_model(config), rows) == pytest.approx(4 * (read + rows * config.model_dim), rel=1e-6)


def test_quality_is_that_of_each_layout_through_each_cache():
    text = (Path(__file__).parents[1] / "data" / "kjv_genesis.txt").read_text()[:150]
    bytes_of = lambda K: dataclasses.replace(MHA, vocab_size=256, num_kv_heads=K)
    layouts = [Layout(name, make_model(bytes_of(K), tokenizer=byte_tokenizer())) for name, K in (("mha", 4), ("mqa", 1))]
    rows = study.quality(layouts, ["float32", "int8"], text)
    assert [(r["layout"], r["kv_dtype"]) for r in rows] == [
        ("mha", "float32"),
        ("mqa", "float32"),
        ("mha", "int8"),
        ("mqa", "int8"),
    ]
    L, H, f32 = 2, 16, 4
    assert [r["kv_bytes_per_token"] for r in rows] == [2 * L * K * vector for vector in (H * f32, H + 4) for K in (4, 1)]
    for row, layout, base in zip(rows, layouts * 2, (rows[0], rows[0], rows[2], rows[2]), strict=True):
        assert row["bits_per_byte"] == bits_per_byte(layout.model, text, row["kv_dtype"])
        assert row["bits_per_byte_over_base"] == pytest.approx(row["bits_per_byte"] / base["bits_per_byte"] - 1, abs=1e-12)
    assert 7 < rows[0]["bits_per_byte"] < 12 and rows[1]["bits_per_byte"] != rows[0]["bits_per_byte"] != rows[2]["bits_per_byte"]


def test_cases_are_all_combinations():
    assert cases_of([], [], [1, 8], [512]) == [Case(None, None, 1, 512), Case(None, None, 8, 512)]
    assert len(cases_of([16, 128], ["float32", "int8"], [1], [1, 2, 3])) == 12


def test_markdown_has_every_column_of_every_row(result):
    told = layout_report.describe(result)
    lines = [line for line in told.splitlines() if line.startswith("| mha") or line.startswith("| mqa")]
    assert len(lines) == 4 and len({line.count("|") for line in lines[:2]}) == 1
    assert "+6.67%" in told and "0.25" in lines[1] and "1,024" in lines[0] and "of a.txt" in told
    part = layout_report.describe(result | {"whole_layers": 32})
    assert "Only the first 2 of 32 layers" in part and "Only the first" not in told
    json.dumps(result)  # nothing that JSON does not know


def test_two_runs_agree_where_a_median_lies_within_the_others_rounds(result, layouts, tmp_path):
    rows = result["rows"]
    assert layout_report.compare_runs(rows, rows) == {"rows": 2, "step_ms_apart": [], "step_over_base_apart": []}
    slower = [row | {"step_ms": dataclasses.asdict(Figure(1e6, 1e6, 1e6))} for row in rows[:1]]
    found = layout_report.compare_runs(slower, rows)
    [apart] = found["step_ms_apart"]
    assert (found["rows"], found["step_over_base_apart"]) == (1, []) and apart["layout"] == "mha" and apart["here"]["median"] == 1e6
    told = layout_report.describe(result | {"against": {"file": "b.json"} | found})
    assert "Against b.json:" in told and "ms/step: 0 of 1 rows agree" in told and "x: 1 of 1 rows agree" in told
    assert "mha float32 B 2 T 60 P 8: 1000000.00 (" in told
    # Which rows there are is known before they are measured.
    assert len(layout_report.in_common(study.on_paper(layouts, CASES), rows)) == 2
    with pytest.raises(ValueError, match="no row in common"):
        layout_report.in_common(study.on_paper(layouts, cases_of([16], [], [2], [60])), rows)
    path = tmp_path / "layouts.json"
    path.write_text(json.dumps(result))
    assert layout_report.read_run(path) == rows


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": []}', '{"rows": [1]}', '{"rows": [{"layout": "mha"}]}'])
def test_what_is_no_run_is_refused(text, tmp_path):
    path = tmp_path / "layouts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="layouts.json is no layouts.json of a run"):
        layout_report.read_run(path)


def test_the_picture_is_drawn(result, tmp_path):
    pytest.importorskip("matplotlib")
    layout_report.draw(tmp_path / "a.png", result)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


SMALL = dict(PRESETS["llama-3.1-8b"]) | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "num_hidden_layers": 3, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return str(tmp_path)


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_random_models_have_the_arrays_of_their_shape_and_share_tables(shape, weights):
    storage = choose_storage(None, weights)
    models, whole = random_models(shape, [4, 1], storage, num_layers=2)
    assert whole == 3 and [(m.config.num_kv_heads, m.config.num_layers) for m in models] == [(4, 2), (1, 2)]
    for model in models:
        check_params(model.params, model.config, storage, "here")
    assert all(a is b for a, b in zip(*(jax.tree.leaves(m.params["head"]) for m in models), strict=True))
    assert np.isfinite(np.asarray(jaxkv.score(models[1], [[1, 2, 3]])[0])).all()


def test_what_does_not_fit_is_refused_with_the_layers_that_do(shape):
    storage = choose_storage(None, "float32")
    with pytest.raises(
        ValueError, match="2 layouts of .* with 3 layers in float32 need .* GB, and 2.1 GB are free: --num_layers=2"
    ):
        random_models(shape, [4, 1], storage, room_bytes=(2 << 30) + 800_000)
    with pytest.raises(ValueError, match="not even one layer fits"):
        random_models(shape, [4], storage, room_bytes=1000)
    with pytest.raises(ValueError, match="num_layers=4 must be 1 to 3"):
        random_models(shape, [4], storage, num_layers=4)
    with pytest.raises(ValueError, match="jaxkv does not run deepseek-v3"):
        random_models("deepseek-v3", [1], storage)
    with pytest.raises(ValueError, match="num_q_heads=4 must be a multiple of num_kv_heads=3"):
        random_models(shape, [3], storage)


def test_first_layers_cut_everything_that_is_a_layer():
    cut = first_layers(tiny_config(), 1)
    assert (cut.num_layers, cut.layer_windows, cut.layer_ropes) == (1, tiny_config().layer_windows[:1], (0,))
