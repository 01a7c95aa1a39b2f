"""From what was typed to decoders, tasks and options."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions
from i2cl.storage.layout import DESCRIPTION, FILES

if TYPE_CHECKING:
    from i2cl.core.injection import Injection
    from i2cl.models.architectures import Architecture
    from i2cl.models.decoder import Decoder
    from i2cl.tasks import Task

UNWORDED = "{text} {label}"  # stands where a chat's template will


def decoder(name: str, options: ModelOptions, architecture: "Architecture | None" = None) -> "Decoder":
    """Load a model quietly; a small one on the CPU then runs on one thread, which is fastest."""
    libraries()
    import torch

    from i2cl.experiments.workers import is_small
    from i2cl.models.decoder import Decoder

    quiet()
    given: dict[str, Any] = vars(options) | {"device_map": _device_map(options.device_map)}
    with console.waiting(f"loading {name}"):
        loaded = Decoder.from_pretrained(name, architecture=architecture, **given)
    if is_small(loaded):
        torch.set_num_threads(1)
    return loaded


def libraries() -> None:
    """Import what takes seconds, saying so."""
    with console.waiting("loading PyTorch and transformers"):
        import_module("i2cl.models.decoder")


def _device_map(typed: str | None) -> str | dict[str, Any] | None:
    """A name such as ``auto``, or what JSON says of each module."""
    if typed is None or not typed.lstrip().startswith(("{", "[", '"')):
        return typed
    try:
        places = json.loads(typed)
    except (ValueError, RecursionError) as error:
        cure = 'write it like \'{"": "cpu"}\''
        raise I2CLError(f"--device-map {typed!r} is no JSON ({error}): {cure}") from None
    if not isinstance(places, dict) or not all(isinstance(place, str | int) for place in places.values()):
        raise I2CLError(f"--device-map {typed!r} is no map: give every module a device, cpu or disk")
    return places


def require_options(
    loading: ModelOptions, model: str | None = None, settings: Sequence[str] | None = None
) -> None:
    """Check what can be checked before PyTorch is imported. Raises I2CLError on contradicting options, a
    local model that is missing, or a method's option that is not NAME=VALUE.
    """
    _device_map(loading.device_map)
    if loading.device is not None and loading.device_map is not None:
        raise I2CLError("device and device_map exclude each other: give one of them")
    if model is not None:
        require_model(model)
    options(settings)


def require_model(name: str) -> None:
    """Check before PyTorch is imported that a local model is there. Raises I2CLError."""
    local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if local and not Path(name).exists():
        cure = "give a folder, a GGUF file, a hub id, or 'reference'"
        raise I2CLError(f"model folder {name!r} does not exist: {cure}")


def require_artefact(name: str) -> None:
    """Check before PyTorch is imported that an artefact is there, or fetch it from the hub.

    Raises I2CLError if it is in neither place, or the folder holds none.
    """
    folder = Path(name)
    if not folder.exists():
        from i2cl.storage.hub import download

        folder = download(name, None, FILES)
    if not (folder / DESCRIPTION).is_file():
        raise I2CLError(f"{name!r} is no injection: it has no {DESCRIPTION} (made by `i2cl fit`)")


def of_artefact(options: ModelOptions, injection: "Injection", model: str | None) -> ModelOptions:
    """With the revision that an injection was made on, unless another one or another model is named."""
    return replace(options, revision=options.revision or (None if model else injection.base.revision))


def automatic(options: ModelOptions) -> ModelOptions:
    """Choose the dtype by the device and the checkpoint, unless the user has."""
    return replace(options, dtype=options.dtype or "auto")


def artefact_decoder(injection: "Injection", model: str | None, options: ModelOptions) -> "Decoder":
    """Load the model that an injection was made on, or the one that is named instead. Raises I2CLError if the
    first is not found where it was, naming the option that says where it is.
    """
    if model is not None:
        return decoder(model, options)
    try:
        return decoder(injection.base.name, options)
    except I2CLError as error:
        where = f"the injection was made on {injection.base.name!r}; --model names another place"
        raise I2CLError(f"{error} ({where})") from None


def quiet() -> None:
    """No progress bars and no advice from the libraries below."""
    import logging as standard

    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for library in ("accelerate", "bitsandbytes", "torchao"):
        standard.getLogger(library).setLevel(standard.ERROR)
    _quiet_hub()


def _quiet_hub() -> None:
    """Retries of the hub client are not for users: the error that ends them is."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()


def local_task(name: str, options: TaskOptions) -> "Task | None":
    """Load a task that needs neither PyTorch nor the hub, or return None for one of the hub.

    Raises I2CLError as `task`, also for an unknown name: a typing mistake is reported at once.
    """
    from i2cl.tasks.loaders import BENCHMARK_TASKS, PAPER_TASKS

    of_hub = name in {*PAPER_TASKS, *BENCHMARK_TASKS} and options.data_dir is None
    return None if of_hub else task(name, options)


def task(name: str, options: TaskOptions) -> "Task":
    """Load one task. Rows without a template get the default one. Raises I2CLError as `i2cl.load_task`."""
    from i2cl.tasks import load_task
    from i2cl.tasks.loaders import default_template

    if "huggingface_hub" in sys.modules:
        _quiet_hub()
    if options.chat and options.template:
        raise I2CLError("--chat and --template exclude each other: leave one of them out")
    template = UNWORDED if options.chat else default_template(name)
    if options.template is not None:
        template = options.template.replace("\\n", "\n")
    return load_task(
        name,
        data_dir=options.data_dir,
        template=template,
        labels=label_words(options.labels) if options.labels is not None else None,
        text_column=options.text_column,
        label_column=options.label_column,
        test_path=options.test,
        skip_bad_rows=options.skip_bad_rows,
    )


def label_words(typed: str) -> list[str] | dict[str, str]:
    """Parse ``--labels``: words, or NAME=CODE pairs as a dict from code to name.

    Raises I2CLError on a mixture of both, or a code that is given twice.
    """
    parts = split(typed)
    pairs = [tuple(one.strip() for one in part.partition("=")) for part in parts]
    if not any(equals for _, equals, _ in pairs):
        return parts
    if bad := [part for part, pair in zip(parts, pairs, strict=True) if not all(pair)]:
        cure = "write all as NAME=CODE, such as --labels good=1,bad=0"
        raise I2CLError(f"--labels: {bad[0]!r} is not NAME=CODE: {cure}")
    words: dict[str, str] = {}
    for name, _, code in pairs:
        if words.setdefault(code, name) != name:
            raise I2CLError(f"--labels: code {code!r} is given to {words[code]!r} and {name!r}: choose one")
    return words


def task_names(names: str, model: str) -> list[str]:
    """Names; ``all`` means the reference model's tasks, or the paper's for any other model."""
    from i2cl.tasks import list_tasks

    if names != "all":
        return split(names)
    group = "reference" if model == "reference" else "paper"
    return [known.name for known in list_tasks() if known.group == group]


def split(names: str) -> list[str]:
    """Names with commas between, and spaces or not."""
    return [name.strip() for name in names.split(",")]


def options(settings: Sequence[str] | None) -> dict[str, str]:
    """What ``--set`` says, by name. Raises I2CLError on something that is not NAME=VALUE."""
    values: dict[str, str] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise I2CLError(f"--set {setting!r} is not NAME=VALUE: write it like --set formula=add")
        values[name.strip()] = value.strip()
    return values
