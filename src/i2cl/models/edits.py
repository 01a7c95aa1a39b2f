"""Edits that read or change the outputs of a decoder's layers, and their hooks.

`AffineEdit` is the edit of an injection. Every hook is removed at the end of its ``with`` block, also on
errors (`torch.nn.Module.register_forward_hook`,
https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html).
Source: paper, section "Context Injection", which changes the outputs of the sublayers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from i2cl.models.batching import Batch

# Returns the replacement of a tensor, or None to keep it.
Hook = Callable[[Tensor], Tensor | None]


@contextmanager
def registered(handles: Iterable[Any]) -> Iterator[None]:
    """Keep hooks registered while the block runs, then remove them by their handles."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def edit_outputs(changes: Iterable[tuple[nn.Module, Hook]]) -> AbstractContextManager[None]:
    """Replace each module's output by ``change(output)`` while the block runs.

    If the output is a tuple, as of attention modules, its first element is replaced. ``change`` must return a
    new tensor: editing in place would break autograd and the residual stream.
    """
    return registered(
        module.register_forward_hook(partial(_replace_output, change)) for module, change in changes
    )


def edit_inputs(changes: Iterable[tuple[nn.Module, Hook]]) -> AbstractContextManager[None]:
    """Replace the first argument of each module, or ``hidden_states``, by ``change(argument)``."""
    return registered(
        module.register_forward_pre_hook(partial(_replace_input, change), with_kwargs=True)
        for module, change in changes
    )


def add_to_outputs(
    changes: Iterable[tuple[nn.Module, Callable[[Tensor], Tensor]]],
) -> AbstractContextManager[None]:
    """Add ``change(argument)``, given the module's first argument, to each module's output in the block."""
    return registered(
        module.register_forward_hook(partial(_add_to_output, change)) for module, change in changes
    )


