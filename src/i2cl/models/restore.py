"""Lock and freeze a model for a block of code, then restore its state."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from i2cl.errors import I2CLError

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()
_IN_USE_AT_FORK: WeakSet[nn.Module] = WeakSet()


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


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Hold a model's lock, with the model in evaluation mode and without gradients of its parameters."""
    with lock_of(model):
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        training = [module for module in model.modules() if module.training]
        try:
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            for module in training:
                module.training = False
            yield
        finally:
            for name, parameter in model.named_parameters():  # offloading has replaced some parameters
                parameter.requires_grad_(name in trainable)
            for module in training:
                module.training = True


def _reset_after_fork() -> None:
    """Make models usable in a forked child (multiprocessing, gunicorn --preload, DataLoader).

    GNU OpenMP hangs in a child whose parent has used several threads, so the child uses one, like PyTorch's
    DataLoader workers. A model that another thread was using stays unusable: its hooks are never removed.
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
