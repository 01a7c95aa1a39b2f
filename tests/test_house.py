"""How the package is built: imports run one way, importing is cheap, files stay short."""

import ast
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import i2cl

SOURCE = Path(i2cl.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = sorted(SOURCE.rglob("*.py"))

ORDER = (
    {"errors"},
    {"backward"},
    {"ray_cluster", "hooks", "files", "products", "streams", "training", "hub"}
    | {"stored", "offloading", "quantization"},
    {"outputs", "alibi", "architectures", "tasks", "reference", "card", "freezing"},
    {"batching", "fingerprint", "identity", "loading"},
    {"edits", "memory", "prefix"},
    {"decoder"},
    {"scoring", "context", "rows"},
    {"classes"},
    {"artefact"},
    {"injection", "recipe"},
    {"calibration", "composition", "adapters", "pool"},
    {"transfer", "methods", "joint"},
    {"evaluation", "classifier", "harness"},
    {"prediction", "parallel"},
    {"benchmark", "experiments", "export"},
    {"cli"},
)
"""Modules and packages, lowest first. One imports only what stands before its own set."""

SIDEWAYS = {("tasks", "reference"), ("reference", "tasks")}
"""The reference tasks are tasks, and the list of all tasks names them."""

LONG = {"decoder.py": "one class owns the model, and half of it is what its attributes and arguments mean"}
LONGEST = 250

HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "peft",
    "matplotlib",
    "sklearn",
    "pandas",
    "scipy",
    "ray",
    "gguf",
    "llama_cpp",
    "lm_eval",
)


def place(name):
    """Where in the order a module of the package stands."""
    for number, names in enumerate(ORDER):
        if name in names:
            return number
    return pytest.fail(f"src/i2cl/{name} has no place in the order of {Path(__file__).name}: give it one")


def module(path):
    """Dotted name of a file, below the package."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path):
    """Modules of this package that a file imports, anywhere in it, below the package."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written out in full"
            names = [node.module]
            if node.module == "i2cl":  # ``from i2cl import cli`` imports a module, or a public name
                names = [f"i2cl.{alias.name}" for alias in node.names if (SOURCE / alias.name).exists()]
                names += [f"i2cl.{a.name}" for a in node.names if (SOURCE / f"{a.name}.py").exists()]
        else:
            continue
        yield from (name.removeprefix("i2cl.") for name in names if name.startswith("i2cl."))


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_run_downwards(path):
    mine = module(path).split(".")[0]
    if not mine:
        return  # the package itself names everything, lazily
    for imported in imports(path):
        theirs = imported.split(".")[0]
        if theirs != mine and (mine, theirs) not in SIDEWAYS:
            assert place(theirs) < place(mine), f"{module(path)} may not import {imported}"


def test_the_order_is_checked_on_what_is_there():
    found = {name for path in FILES for name in imports(path)}
    assert {"errors", "hooks", "decoder", "injection", "methods.base", "cli"} <= found


def test_methods_do_not_import_each_other():
    for path in (SOURCE / "methods").glob("*.py"):
        if path.name != "__init__.py":
            others = {name for name in imports(path) if name.startswith("methods")}
            sideways = {name for name in others if not name.endswith("base")}
            assert not sideways, f"{path.name} imports {sideways}: share code in base.py or a ..._base.py"


def loaded_after(statement):
    command = [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"]
    environment = {"PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("statement", ["import i2cl", "import i2cl.cli", "from i2cl import I2CLError"])
def test_importing_is_cheap(statement):
    loaded = loaded_after(statement)
    assert "i2cl" in loaded
    assert not loaded & set(HEAVY)


def documented_data():
    """Names that are assigned to and have a string below that says what they are."""
    for path in FILES:
        body = parsed(path).body
        for node, below in pairwise(body):
            told = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if told and isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_public_names_are_there_and_documented():
    assert i2cl.__all__
    for name in i2cl.__all__:
        value = getattr(i2cl, name)
        assert value.__doc__ if callable(value) else name in documented_data(), f"{name} has no docstring"
        assert name in dir(i2cl)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = i2cl.no_such_name


def test_type_checkers_see_every_public_name():
    tree = parsed(SOURCE / "__init__.py")
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body for alias in node.names}
    assert seen == set(i2cl.__all__)


def calls(tree):
    return (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))


@pytest.mark.parametrize("path", FILES, ids=module)
def test_nothing_unsafe_and_no_prints(path):
    tree = parsed(path)
    names = {func.id for func in calls(tree) if isinstance(func, ast.Name)}
    assert not names & {"print", "eval", "exec", "breakpoint"}
    assert "torch.load(" not in path.read_text(encoding="utf-8")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
            assert not {name.split(".")[0] for name in modules} & {"pickle", "cPickle", "dill", "cloudpickle"}


def public(node, prefix=""):
    """Public functions, classes and methods below a node."""
    for child in node.body:
        defined = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if defined and not child.name.startswith("_"):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{prefix}{child.name}.")


@pytest.mark.parametrize("path", FILES, ids=module)
def test_everything_public_has_a_docstring(path):
    tree = parsed(path)
    assert ast.get_docstring(tree), f"{path.name} has no docstring"
    assert [name for name, node in public(tree) if not ast.get_docstring(node)] == []


@pytest.mark.parametrize("path", FILES, ids=module)
def test_files_are_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    name = str(path.relative_to(SOURCE))
    assert lines <= LONGEST or name in LONG, f"{name} has {lines} lines: split it"


def test_long_files_are_still_long():
    assert [name for name in LONG if len((SOURCE / name).read_text().splitlines()) <= LONGEST] == []


SCRIPTS = sorted(path for folder in ("scripts", "benchmarks") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_scripts_import_is_there(path, monkeypatch):
    for folder in ("benchmarks", "scripts", "tests"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    runpy.run_path(str(path), run_name="imported")
