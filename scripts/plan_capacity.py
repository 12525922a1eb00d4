"""Plans capacity on paper: how many sequences of what length fit on which chips, what a
decode step reads, how fast it can be at best, and what to change for more.

--model is a preset, a model that comes with jaxkv, a folder of Hugging Face's or jaxkv's
form, or a config.json. --device is a chip of the
table, a row of --device_file, or one described by --memory_gb (or --memory_gib),
--hbm_gbps and --tflops_bf16, which also change a row of the table. Token counts may be
written 128K (x 1,024) or 1M. Sizes say GiB (2^30 bytes) or GB (10^9).

--plan FILE checks a capacity plan in YAML, the one the serving engine admits by;
--save_plan FILE writes the one of this deployment. Times are lower bounds from data
sheets; nothing is measured and no accelerator is touched.

--audit compiles the engine's real prefill and decode steps for one --device (TPU v5e,
v5p, v6e, tpu7x, NVIDIA a100, h100, h200; cpu) and compares the planner's bytes with the
compiler's. The device need not be here: `pip install 'jaxkv[aot]'` brings the compilers.

  python scripts/plan_capacity.py --model llama-3.1-8b --device h100 --context 8K
  python scripts/plan_capacity.py --model llama-3.1-8b --device h100 --context 8K --what_if context=128K
  python scripts/plan_capacity.py --model llama-3.1-70b --device v5p --chips 4 --sequences 64 --kv_dtype int8
  python scripts/plan_capacity.py --plan plan.yaml
  python scripts/plan_capacity.py --audit --model gemma-3-1b --device v5e
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

# Run from a clone without an installation, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import flags  # noqa: E402

from jaxkv import planning  # noqa: E402
from jaxkv.planning import devices, engine_plan, plot, report, what_if  # noqa: E402
from jaxkv.planning.shapes import KV_BYTES, WEIGHT_BYTES  # noqa: E402
from scripts import _script  # noqa: E402

FLAGS = flags.FLAGS


class _Tokens(flags.ArgumentParser):
    """Parses 131072 or 128K."""

    def parse(self, argument) -> int:
        return what_if.tokens(str(argument))

    def flag_type(self) -> str:
        return "int"


class _Number(flags.FloatParser):
    """Parses a finite number."""

    def convert(self, argument) -> float:
        value = super().convert(argument)
        if not math.isfinite(value):
            raise ValueError(f"{argument!r} is not a finite number")
        return value


flags.DEFINE_string("model", "llama-3.1-8b", f"{', '.join(planning.MODELS)}; or a path.")
flags.DEFINE_string("device", "h100", f"{', '.join(planning.CHIPS)}; or a name of your own.")
flags.DEFINE_integer("chips", 1, "Chips of that kind.")
flags.DEFINE_integer("tensor_parallel", None, "jax devices that share one copy of the weights; without it all, and no replicas.")
flags.DEFINE(_Tokens(), "context", "8K", "Tokens a sequence may have, prompt and answer.")
flags.DEFINE_integer("sequences", None, "Sequences wanted at once; without it as many as fit.")
flags.DEFINE_enum("weights", "bfloat16", list(WEIGHT_BYTES), "How weights are stored.")
flags.DEFINE_enum("kv_dtype", "bfloat16", list(KV_BYTES), "How keys and values are stored.")
flags.DEFINE_integer("page_size", None, "Tokens a page; without it 16, on TPU 128 or 256.")
flags.DEFINE_integer("num_kv_heads", None, "Another head layout of the model: MHA, GQA or MQA.")
flags.DEFINE(_Tokens(), "shared_tokens", "0", "Tokens of a prefix that sequences share.")
flags.DEFINE_integer("sharers", 0, "Sequences that share one prefix; 0: all.")
flags.DEFINE_bool("free_window_pages", False, "Free pages behind windows (jaxkv keeps them today).")
flags.DEFINE(_Number(), "memory_fraction", 0.9, "Of the memory, for weights, activations and KV.")
flags.DEFINE(_Number(), "activations_gib", None, "Activations of a device, measured; without it an estimate.")
flags.DEFINE(_Tokens(), "step_tokens", "2K", "Tokens of the largest step (vLLM: max_num_batched_tokens), for that estimate.")
flags.DEFINE(_Number(), "low_watermark_gib", 0.0, "KV kept free on each device.")
flags.DEFINE(_Number(), "memory_gb", None, "Memory of a chip in GB, instead of the table's.")
flags.DEFINE(_Number(), "memory_gib", None, "The same in GiB.")
flags.DEFINE(_Number(), "hbm_gbps", None, "Bandwidth of a chip in GB/s, instead of the table's.")
flags.DEFINE(_Number(), "tflops_bf16", None, "Dense peak of a chip in TFLOP/s, instead of the table's.")
flags.DEFINE_string("device_file", None, "YAML file of chips, before the table's: NAME: {memory_gb, hbm_gbps, matrix_tflops_bf16}.")
flags.DEFINE(_Number(), "link_gbps", planning.Costs.link_gbps, "GB/s to the host, of a replica's devices together, for offload.")
flags.DEFINE(_Number(), "kv8_extra_us", None, "Measured extra time of a decode step with 8-bit KV, in microseconds.")
flags.DEFINE(_Number(), "kv8_cost_ratio", planning.Costs.kv8_cost_ratio, "Measured cost of a cached token in 8-bit KV over 16-bit.")
flags.DEFINE_multi_string("what_if", [], "KEY=VALUE,...: what the same chips then hold.")
flags.DEFINE_string("plan", None, "YAML plan to check; nothing else is planned.")
flags.DEFINE_string("save_plan", None, "YAML file to write this deployment's plan to.")
flags.DEFINE_string("plot", None, "PNG file to draw concurrency against context into; needs matplotlib.")
flags.DEFINE_bool("audit", False, "Compile the real steps for the device and compare bytes; plans nothing.")
flags.DEFINE_bool("json", False, "One JSON object with every figure instead of the report.")


def main(terminal) -> None:
    """Answers what was asked."""
    if FLAGS.plan:
        _only("plan", "json")
        return _check_plan()
    if FLAGS.audit:
        _only("audit", "json", "model", "device", "weights", "kv_dtype", "page_size", "num_kv_heads", "chips", "tensor_parallel")
        return _audit(terminal)
    if FLAGS.save_plan and FLAGS.what_if:
        raise ValueError("--save_plan with --what_if: a plan is of one deployment; give the change as flags of its own")
    for name in ("save_plan", "plot"):
        _script.check_file(name)
    d, costs = _deployment(), planning.Costs(FLAGS.link_gbps, FLAGS.kv8_extra_us, FLAGS.kv8_cost_ratio)
    changed = [(text, what_if.apply(d, text, _chips())) for text in FLAGS.what_if]
    figures = planning.figures(d, costs)
    others = [(text, c, planning.figures(c, costs)) for text, c in changed]
    if FLAGS.save_plan:
        planning.capacity_plan(d).write(FLAGS.save_plan, engine_plan.provenance(d))
        print(f"{FLAGS.save_plan} is written: the plan of this deployment", file=sys.stderr)
    if FLAGS.plot:
        named = [("now", d), *changed] if changed else [(f"{d.model.name} on {d.chips} {d.chip.name}", d)]
        drawn = plot.draw(FLAGS.plot, named)
        told = "is written" if drawn else "is not written: nothing fits at any context, so there is nothing to draw"
        print(f"{FLAGS.plot} {told}", file=sys.stderr)
    if FLAGS.json:
        print(json.dumps(figures | {"what_if": [{"change": text} | f for text, _, f in others]}))
    elif others:
        print("\n\n\n".join(report.compare(d, figures, c, f, text) for text, c, f in others))
    else:
        print(report.describe(d, figures))


def _only(mode: str, *taken: str) -> None:
    """Refuses flags that have no part in what `mode` does."""
    given = [flag.name for flag in FLAGS.get_key_flags_for_module(sys.argv[0]) if flag.present]
    if idle := [f"--{name}" for name in given if name not in (mode, *taken)]:
        raise ValueError(f"{', '.join(idle)}: no part of --{mode}; leave out what it does not use")


def _stray_change(argv: list[str]) -> str | None:
    """The first argument that is a change but stands behind no flag."""
    for before, arg in zip(argv, argv[1:], strict=False):
        if arg.partition("=")[0] in what_if.KEYS and "=" in arg and (not before.startswith("-") or "=" in before):
            return arg
    return None


def _check_plan() -> None:
    plan = planning.CapacityPlan.read(FLAGS.plan).check()
    if FLAGS.json:
        print(json.dumps(plan.to_dict() | {"max_admissible_sequences": plan.largest_active_sequences}))
    else:
        print(report.describe_plan(plan, FLAGS.plan))


def _audit(terminal) -> None:
    """Imports what compiles only here: a plan needs neither the engine nor a backend."""
    from jaxkv.planning import audit, audit_report, compilers, live_memory

    d = audit.one_device(_deployment())
    compilers.stay_on_cpu()
    if d.chip.platform != "cpu":
        compilers.require(d.chip.name)
    compiler = "XLA of this machine" if d.chip.platform == "cpu" else compilers.compiler_version(d.chip.name)
    found = audit.run(d, report=terminal)
    if live_memory.is_here(d):
        found = live_memory.with_live(found, terminal)
    terminal.done()
    if FLAGS.json:
        print(json.dumps(audit.figures(found) | {"compiler": compiler}))
    else:
        print(audit_report.describe(found, compiler))


def _deployment() -> planning.Deployment:
    model = planning.model_shape(FLAGS.model)
    if FLAGS.num_kv_heads is not None:
        model = model.with_kv_heads(FLAGS.num_kv_heads)
    names = {field.name for field in dataclasses.fields(planning.Deployment)} - {"model", "chip"}
    options: dict[str, Any] = {name: FLAGS[name].value for name in names}
    return planning.Deployment(model, _chip(), **options)


def _chips() -> dict[str, planning.Chip]:
    return devices.read_chips(FLAGS.device_file) if FLAGS.device_file else dict(planning.CHIPS)


def _chip() -> planning.Chip:
    if FLAGS.audit and FLAGS.device == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return planning.Chip("cpu", "cpu", memory, hbm_gbps=1, matrix_tflops_bf16=1)  # an audit tells no times
    return devices.described(
        FLAGS.device,
        _chips(),
        memory_gb=FLAGS.memory_gb,
        memory_gib=FLAGS.memory_gib,
        hbm_gbps=FLAGS.hbm_gbps,
        tflops=FLAGS.tflops_bf16,
    )


if __name__ == "__main__":
    if stray := _stray_change(sys.argv):
        sys.stderr.write(f"error: {stray!r} stands behind no flag: repeat --what_if for another change, or join with a comma\n")
        sys.exit(1)
    _script.run(main)
