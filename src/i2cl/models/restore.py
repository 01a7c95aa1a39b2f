"""How a model is borrowed: by one thread at a time, without training it, and given back as it was."""

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

POLL = 0.1  # seconds between two looks for Ctrl-C while another thread has the model
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()
_IN_USE_AT_FORK: WeakSet[nn.Module] = WeakSet()


class _CtrlC:
    """The handler of SIGINT while anything is borrowed: what borrows and gives back is not cut in two.
    It only acts in the main thread, the only one that runs signal handlers. That it is there before a block
    ends matters: Ctrl-C may come when ``__exit__`` is called and has not begun.
    """

    def __init__(self) -> None:
        self._borrowed = 0
        self._waits = False
        self._usual: Any = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        at = frame
        while at is not None and at.f_code not in (_Whole.__enter__.__code__, _Whole.__exit__.__code__):
            at = at.f_back
        if at is None:
            self._usual(number, frame)
        else:
            self._waits = True

    def hold(self) -> bool:
        """Replace the usual handler, if it is one of Python. Returns whether `release` has to be called."""
        if not _in_main_thread():
            return False
        usual: Any = signal.getsignal(signal.SIGINT)
        if self._borrowed == 0 and callable(usual) and usual is not self:
            self._usual, self._waits = usual, False
            signal.signal(signal.SIGINT, self)
        self._borrowed += 1
        return True

    def release(self) -> None:
        """Put the usual handler back after the last block, and deliver a Ctrl-C that came meanwhile.

        Another thread, to which a block may have been handed over, cannot set handlers: this one then stays,
        calls the usual one at Ctrl-C, and is replaced when the main thread leaves its next block.
        """
        self._borrowed -= 1
        mine: Any = signal.getsignal(signal.SIGINT)
        if self._borrowed == 0 and mine is self and _in_main_thread():
            signal.signal(signal.SIGINT, self._usual)
        self.tell()

    def tell(self) -> None:
        """Let the usual handler have what came meanwhile, which as a rule raises KeyboardInterrupt."""
        if self._waits and _in_main_thread():
            self._waits = False
            self._usual(signal.SIGINT, None)


_CTRL_C = _CtrlC()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _Whole(AbstractContextManager[T], Generic[T]):
    """Another context manager, which Ctrl-C finds entered or left, never half."""

    def __init__(self, inner: AbstractContextManager[T]) -> None:
        self._inner = inner

    def __enter__(self) -> T:
        with ExitStack() as stack:
            if _CTRL_C.hold():
                stack.callback(_CTRL_C.release)
            entered = stack.enter_context(self._inner)
            _CTRL_C.tell()
            self._stack = stack.pop_all()
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)


def uninterrupted(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """As `contextlib.contextmanager`, but Ctrl-C waits while the block is entered and while it is left."""
    make = contextmanager(function)

    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Whole(make(*args, **kwargs))

    return made


def lock_of(model: nn.Module) -> threading.RLock:
    """Return the lock of a model, which everything that runs it shares.

    Raises:
        I2CLError: in a process that was forked while another thread was using the model.
    """
    if model in _IN_USE_AT_FORK:
        what = "this process was forked while another thread was using the model"
        raise I2CLError(f"{what}: load it in this process, or start processes with 'spawn'")
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


def _reset_after_fork() -> None:
    """Make models usable in a forked child (multiprocessing, gunicorn --preload, DataLoader).

    GNU OpenMP hangs in a child if its parent has used several threads, so the child uses one, as torch's own
    DataLoader workers do. A model that another thread was using has hooks that nobody will remove any more.
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
    """Evaluation mode, no gradients of parameters, `i2cl.models.onednn`; one thread at a time."""
    lock = lock_of(model)
    while not lock.acquire(timeout=POLL):
        _CTRL_C.tell()
    try:
        with _untrained(model), fast_products(model):
            yield
    finally:
        lock.release()


@contextmanager
def _untrained(model: nn.Module) -> Iterator[None]:
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    training = [module for module in model.modules() if module.training]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():  # offloading makes them anew at every run
            parameter.requires_grad_(name in wanted)
        for module in training:
            module.training = True
