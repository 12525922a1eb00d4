"""scripts/plan_capacity.py as a user runs it, and docs/planning.md and layouts.md: every block and figure of it is recomputed here.

One process imports what the script needs and then forks for each command, because importing is nearly all that a command costs.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("planning.md", "layouts.md")}
DOC = "\n".join(PAGES.values())
ALL_BLOCKS = re.findall(r"```sh\npython (\S+) ([^\n]*)\n```\n\n```text\n(.*?)```", DOC, re.S)
BLOCKS = [block for block in ALL_BLOCKS if "--audit" not in block[1]]  # audits compile: tests/planning/test_audit.py has theirs
FILES = re.findall(r"```yaml (\S+)\n(.*?)```", DOC, re.S)
# Audits and measurements have figures that no plan has: tests of their own.
SECTIONS = [s for page in PAGES.values() for s in page.split("\n## ")[1:] if "--audit" not in s and "compare_layouts" not in s]
FIGURE = r"\d[\d,]*(?:\.\d+)?"

# What is wrong with each, and the words that must lead out of it.
MISTAKES = {
    ("--model=llama-9",): "or a preset: llama-2-7b",
    ("--model=meta-llama/Llama-3.1-8B-Instruct",): "did you mean llama-3.1-8b or ",
    ("--device=h1000",): "--device_file",
    ("--context=8Q",): "'8Q' is no count of tokens: write 131072 or 128K",
    ("--chips=3",): "tensor_parallel may be 1, 2, 4, 8, 16, 32",
    ("--num_kv_heads=5",): "num_q_heads=32 must be a multiple of num_kv_heads=5",
    ("--what_if=contxt=1",): "KEY of model, device, num_kv_heads, context",
    ("--memory_gb=80", "--memory_gib=74"): "give the memory once",
    ("--plan=absent.yaml",): "absent.yaml: there is no such file",
    ("--plan=bad.yaml",): "weights_gib, activations_gib",
    ("--model=llama-3.1-405b", "--save_plan=none.yaml"): "does not fit on 1 h100",
    ("--model=none/config.json",): "none/config.json: there is no such file",
    ("--device=mine", "--memory_gb=80"): "to describe it give --hbm_gbps and --tflops_bf16, too",
    ("--what_if=chips=2", "--save_plan=none.yaml"): "give the change as flags of its own",
    ("--what_if", "chips=2", "context=64K"): "'context=64K' stands behind no flag: repeat --what_if",
    ("--save_plan=nodir/none.yaml",): "--save_plan=nodir/none.yaml: there is no folder ",
    ("--plot=nodir/none.png",): "there is no folder ",
    ("--plot=.",): "--plot=. is a folder",
    ("--device=tpu7x", "--save_plan=none.yaml"): "jaxkv's engine runs on one device",
    ("--link_gbps=0",): "link_gbps must be positive",
    ("--kv8_cost_ratio=1",): "kv8_cost_ratio must lie between 0 and 1",
    ("--kv8_extra_us=-1",): "0 or more",
    ("--kv8_extra_us=nan", "--json"): "--kv8_extra_us=nan: 'nan' is not a finite number",
    ("--link_gbps=inf",): "'inf' is not a finite number",
    ("--model=deepseek-v3", "--device=h200", "--chips=16", "--save_plan=none.yaml"): "choose another model",
    ("--free_window_pages", "--save_plan=none.yaml"): "leave out free_window_pages",
    ("--device=v5p", "--page_size=24", "--save_plan=none.yaml"): "change page_size or kv_dtype",
    ("--plan=plan.yaml", "--context=8K"): "--context: no part of --plan",
    ("--audit", "--context=8K", "--sequences=2", "--what_if=chips=2"): "--context, --sequences, --what_if: no part of --audit",
    ("--audit", "--plot=none.png", "--save_plan=none.yaml", "--memory_gb=1"): "--memory_gb, --save_plan, --plot: no part of --audit",
    ("stray",): "unexpected argument 'stray'",
    ("--audit", "--model=deepseek-v3"): "jaxkv does not run deepseek-v3",
    ("--audit", "--chips=2"): "the audit compiles the steps of one device",
    ("--audit", "--device=b200"): "no compiler is known for device 'b200'; there are some for v5e, v5p",
}  # fmt: skip
# What must stand in the report of each.
REPORTS = {
    ("--model=llama-3.1-405b",): ["nothing is left for KV", "not 1 sequence of 8,192 tokens: ", "h100 with tensor_parallel 16 do", "chips that hold one sequence: 16, tensor_parallel 16"],
    ("--model=mistral-7b", "--free_window_pages"): ["of any length: every layer forgets", "without pages behind windows"],
    ("--model=deepseek-v3", "--device=b200", "--chips=16"): ["16 copies of the latent", "of 256 experts a layer"],
    ("--device=mine", "--memory_gib=48", "--hbm_gbps=900", "--tflops_bf16=180"): ["on 1 mine", "48.00"],
    ("--model=gemma-3-1b", "--device=v5e", "--context=64K"): ["the model was made for 32,768", "in pages of 256"],
    ("--chips=2", "--tensor_parallel=1", "--sequences=7"): ["2 replicas", "each replica is an engine of its own", "A decode step of 4 sequences a replica"],
    ("--shared_tokens=4K", "--sharers=4"): ["4,096 of them the same for each 4", "with the shared prefix cached"],
    ("--kv_dtype=int8", "--kv8_extra_us=100"): ["a scale a token and head", "100 us extra a step", "at 54% of the 16-bit cost (published)"],
    ("--kv8_cost_ratio=0.6",): ["at 60% of the 16-bit cost (given)"],
    ("--model=gemma-3-1b", "--kv8_extra_us=100"): ["at 56% of the 16-bit cost (stored)"],
    ("--num_kv_heads=1",): ["bandwidth-bound", "compute-bound", "which may overlap; at most"],
    ("--device=v6e", "--page_size=24"): ["but the kernels of v6e take no such pool: page_size 24 of a bfloat16 pool must be"],
    ("--model=tiny-gqa", "--context=4K"): ["tiny-gqa on 1 h100", "820,352 parameters"],
    ("--num_kv_heads=1", "--context=4K"): ["1 KV head x 128"],
    ("--chips=2",): ["not run by jaxkv yet: its engine runs on one device"],
    ("--help",): ["--what_if=TEXT", "--context=N", "lower bounds"],
}  # fmt: skip
JSON = ("--context=8K", "--json", "--what_if=context=128K")
SAVE = ("--context=8K", "--save_plan=saved.yaml")
CHECKED = ("--plan=saved.yaml", "--json")
EMPTY_PLOT = ("--model=llama-3.1-405b", "--plot=empty.png")
PLOT = ("--plot=plot.png", "--what_if=chips=2", "--what_if=model=mistral-7b,free_window_pages=true")

_FORKS = """
import json, os, runpy, sys
sys.path.insert(0, {root!r})
import absl.app, yaml, jaxkv.planning
out = []
for argv in json.load(sys.stdin):
    files = [os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for name in (".out", ".err")]
    if not (pid := os.fork()):
        os.dup2(files[0], 1), os.dup2(files[1], 2)
        sys.argv = [{script!r}, *argv]
        try:
            runpy.run_path({script!r}, run_name="__main__")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)  # at once: taking jax apart costs more than the command
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for file in files:
        os.close(file)
    out.append((status, open(".out").read(), open(".err").read()))
