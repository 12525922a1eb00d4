"""Plans and chips as YAML: round trips, and every way to get them wrong."""

import builtins
import dataclasses
import re

import pytest

from jaxkv.planning import CapacityPlan, Deployment, PlanError, capacity_plan, chip, model_shape
from jaxkv.planning.devices import described, read_chips
from jaxkv.planning.engine_plan import provenance

pytest.importorskip("yaml")

GOOD = CapacityPlan(
    memory_gib=80, weights_gib=42, activations_gib=8, runtime_and_fragmentation_gib=6, kv_budget_gib=20,
    max_context_tokens=32_768, max_active_sequences=22, reserve_per_sequence_gib=0.75, low_watermark_gib=3,
)  # fmt: skip


def test_a_plan_survives_its_file(tmp_path):
    GOOD.check().write(tmp_path / "plan.yaml")
    assert CapacityPlan.read(tmp_path / "plan.yaml") == GOOD
    odd = dataclasses.replace(GOOD, memory_gib=74.505805969, kv_budget_gib=0.1 + 0.2)
    odd.write(tmp_path / "odd.yaml")
    assert CapacityPlan.read(tmp_path / "odd.yaml") == odd


def test_a_plan_says_what_it_is_of(tmp_path):
    d = Deployment(
        model_shape("llama-3.1-8b"), chip("h100"), chips=2, tensor_parallel=1, shared_tokens=4096, sharers=8, kv_dtype="int8"
    )
    plan = capacity_plan(d)
    plan.write(tmp_path / "plan.yaml", provenance(d))
    text = (tmp_path / "plan.yaml").read_text()
    assert CapacityPlan.read(tmp_path / "plan.yaml") == plan
    for words in [
        "# llama-3.1-8b on 2 h100, tensor_parallel 1: weights bfloat16, KV int8 in pages of 16, context 8,192\n",
        "# Of one of 2 replicas: an engine runs on one device",
        "# A prefix of 4,096 tokens is shared by 8 sequences: reserve_per_sequence_gib counts it once",
        "right only for requests that share it\n",
    ]:
        assert words in text
    assert "by all sequences" in provenance(d.change(sharers=0)) and "prefix" not in provenance(
        d.change(shared_tokens=0, sharers=0)
    )


def test_22_fit_and_23_do_not():
    GOOD.check()
    for n in (23, 24, 10**9):
        with pytest.raises(PlanError, match="at most 22 sequences") as error:
            dataclasses.replace(GOOD, max_active_sequences=n).check()
        dataclasses.replace(GOOD, max_active_sequences=error.value.largest).check()


def test_the_unassigned_rest_is_named_as_a_way_out():
    plan = dataclasses.replace(GOOD, max_active_sequences=24)
    with pytest.raises(PlanError, match=re.escape("(or kv_budget_gib 21: 4 GiB are unassigned)")):
        plan.check()
    dataclasses.replace(plan, kv_budget_gib=21).check()
    with pytest.raises(PlanError) as error:
        dataclasses.replace(plan, max_active_sequences=40).check()
    assert "unassigned" not in str(error.value)  # 33 GiB are not there


def test_parts_beyond_the_memory_name_the_largest_budget():
    with pytest.raises(
        PlanError, match=r"42 \+ .*8 \+ .*6 \+ KV budget 30 = 86 GiB of a memory of 80 GiB; kv_budget_gib may be at most 24"
    ):
        dataclasses.replace(GOOD, kv_budget_gib=30).check()
    with pytest.raises(PlanError, match="nothing is left for KV: more or larger devices"):
        dataclasses.replace(GOOD, weights_gib=90).check()


def test_one_sequence_is_told_in_the_singular():
    with pytest.raises(PlanError, match="at most 1 sequence is admissible"):
        dataclasses.replace(GOOD, reserve_per_sequence_gib=10).check()


def test_sums_of_decimal_fractions_are_not_rejected():
    tenths = dict(memory_gib=0.6, weights_gib=0.1, activations_gib=0.1, runtime_and_fragmentation_gib=0.1, kv_budget_gib=0.3)
    plan = CapacityPlan(**tenths, max_context_tokens=1, max_active_sequences=3, reserve_per_sequence_gib=0.1)
    assert plan.check().largest_active_sequences == 3


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "must hold a mapping"),
        ("- 1", "must hold a mapping"),
        ("{", "not valid YAML"),
        ("memory_gib: 80", "weights_gib, activations_gib, .* missing"),
        ("weights_gib: 1\nweights_gib: 2", "'weights_gib' is given twice"),
        ("memory_gb: 80", r"unknown key 'memory_gb' .sizes are in GiB, 2\^30 bytes.; known are memory_gib"),
    ],
)
def test_bad_plan_files_are_named(text, words, tmp_path):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"plan.yaml: {words}"):
        CapacityPlan.read(tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("memory_gib", "80", "memory_gib must be a number of GiB, got '80'"),
        ("memory_gib", 0, "memory_gib must be positive"),
        ("weights_gib", -1, "weights_gib must be finite and not negative, got -1"),
        ("kv_budget_gib", float("nan"), "kv_budget_gib must be finite"),
        ("max_active_sequences", 2.5, "max_active_sequences must be a whole number, got 2.5"),
        ("max_active_sequences", True, "max_active_sequences must be a whole number, got True"),
        ("max_context_tokens", 0, "max_context_tokens must be positive"),
        ("reserve_per_sequence_gib", 0, "reserve_per_sequence_gib must be positive"),
    ],
)
def test_bad_plan_values_are_named(field, value, words):
    with pytest.raises(ValueError, match=f"the plan: {words}"):
        CapacityPlan.from_dict(GOOD.to_dict() | {field: value})


