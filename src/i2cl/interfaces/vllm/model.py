"""Subclasses of vLLM's model classes that edit the output of every residual writer."""

from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from i2cl.errors import I2CLError
from i2cl.interfaces.vllm.support import WRITERS, plugin_settings
from i2cl.interfaces.vllm.tables import RowsV2, Tables


class Hooked:
    """Mixin for vLLM model classes: registers the task tables and their hooks."""

    i2cl_tables: Tables  # the model runner fills its slots before every forward pass

    def __init__(self, *, vllm_config: Any, prefix: str = "", **more: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **more)  # type: ignore[call-arg]
        config = vllm_config.model_config
        self.i2cl_tables = Tables(
            find_writers(self, type(self).__name__),
            plugin_settings(vllm_config)["slots"],
            config.get_hidden_size(),
            vllm_config.scheduler_config.max_num_batched_tokens,
        )

    def get_model_state_cls(self) -> Any:
        """Return the class that model runner V2 uses for the state of requests: its default, with slots."""
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        return type("InjectedModelState", (RowsV2, DefaultModelState), {"__module__": __name__})


def find_writers(model: Any, architecture: str) -> list[nn.Module]:
    """Return the residual writers of a vLLM model, in the order of [layer, (mha, mlp)].

    Raises I2CLError if a writer's output is not reduced over all ranks, or excludes its bias.
    """
    paths = WRITERS[architecture]
    blocks = model.get_submodule(paths.blocks)
    writers = [block.get_submodule(path) for block in blocks for path in (paths.attention, paths.mlp)]
    for writer in writers:
        if not writer.reduce_results or writer.skip_bias_add:
            raise I2CLError(
                f"{type(writer).__name__} of {architecture} returns a partial sum, which cannot be edited: "
                "serve the task with InjectionPool, or as a folded checkpoint"
            )
    return writers


@cache
def __getattr__(name: str) -> Any:
    """Create the hooked class of an architecture when vLLM's model registry imports it."""
    if name not in WRITERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    paths = WRITERS[name]
    base = getattr(import_module(f"vllm.model_executor.models.{paths.module}"), paths.name)
    return type(name, (Hooked, base), {"__module__": __name__, "__doc__": f"{paths.name} with task edits."})
