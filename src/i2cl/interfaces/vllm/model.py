"""vLLM's model classes with an edit behind every residual writer."""

from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from i2cl.errors import I2CLError
from i2cl.interfaces.vllm.support import WRITERS, settings_of
from i2cl.interfaces.vllm.tables import RowsV2, Tables


class Hooked:
    """What is put in front of a class of vLLM."""

    i2cl_tables: Tables  # what a runner fills before every forward pass

    def __init__(self, *, vllm_config: Any, prefix: str = "", **more: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **more)  # type: ignore[call-arg]
        config = vllm_config.model_config
        self.i2cl_tables = Tables(
            found_writers(self, type(self).__name__),
            settings_of(vllm_config)["slots"],
            config.get_hidden_size(),
            vllm_config.scheduler_config.max_num_batched_tokens,
        )

    def get_model_state_cls(self) -> Any:
        """What model runner V2 asks for the requests' state: its default one, with the slots."""
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        return type("InjectedModelState", (RowsV2, DefaultModelState), {"__module__": __name__})


def found_writers(model: Any, architecture: str) -> list[nn.Module]:
    """The residual writers of a model of vLLM, in the order of [layer, (mha, mlp)]. Raises I2CLError if what
    they put out is not yet the sum over all ranks.
    """
    row = WRITERS[architecture]
    blocks = model.get_submodule(row.blocks)
    writers = [block.get_submodule(path) for block in blocks for path in (row.attention, row.mlp)]
    for writer in writers:
        if not writer.reduce_results or writer.skip_bias_add:
            cure = "serve it with InjectionPool, or folded"
            raise I2CLError(f"a {type(writer).__name__} of {architecture} puts out a part of a sum: {cure}")
    return writers


@cache
def __getattr__(name: str) -> Any:
    """The hooked class of an architecture, as vLLM's registry asks for it."""
    if name not in WRITERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    row = WRITERS[name]
    base = getattr(import_module(f"vllm.model_executor.models.{row.module}"), row.name)
    return type(name, (Hooked, base), {"__module__": __name__, "__doc__": f"{row.name}, edited."})
