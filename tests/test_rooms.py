"""Imports go one way, and each job has one room: read from the source, so that no test has to import anything."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("scripts", "jaxkv", "pallas_kernels")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
# Whom each room may not import.
FORBIDDEN = {
    "pallas_kernels": {"jaxkv", "scripts", "flax", "optax", "orbax", "absl"},
    "jaxkv": {"scripts", "absl"},
    "scripts": {"optax", "orbax"},
}
# Parts of jaxkv that stand on the core, and so are not known to it.
OUTER = ("jaxkv.serving", "jaxkv.planning", "jaxkv.research")


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def imports(path):
    """Dotted names of everything a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names(path):
    """Dotted names of every attribute and call in a file, as far as they are plain."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield f"{node.func.id}()"


def test_the_rooms_are_there():
    assert {name_of(p) for p in FILES} >= {
        "jaxkv/steps.py",
        "jaxkv/io/checkpoint.py",
        "pallas_kernels/ops.py",
        "scripts/generate.py",
    }


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    for imported in imports(path):
        assert imported.split(".")[0] not in FORBIDDEN[room], f"{name_of(path)} imports {imported}"
        # What `jaxkv` offers comes from all its rooms.
        if room == "jaxkv" and name_of(path) != "jaxkv/__init__.py" and not name_of(path).replace("/", ".").startswith(OUTER):
            assert not imported.startswith(OUTER), f"the core file {name_of(path)} imports {imported}"
        if imported.split(".")[0] == "orbax":
            assert name_of(path) == "jaxkv/io/checkpoint.py", f"{name_of(path)} imports {imported}"
        if imported.split(".")[0] == "optax":
            assert name_of(path).startswith("jaxkv/research/"), f"{name_of(path)} imports {imported}, and trains nothing"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_models_are_jitted_in_one_place_and_only_scripts_print(path):
    name, used = name_of(path), set(names(path))
    if not name.startswith("scripts/"):
        assert "print()" not in used, f"{name} prints"
    if name not in ("jaxkv/steps.py", "jaxkv/model/params.py") and not name.startswith(
        ("jaxkv/io/", "scripts/", "jaxkv/research/")
    ):
        assert "jax.jit" not in used and "jax.jit" not in set(imports(path)), f"{name} jits"


def test_nothing_reads_pickles():
    for path in FILES:
        assert not {"pickle", "dill", "cloudpickle", "marshal"} & set(imports(path)), name_of(path)
        assert not {"numpy.load", "np.load", "torch.load"} & set(names(path)), name_of(path)
