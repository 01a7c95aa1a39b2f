"""Entry point of the plugin, and the complete list of vLLM methods that it patches.

vLLM calls `register` (group ``vllm.general_plugins``) in the front end, the engine core and every worker.
"""

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

from i2cl.errors import I2CLError
from i2cl.interfaces.vllm.support import NAME, SUBLAYERS, require_version


def register() -> None:
    """Install the plugin if ``VLLM_PLUGINS`` contains its name; further calls have no effect.

    vLLM's default is to load every installed plugin; this one has to be enabled explicitly. Raises I2CLError
    if this version of vLLM was not tested.
    """
    import torch
    import vllm
    from vllm import envs

    if NAME not in (envs.VLLM_PLUGINS or ()):
        return
    require_version(vllm.__version__)
    # vLLM's attention uses AMX tiles without Linux's permission: a short first prompt, such as the canary's,
    # ends the process with SIGILL
    torch.cpu._init_amx()  # noqa: SLF001
    for architecture in SUBLAYERS:
        vllm.ModelRegistry.register_model(architecture, f"i2cl.interfaces.vllm.worker:{architecture}")
    _install()


@cache
def _install() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from i2cl.interfaces.vllm import engine, frontend, worker

    refusal = type("TaskError", (VLLMValidationError, I2CLError), {})  # vLLM's server answers 400
    _patch(SamplingParams, "verify", partial(frontend.wrap_verify, refusal=refusal))  # admits tasks
    _patch(Executor, "__init__", engine.wrap_executor)  # checks the configuration
    _patch(Executor, "sleep", engine.wrap_sleep)  # keeps the tables through sleep mode
    _patch(Executor, "wake_up", engine.wrap_wake_up)
    _patch(EngineCore, "get_supported_tasks", engine.wrap_supported_tasks)  # runs the canary
    _patch(EngineCore, "collective_rpc", engine.wrap_rpc)  # allocates slots
    _patch(Request, "from_engine_core_request", engine.wrap_request)  # salts the prefix cache
    _patch(GPUModelRunner, "_model_forward", worker.wrap_model_forward)  # slots for model runner V1


@cache
def install_in_server() -> None:
    """Patch the module that only vLLM's HTTP server imports."""
    from vllm.entrypoints.serve.engine.serving import BaseServing

    from i2cl.interfaces.vllm import frontend

    _patch(BaseServing, "_check_model", frontend.wrap_check_model)  # requests that would ignore their task


def _patch(owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    """Replace a method by ``wrap``, which gets the original method as its first argument."""
    attribute = vars(owner)[name]
    is_classmethod = isinstance(attribute, classmethod)
    original = attribute.__func__ if is_classmethod else attribute

    @wraps(original)  # the engine core decodes front-end calls by this signature
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrap(original, *args, **kwargs)

    setattr(owner, name, classmethod(patched) if is_classmethod else patched)
