"""Which task's edit stands where: slots of the tables, digests, and the slot of every token of a batch.

It imports nothing of vLLM, so that all of it is tested where there is none.
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

# In a request's extra arguments: what the front end found its task to be, which nobody else may set.
DIGEST = "i2cl_digest"

_OURS = f"{NAME}:"
PLAIN = 0  # the slot of tokens without a task, and of padding: it adds nothing and scales by one


@dataclass(frozen=True, eq=False)
class Packed:
    """What a worker needs of a task, in a form that any channel between processes carries."""

    rows: bytes  # ``lambda v`` of every layer, attention and then MLP, as bytes of float32
    scales: bytes  # beta of the same

    @classmethod
    def of(cls, rows: Float[Tensor, "layers 2 d"], scales: Float[Tensor, "layers 2"]) -> "Packed":
        """Pack two tensors."""
        return cls(*(one.float().cpu().contiguous().numpy().tobytes() for one in (rows, scales)))

    @classmethod
    def of_injection(cls, injection: Injection) -> "Packed":
        """Pack an injection. Raises I2CLError if it acts on other than all tokens of the writers' outputs."""
        require_foldable(injection)
        amount, keep = injection.coefficients.float().unbind(-1)
        return cls.of(amount[..., None] * injection.context.values.float(), keep)

    @cached_property
    def digest(self) -> str:
        """Hash of both, as 32 hex digits: two tasks with the same edit may share what is cached."""
        return hashlib.sha256(self.scales + self.rows).hexdigest()[:32]

    def tensors(self, d: int) -> tuple[Float[Tensor, "writers d"], Float[Tensor, " writers"]]:
        """Unpack it for a model of width ``d``."""
        read = partial(torch.frombuffer, dtype=torch.float32)
        return read(bytearray(self.rows)).view(-1, d), read(bytearray(self.scales))


def digest_of(params: Any) -> str | None:
    """The digest that a request's ``SamplingParams`` carry; None for a plain request."""
    extra: Mapping[str, Any] = getattr(params, "extra_args", None) or {}
    return extra.get(DIGEST)


class Salts:
    """Cache salts under which keys and values of one edit are found, and of nothing else.

    A part that nobody outside this process knows is in all of ours, and a plain request's salt that begins
    like ours is moved away.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)

    def of(self, salt: str | None, digest: str | None) -> str | None:
        """The salt of a request, from its own and the digest of its edit, if it has one."""
        if digest is not None:
            return f"{_OURS}{self._secret}:{digest}:{salt or ''}"
        return f"{_OURS}plain:{salt}" if salt is not None and salt.startswith(_OURS) else salt


class Ledger:
    """The engine core's book of slots: no slot is given away while a request may still need it.

    A dropped task keeps its slot until another task needs that, and no request that was admitted with it,
    running or waiting, is left. Requests are known by weak references, so none can be forgotten here.
    Methods may be called from several threads. ``slots``: how many there are beside that of plain requests.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots, 0, -1))
        self._places: dict[str, int] = {}
        self._dropped: dict[str, None] = {}
        self._requests: dict[str, WeakSet[Any]] = {}
        self._lock = RLock()

    def load(self, digest: str) -> tuple[int, bool]:
        """A slot for an edit, and whether it has to be written there. Raises I2CLError if all are taken."""
        with self._lock:
            if digest in self._places:
                self._dropped.pop(digest, None)
                return self._places[digest], False
            if not self._free:
                self._reclaim()
            self._places[digest] = slot = self._free.pop()
            self._requests[digest] = WeakSet()
            return slot, True

    def unbook(self, digest: str) -> None:
        """Take back `load` of an edit that could not be written."""
        with self._lock:
            del self._requests[digest]
            self._free.append(self._places.pop(digest))

    def drop(self, digest: str) -> None:
        """Let another edit have the slot as soon as no request needs it."""
        with self._lock:
            if digest in self._places:
                self._dropped[digest] = None

    def admit(self, digest: str, request: Any) -> None:
        """Note that a request needs an edit until nothing refers to the request any more. Raises I2CLError if
        the edit is in no slot; the slot of a dropped one still has it.
        """
        with self._lock:
            if digest not in self._places:
                raise I2CLError("this request's task was dropped before it began: send it again")
            self._requests[digest].add(request)

    def _reclaim(self) -> None:
        for digest in self._dropped:
            if not self._requests[digest]:
                del self._dropped[digest], self._requests[digest]
                self._free.append(self._places.pop(digest))
                return
        raise I2CLError(
            f"all {self.slots} slots hold tasks that are loaded or still answering: drop some, or start with "
            f'more (--additional-config \'{{"i2cl": {{"slots": {2 * self.slots}}}}}\')'
        )


def token_slots(
    slots: Sequence[int] | Int[np.ndarray, " requests"], starts: Int[np.ndarray, " requests_and_1"], size: int
) -> NDArray[np.int32]:
    """The slot of every token of a batch.

    ``slots``: of each request, in the batch's order; ``starts``: place of each request's first token, and
    then of what is behind the last one; ``size``: tokens of the batch with padding, which gets the slot of
    plain requests.
    """
    places = np.full(size, PLAIN, dtype=np.int32)
    places[: starts[-1]] = np.repeat(np.asarray(slots, dtype=np.int32), np.diff(starts))
    return places
