"""How a model is borrowed: by one thread at a time, without training it, and given back as it was."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from i2cl.models.products import fast_products

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def lock_of(model: nn.Module) -> threading.RLock:
    """The lock of a model, which all that run it share."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without parameter gradients and with `i2cl.models.products`; restored on leaving.

    Other threads wait until then.
    """
    with lock_of(model), _untrained(model), fast_products(model):
        yield


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
