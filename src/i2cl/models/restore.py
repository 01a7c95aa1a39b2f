"""Lock and freeze a model for a block of code, then restore its state."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from i2cl.errors import I2CLError
from i2cl.models.onednn import fast_products

P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS = 0.1  # interval at which a thread that waits for the model checks for Ctrl-C
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()
_IN_USE_AT_FORK: WeakSet[nn.Module] = WeakSet()


class _InterruptHandler:
    """SIGINT handler that defers Ctrl-C while a context manager is being entered or left.

    Python runs signal handlers only in the main thread, so this has no effect in others. The handler must be
    installed for the whole block, since Ctrl-C can arrive between the call of ``__exit__`` and its first
    line.
    """

    def __init__(self) -> None:
        self._blocks = 0
        self._pending = False
        self._original: Any = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        deferring = (_UninterruptedContext.__enter__.__code__, _UninterruptedContext.__exit__.__code__)
        while frame is not None and frame.f_code not in deferring:
            frame = frame.f_back
        if frame is None:
            self._original(number, frame)
        else:
            self._pending = True

    def install(self) -> bool:
        """Replace a Python handler of SIGINT. Returns whether `uninstall` must be called."""
        if not _in_main_thread():
            return False
        original: Any = signal.getsignal(signal.SIGINT)
        if self._blocks == 0 and callable(original) and original is not self:
            self._original, self._pending = original, False
            signal.signal(signal.SIGINT, self)
        self._blocks += 1
        return True

    def uninstall(self) -> None:
        """Restore the original handler after the last block, and deliver a deferred Ctrl-C.

        A block may be left in another thread, which cannot set handlers. This handler then stays installed,
        calls the original one, and is replaced when the main thread leaves its next block.
        """
        self._blocks -= 1
        current: Any = signal.getsignal(signal.SIGINT)
        if self._blocks == 0 and current is self and _in_main_thread():
            signal.signal(signal.SIGINT, self._original)
        self.deliver()

    def deliver(self) -> None:
        """Call the original handler for a deferred Ctrl-C; it usually raises KeyboardInterrupt."""
        if self._pending and _in_main_thread():
            self._pending = False
            self._original(signal.SIGINT, None)


_INTERRUPTS = _InterruptHandler()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _UninterruptedContext(AbstractContextManager[T], Generic[T]):
    """Context manager whose ``__enter__`` and ``__exit__`` are not interrupted by Ctrl-C."""

    def __init__(self, inner: AbstractContextManager[T]) -> None:
        self._inner = inner

    def __enter__(self) -> T:
        with ExitStack() as stack:
            if _INTERRUPTS.install():
                stack.callback(_INTERRUPTS.uninstall)
            value = stack.enter_context(self._inner)
            _INTERRUPTS.deliver()
            self._stack = stack.pop_all()
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)


def uninterrupted(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Decorate like `contextlib.contextmanager`, but defer Ctrl-C while the block is entered or left."""
    make = contextmanager(function)

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _UninterruptedContext(make(*args, **kwargs))

    return wrapper


def lock_of(model: nn.Module) -> threading.RLock:
    """Return the lock that must be held to run a model.

    Raises:
        I2CLError: in a process that was forked while another thread was using the model.
    """
    if model in _IN_USE_AT_FORK:
        raise I2CLError(
            "this process was forked while another thread was using the model: load it in this process, or "
            "start processes with 'spawn'"
        )
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


def _reset_after_fork() -> None:
    """Make models usable in a forked child (multiprocessing, gunicorn --preload, DataLoader).

    GNU OpenMP hangs in a child if its parent has used several threads, so the child uses one, like torch's
    DataLoader workers. A model that another thread was using cannot be used: its hooks will not be removed.
    """
    global _LOCKS_LOCK  # noqa: PLW0603
    _LOCKS_LOCK = threading.Lock()
    for model, lock in list(_LOCKS.items()):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            _IN_USE_AT_FORK.add(model)
    if len(_LOCKS):  # a model has run in the parent
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_after_fork)


@uninterrupted
def frozen(model: nn.Module) -> Iterator[None]:
    """Hold the model's lock, in evaluation mode, without gradients of parameters, with fast CPU kernels."""
    lock = lock_of(model)
    while not lock.acquire(timeout=POLL_SECONDS):
        _INTERRUPTS.deliver()
    try:
        with _evaluation_mode(model), fast_products(model):
            yield
    finally:
        lock.release()


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Disable training mode and gradients of parameters, and restore them afterwards."""
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    training = [module for module in model.modules() if module.training]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():  # looked up again: offloading replaces parameters
            parameter.requires_grad_(name in trainable)
        for module in training:
            module.training = True
