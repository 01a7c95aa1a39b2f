"""Out-of-place edits of module outputs and inputs, the only place that registers hooks.

Every hook lives inside a ``with`` block and is removed on success and on error alike
(`torch.nn.Module.register_forward_hook`,
https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn

from i2cl.models.restore import uninterrupted

Hook = Callable[[Tensor], Tensor | None]
"""Takes a tensor and returns its replacement, or None to leave it (a mere look)."""

KeywordChange = Callable[[nn.Module, dict[str, Any]], dict[str, Any]]
"""Takes a module and its keyword arguments and returns the ones it is to have."""


@uninterrupted
def _held(handles: Iterable[Any]) -> Iterator[None]:
    """Hooks, from when they are registered until the block ends."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def edit_outputs(changes: Iterable[tuple[nn.Module, Hook]]) -> AbstractContextManager[None]:
    """Replace what each module returns by ``change(output)`` while the block runs.
    Modules that return a tuple (attention) have its first element replaced. The change must build a new
    tensor: editing in place would break autograd and the residual stream.
    """
    return _held(module.register_forward_hook(_output_hook(change)) for module, change in changes)


def edit_inputs(changes: Iterable[tuple[nn.Module, Hook]]) -> AbstractContextManager[None]:
    """Replace the first argument of each module, or ``hidden_states``, by ``change(argument)``."""
    return _held(
        module.register_forward_pre_hook(_input_hook(change), with_kwargs=True) for module, change in changes
    )


def add_to_outputs(
    changes: Iterable[tuple[nn.Module, Callable[[Tensor], Tensor]]],
) -> AbstractContextManager[None]:
    """Add ``change(argument)`` of its first argument to what each module returns while the block runs."""
    return _held(module.register_forward_hook(_adding_hook(change)) for module, change in changes)


def edit_keywords(changes: Iterable[tuple[nn.Module, KeywordChange]]) -> AbstractContextManager[None]:
    """Replace the keyword arguments of each module by ``change(module, keywords)`` while the block runs."""
    return _held(
        module.register_forward_pre_hook(_keyword_hook(change), with_kwargs=True)
        for module, change in changes
    )


def _adding_hook(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def hook(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + change(args[0])

    return hook


def _keyword_hook(change: KeywordChange) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, change(module, kwargs)

    return hook


def _output_hook(change: Hook) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        changed = change(first)
        if changed is None:
            return None
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return hook


def _input_hook(change: Hook) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = change(args[0] if args else kwargs["hidden_states"])
        if changed is None:
            return None
        if args:
            return (changed, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": changed}

    return hook
