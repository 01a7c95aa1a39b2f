"""Edits that read or change the outputs of a decoder's layers, and their hooks.

`AffineEdit` is the edit of an injection. Every hook is removed at the end of its ``with`` block, also on
errors (`torch.nn.Module.register_forward_hook`,
https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html).
Source: paper, section "Context Injection", which changes the outputs of the sublayers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
def held(handles: Iterable[Any]) -> Iterator[None]:
    """Keep hooks registered while the block runs."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def edit_outputs(changes: Iterable[tuple[nn.Module, Hook]]) -> AbstractContextManager[None]:
    """Replace each module's output by ``change(output)`` while the block runs.

    Of a tuple (attention), the first element is replaced. ``change`` must return a new tensor: editing in
    place would break autograd and the residual stream.
    """
    return held(module.register_forward_hook(partial(_with_output, change)) for module, change in changes)


def edit_inputs(changes: Iterable[tuple[nn.Module, Hook]]) -> AbstractContextManager[None]:
    """Replace the first argument of each module, or ``hidden_states``, by ``change(argument)``."""
    return held(
        module.register_forward_pre_hook(partial(_with_input, change), with_kwargs=True)
        for module, change in changes
    )


def add_to_outputs(
    changes: Iterable[tuple[nn.Module, Callable[[Tensor], Tensor]]],
) -> AbstractContextManager[None]:
    """Add ``change(argument)`` of the first argument to each module's output while the block runs."""
    return held(module.register_forward_hook(partial(_plus, change)) for module, change in changes)


