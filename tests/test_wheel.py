"""The wheel contains the whole package, and works with only its dependencies installed."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from i2cl.version import __version__

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
DEMANDED = {"models/reference/model.safetensors", "tasks/builtin/tickets.train.jsonl", "py.typed"}
DEMANDED |= {"tasks/builtin/sst2.toml", "experiments/builtin/main.toml", "experiments/report/report.html.j2"}
EXTRAS = "datasets accelerate peft matplotlib sklearn scipy bitsandbytes ray gguf xllamacpp"
WITHOUT_EXTRAS = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS.split()!r}))
from i2cl.interfaces.cli import main
main()
"""

pytestmark = pytest.mark.skipif(
    find_spec("hatchling") is None,
    reason="hatchling, which builds wheels, is not installed (make test-wheel)",
)


def stdout(*words, cwd, environment=None):
    """Run a program that must succeed, by default without PYTHONPATH, and return its stdout."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": cwd, "env": environment or alone, "capture_output": True, "text": True}
    done = subprocess.run([str(word) for word in words], check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    stdout(*pip, "--wheel-dir", folder, ROOT, cwd=folder, environment=os.environ)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Python of an environment with the installed wheel and its dependencies, but not the source tree."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder, symlinks=True)
    result = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", result, "install", "--quiet", "--no-deps"]
    stdout(*pip, wheel, cwd=folder)
    site = stdout(result, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return result


def test_the_wheel_carries_every_file_of_the_package_and_the_licence(wheel):
    with zipfile.ZipFile(wheel) as held:
        names = set(held.namelist())
        metadata = held.read(f"i2cl-{__version__}.dist-info/METADATA").decode()
    inside = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*") if path.is_file()}
    assert {name for name in inside if "__pycache__" not in name} <= names
    assert {f"i2cl/{name}" for name in DEMANDED} <= names
    assert f"i2cl-{__version__}.dist-info/licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in metadata


def test_the_wheel_predicts_without_extras_and_without_assertions(python):
    where = stdout(python, "-c", "import i2cl; print(i2cl.__file__, *i2cl.__all__)", cwd=python.parent)
    assert where.startswith(str(python.parents[1]))
    assert stdout(python.with_name("i2cl"), "--version", cwd=python.parent) == f"{__version__}\n"
    out = stdout(python, "-O", "-c", WITHOUT_EXTRAS, "check", "reference", cwd=python.parent)
    assert "passed       True" in out