def test_without_pyyaml_the_way_out_is_named(monkeypatch, tmp_path):
    real = builtins.__import__

    def no_yaml(name, *args, **kwargs):
        if name == "yaml":
            raise ModuleNotFoundError("No module named 'yaml'", name="yaml")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_yaml)
    with pytest.raises(ValueError, match=r"need PyYAML: pip install 'jaxkv\[plan\]'"):
        GOOD.write(tmp_path / "plan.yaml")


def test_users_add_chips(tmp_path):
    (tmp_path / "chips.yaml").write_text(
        "l40s: {memory_gb: 48, hbm_gbps: 864, matrix_tflops_bf16: 362}\n"
        "mine: {memory_gib: 64, hbm_gbps: 80.5, matrix_tflops_bf16: 2, platform: cpu, devices_per_chip: 2}\n"
    )
    rows = read_chips(tmp_path / "chips.yaml")
    assert (rows["l40s"].memory_bytes, rows["l40s"].platform, rows["l40s"].devices_per_chip) == (48 * 10**9, "gpu", 1)
    assert (rows["mine"].memory_bytes, rows["mine"].platform, rows["mine"].devices_per_chip) == (64 * 2**30, "cpu", 2)


@pytest.mark.parametrize(
    "row, words",
    [
        ("5", "x must be a mapping of platform, memory_gb"),
        ("{memory_gb: 1, memory_gib: 1, hbm_gbps: 1, matrix_tflops_bf16: 1}", "give memory_gb .* or memory_gib"),
        ("{hbm_gbps: 1, matrix_tflops_bf16: 1}", "give memory_gb .* or memory_gib"),
        ("{memory_gb: 1, matrix_tflops_bf16: 1}", "hbm_gbps is missing"),
        ("{memory_gb: 1, hbm_gbps: 0, matrix_tflops_bf16: 1}", "hbm_gbps must be a positive number, got 0"),
        ("{memory_gb: -1, hbm_gbps: 1, matrix_tflops_bf16: 1}", "the memory must be a positive number, got -1"),
        ("{memory_gb: 1, hbm_gbps: 1, matrix_tflops_bf16: 1, sms: 3}", "unknown key 'sms'; known are"),
        ("{memory_gb: 1, hbm_gbps: 1, matrix_tflops_bf16: 1, platform: abacus}", "platform must be tpu, gpu or cpu"),
        (
            "{memory_gb: 1, hbm_gbps: 1, matrix_tflops_bf16: 1, devices_per_chip: 1.5}",
            "devices_per_chip must be a whole number, got 1.5",
        ),
    ],
)
def test_bad_chips_are_named(row, words, tmp_path):
    (tmp_path / "chips.yaml").write_text(f"x: {row}")
    with pytest.raises(ValueError, match=words):
        read_chips(tmp_path / "chips.yaml")


def test_a_users_row_wins_and_the_exact_name_before_another_case(tmp_path):
    row = "{memory_gb: %d, hbm_gbps: 1, matrix_tflops_bf16: 1}\n"
    (tmp_path / "chips.yaml").write_text("H100: " + row % 48 + "Card: " + row % 1 + "card: " + row % 2)
    rows = read_chips(tmp_path / "chips.yaml")
    gb = lambda name: chip(name, rows).memory_bytes // 10**9
    assert (gb("H100"), gb("h100"), gb("H200")) == (48, 48, 141)
    assert (gb("Card"), gb("card")) == (1, 2)
    assert described("h100", rows, hbm_gbps=7).memory_bytes == 48 * 10**9 and chip("H100").name == "h100"


def test_flags_describe_or_change_a_chip():
    mine = described("mine", memory_gib=48, hbm_gbps=900, tflops=180)
    assert (mine.memory_bytes, mine.hbm_gbps, mine.matrix_tflops_bf16) == (48 * 2**30, 900, 180)
    assert described("H100", hbm_gbps=2000).memory_bytes == chip("h100").memory_bytes
    with pytest.raises(ValueError, match="no row for device 'mine'; there are v5e, .*--memory_gb, --hbm_gbps and --tflops_bf16"):
        described("mine")
    with pytest.raises(ValueError, match="^no row for device 'mine': to describe it give --hbm_gbps and --tflops_bf16, too$"):
        described("mine", memory_gb=48)
    with pytest.raises(ValueError, match="no row for device 'H10': did you mean h100"):
        chip("H10")
    with pytest.raises(ValueError, match="give the memory once"):
        described("h100", memory_gb=80, memory_gib=74)