class Replay:
    """Caches the output of a decoder's lower blocks, batch by batch, so that later passes can skip them.

    Beyond the paper: the last step of a fit takes many passes of a model's upper end over the same
    demonstrations. The owner must keep the lower blocks unchanged between passes, and must not fill
    key-value caches.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        #: lower blocks; empty if a ``forward`` is replaced already, for example by Accelerate
        self.blocks = [] if any("forward" in block.__dict__ for block in blocks) else list(blocks)
        #: residual stream after the last of them, for each batch
        self.kept: dict[tuple[Any, ...], Float[Tensor, "lines tokens d"]] = {}
        self._tuples: dict[int, int] = {}

    @contextmanager
    def during(self, batch: Batch) -> Iterator[None]:
        """Record the blocks' output in a pass over a batch, or replay it."""
        shape = tuple(batch.input_ids.shape)
        key = (batch.rows, shape, tuple(batch.input_ids.flatten().tolist()))
        with ExitStack() as stack:
            for place, block in enumerate(self.blocks):
                if key in self.kept:
                    given = self.kept[key] if place == len(self.blocks) - 1 else None
                    block.__dict__["forward"] = partial(self._skipped, place, given)
                    stack.callback(block.__dict__.pop, "forward")
                else:
                    handle = block.register_forward_hook(partial(self._keep, place, key))
                    stack.callback(handle.remove)
            yield

    def _skipped(self, place: int, given: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Return the incoming or the cached residual stream, in the form of the block's output."""
        stream = given if given is not None else args[0] if args else kwargs["hidden_states"]
        length = self._tuples[place]
        return (stream, *[None] * (length - 1)) if length else stream

    def _keep(self, place: int, key: tuple[Any, ...], _module: nn.Module, _args: Any, output: Any) -> None:
        self._tuples[place] = len(output) if isinstance(output, tuple) else 0
        if place == len(self.blocks) - 1:
            stream: Tensor = output[0] if isinstance(output, tuple) else output
            self.kept[key] = stream.detach().clone()  # some blocks add in place


def _plus(
    change: Callable[[Tensor], Tensor], _module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    return output + change(args[0])


def _with_output(change: Hook, _module: nn.Module, _args: Any, output: Any) -> Any:
    if not isinstance(output, tuple):
        return change(output)
    changed = change(output[0])
    return None if changed is None else (changed, *output[1:])


def _with_input(change: Hook, _module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    changed = change(args[0] if args else keywords["hidden_states"])
    if changed is None:
        return None
    return ((changed, *args[1:]), keywords) if args else (args, keywords | {"hidden_states": changed})


# Input or output of a layer; a line is a row of the batch, or all rows of a packed batch.
States = Float[Tensor, "lines tokens d"]
# Modules that an edit hooks: the two sublayers of a layer, or the block.
HookPoint = Literal["sublayers", "hidden"]
AnyHookPoint = HookPoint | Literal["embeddings"]
Places = Callable[[AnyHookPoint], list[tuple[int, int, nn.Module]]]  # layer, index and module of each kind


class Edit:
    """Changes the outputs of a decoder's layers. Subclasses override `output` and, if needed, `enter`."""

    #: the two sublayers (index 0 attention, 1 MLP), the block output (index 0), or the tokens' input
    #: embeddings (layer 0, index 0)
    hook_point: AnyHookPoint = "sublayers"
    sees_input: bool = False  #: whether `enter` is called
    #: whether it acts on every token in the same way, so that a row may run in parts or forked
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
        shift: added to the output of each sublayer; with ``tasks`` one for each task. Gradients flow to it
            and to ``scale`` if enabled.
        scale: factor of the output of each sublayer.
        hook_point: whose outputs change; with ``"hidden"`` the sublayers axis has length 1.
        tasks: index of each query's task; None if all queries share one.
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
        self._batch: Batch | None = None  # the batch of `_owners`
        self._owners = torch.empty(0, dtype=torch.long)

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
            owners, across = self._owners_of(self.tasks, batch), 0 if batch.packed else 1
            shift = shift.index_select(0, owners).unsqueeze(across)
            scale = scale.index_select(0, owners)[:, None].unsqueeze(across)
        mixed: Tensor = torch.addcmul(shift.to(output.device), scale.to(output.device), output)
        return mixed.to(output.dtype)

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

    def _owners_of(self, tasks: Int[Tensor, " queries"], batch: Batch) -> Int[Tensor, " owners"]:
        """Return the task of each row, or of each token of a packed batch."""
        if self._batch is not batch:
            owners = tasks[list(batch.rows)]
            if batch.packed:
                end = batch.first.new_tensor([batch.input_ids.shape[1]])
                owners = owners.repeat_interleave(torch.diff(batch.first, append=end))
            self._batch, self._owners = batch, owners
        return self._owners


@cache
def _keeps_alpha(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether ``torch.add`` uses alpha unrounded; CPU kernels round it to lower precisions."""
    one = torch.ones(1, device=device, dtype=dtype)
    return bool(torch.add(-one, one, alpha=1.0001) != 0)


class Keep(Edit):
    """Copies the output at one token of each row; ``kept`` has one (batch x d) tensor per sublayer."""

    def __init__(self, hook_point: HookPoint, at: Int[Tensor, " batch"]) -> None:
        self.hook_point = hook_point
        self.at = at
        self.kept: list[Tensor] = []

    def output(self, _layer: int, _index: int, output: States, _batch: Batch) -> None:
        """Copy the output."""
        row = torch.arange(len(output), device=output.device)
        self.kept.append(output[row, self.at.to(output.device)])  # a copy, also where the block adds in place


@contextmanager
def editing(edit: Edit | None, blocks: Sequence[nn.Module], places: Places, batch: Batch) -> Iterator[None]:
    """Apply an edit to a model while the block runs."""
    if edit is None:
        yield
        return
    looks = [(block, partial(edit.enter, layer)) for layer, block in enumerate(blocks) if edit.sees_input]
    changes = [
        (module, partial(_changed, edit, layer, at, batch)) for layer, at, module in places(edit.hook_point)
    ]
    with edit_inputs(looks), edit_outputs(changes):
        yield


def _changed(edit: Edit, layer: int, index: int, batch: Batch, output: Tensor) -> Tensor | None:
    rows, width = batch.input_ids.shape
    changed = edit.output(layer, index, output.view(rows, width, -1), batch)  # OPT's fc2 is 2-D
    return None if changed is None else changed.view(output.shape)
