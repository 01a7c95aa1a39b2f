"""Supported vLLM versions, architectures and configurations, and the plugin's keys in a request.

Does not import vLLM, so it can be tested without it.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from i2cl.errors import I2CLError
from i2cl.version import __version__

NAME = "i2cl"  # plugin name in ``VLLM_PLUGINS``, and the key of the task in a request's extra arguments
DIGEST = "i2cl_digest"  # key of the digest of the task's edit, set by the front end only

# Minor versions that pass the tests. The patched methods are internal to vLLM and may change in any other.
TESTED_VERSIONS = ("0.32",)

ANY_VERSION_ENV = "I2CL_VLLM_ANY"  # environment variable: 1 accepts an untested version
DEFAULT_SLOTS = 64  # maximum number of loaded tasks


class Sublayers(NamedTuple):
    """Location of a vLLM model class and of its sublayers."""

    module: str  # in ``vllm.model_executor.models``
    name: str  # class name
    blocks: str = "model.layers"  # path from the model to the list of blocks
    attention: str = "self_attn.o_proj"  # path from a block to its attention output projection
    mlp: str = "mlp.down_proj"  # path from a block to its MLP output projection


# Keys: architecture names in config.json.
SUBLAYERS: Mapping[str, Sublayers] = MappingProxyType(
    {
        "GPT2LMHeadModel": Sublayers("gpt2", "GPT2LMHeadModel", "transformer.h", "attn.c_proj", "mlp.c_proj"),
        "GemmaForCausalLM": Sublayers("gemma", "GemmaForCausalLM"),
        "GraniteForCausalLM": Sublayers("granite", "GraniteForCausalLM"),
        "LlamaForCausalLM": Sublayers("llama", "LlamaForCausalLM"),
        "MistralForCausalLM": Sublayers("mistral", "MistralForCausalLM"),
        "NemotronForCausalLM": Sublayers("nemotron", "NemotronForCausalLM"),
        "OPTForCausalLM": Sublayers(
            "opt", "OPTForCausalLM", "model.decoder.layers", "self_attn.out_proj", "fc2"
        ),
        "Phi3ForCausalLM": Sublayers("phi3", "Phi3ForCausalLM"),
        "Qwen2ForCausalLM": Sublayers("qwen2", "Qwen2ForCausalLM"),
        "Qwen3ForCausalLM": Sublayers("qwen3", "Qwen3ForCausalLM"),
        "StableLmForCausalLM": Sublayers("stablelm", "StablelmForCausalLM"),
    }
)


def require_version(version: str) -> None:
    """Raise I2CLError for an untested version of vLLM, unless I2CL_VLLM_ANY=1 is set."""
    minor = ".".join(version.split(".")[:2])
    if minor not in TESTED_VERSIONS and os.environ.get(ANY_VERSION_ENV) != "1":
        tested = ", ".join(f"{prefix}.*" for prefix in TESTED_VERSIONS)
        raise I2CLError(
            f"vLLM {version} was not tested with i2cl {__version__} (tested: {tested}): install a tested "
            f"version, or set {ANY_VERSION_ENV}=1 to try this one"
        )


def plugin_settings(config: Any) -> dict[str, Any]:
    """Return the plugin's settings from a ``VllmConfig``'s ``additional_config``.

    The plugin's version is included because compiled graphs depend on it. Raises I2CLError on an unknown
    field or an invalid number of slots.
    """
    additional = config.additional_config
    settings = additional.get(NAME, {}) if isinstance(additional, dict) else None
    slots = settings.get("slots", DEFAULT_SLOTS) if isinstance(settings, dict) else None
    known = isinstance(settings, dict) and settings.keys() <= {"slots", "version"}
    # the canary needs two slots
    if not known or not isinstance(slots, int) or isinstance(slots, bool) or slots < 2:
        raise I2CLError(
            f"additional_config={additional!r} is not valid for i2cl: write {{'i2cl': {{'slots': 64}}}} "
            "(at least 2 slots)"
        )
    return {"slots": slots, "version": __version__}


def require_supported(config: Any) -> None:
    """Raise I2CLError, with the first reason found, if a ``VllmConfig`` is not supported by the plugin."""
    model, parallel = config.model_config, config.parallel_config
    ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    checks = (
        (model.architecture in SUBLAYERS, f"unknown sublayers (supported: {', '.join(sorted(SUBLAYERS))})"),
        (
            not parallel.enable_dbo and parallel.ubatch_size <= 1,
            "dual-batch overlap splits batches, which the slots do not follow: disable it",
        ),
        (ranks == 1, "context parallelism splits a request's tokens over ranks: disable it"),
        (parallel.pipeline_parallel_size == 1, "pipeline parallelism was not tested: use tensor parallelism"),
        (
            parallel.data_parallel_size == 1 and parallel._api_process_count == 1,  # noqa: SLF001
            "tasks need one front end and one engine: start several servers behind a load balancer",
        ),
        (
            config.lora_config is None,
            "LoRA replaces the sublayers by its own layers, which bypass the edit: disable it",
        ),
        (config.speculative_config is None, "speculative decoding (drafts) was not tested: disable it"),
        (
            config.kv_transfer_config is None,
            "transferred KV blocks do not identify their task: leave kv_transfer_config and offloading unset",
        ),
        (
            model.logprobs_mode == "raw_logprobs",
            "label scores need unmodified log-probabilities: leave logprobs_mode at raw_logprobs",
        ),
    )
    for supported, problem in checks:
        if not supported:
            raise I2CLError(
                f"i2cl cannot serve {model.architecture} with this configuration: {problem} (or remove i2cl "
                "from VLLM_PLUGINS)"
            )


def digest_of(params: Any) -> str | None:
    """Return the digest of the task's edit in a request's ``SamplingParams``, or None for a plain request."""
    extra: Mapping[str, Any] = getattr(params, "extra_args", None) or {}
    return extra.get(DIGEST)
