"""Where vLLM finds the plugin, and the list of all that it puts in place of vLLM's own.

Group ``vllm.general_plugins``: vLLM calls `register` in the front end, the engine core and every worker.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from i2cl.errors import I2CLError
from i2cl.interfaces.vllm.support import NAME, WRITERS, require_version

_MARK = "_i2cl_wraps"


def register() -> None:
    """Install the plugin, once a process, where ``VLLM_PLUGINS`` names it, and not wherever both packages
    are. Raises I2CLError if this version of vLLM was not tested.
    """
    import vllm
    from vllm import envs

    if NAME not in (envs.VLLM_PLUGINS or ()):
        return
    require_version(vllm.__version__)
    for architecture in WRITERS:
        vllm.ModelRegistry.register_model(architecture, f"i2cl.interfaces.vllm.model:{architecture}")
    _install()


def _install() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from i2cl.interfaces.vllm import engine, frontend, tables

    refusal = type("TaskError", (VLLMValidationError, I2CLError), {})  # vLLM's server makes a 400 of it
    _put(SamplingParams, "verify", partial(frontend.wrap_verify, refusal=refusal))  # an unknown task
    _put(Executor, "__init__", engine.wrap_executor)  # refusals, and the class that is added to workers
    _put(Executor, "sleep", engine.wrap_sleep)  # keeps the tables through sleep mode
    _put(Executor, "wake_up", engine.wrap_wake_up)
    _put(EngineCore, "get_supported_tasks", engine.wrap_supported_tasks)  # the canary
    _put(EngineCore, "collective_rpc", engine.wrap_rpc)  # slots
    _put(Request, "from_engine_core_request", engine.wrap_request)  # cache salt
    _put(GPUModelRunner, "_model_forward", tables.forward_v1)  # rows of model runner V1; V2 asks the model


def install_in_server() -> None:
    """Install what only vLLM's HTTP server needs, whose modules other processes do not load."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.serve.engine.serving import BaseServing
    from vllm.exceptions import VLLMValidationError

    from i2cl.interfaces.vllm import frontend

    refusal = type("BeamError", (VLLMValidationError, I2CLError), {})
    for body in (CompletionRequest, ChatCompletionRequest):
        _put(body, "to_beam_search_params", partial(frontend.wrap_beam_search, refusal=refusal))
    _put(BaseServing, "_check_model", frontend.wrap_check_model)  # tasks where vLLM would ignore them


def _put(owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    """Call ``wrap`` in place of a method of vLLM, with that in front of what it is given; once."""
    attribute = vars(owner)[name]
    classmethod_ = isinstance(attribute, classmethod)
    original = attribute.__func__ if classmethod_ else attribute
    if not hasattr(original, _MARK):

        @wraps(original)  # by whose signature the engine core takes calls of front ends
        def fresh(*args: Any, **more: Any) -> Any:
            return wrap(original, *args, **more)

        setattr(fresh, _MARK, original)
        setattr(owner, name, classmethod(fresh) if classmethod_ else fresh)
