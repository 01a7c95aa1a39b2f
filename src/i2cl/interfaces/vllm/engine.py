"""Engine-core side of the plugin: slot allocation, prefix-cache isolation and the start-up canary.

`i2cl.interfaces.vllm.plugin` lists every vLLM method that is patched.
"""

import secrets
from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.interfaces.vllm.support import DIGEST, NAME, digest_of, plugin_settings, require_supported
from i2cl.interfaces.vllm.worker import PackedEdit, restore_tables, save_tables, write_edit

LOAD, DROP = "i2cl_load", "i2cl_drop"  # RPCs from a front end to the engine core

ASLEEP = "the engine is asleep: wake it up (POST /wake_up), then load the task"

# Maximum difference between the two canaries' log-probabilities (rounding), relative to their effect.
CANARY_TOLERANCE = 0.05
MAX_CANARY_STEPS = 1000


class SlotAllocator:
    """Slots of an engine core's edits. A slot is never reused while a request may still need it.

    A dropped edit keeps its slot until another edit needs one and all of its admitted requests, running or
    waiting, have ended. Requests are tracked by weak references, so none can leak. Thread-safe.

    Args:
        count: number of slots, without the one of plain requests.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count, 0, -1))
        self._slots: dict[str, int] = {}  # by digest of the edit
        self._dropped: dict[str, None] = {}  # oldest first
        self._requests: dict[str, WeakSet[Any]] = {}
        self._lock = RLock()

    def load(self, digest: str, write: Callable[[int], None]) -> int:
        """Return the slot of an edit. A new edit gets a slot, and ``write`` is called with it.

        Raises:
            I2CLError: if no slot is free.
            Exception: as ``write``, after which the slot is free again.
        """
        with self._lock:
            self._dropped.pop(digest, None)
            if digest not in self._slots:
                if not self._free:
                    self._reclaim()
                self._slots[digest], self._requests[digest] = self._free.pop(), WeakSet()
                try:
                    write(self._slots[digest])
                except BaseException:
                    self._release(digest)
                    raise
            return self._slots[digest]

    def drop(self, digest: str) -> None:
        """Release the slot of an edit once no request needs it."""
        with self._lock:
            if digest in self._slots:
                self._dropped[digest] = None

    def admit(self, digest: str, request: Any) -> None:
        """Hold the slot of an edit until the request is garbage-collected.

        A dropped edit is admitted as long as its slot is not reused; otherwise raises I2CLError.
        """
        with self._lock:
            if digest not in self._slots:
                raise I2CLError("the task of this request was dropped before it began: send it again")
            self._requests[digest].add(request)

    def _reclaim(self) -> None:
        """Release the slot that was dropped first and is not in use. Raises I2CLError if there is none."""
        for digest in self._dropped:
            if not self._requests[digest]:
                del self._dropped[digest]
                self._release(digest)
                return
        raise I2CLError(
            f"all {self.count} slots hold tasks that are loaded or still in use: drop some, or restart with "
            f'more slots (--additional-config \'{{"i2cl": {{"slots": {2 * self.count}}}}}\')'
        )

    def _release(self, digest: str) -> None:
        del self._requests[digest]
        self._free.append(self._slots.pop(digest))


class Core:
    """Plugin state of an engine core. A process has at most one engine core at a time."""

    current: "Core | None" = None

    def __init__(self, slots: int) -> None:
        self.slots = SlotAllocator(slots)
        self.canary_passed = False
        self._secret = secrets.token_hex(16)

    def cache_salt(self, salt: str | None, digest: str | None) -> str | None:
        """Return the prefix-cache salt of a request, which keeps the cache entries of different edits apart.

        The salt of a task contains a random secret of this process, because digests are public. A client's
        salt that begins with our prefix gets another prefix, so no plain request can read a task's entries.

        Args:
            salt: salt that the client sent.
            digest: digest of the task's edit; None for a plain request.
        """
        prefix = f"{NAME}:"
        if digest is not None:
            return f"{prefix}{self._secret}:{digest}:{salt or ''}"
        return f"{prefix}plain:{salt}" if salt is not None and salt.startswith(prefix) else salt


def wrap_executor(
    original: Callable[..., None], executor: Any, vllm_config: Any, *args: Any, **options: Any
) -> None:
    """Wrap ``Executor.__init__``, the first step of an engine core, to reject unsupported configurations."""
    require_supported(vllm_config)
    settings = plugin_settings(vllm_config)
    # additional_config is part of the compile cache key, which ignores hooks: without this entry, vLLM
    # would reuse graphs compiled without the plugin.
    vllm_config.additional_config = {**vllm_config.additional_config, NAME: settings}
    Core.current = Core(settings["slots"])
    original(executor, vllm_config, *args, **options)


def wrap_supported_tasks(original: Callable[..., Any], core: Any) -> Any:
    """Wrap ``EngineCore.get_supported_tasks``, which front ends call before their first request, to run the
    canary once.
    """
    if Core.current is not None and not Core.current.canary_passed:
        run_canary(core)
        Core.current.canary_passed = True
    return original(core)


def wrap_rpc(
    original: Callable[..., Any],
    core: Any,
    method: Any,
    timeout: Any = None,
    args: Any = (),
    kwargs: Any = None,
) -> Any:
    """Wrap ``EngineCore.collective_rpc`` to allocate and release slots on LOAD and DROP."""
    if method not in {LOAD, DROP} or Core.current is None:
        return original(core, method, timeout, args, kwargs)
    slots = Core.current.slots
    if method == DROP:
        slots.drop(*args)
        return []
    edit = PackedEdit(*args)

    def write(slot: int) -> None:
        if core.model_executor.is_sleeping:  # the tables' memory is unmapped during sleep
            raise I2CLError(ASLEEP)
        results = original(core, write_edit, timeout, (slot, edit.digest, *args), None)
        if errors := [error for error in results if error is not None]:
            raise I2CLError(f"{len(errors)} of {len(results)} workers could not write this task, {errors[0]}")

    return [slots.load(edit.digest, write)]


def wrap_sleep(original: Callable[..., None], executor: Any, level: int = 1) -> None:
    """Wrap ``Executor.sleep`` to copy the tables to the host first, at every sleep level and backend."""
    if "weights" not in executor.sleeping_tags:  # already asleep: vLLM ignores the call
        executor.collective_rpc(save_tables)
    original(executor, level)


def wrap_wake_up(original: Callable[..., None], executor: Any, tags: list[str] | None = None) -> None:
    """Wrap ``Executor.wake_up`` to restore the tables once all memory is mapped again."""
    original(executor, tags)
    if not executor.is_sleeping:
        executor.collective_rpc(restore_tables)


def wrap_request(original: Callable[..., Any], cls: Any, request: Any, block_hasher: Any) -> Any:
    """Wrap ``Request.from_engine_core_request`` to salt the prefix cache and hold the task's slot."""
    core = Core.current
    if core is None:
        return original(cls, request, block_hasher)
    digest = digest_of(request.sampling_params)
    request.cache_salt = core.cache_salt(request.cache_salt, digest)
    engine_request = original(cls, request, block_hasher)
    if digest is not None:
        core.slots.admit(digest, engine_request)
    return engine_request


