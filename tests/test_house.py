"""How the package is built: imports run one way and importing is cheap."""

import ast
import runpy
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

import i2cl

SOURCE = Path(i2cl.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = sorted(SOURCE.rglob("*.py"))

LAYERS = (
    {"errors", "version"},
    {"tasks", "storage"},
    {"models"},
    {"encoders"},
    {"core"},
    {"injections"},
    {"methods"},
    {"labelling"},
    {"experiments", "export"},
    {"interfaces"},
)
"""Layers of packages, lowest first. A package may only import from lower layers."""

SHARED_BY_METHODS = {"methods.base", "methods.prompting", "methods.adapters", "methods.classifiers"}
SHARED_BY_METHODS |= {"methods.cross_validation", "methods.injecting", "methods.postprocessing"}
SHARED_BY_METHODS |= {"methods.i2cl", "methods.compressors.base"}

MOST_IN_A_FOLDER = 19
MOST_ON_TOP = 14

_HEAVY = """torch transformers datasets peft matplotlib sentence_transformers setfit sklearn pandas scipy
ray gguf xllamacpp vllm"""
HEAVY = set(_HEAVY.split())


def layer(name):
    """Return the index of the layer of a dotted name."""
    room = name.split(".")[0]
    for number, names in enumerate(LAYERS):
        if room in names:
            return number
    return pytest.fail(f"src/i2cl/{room} has no place among the layers of {Path(__file__).name}: give it one")


def module(path):
    """Return the dotted name of a file, relative to the package."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path):
    """Sublayers and packages of this package that a file imports, anywhere in it, below the package."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written out in full"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if is_module(name) else node.module for name in inside]
        else:
            continue
        yield from (name.removeprefix("i2cl.") for name in names if name.startswith("i2cl."))


def is_module(name):
    """Return whether a dotted name is a module or package, not something defined in one."""
    path = SOURCE.parent / name.replace(".", "/")
    return name.startswith("i2cl.") and (path.with_suffix(".py").is_file() or path.is_dir())


def upward(mine, imported):
    """Return whether an import goes to a higher layer, or to another package of the same layer."""
    same_room = mine.split(".")[0] == imported.split(".")[0]
    return not same_room and layer(imported) >= layer(mine)


def import_graph():
    """Files by dotted name, each with the files it imports; a package is named like its ``__init__``."""
    known = {module(path) for path in FILES}
    return {module(path): {name for name in imports(path) if name in known} for path in FILES if module(path)}


def test_imports_run_downwards_and_violations_are_detected():
    pairs = [(module(path), name) for path in FILES if module(path) for name in imports(path)]
    assert [pair for pair in pairs if upward(*pair)] == []
    TopologicalSorter(import_graph()).prepare()  # which names files that import each other
    assert upward("core.context", "methods.base")
    assert upward("tasks.task", "storage.atomic")
    assert not upward("core.anchored", "core.context")
    assert not upward("interfaces.cli.fit", "core.context")
    graph = import_graph()
    assert {"errors", "models.decoder", "core.injection", "methods.base"} <= set().union(*graph.values())
    graph["models.edits"] = graph["models.edits"] | {"models.decoder"}
    with pytest.raises(CycleError, match=r"models\.edits"):
        TopologicalSorter(graph).prepare()


def entries(folder):
    """Return the visible files of a folder, without the marker ``py.typed`` and type stubs."""
    names = {one.name for one in folder.iterdir()}
    return [
        name for name in names - {"__pycache__", "py.typed"} if name.removesuffix("i") not in names - {name}
    ]


def test_few_packages_none_of_them_crowded():
    assert len(entries(SOURCE)) <= MOST_ON_TOP
    folders = {path.parent for path in FILES if path.parent != SOURCE}
    assert [folder for folder in folders if len(entries(folder)) > MOST_IN_A_FOLDER] == []


def test_methods_do_not_import_each_other():
    for path in (SOURCE / "methods").rglob("*.py"):
        if path.name != "__init__.py":
            others = {name for name in imports(path) if name.startswith("methods")}
            sideways = others - SHARED_BY_METHODS
            assert not sideways, f"{path.name} imports {sideways}: share code in one of {SHARED_BY_METHODS}"


def loaded_after(statement):
    command = [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"]
    environment = {"PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "statement",
    ["import i2cl.interfaces.cli", "from i2cl import I2CLError", "import i2cl.models.architectures"],
)
def test_importing_is_cheap(statement):
    loaded = loaded_after(statement)
    assert "i2cl" in loaded
    assert not loaded & HEAVY


def documented_data():
    """Return names of constants that are documented by a string below the assignment."""
    for path in FILES:
        body = parsed(path).body
        for node, below in pairwise(body):
            value = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if value and isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_public_names_exist_are_documented_and_visible_to_type_checkers():
    assert i2cl.__all__
    for name in i2cl.__all__:
        value = getattr(i2cl, name)
        assert value.__doc__ if callable(value) else name in documented_data(), f"{name} has no docstring"
        assert name in dir(i2cl)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = i2cl.no_such_name


SCRIPTS = sorted(path for folder in ("scripts", "benchmarks") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_scripts_import_is_there(path, monkeypatch):
    for folder in ("benchmarks", "scripts", "tests"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    runpy.run_path(str(path), run_name="imported")


def test_torch_loads_nothing_but_weights():
    nodes = (node for path in FILES for node in ast.walk(parsed(path)))
    calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
    loads = [call for call in calls if call.startswith("torch.load")]
    assert all("weights_only=True" in call for call in loads)
