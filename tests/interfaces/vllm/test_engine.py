"""Engine core with stand-ins for vLLM: slots, cache salts, sleep mode and the canary."""

from types import SimpleNamespace

import pytest
import torch

from fitting import raises
from i2cl.errors import I2CLError
from i2cl.interfaces.vllm import engine
from i2cl.interfaces.vllm.engine import DROP, LOAD, Core, SlotAllocator
from i2cl.interfaces.vllm.plugin import _patch
from i2cl.interfaces.vllm.worker import PackedEdit, restore_tables, save_tables, write_edit

from .standins import params, vllm_config

ONE = PackedEdit.of(torch.ones(1, 2, 4), torch.zeros(1, 2))


class Request:
    """vLLM's request of the engine core, with the attributes that the plugin uses."""

    def __init__(self, salt):
        self.cache_salt = salt

    @classmethod
    def from_engine_core_request(cls, request, block_hasher):
        return cls(request.cache_salt)


class EngineCore:
    """vLLM's engine core, with its calls to workers."""

    def __init__(self):
        self.sent, self.message = [], [None, None]
        self.model_executor = SimpleNamespace(is_sleeping=False)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.sent.append((method, *args))
        if isinstance(self.message, Exception):
            raise self.message
        return self.message

    def get_supported_tasks(self):
        return ("generate",)


