"""What the engine core does: it books slots, keeps tasks apart in the cache, and tries the edit at its start.

All that is replaced of vLLM here is listed in `i2cl.interfaces.vllm.plugin`.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.interfaces.vllm.slots import DIGEST, Ledger, Packed, Salts, digest_of
from i2cl.interfaces.vllm.support import NAME, WORKER, require_supported, settings_of

# Names of calls: to the engine core, which books a slot, and from there to the workers.
LOAD, DROP, WRITE = "i2cl_load", "i2cl_drop", "i2cl_write"
SAVE, RESTORE = "i2cl_save", "i2cl_restore"  # to the workers, around vLLM's sleep mode

ASLEEP = "the engine is asleep: wake it up (POST /wake_up), then load the task"

# Of the change that the canary's tasks make: how far their answers may be apart, since they are rounded.
SHARE = 0.05
MOST_STEPS = 1000


class Core:
    """What the plugin keeps of an engine core. One process has at most one at a time."""

    current: "Core | None" = None

    def __init__(self, slots: int) -> None:
        self.ledger = Ledger(slots)  # its slots
        self.salts = Salts()  # what keeps its tasks apart in the cache
        self.tried = False  # whether the canary has answered


def wrap_executor(
    original: Callable[..., None], executor: Any, vllm_config: Any, *args: Any, **more: Any
) -> None:
    """``Executor.__init__``, the first thing that a core does: refuse what cannot be served."""
    require_supported(vllm_config)
    settings = settings_of(vllm_config)
    # In the key of compiled graphs, which knows of no hooks: graphs of a plain model must not be found.
    vllm_config.parallel_config.worker_extension_cls = WORKER
    vllm_config.additional_config = {**vllm_config.additional_config, NAME: settings}
    Core.current = Core(settings["slots"])
    original(executor, vllm_config, *args, **more)


def wrap_supported_tasks(original: Callable[..., Any], core: Any) -> Any:
    """``EngineCore.get_supported_tasks``, which a front end asks before its first request: try the edit."""
    if Core.current is not None and not Core.current.tried:
        try_canary(core)
        Core.current.tried = True
    return original(core)


def wrap_rpc(
    original: Callable[..., Any],
    core: Any,
    method: Any,
    timeout: Any = None,
    args: Any = (),
    kwargs: Any = None,
) -> Any:
    """``EngineCore.collective_rpc``: loading and dropping go by the ledger."""
    if method not in {LOAD, DROP} or Core.current is None:
        return original(core, method, timeout, args, kwargs)
    ledger = Core.current.ledger
    if method == DROP:
        ledger.drop(*args)
        return []
    packed = Packed(*args)
    slot, fresh = ledger.load(packed.digest)
    if fresh:
        try:
            _require_awake(core)
            _require_written(original(core, WRITE, timeout, (slot, packed.digest, *args), None))
        except BaseException:
            ledger.unbook(packed.digest)
            raise
    return [slot]


def _require_awake(core: Any) -> None:
    if core.model_executor.is_sleeping:  # the memory of the tables is not mapped
        raise I2CLError(ASLEEP)


def _require_written(results: list[str | None]) -> None:
    if faults := [fault for fault in results if fault is not None]:
        raise I2CLError(f"{len(faults)} of {len(results)} workers could not write this task, {faults[0]}")


def wrap_sleep(original: Callable[..., None], executor: Any, level: int = 1) -> None:
    """``Executor.sleep``: copy the tables to the host first, whatever this level and backend discard."""
    if "weights" not in executor.sleeping_tags:  # else vLLM ignores the call
        executor.collective_rpc(SAVE)
    original(executor, level)


def wrap_wake_up(original: Callable[..., None], executor: Any, tags: list[str] | None = None) -> None:
    """``Executor.wake_up``: copy the tables back once all memory is there again."""
    original(executor, tags)
    if not executor.is_sleeping:
        executor.collective_rpc(RESTORE)


def wrap_request(original: Callable[..., Any], cls: Any, request: Any, block_hasher: Any) -> Any:
    """``Request.from_engine_core_request``: a cache salt of its edit, and the ledger's note."""
    core = Core.current
    if core is None:
        return original(cls, request, block_hasher)
    digest = digest_of(request.sampling_params)
    request.cache_salt = core.salts.of(request.cache_salt, digest)
    fresh = original(cls, request, block_hasher)
    if digest is not None:
        core.ledger.admit(digest, fresh)
    return fresh


class Worker:
    """What vLLM adds to its workers (``worker_extension_cls``)."""

    def i2cl_write(self, slot: int, digest: str, rows: bytes, scales: bytes) -> str | None:
        """The workers' half of loading; what went wrong, if anything did.

        It raises nothing: vLLM reads no more answers after a worker's error, and takes those of the other
        ranks for answers to its next call.
        """
        worker: Any = self
        try:
            worker.model_runner.model.i2cl_tables.write(slot, digest, Packed(rows, scales))
        except I2CLError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - told to the core, which raises it
            return f"{type(error).__name__} ({error}): see the server's log, and load it again"
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
    """Two tasks with one answer: the writers' own outputs are lost, and one vector is added to the stream.

    One adds it all at the first writer, the other in equal parts at all of them. A writer that is not edited
    adds what it makes of a stream that differs between the two.
    """
    vector = torch.randn(d, generator=torch.Generator().manual_seed(0))
    at_once = torch.zeros(layers, 2, d)
    at_once[0, 0] = vector
    nothing = torch.zeros(layers, 2)
    return Packed.of(at_once, nothing), Packed.of((vector / (2 * layers)).expand(layers, 2, d), nothing)


def try_canary(core: Any) -> None:
    """Ask the plain model and both canaries one prompt, through a whole ``EngineCore`` that has just started.
    Raises I2CLError if the answers come back unedited, or edited in part.
    """
    config = core.vllm_config.model_config
    pair = canaries(config.get_total_num_hidden_layers(), config.get_hidden_size())
    size = config.get_vocab_size()
    prompt = [size // 7, size // 3, size // 2]
    for packed in pair:
        core.collective_rpc(LOAD, args=(packed.rows, packed.scales))
    plain, one, other = (ask(core, prompt, digest) for digest in (None, *(each.digest for each in pair)))
    for packed in pair:
        core.collective_rpc(DROP, args=(packed.digest,))
    require_edited(plain, one, other)


def require_edited(plain: Float[Tensor, " n"], one: Float[Tensor, " n"], other: Float[Tensor, " n"]) -> None:
    """Refuse (I2CLError) log-probabilities that show no edit, or not that of every writer: ``plain`` without
    a task, ``one`` and ``other`` with the two canaries.
    """
    change, apart = float((one - plain).abs().max()), float((one - other).abs().max())
    if not change > 1e-3:
        fault = "its answer with a task is that without one"
    elif not apart <= SHARE * change:
        fault = f"not all residual writers are edited (two tasks that are one are {apart:.2g} nats apart)"
    else:
        return
    cure = f"{fault}; serve without i2cl in VLLM_PLUGINS, and report the version and the model"
    raise I2CLError(f"i2cl's edit does not act in this vLLM: {cure}")


def ask(core: Any, prompt: list[int], digest: str | None) -> Float[Tensor, " n"]:
    """Log-probabilities of a few next tokens, from an engine core that no front end uses yet."""
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
    for _ in range(MOST_STEPS):
        outputs, _ = core.step_fn()
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                if output.new_logprobs is not None:
                    return torch.tensor(output.new_logprobs.logprobs[0][1:])
    raise I2CLError("vLLM does not answer i2cl's first request: serve without i2cl in VLLM_PLUGINS")