class Replay:
    """Caches the output of a decoder's lower blocks, batch by batch, so that later passes can skip them.

    Beyond the paper: the last step of a fit runs the top of a model many times over the same demonstrations.
    Between passes the lower blocks must not change, and passes must not fill key-value caches.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        #: the lower blocks; empty, so nothing is skipped, if Accelerate or others replaced a ``forward``
        self.blocks = [] if any("forward" in block.__dict__ for block in blocks) else list(blocks)
        #: residual stream after the last of them, for each batch
        self.streams: dict[tuple[Any, ...], Float[Tensor, "lines tokens d"]] = {}
        self._tuple_lengths: dict[int, int] = {}  # by block: length of the output, 0 if it is not a tuple

    @contextmanager
    def during(self, batch: Batch) -> Iterator[None]:
        """Record the blocks' output in a pass over a batch, or replay it."""
        shape = tuple(batch.input_ids.shape)
        key = (batch.rows, shape, tuple(batch.input_ids.flatten().tolist()))
        with ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                if key in self.streams:
                    cached = self.streams[key] if index == len(self.blocks) - 1 else None
                    block.__dict__["forward"] = partial(self._skip_block, index, cached)
                    stack.callback(block.__dict__.pop, "forward")
                else:
                    handle = block.register_forward_hook(partial(self._record, index, key))
                    stack.callback(handle.remove)
            yield

    def _skip_block(self, index: int, cached: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Replacement for a block's ``forward``: return the cached stream, or the input if there is none."""
        stream = cached if cached is not None else args[0] if args else kwargs["hidden_states"]
        length = self._tuple_lengths[index]
        return (stream, *[None] * (length - 1)) if length else stream

    def _record(self, index: int, key: tuple[Any, ...], _module: nn.Module, _args: Any, output: Any) -> None:
        """Forward hook that remembers the form of a block's output, and the stream after the last block."""
        self._tuple_lengths[index] = len(output) if isinstance(output, tuple) else 0
        if index == len(self.blocks) - 1:
            stream: Tensor = output[0] if isinstance(output, tuple) else output
            self.streams[key] = stream.detach().clone()  # some blocks add in place


def _add_to_output(
    change: Callable[[Tensor], Tensor], _module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    return output + change(args[0])


def _replace_output(change: Hook, _module: nn.Module, _args: Any, output: Any) -> Any:
    if not isinstance(output, tuple):
        return change(output)
    changed = change(output[0])
    return None if changed is None else (changed, *output[1:])


def _replace_input(change: Hook, _module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    changed = change(args[0] if args else keywords["hidden_states"])
    if changed is None:
        return None
    return ((changed, *args[1:]), keywords) if args else (args, keywords | {"hidden_states": changed})


# Input or output of a layer; a line is a row of the batch, or all rows of a packed batch.
States = Float[Tensor, "lines tokens d"]
# Modules that an edit hooks: the two sublayers of a layer, or the block.
HookPoint = Literal["sublayers", "hidden"]
AnyHookPoint = HookPoint | Literal["embeddings"]
# Returns (layer, index, module) of every module of a kind: `Decoder.hook_points`.
FindModules = Callable[[AnyHookPoint], list[tuple[int, int, nn.Module]]]


class Edit:
    """Changes the outputs of a decoder's layers. Subclasses override `output` and, if needed, `enter`."""

    #: the two sublayers (index 0 attention, 1 MLP), the block output (index 0), or the tokens' input
    #: embeddings (layer 0, index 0)
    hook_point: AnyHookPoint = "sublayers"
    sees_input: bool = False  #: whether `enter` is called
    #: whether it acts on every token in the same way, so that rows may be split or forked
    everywhere: bool = False

    def enter(self, layer: int, residual: States) -> None:
        """Read the residual stream that enters a block."""

    def output(self, layer: int, index: int, output: States, batch: Batch) -> States | None:
        """Return the replacement of ``output`` as a new tensor, or None to keep it."""
        raise NotImplementedError


class AffineEdit(Edit):
    """Outputs ``scale * output + shift`` instead of ``output`` at every token of a query.

    The scale stays in float32 on models in lower precision, where a scale of 1.003 would round to 1.

    Args:
        shift: added to the output of each sublayer. Gradients flow to it and to ``scale`` if enabled.
        scale: factor of the output of each sublayer.
        hook_point: whose outputs change; with ``"hidden"`` the sublayers axis has length 1.
        tasks: index into ``shift`` and ``scale`` for each query; None if all queries share them.
    """

    hook_point: HookPoint
    everywhere = True

    def __init__(
        self,
        shift: Float[Tensor, "*tasks layers sublayers d"],
        scale: Float[Tensor, "*tasks layers sublayers"],
        hook_point: HookPoint = "sublayers",
        tasks: Int[Tensor, " queries"] | None = None,
    ) -> None:
        self.shift = shift
        self.scale = scale
        self.hook_point = hook_point
        self.tasks = tasks
        # Unbound once: indexing at every hook point would allocate a full-size gradient each time.
        self._shifts = [layer.unbind(-2) for layer in shift.unbind(-3)]
        self._scales = [layer.unbind(-1) for layer in scale.unbind(-2)]
        self._constants: dict[tuple[int, int, torch.device, torch.dtype], tuple[Tensor, float]] = {}
        self._batch: Batch | None = None  # the batch of `_batch_tasks`
        self._batch_tasks = torch.empty(0, dtype=torch.long)

    @classmethod
    def linear(
        cls,
        values: Float[Tensor, "layers sublayers d"],
        coefficients: Float[Tensor, "layers sublayers 2"],
        hook_point: HookPoint = "sublayers",
    ) -> "AffineEdit":
        """Return the edit ``lambda * v + beta * output`` of the paper; coefficients are (lambda, beta)."""
        strength, scale = coefficients.unbind(-1)
        return cls(strength[..., None] * values, scale, hook_point)

    def output(self, layer: int, index: int, output: States, batch: Batch | None = None) -> States:
        """Return the edited output. ``batch`` is needed if queries have different tasks."""
        if self.tasks is None and not self.scale.requires_grad:
            constant, factor = self._constant(layer, index, output)
            return torch.add(constant, output, alpha=factor).to(output.dtype)  # the only cost of an injection
        shift, scale = self._shifts[layer][index], self._scales[layer][index]
        if self.tasks is not None and batch is not None:
            # one shift per token of the single line of a packed batch; otherwise one per line
            tasks, new_axis = self._tasks_of(self.tasks, batch), 0 if batch.packed else 1
            shift = shift.index_select(0, tasks).unsqueeze(new_axis)
            scale = scale.index_select(0, tasks)[:, None].unsqueeze(new_axis)
        edited: Tensor = torch.addcmul(shift.to(output.device), scale.to(output.device), output)
        return edited.to(output.dtype)

    def _constant(self, layer: int, index: int, output: Tensor) -> tuple[Float[Tensor, " d"], float]:
        """Return shift and scale on the output's device, cached unless the shift is trained."""
        key = layer, index, output.device, output.dtype
        if (constant := self._constants.get(key)) is not None:
            return constant
        dtype = output.dtype if _keeps_alpha(output.device, output.dtype) else torch.float32
        constant = self._shifts[layer][index].to(output.device, dtype), self._scales[layer][index].item()
        if not self.shift.requires_grad:  # do not keep a graph beyond its pass
            self._constants[key] = constant
        return constant

    def _tasks_of(self, tasks: Int[Tensor, " queries"], batch: Batch) -> Int[Tensor, " lines_or_tokens"]:
        """Return the task of each line, or of each token of a packed batch; computed once per batch."""
        if self._batch is not batch:
            batch_tasks = tasks[list(batch.rows)]
            if batch.packed:
                end = batch.first.new_tensor([batch.input_ids.shape[1]])
                batch_tasks = batch_tasks.repeat_interleave(torch.diff(batch.first, append=end))
            self._batch, self._batch_tasks = batch, batch_tasks
        return self._batch_tasks


@cache
def _keeps_alpha(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether ``torch.add`` uses alpha unrounded; CPU kernels round it to lower precisions."""
    ones = torch.ones(1, device=device, dtype=dtype)
    return bool(torch.add(-ones, ones, alpha=1.0001) != 0)


class RecordMean(Edit):
    """Applies another edit, and records the mean state of each query where it enters some blocks.

    The mean is over all tokens but the first, whose state is an outlier in many LLMs (Sun et al. 2024,
    https://arxiv.org/abs/2402.17762).

    Attributes:
        states: mean states by layer, float32 on the CPU, one row per query.
    """

    sees_input = True

    def __init__(self, edit: Edit, layers: Collection[int], queries: int, d: int) -> None:
        self.edit = edit
        self.hook_point = edit.hook_point
        self.states = {layer: torch.zeros(queries, d) for layer in layers}
        self._residual = torch.empty(0)

    def enter(self, layer: int, residual: States) -> None:
        """Keep the residual stream until its batch is known."""
        if self.edit.sees_input:
            self.edit.enter(layer, residual)
        if layer in self.states:
            self._residual = residual

    def output(self, layer: int, index: int, output: States, batch: Batch) -> States | None:
        """Record the states that entered the layer, and return the edited output."""
        if layer in self.states and index == 0:
            tokens = torch.arange(output.shape[1], device=output.device)
            counted = (tokens > 0) & (tokens <= batch.last.to(output.device)[:, None])
            shares = counted / counted.sum(1, keepdim=True).clamp(min=1)
            residual = self._residual.to(output.device).float()
            self.states[layer][list(batch.rows)] = torch.einsum("btd,bt->bd", residual, shares.float()).cpu()
        return self.edit.output(layer, index, output, batch)


class CaptureToken(Edit):
    """Copies the output at one token of each row; ``outputs`` has one (batch x d) tensor per hook point."""

    def __init__(self, hook_point: HookPoint, at: Int[Tensor, " batch"]) -> None:
        self.hook_point = hook_point
        self.at = at
        self.outputs: list[Tensor] = []

    def output(self, _layer: int, _index: int, output: States, _batch: Batch) -> None:
        """Copy the output."""
        row = torch.arange(len(output), device=output.device)
        self.outputs.append(
            output[row, self.at.to(output.device)]
        )  # a copy, also where the block adds in place


@contextmanager
def editing(
    edit: Edit | None, blocks: Sequence[nn.Module], find_modules: FindModules, batch: Batch
) -> Iterator[None]:
    """Apply an edit to a model while the block runs.

    Args:
        edit: the edit; None changes nothing.
        blocks: the decoder blocks.
        find_modules: finds the modules of the edit's hook point.
        batch: the batch that will run.
    """
    if edit is None:
        yield
        return
    input_hooks = [
        (block, partial(edit.enter, layer)) for layer, block in enumerate(blocks) if edit.sees_input
    ]
    output_hooks = [
        (module, partial(_edit_output, edit, layer, index, batch))
        for layer, index, module in find_modules(edit.hook_point)
    ]
    with edit_inputs(input_hooks), edit_outputs(output_hooks):
        yield


def _edit_output(edit: Edit, layer: int, index: int, batch: Batch, output: Tensor) -> Tensor | None:
    """Call ``edit.output`` with one line per row of the batch: OPT's ``fc2`` merges lines and tokens."""
    lines, width = batch.input_ids.shape
    edited = edit.output(layer, index, output.view(lines, width, -1), batch)
    return None if edited is None else edited.view(output.shape)