class Executor:
    """vLLM's executor, which gets the workers' configuration and puts them to sleep."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.sleeping_tags, self.sent = set(), []

    @property
    def is_sleeping(self):
        return bool(self.sleeping_tags)

    def collective_rpc(self, method):
        self.sent.append(method)

    def sleep(self, level=1):
        self.sent.append(f"sleep {level}")
        self.sleeping_tags |= {"weights", "kv_cache"}

    def wake_up(self, tags=None):
        self.sent.append("wake_up")
        self.sleeping_tags -= set(tags or self.sleeping_tags)


@pytest.fixture
def core(monkeypatch):
    """A patched engine core that does not run the canary."""
    monkeypatch.setattr(Core, "current", Core(2))
    for owner, name, wrap in (
        (EngineCore, "collective_rpc", engine.wrap_rpc),
        (EngineCore, "get_supported_tasks", engine.wrap_supported_tasks),
        (Request, "from_engine_core_request", engine.wrap_request),
        (Executor, "__init__", engine.wrap_executor),
        (Executor, "sleep", engine.wrap_sleep),
        (Executor, "wake_up", engine.wrap_wake_up),
    ):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # to be put back
        _patch(owner, name, wrap)
    return EngineCore()


def asked(digest=None, salt=None):
    return SimpleNamespace(sampling_params=params(digest), cache_salt=salt)


def test_load_allocates_a_slot_and_writes_it_once(core):
    assert core.collective_rpc(LOAD, args=(ONE.rows, ONE.scales)) == [1]
    assert core.collective_rpc(LOAD, None, (ONE.rows, ONE.scales), None) == [1]
    assert core.sent == [(write_edit, 1, ONE.digest, ONE.rows, ONE.scales)]
    assert core.collective_rpc(DROP, args=(ONE.digest,)) == []
    assert core.collective_rpc("another", args=(1,)) == [None, None]
    assert core.sent[1:] == [("another", 1)]


@pytest.mark.parametrize("message", [[None, "no memory: buy some"], RuntimeError("a worker is gone")])
def test_a_failed_write_frees_the_slot(core, message):
    core.message = message
    for _ in range(2):
        with pytest.raises((I2CLError, RuntimeError), match=r"1 of 2 workers .* buy some|a worker is gone"):
            core.collective_rpc(LOAD, args=(ONE.rows, ONE.scales))
        raises("send it again", Request.from_engine_core_request, asked(ONE.digest), None)
    core.message = [None, None]
    assert core.collective_rpc(LOAD, args=(ONE.rows, ONE.scales)) == [1]
    assert [method for method, *_ in core.sent] == [write_edit] * 3
    assert Request.from_engine_core_request(asked(ONE.digest), None).cache_salt


def test_a_task_cannot_be_loaded_while_the_engine_sleeps(core):
    core.model_executor.is_sleeping = True
    raises(r"asleep: wake it up \(POST /wake_up\)", core.collective_rpc, LOAD, None, (ONE.rows, ONE.scales))
    core.model_executor.is_sleeping = False
    assert core.collective_rpc(LOAD, args=(ONE.rows, ONE.scales)) == [1]
    assert core.sent == [(write_edit, 1, ONE.digest, ONE.rows, ONE.scales)]


def test_tables_are_saved_before_sleep_and_restored_once_all_memory_is_awake(core):
    executor = Executor(vllm_config())
    executor.sleep(2)
    executor.sleep(1)  # asleep already: what is in the tables must not be saved now
    executor.wake_up(["weights"])
    executor.wake_up(["kv_cache"])
    assert executor.sent == [save_tables, "sleep 2", "sleep 1", "wake_up", "wake_up", restore_tables]


def test_task_requests_are_salted_and_plain_requests_keep_their_salt(core):
    core.collective_rpc(LOAD, args=(ONE.rows, ONE.scales))
    result = Request.from_engine_core_request(asked(ONE.digest, "mine"), None).cache_salt
    assert result == Core.current.cache_salt("mine", ONE.digest) != "mine"
    assert Request.from_engine_core_request(asked(salt="mine"), None).cache_salt == "mine"
    assert Request.from_engine_core_request(asked(), None).cache_salt is None
    assert Request.from_engine_core_request(asked(salt=result), None).cache_salt != result


def test_the_executor_gets_the_settings_or_the_start_fails(core):
    config = vllm_config(additional_config={"other": 1})
    assert Executor(config).vllm_config.additional_config["i2cl"]["slots"] == 64
    assert config.additional_config["other"] == 1
    assert Core.current.slots.count == 64
    raises("LoRA", Executor, vllm_config(lora_config=object()))


def test_the_canary_runs_once_before_the_first_request(core, monkeypatch):
    runs = []
    monkeypatch.setattr(engine, "run_canary", runs.append)
    assert core.get_supported_tasks() == core.get_supported_tasks() == ("generate",)
    assert runs == [core]


class Running:
    """A request that can be referenced weakly."""


@pytest.fixture
def written():
    """Slots that were written."""
    return []


@pytest.fixture
def slots(written):
    """Allocator of two slots, both of them in use."""
    allocator = SlotAllocator(2)
    assert [allocator.load(digest, written.append) for digest in ("a", "b")] == [1, 2]
    return allocator


def test_slot_is_not_reused_while_a_request_needs_it(slots, written):
    running = Running()
    slots.admit("a", running)
    slots.drop("a")
    raises(r'all 2 slots hold tasks.*"slots": 4', slots.load, "c", written.append)
    del running
    assert slots.load("c", written.append) == 1
    assert slots.load("b", written.append) == 2
    assert written == [1, 2, 1]


def test_dropped_edit_is_admitted_until_its_slot_is_reused(slots, written):
    late = Running()
    slots.drop("a")
    slots.admit("a", late)  # its front end admitted it before the drop
    raises("all 2 slots", slots.load, "c", written.append)
    assert slots.load("a", written.append) == 1
    slots.drop("a")
    del late
    slots.load("c", written.append)
    for digest in ("a", "never"):
        raises("dropped before it began", slots.admit, digest, Running())
    slots.drop("never")


def test_salts_separate_tasks_clients_and_plain_requests():
    core = Core(2)
    sent = [(salt, digest) for salt in (None, "mine", "a:", "a") for digest in ("a", "b")]
    assert len({core.cache_salt(*one) for one in sent}) == len(sent)
    task = core.cache_salt(None, "a")
    # guesses of a plain client: the public digest, the salt itself, and what the salt becomes
    guesses = ["|i2cl:a", "i2cl:a", "i2cl:", task, core.cache_salt(task, None)]
    plain = {core.cache_salt(guess, None) for guess in guesses}
    assert task not in plain
    assert len(plain) == len(guesses)
    assert Core(2).cache_salt(None, "a") != task
    assert [core.cache_salt(salt, None) for salt in (None, "", "mine")] == [None, "", "mine"]


class Blocks:
    """A residual stream through random non-linear sublayers, of which only some may be edited."""

    def __init__(self, layers, d):
        draw = torch.Generator().manual_seed(3)
        self.weights = torch.randn(2 * layers, d, d, generator=draw) / d**0.5
        self.head = torch.randn(16, d, generator=draw)

    def answers(self, packed, edited):
        stream = torch.ones(self.head.shape[1])
        rows, scales = packed.tensors(len(stream)) if packed else (None, None)
        for place, weight in enumerate(self.weights):
            own = torch.tanh(weight @ stream)
            stream = stream + (scales[place] * own + rows[place] if packed and edited(place) else own)
        return (self.head @ (stream / stream.norm())).log_softmax(-1)


@pytest.mark.parametrize(
    ("edited", "fault"),
    [
        (lambda _: True, None),
        (lambda _: False, "does not change the answer"),
        (lambda place: place != 5, "not all sublayers"),
        (lambda place: place != 0, "not all sublayers"),
        (lambda place: place % 2 == 0, "not all sublayers"),
    ],
)
def test_the_canary_detects_missing_edits(edited, fault):
    blocks = Blocks(4, 32)
    value = [blocks.answers(one, edited) for one in (None, *engine.canaries(4, 32))]
    if fault is None:
        engine.require_edited(*value)
    else:
        raises(fault, engine.require_edited, *value)


def test_the_canary_fails_on_nan():
    plain, broken = torch.zeros(4), torch.full((4,), torch.nan)
    raises("does not work", engine.require_edited, plain, broken, broken)
