"""What of vLLM was tested, where its models keep their residual writers, and what is refused, and why.

It imports nothing of vLLM, so that all of it is tested where there is none.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from i2cl.errors import I2CLError
from i2cl.version import __version__

NAME = "i2cl"  # of the plugin in ``VLLM_PLUGINS``, and of the task in a request's extra arguments

# Minor versions that the tests ran with. What it hooks is internal to vLLM and may move in any other.
TESTED = ("0.32",)

ANY = "I2CL_VLLM_ANY"  # set to 1, the environment variable that goes on with another version
WORKER = "i2cl.interfaces.vllm.engine.Worker"  # the class that vLLM adds to its workers
SLOTS = 64  # how many tasks can be in the tables unless ``additional_config`` says otherwise


class Writers(NamedTuple):
    """Where a model class of vLLM is, and its residual writers."""

    module: str  # below ``vllm.model_executor.models``
    name: str  # of the class
    blocks: str = "model.layers"  # path from the model to the list of blocks
    # path from a block to the linear layer that writes the attention output
    attention: str = "self_attn.o_proj"
    mlp: str = "mlp.down_proj"  # path from a block to the one that writes the MLP output


# By the architecture in a model's config.json. Read-only.
WRITERS: Mapping[str, Writers] = MappingProxyType(
    {
        "GPT2LMHeadModel": Writers("gpt2", "GPT2LMHeadModel", "transformer.h", "attn.c_proj", "mlp.c_proj"),
        "GemmaForCausalLM": Writers("gemma", "GemmaForCausalLM"),
        "GraniteForCausalLM": Writers("granite", "GraniteForCausalLM"),
        "LlamaForCausalLM": Writers("llama", "LlamaForCausalLM"),
        "MistralForCausalLM": Writers("mistral", "MistralForCausalLM"),
        "NemotronForCausalLM": Writers("nemotron", "NemotronForCausalLM"),
        "OPTForCausalLM": Writers(
            "opt", "OPTForCausalLM", "model.decoder.layers", "self_attn.out_proj", "fc2"
        ),
        "Phi3ForCausalLM": Writers("phi3", "Phi3ForCausalLM"),
        "Qwen2ForCausalLM": Writers("qwen2", "Qwen2ForCausalLM"),
        "Qwen3ForCausalLM": Writers("qwen3", "Qwen3ForCausalLM"),
        "StableLmForCausalLM": Writers("stablelm", "StablelmForCausalLM"),
    }
)


def require_version(version: str) -> None:
    """Refuse (I2CLError) a version of vLLM that nothing was tested with, and say how to go on anyway."""
    minor = ".".join(version.split(".")[:2])
    if minor not in TESTED and os.environ.get(ANY) != "1":
        known = ", ".join(f"{one}.*" for one in TESTED)
        cure = f"install one of these, or set {ANY}=1 to go on, and see that the start does not fail"
        raise I2CLError(f"vLLM {version} was not tested with i2cl {__version__} (tested: {known}): {cure}")


def settings_of(config: Any) -> dict[str, Any]:
    """The plugin's part of a ``VllmConfig``'s ``additional_config``, with the version, which compiled graphs
    depend on. Raises I2CLError on an unknown field, or a number of slots that is none.
    """
    whole = config.additional_config
    given = whole.get(NAME, {}) if isinstance(whole, dict) else None
    slots = given.get("slots", SLOTS) if isinstance(given, dict) else None
    known = isinstance(given, dict) and given.keys() <= {"slots", "version"}
    if not known or not isinstance(slots, int) or isinstance(slots, bool) or slots < 2:
        cure = "write {'i2cl': {'slots': 64}}"
        raise I2CLError(f"additional_config={whole!r} is none that i2cl reads: {cure}")
    return {"slots": slots, "version": __version__}


def require_supported(config: Any) -> None:
    """Refuse (I2CLError) a ``VllmConfig`` that the edit would be wrong with, for the first reason found."""
    model, parallel = config.model_config, config.parallel_config
    ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    known = ", ".join(sorted(WRITERS))
    one = "tasks are loaded by one front end into one engine: start several servers behind a balancer"
    faults = {
        f"its residual writers in vLLM are not known (those of {known} are)": model.architecture
        not in WRITERS,
        "dual-batch overlap runs halves of a batch, and the slots are those of a whole one: leave it off": (
            parallel.enable_dbo or parallel.ubatch_size > 1
        ),
        "context parallelism splits a request's tokens over ranks: leave it off": ranks > 1,
        "pipeline parallelism was not tested: use tensor parallelism": parallel.pipeline_parallel_size > 1,
        one: parallel.data_parallel_size > 1 or parallel._api_process_count > 1,  # noqa: SLF001
        "LoRA puts layers of its own around the residual writers, which then are not called: leave it off": (
            config.lora_config is not None
        ),
        "a speculator's drafts were not tested with it: leave it off": config.speculative_config is not None,
        "keys and values from outside do not tell their task: leave kv_transfer_config and offloading out": (
            config.kv_transfer_config is not None
        ),
        "it extends vLLM's workers itself: leave worker_extension_cls out": (
            parallel.worker_extension_cls not in {"", None, WORKER}
        ),
        "labels are scored by plain log-probabilities: leave logprobs_mode at raw_logprobs": (
            model.logprobs_mode != "raw_logprobs"
        ),
    }
    for reason, wrong in faults.items():
        if wrong:
            cure = f"{reason}; without i2cl in VLLM_PLUGINS vLLM runs as ever"
            raise I2CLError(f"i2cl cannot inject into {model.architecture} as it is started: {cure}")
