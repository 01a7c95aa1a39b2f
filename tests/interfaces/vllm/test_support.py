"""Supported versions and configurations, without vLLM."""

import pytest

from fitting import one_line
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
    one_line(rf"vLLM 0\.33\.0 was not tested .*{ANY_VERSION_ENV}=1", require_version, "0.33.0")
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
    one_line(reason, require_supported, vllm_config(**{field: value}))


def test_the_plugin_version_is_part_of_the_compile_key():
    assert plugin_settings(vllm_config()) == {"slots": DEFAULT_SLOTS, "version": __version__}
    given = vllm_config(additional_config={"i2cl": {"slots": 5, "version": "old"}, "other": 1})
    assert plugin_settings(given) == {"slots": 5, "version": __version__}


@pytest.mark.parametrize("given", [{"slots": 1}, {"slots": "8"}, {"slots": True}, {"slot": 8}, 8])
def test_invalid_settings_are_rejected(given):
    one_line("additional_config", plugin_settings, vllm_config(additional_config={"i2cl": given}))