json.dump(out, sys.stdout)
"""


def run(folder: Path, commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """(exit status, stdout, stderr) of each command, run in `folder` where jax has no backend to touch."""
    program = _FORKS.format(root=str(ROOT), script=str(ROOT / "scripts" / "plan_capacity.py"))
    env = os.environ | {"COLUMNS": "100", "JAX_PLATFORMS": "none"}
    pipes = dict(input=json.dumps(commands), capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=env, timeout=300, **pipes)
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands run, with the files that the page shows."""
    path = tmp_path_factory.mktemp("plan")
    for name, text in [*FILES, ("bad.yaml", "memory_gib: 80")]:
        (path / name).write_text(text)
    return path


@pytest.fixture(scope="module")
def results(folder):
    """What each command of this file and of the page gives, by its arguments."""
    documented = [tuple(shlex.split(args)) for _, args, _ in BLOCKS]
    commands = [*documented, *MISTAKES, *REPORTS, JSON, SAVE, CHECKED, PLOT, EMPTY_PLOT]
    return dict(zip(commands, run(folder, [list(args) for args in commands]), strict=True))


def test_the_pages_have_their_examples():
    assert len(BLOCKS) >= 15 and {name for name, _ in FILES} == {"chips.yaml", "plan.yaml"}
    assert len(ALL_BLOCKS) == DOC.count("```sh\npython scripts/plan_capacity.py") == DOC.count("```text")
    assert {script for script, _, _ in BLOCKS} == {"scripts/plan_capacity.py"}


