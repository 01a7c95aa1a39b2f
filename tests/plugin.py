"""Shapes in signatures are checked while tests run; models are tiny, random and built in memory."""

import copy
import gc
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, get_args

import jaxtyping
import numpy as np
import pytest
import torch

from tiny import tiny_model, tiny_tokenizer  # before the hook, which would compile transformers again

gc.disable()  # until all tests are there

SHAPED = ("core", "injections", "methods", "models.architectures")
SHAPED += ("models.batching", "models.decoder", "models.edits", "models.label_tokens")
SHAPED += ("models.residual_check", "models.scoring")
SHAPED += ("experiments.evaluation", "experiments.evidence.fit_evaluation", "experiments.report")
SHAPED += ("experiments.statistics",)
"""Modules whose signatures have shapes."""

MAX_CHECKS = 3
"""How often a test checks the shapes of a function: checking every call takes a tenth to a fifth of a fit."""

_checks: Counter[int] = Counter()
"""How often the current test has checked each function, by the identity of its code: hashing code is slow."""


def _has_shape(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, get_args(hint)))


def _where_shaped(check: Callable[..., Any]) -> Callable[..., Any]:
    """Check only functions with shapes in their signatures: checking all took a fifth of the tests' time."""

    def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
        def decorate(thing: Any) -> Any:
            hints = getattr(thing, "__annotations__", {}).values()
            if not any(map(_has_shape, hints)):
                return thing
            if not inspect.isfunction(thing):
                return check(thing, typechecker=typechecker)
            # A nested function is decorated at each call of the outer one.
            if _checks[id(thing.__code__)] >= MAX_CHECKS:
                return thing
            return _check_first_calls(thing, partial(check, typechecker=typechecker))

        return decorate

    return jaxtyped


def _check_first_calls(function: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
    checked, code = None, id(function.__code__)  # compiled at the first call

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal checked
        if _checks[code] >= MAX_CHECKS:
            return function(*args, **options)
        _checks[code] += 1
        checked = checked or check(function)
        return checked(*args, **options)

    return call


def pytest_runtest_setup() -> None:
    """Check the shapes of all functions again in the next test."""
    _checks.clear()


jaxtyping.jaxtyped = _where_shaped(jaxtyping.jaxtyped)  # by this name the hook's modules call it
jaxtyping.install_import_hook([f"i2cl.{module}" for module in SHAPED], "beartype.beartype")

from i2cl import encoders  # noqa: E402
from i2cl.core import experts  # noqa: E402
from i2cl.models import decoder as decoder_module  # noqa: E402
from i2cl.models.decoder import Decoder  # noqa: E402
from i2cl.models.loading import REFERENCE  # noqa: E402
from i2cl.storage import model_cache  # noqa: E402
from i2cl.tasks import Example, Task, Template  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the test that waits longest for other processes first, so that others run at the same time."""
    items.sort(key=lambda item: item.path.name != "test_ray.py")


def pytest_collection_finish() -> None:
    """Collect garbage less often, and never among imported modules, most of which are torch's.

    Let the loggers of torch propagate: pytest would add its handlers to each of them in each test.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.startswith("torch"):
            logger.propagate = True
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep converted GGUF models out of the user's cache; workers share one."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(model_cache.CACHE_VARIABLE, str(root / "i2cl-cache"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_fsync() -> Iterator[None]:
    """Skip the milliseconds that a disk takes for each file; tests of storage count the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _copied_reference() -> Iterator[None]:
    """Read the bundled model once with each set of options: a copy takes a quarter of the time."""
    load, loaded = decoder_module.load_model_and_tokenizer, {}

    def load_or_copy(name: str, **options: Any) -> Any:
        if name != REFERENCE or options["device_map"] or options["quantization"]:
            return load(name, **options)
        key = repr(sorted(options.items()))
        if key not in loaded:
            loaded[key] = load(name, **options)
        return copy.deepcopy(loaded[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_module, "load_model_and_tokenizer", load_or_copy)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_native_bfloat16() -> Iterator[None]:
    """Make ``--dtype auto`` the same on every CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("i2cl.models.precision.cpu_has_bfloat16", lambda: False)
        patch.setattr("i2cl.models.loading.cpu_has_bfloat16", lambda: False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_local_encoder() -> Iterator[None]:
    """Make the baselines of `fit` and `demo` independent of the installed packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoders, "local_encoder", lambda: None)
        yield


class WordsEncoder:
    """A fake sentence encoder: counts the words of a text in 24 buckets."""

    def __init__(self, turned: int = 0) -> None:
        self.turned = turned

    def encode(self, texts: list[str], **_: Any) -> np.ndarray:
        """Vectors of unit length."""
        rows = np.zeros((len(texts), 24), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in text.lower().split():
                row[(sum(map(ord, word)) + self.turned) % 24] += 1
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def words_encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[WordsEncoder], None]]:
    """Replace every sentence encoder by `WordsEncoder`; a call replaces it by another one."""

    def put(encoder: WordsEncoder = WordsEncoder()) -> None:  # noqa: B008 - it has no state
        encoders.probe.cache_clear()
        for module in (encoders, experts):
            monkeypatch.setattr(module, "frozen_encoder", lambda *_: encoder)
            monkeypatch.setattr(module, "require_packages", lambda *_: None)
        monkeypatch.setattr(encoders, "encoder_source", lambda name: name)

    put()
    yield put
    encoders.probe.cache_clear()


@pytest.fixture
def few_golden_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two golden texts instead of all twelve, to save time."""
    from i2cl.export import golden

    monkeypatch.setattr(golden, "TEXTS", golden.TEXTS[:2])


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Function that runs a command and returns its exit code, stdout and stderr."""
    from commands import run_command  # with all of the command line, which few tests need

    return partial(run_command, capsys)


@pytest.fixture
def stdout(call: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Function that runs a command, checks its exit code and returns its stdout."""

    def ran(*words: Any, code: int = 0) -> str:
        result, out, err = call(*words)
        assert result == code, err
        return out

    return ran


@pytest.fixture
def refused(call: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Run a command that must fail with ``lines`` lines on stderr and no output; return the lines."""

    def refuse(*words: Any, lines: int = 1) -> str:
        code, out, err = call(*words)
        assert (code, out, err.count("\n")) == (2, "", lines), err
        return err.rstrip("\n")

    return refuse


@pytest.fixture
def decoder() -> Decoder:
    """A tiny random Llama."""
    return Decoder(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama")


@pytest.fixture
def task() -> Task:
    """Two classes, texts of different lengths."""
    words = ("good", "bad")
    rows = tuple(
        Example(f"this film number {number} is {words[number % 2]}" + " indeed" * (number % 5), number % 2)
        for number in range(40)
    )
    template = Template("Review: {text}\nSentiment: {label}")
    return Task("films", ("positive", "negative"), template, train=rows[:24], test=rows[24:])
