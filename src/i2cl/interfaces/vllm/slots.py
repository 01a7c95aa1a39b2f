"""Slot allocation, digests and cache salts of tasks.

Does not import vLLM, so it can be tested without it.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from threading import RLock
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.export.folding import require_foldable
from i2cl.interfaces.vllm.support import NAME

# Key in a request's extra arguments: digest of its task, set by the front end only.
DIGEST = "i2cl_digest"

_SALT_PREFIX = f"{NAME}:"
PLAIN = 0  # slot of padding and of tokens without a task: the identity edit


@dataclass(frozen=True, eq=False)
class Packed:
    """Edit of a task, as bytes that can be sent to any worker process."""

    rows: bytes  # float32 ``lambda v`` of every residual writer, in the order of [layer, (mha, mlp)]
    scales: bytes  # float32 beta, in the same order

    @classmethod
    def of(cls, rows: Float[Tensor, "layers 2 d"], scales: Float[Tensor, "layers 2"]) -> "Packed":
        """Pack the tensors of an edit."""
        return cls(*(one.float().cpu().contiguous().numpy().tobytes() for one in (rows, scales)))

    @classmethod
    def of_injection(cls, injection: Injection) -> "Packed":
        """Pack an injection. Raises I2CLError unless it edits the writers' outputs at all positions."""
        require_foldable(injection)
        edit = injection.affine_edit()
        return cls.of(edit.shift, edit.scale)

    @cached_property
    def digest(self) -> str:
        """Hash of the edit (32 hex digits). Tasks with the same edit share slots and prefix cache."""
        return hashlib.sha256(self.scales + self.rows).hexdigest()[:32]

    def tensors(self, d: int) -> tuple[Float[Tensor, "writers d"], Float[Tensor, " writers"]]:
        """Unpack rows and scales for a model of width ``d``."""
        read = partial(torch.frombuffer, dtype=torch.float32)
        return read(bytearray(self.rows)).view(-1, d), read(bytearray(self.scales))


def digest_of(params: Any) -> str | None:
    """Return the task digest in a request's ``SamplingParams``, or None for a plain request."""
    extra: Mapping[str, Any] = getattr(params, "extra_args", None) or {}
    return extra.get(DIGEST)


class Salts:
    """Salts that keep the prefix-cache entries of different edits apart.

    Salts of tasks contain a random secret of this process, because digests are public. A client's salt that
    begins with our prefix gets another prefix, so no plain request can read a task's cache entries.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)

    def of(self, salt: str | None, digest: str | None) -> str | None:
        """Return a request's salt, given the client's salt and the digest of its task, if any."""
        if digest is not None:
            return f"{_SALT_PREFIX}{self._secret}:{digest}:{salt or ''}"
        return f"{_SALT_PREFIX}plain:{salt}" if salt is not None and salt.startswith(_SALT_PREFIX) else salt


class Ledger:
    """Slot allocation of an engine core. A slot is never reused while a request may still need it.

    A dropped task keeps its slot until another task needs one and all of its admitted requests, running or
    waiting, have ended. Requests are tracked by weak references, so none can leak. Thread-safe.

    Args:
        slots: number of slots, without the one of plain requests.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots, 0, -1))
        self._places: dict[str, int] = {}
        self._dropped: dict[str, None] = {}
        self._requests: dict[str, WeakSet[Any]] = {}
        self._lock = RLock()

    def load(self, digest: str) -> tuple[int, bool]:
        """Allocate a slot for an edit.

        Returns:
            The slot, and whether the edit still has to be written there.

        Raises:
            I2CLError: if no slot is free.
        """
        with self._lock:
            if digest in self._places:
                self._dropped.pop(digest, None)
                return self._places[digest], False
            if not self._free:
                self._reclaim()
            self._places[digest] = slot = self._free.pop()
            self._requests[digest] = WeakSet()
            return slot, True

    def cancel_load(self, digest: str) -> None:
        """Release the slot of an edit that could not be written."""
        with self._lock:
            del self._requests[digest]
            self._free.append(self._places.pop(digest))

    def drop(self, digest: str) -> None:
        """Release the slot of an edit once no request needs it."""
        with self._lock:
            if digest in self._places:
                self._dropped[digest] = None

    def admit(self, digest: str, request: Any) -> None:
        """Hold the slot of an edit until the request is garbage-collected.

        A dropped edit is admitted as long as its slot is not reused; otherwise raises I2CLError.
        """
        with self._lock:
            if digest not in self._places:
                raise I2CLError("the task of this request was dropped before it began: send it again")
            self._requests[digest].add(request)

    def _reclaim(self) -> None:
        for digest in self._dropped:
            if not self._requests[digest]:
                del self._dropped[digest], self._requests[digest]
                self._free.append(self._places.pop(digest))
                return
        raise I2CLError(
            f"all {self.slots} slots hold tasks that are loaded or still in use: drop some, or restart with "
            f'more slots (--additional-config \'{{"i2cl": {{"slots": {2 * self.slots}}}}}\')'
        )


def token_slots(
    slots: Sequence[int] | Int[np.ndarray, " requests"], starts: Int[np.ndarray, " requests_and_1"], size: int
) -> NDArray[np.int32]:
    """Return the slot of every token in a batch.

    Args:
        slots: slot of each request, in batch order.
        starts: offset of each request's first token, then the total number of tokens.
        size: number of tokens including padding, which gets the slot of plain requests.
    """
    per_token = np.full(size, PLAIN, dtype=np.int32)
    per_token[: starts[-1]] = np.repeat(np.asarray(slots, dtype=np.int32), np.diff(starts))
    return per_token