def canaries(layers: int, d: int) -> tuple[PackedEdit, PackedEdit]:
    """Build two edits that give the same answer if, and only if, every sublayer is edited.

    Both zero the sublayers' outputs and add the same vector to the residual stream: the first at the first
    sublayer, the second in equal parts at all sublayers. A sublayer that is not edited sees a different
    stream in each case, so its unedited output makes the answers differ.
    """
    vector = torch.randn(d, generator=torch.Generator().manual_seed(0))
    at_first_sublayer = torch.zeros(layers, 2, d)
    at_first_sublayer[0, 0] = vector
    at_all_sublayers = (vector / (2 * layers)).expand(layers, 2, d)
    scales = torch.zeros(layers, 2)
    return PackedEdit.of(at_first_sublayer, scales), PackedEdit.of(at_all_sublayers, scales)


def run_canary(core: Any) -> None:
    """Send one prompt to a newly started ``EngineCore``, without a task and under both canaries.

    Raises:
        I2CLError: if the edit has no effect, or not all sublayers are edited.
    """
    config = core.vllm_config.model_config
    pair = canaries(config.get_total_num_hidden_layers(), config.get_hidden_size())
    size = config.get_vocab_size()
    prompt = [size // 7, size // 3, size // 2]
    for edit in pair:
        core.collective_rpc(LOAD, args=(edit.rows, edit.scales))
    plain, first, second = (
        next_token_log_probs(core, prompt, digest) for digest in (None, *(edit.digest for edit in pair))
    )
    for edit in pair:
        core.collective_rpc(DROP, args=(edit.digest,))
    require_edited(plain, first, second)


def require_edited(
    plain: Float[Tensor, " n"], first: Float[Tensor, " n"], second: Float[Tensor, " n"]
) -> None:
    """Check that the canaries' log-probabilities show the edit of every sublayer.

    Args:
        plain: log-probabilities without a task.
        first: log-probabilities under the first canary.
        second: log-probabilities under the second canary.

    Raises:
        I2CLError: if the edit has no effect, or not all sublayers are edited.
    """
    effect, difference = float((first - plain).abs().max()), float((first - second).abs().max())
    # negated comparisons: also true for NaN
    if not effect > 1e-3:
        problem = "a task does not change the answer"
    elif not difference <= CANARY_TOLERANCE * effect:
        problem = f"not all sublayers are edited (equivalent tasks differ by {difference:.2g} nats)"
    else:
        return
    raise I2CLError(
        f"i2cl's edit does not work in this vLLM: {problem}; remove i2cl from VLLM_PLUGINS, and report the "
        "vLLM version and the model"
    )


def next_token_log_probs(core: Any, prompt: list[int], digest: str | None) -> Float[Tensor, " n"]:
    """Return the next-token log-probabilities of token ids 0 to 15, before any front end uses the core.

    Raises I2CLError if the engine does not answer.
    """
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    extra = None if digest is None else {NAME: NAME, DIGEST: digest}
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logprob_token_ids=list(range(16)), extra_args=extra
    )
    names = ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    fields: dict[str, Any] = dict.fromkeys(names) | {"prompt_token_ids": prompt, "arrival_time": 0.0}
    request = EngineCoreRequest(request_id=f"i2cl-canary-{digest}", sampling_params=params, **fields)
    core.add_request(*core.preprocess_add_request(request))
    for _ in range(MAX_CANARY_STEPS):
        outputs, _ = core.step_fn()
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                if output.new_logprobs is not None:
                    return torch.tensor(output.new_logprobs.logprobs[0][1:])
    raise I2CLError("vLLM did not answer the canary request of i2cl: remove i2cl from VLLM_PLUGINS")
