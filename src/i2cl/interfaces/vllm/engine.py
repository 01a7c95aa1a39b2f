"""Engine-core side of the plugin: slot allocation, prefix-cache isolation and the start-up canary.

`i2cl.interfaces.vllm.plugin` lists every vLLM method that is patched.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.interfaces.vllm.slots import DIGEST, Ledger, Packed, Salts, digest_of
from i2cl.interfaces.vllm.support import NAME, WORKER, plugin_settings, require_supported

# RPC names. LOAD and DROP go to the engine core, which allocates the slot and sends WRITE to the workers.
LOAD, DROP, WRITE = "i2cl_load", "i2cl_drop", "i2cl_write"
SAVE, RESTORE = "i2cl_save", "i2cl_restore"  # sent to the workers around vLLM's sleep mode

ASLEEP = "the engine is asleep: wake it up (POST /wake_up), then load the task"

# Maximum difference between the two canaries' log-probabilities (rounding), relative to their effect.
CANARY_TOLERANCE = 0.05
MAX_CANARY_STEPS = 1000


class Core:
    """Plugin state of an engine core. A process has at most one engine core at a time."""

    current: "Core | None" = None

    def __init__(self, slots: int) -> None:
        self.ledger = Ledger(slots)
        self.salts = Salts()
        self.canary_passed = False


def wrap_executor(
    original: Callable[..., None], executor: Any, vllm_config: Any, *args: Any, **more: Any
) -> None:
    """Wrap ``Executor.__init__``, the first step of an engine core, to reject unsupported configurations."""
    require_supported(vllm_config)
    settings = plugin_settings(vllm_config)
    # additional_config is part of the compile cache key, which ignores hooks: without this entry, vLLM
    # would reuse graphs compiled without the plugin.
    vllm_config.parallel_config.worker_extension_cls = WORKER
    vllm_config.additional_config = {**vllm_config.additional_config, NAME: settings}
    Core.current = Core(settings["slots"])
    original(executor, vllm_config, *args, **more)


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
    ledger = Core.current.ledger
    if method == DROP:
        ledger.drop(*args)
        return []
    packed = Packed(*args)
    slot, is_new = ledger.load(packed.digest)
    if is_new:
        try:
            _require_awake(core)
            _require_written(original(core, WRITE, timeout, (slot, packed.digest, *args), None))
        except BaseException:
            ledger.cancel_load(packed.digest)
            raise
    return [slot]


def _require_awake(core: Any) -> None:
    if core.model_executor.is_sleeping:  # the tables' memory is unmapped during sleep
        raise I2CLError(ASLEEP)


def _require_written(results: list[str | None]) -> None:
    if errors := [error for error in results if error is not None]:
        raise I2CLError(f"{len(errors)} of {len(results)} workers could not write this task, {errors[0]}")


def wrap_sleep(original: Callable[..., None], executor: Any, level: int = 1) -> None:
    """Wrap ``Executor.sleep`` to copy the tables to the host first, at every sleep level and backend."""
    if "weights" not in executor.sleeping_tags:  # already asleep: vLLM ignores the call
        executor.collective_rpc(SAVE)
    original(executor, level)


def wrap_wake_up(original: Callable[..., None], executor: Any, tags: list[str] | None = None) -> None:
    """Wrap ``Executor.wake_up`` to restore the tables once all memory is mapped again."""
    original(executor, tags)
    if not executor.is_sleeping:
        executor.collective_rpc(RESTORE)


def wrap_request(original: Callable[..., Any], cls: Any, request: Any, block_hasher: Any) -> Any:
    """Wrap ``Request.from_engine_core_request`` to salt the prefix cache and hold the task's slot."""
    core = Core.current
    if core is None:
        return original(cls, request, block_hasher)
    digest = digest_of(request.sampling_params)
    request.cache_salt = core.salts.of(request.cache_salt, digest)
    engine_request = original(cls, request, block_hasher)
    if digest is not None:
        core.ledger.admit(digest, engine_request)
    return engine_request


class Worker:
    """Mixin that vLLM adds to its worker class (``worker_extension_cls``)."""

    def i2cl_write(self, slot: int, digest: str, rows: bytes, scales: bytes) -> str | None:
        """Write a task into this worker's tables. Return an error message, or None on success.

        Never raises: after an exception in one worker, vLLM stops reading replies and would take the other
        ranks' replies as the results of its next call.
        """
        worker: Any = self
        try:
            worker.model_runner.model.i2cl_tables.write(slot, digest, Packed(rows, scales))
        except I2CLError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - returned to the core, which raises it
            return f"{type(error).__name__} ({error}): see the server log, then load the task again"
        return None

    def i2cl_save(self) -> None:
        """Copy the tables to the host before sleep."""
        worker: Any = self
        worker.model_runner.model.i2cl_tables.save()

    def i2cl_restore(self) -> None:
        """Copy the tables back after sleep."""
        worker: Any = self
        worker.model_runner.model.i2cl_tables.restore()


def canaries(layers: int, d: int) -> tuple[Packed, Packed]:
    """Build two tasks that give the same answer if, and only if, every residual writer is edited.

    Both zero the writers' outputs and add the same vector to the residual stream: the first at the first
    writer, the second in equal parts at all writers. A writer that is not edited sees a different stream in
    each case, so its unedited output makes the answers differ.
    """
    vector = torch.randn(d, generator=torch.Generator().manual_seed(0))
    at_first_writer = torch.zeros(layers, 2, d)
    at_first_writer[0, 0] = vector
    at_all_writers = (vector / (2 * layers)).expand(layers, 2, d)
    scales = torch.zeros(layers, 2)
    return Packed.of(at_first_writer, scales), Packed.of(at_all_writers, scales)


def run_canary(core: Any) -> None:
    """Send one prompt to a newly started ``EngineCore``, without a task and under both canary tasks.

    Raises:
        I2CLError: if the edit has no effect, or not all residual writers are edited.
    """
    config = core.vllm_config.model_config
    pair = canaries(config.get_total_num_hidden_layers(), config.get_hidden_size())
    size = config.get_vocab_size()
    prompt = [size // 7, size // 3, size // 2]
    for packed in pair:
        core.collective_rpc(LOAD, args=(packed.rows, packed.scales))
    digests = (None, *(packed.digest for packed in pair))
    plain, first, second = (next_token_scores(core, prompt, digest) for digest in digests)
    for packed in pair:
        core.collective_rpc(DROP, args=(packed.digest,))
    require_edited(plain, first, second)


def require_edited(
    plain: Float[Tensor, " n"], first: Float[Tensor, " n"], second: Float[Tensor, " n"]
) -> None:
    """Check that the canaries' log-probabilities show the edit of every residual writer.

    Args:
        plain: log-probabilities without a task.
        first: log-probabilities under the first canary task.
        second: log-probabilities under the second canary task.

    Raises:
        I2CLError: if the edit has no effect, or not all residual writers are edited.
    """
    effect, difference = float((first - plain).abs().max()), float((first - second).abs().max())
    # negated comparisons: also true for NaN
    if not effect > 1e-3:
        problem = "a task does not change the answer"
    elif not difference <= CANARY_TOLERANCE * effect:
        problem = f"not all residual writers are edited (equivalent tasks differ by {difference:.2g} nats)"
    else:
        return
    raise I2CLError(
        f"i2cl's edit does not work in this vLLM: {problem}; remove i2cl from VLLM_PLUGINS, and report the "
        "vLLM version and the model"
    )


def next_token_scores(core: Any, prompt: list[int], digest: str | None) -> Float[Tensor, " n"]:
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