@pytest.mark.parametrize("args, shown", [(args, shown) for _, args, shown in BLOCKS])
def test_every_block_of_the_pages_is_what_the_tool_prints(results, args, shown):
    status, out, err = results[tuple(shlex.split(args))]
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in shown.splitlines())
    assert re.fullmatch(pattern, out or err), out + err
    assert (status, bool(err)) == ((1, True) if shown.startswith("error:") else (0, False)), err


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.partition("\n")[0])
def test_every_figure_in_a_sentence_is_printed_in_its_section(results, section):
    fences = "\n".join(re.findall(r"```.*?```", section, re.S))
    outs = [results[tuple(shlex.split(args))] for _, args, _ in BLOCKS if f" {args}\n" in fences]
    known = figures_in(" ".join([fences, *(out + err for _, out, err in outs)]), FIGURE)
    prose = re.sub(r"```.*?```|`[^`]*`", "", section.partition("\n")[2], flags=re.S)
    unknown = figures_in(prose, rf"(?<![\w.-]){FIGURE}(?![\w-])") - known
    assert not unknown, "in the text, but not in what the tool prints"


def figures_in(text: str, pattern: str) -> set[float]:
    return {float(figure.replace(",", "")) for figure in re.findall(pattern, text)}


def test_json_has_every_figure_with_its_unit(results):
    status, out, err = results[JSON]
    assert (status, err) == (0, "")
    f = json.loads(out)
    assert f["kv_bytes_per_token"] == 131_072 and f["kv_kib_per_token"] == 128
    assert f["kv_gib_per_sequence"] == 1 and f["kv_gb_per_sequence"] == pytest.approx(1.074, abs=1e-3)
    assert (f["max_sequences"], f["what_if"][0]["max_sequences"], f["what_if"][0]["change"]) == (49, 3, "context=128K")
    assert f["weights_gib"] == pytest.approx(14.96, abs=5e-3) and f["weights_gb"] == pytest.approx(16.06, abs=5e-3)
    assert 0 < f["decode_kv_traffic_fraction"] < 1 and f["max_context_tokens"] == 407_456
    units = "gib|gb|mib|kib|bytes|tokens|ms|ns|us|gbps|tflops|flop_per_byte|per_s|fraction|sequences|compression"
    for key, value in f.items():
        assert not isinstance(value, float) or re.search(rf"(^|_)({units})(_|$)", key), f"{key} has no unit"


def test_a_saved_plan_is_admissible_to_the_last_sequence(results, folder):
    assert (results[SAVE][0], results[SAVE][2]) == (0, "saved.yaml is written: the plan of this deployment\n")
    assert "# llama-3.1-8b on 1 h100, tensor_parallel 1: " in (folder / "saved.yaml").read_text()
    status, out, err = results[CHECKED]
    assert (status, err) == (0, "")
    assert json.loads(out)["max_active_sequences"] == json.loads(out)["max_admissible_sequences"] == 49


@pytest.mark.parametrize("args", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_with_a_way_out(results, folder, args):
    status, out, err = results[args]
    assert (status, out, err.count("\n")) == (1, "", 1) and err.startswith("error: ") and MISTAKES[args] in err
    assert not (folder / "none.yaml").exists()


@pytest.mark.parametrize("args", REPORTS, ids=" ".join)
def test_reports_of_odd_deployments(results, args):
    status, out, err = results[args]
    assert (status, err) == (0, "")
    assert [words for words in REPORTS[args] if words not in out] == [], out
    assert max(map(len, out.splitlines())) <= 132


def test_a_plot_is_a_picture_or_says_what_it_needs(results, folder):
    status, out, err = results[PLOT]
    if importlib.util.find_spec("matplotlib") is None:
        assert (status, out, err) == (1, "", "error: --plot needs matplotlib: pip install matplotlib\n")
    else:
        assert (status, err) == (0, "plot.png is written\n")
        assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_nothing_is_told_and_the_report_is_printed(results, folder):
    pytest.importorskip("matplotlib")
    status, out, err = results[EMPTY_PLOT]
    assert status == 0 and out.startswith("llama-3.1-405b on 1 h100")
    assert err == "empty.png is not written: nothing fits at any context, so there is nothing to draw\n"
    assert not (folder / "empty.png").exists()
