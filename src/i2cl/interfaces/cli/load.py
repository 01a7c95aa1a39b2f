"""Load models and tasks from the values of command-line options."""

import json
import logging
from collections.abc import Iterator, Sequence
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
    from i2cl.models.decoder import Decoder
    from i2cl.tasks import Task

CHAT_PLACEHOLDER = "{text} {label}"  # replaced once the model's chat template is known


def decoder(name: str, options: ModelOptions) -> "Decoder":
    """Load a model without progress bars. A small one on the CPU gets one thread, which is fastest."""
    libraries()
    import torch

    from i2cl.experiments.workers import is_small
    from i2cl.models.decoder import Decoder

    quiet()
    loading_options: dict[str, Any] = vars(options) | {"device_map": _device_map(options.device_map)}
    with console.waiting(f"loading {name}"):
        loaded = Decoder.from_pretrained(name, **loading_options)
    if is_small(loaded):
        torch.set_num_threads(1)
    return loaded


def libraries() -> None:
    """Import PyTorch and transformers, which takes seconds, with a progress message."""
    with console.waiting("loading PyTorch and transformers"):
        import_module("i2cl.models.decoder")


def _device_map(typed: str | None) -> str | dict[str, Any] | None:
    """Parse ``--device-map``: a name such as ``auto``, or a JSON object from modules to devices."""
    if typed is None or not typed.lstrip().startswith(("{", "[", '"')):
        return typed
    try:
        devices = json.loads(typed)
    except (ValueError, RecursionError) as error:
        hint = 'write it like \'{"": "cpu"}\''
        raise I2CLError(f"--device-map {typed!r} is not valid JSON ({error}): {hint}") from None
    if not isinstance(devices, dict) or not all(isinstance(device, str | int) for device in devices.values()):
        hint = 'write it like \'{"": "cpu"}\', with a device, cpu or disk for every module'
        raise I2CLError(f"--device-map {typed!r} is not an object from modules to devices: {hint}")
    return devices


def require_options(
    loading: ModelOptions, model: str | None = None, settings: Sequence[str] | None = None
) -> None:
    """Check what can be checked before PyTorch is imported. Raises I2CLError on contradicting options, a
    local model that is missing, or a method's option that is not NAME=VALUE.
    """
    _device_map(loading.device_map)
    if loading.device is not None and loading.device_map is not None:
        raise I2CLError("--device and --device-map exclude each other: give one of them")
    if model is not None:
        require_model(model)
    parse_settings(settings)


def require_model(name: str) -> None:
    """Check before PyTorch is imported that a local model is there. Raises I2CLError."""
    local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if local and not Path(name).exists():
        hint = "give a folder, a GGUF file, a hub id, or 'reference'"
        raise I2CLError(f"model folder {name!r} does not exist: {hint}")


def require_store(folder: Path) -> None:
    """Check before PyTorch is imported that the folder of a store exists. Raises I2CLError."""
    if not folder.is_dir():
        hint = "create one with `i2cl experiment run NAME --store DIR`"
        raise I2CLError(f"no store at {str(folder)!r}: {hint}")


def require_artefact(name: str) -> None:
    """Check before PyTorch is imported that an artefact exists, and download it from the hub if needed.

    Raises I2CLError if it is neither a folder nor on the hub, or is not an artefact.
    """
    folder = Path(name)
    if not folder.exists():
        from i2cl.storage.hub import download

        folder = download(name, None, FILES)
    if not (folder / DESCRIPTION).is_file():
        hint = "create one with `i2cl fit MODEL TASK -o FOLDER`"
        raise I2CLError(f"{name!r} is not an artefact, it has no {DESCRIPTION}: {hint}")


def with_default_dtype(options: ModelOptions) -> ModelOptions:
    """Let the device and the checkpoint determine the dtype unless ``--dtype`` is given."""
    return replace(options, dtype=options.dtype or "auto")


def artefact_decoder(injection: "Injection", model: str | None, options: ModelOptions) -> "Decoder":
    """Load the model that an injection was fitted on, in the same revision, or ``model`` instead.

    Raises I2CLError if it cannot be loaded; the message names the option for another path.
    """
    if model is not None:
        return decoder(model, options)
    try:
        revision = options.revision or injection.base.revision
        return decoder(injection.base.name, replace(options, revision=revision))
    except I2CLError as error:
        hint = f"the task was fitted on {injection.base.name!r}; give its new path with --model"
        raise I2CLError(f"{error} ({hint})") from None


def quiet() -> None:
    """Disable progress bars and warnings of the libraries that load models, and the hub client's messages on
    retries.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for library in ("accelerate", "bitsandbytes", "huggingface_hub", "torchao"):
        logging.getLogger(library).setLevel(logging.ERROR)


def local_task(name: str, options: TaskOptions) -> "Task | None":
    """Load a task that needs neither PyTorch nor the hub, or return None for a task on the hub.

    Raises I2CLError as `task` does, so a mistyped name is reported before PyTorch is imported.
    """
    from i2cl.tasks.loaders import BENCHMARK_TASKS, PAPER_TASKS

    on_hub = name in {*PAPER_TASKS, *BENCHMARK_TASKS} and options.data_dir is None
    return None if on_hub else task(name, options)


def task(name: str, options: TaskOptions) -> "Task":
    """Load one task, with the default template if none is given. Raises I2CLError as `i2cl.load_task`."""
    from i2cl.tasks import load_task
    from i2cl.tasks.loaders import default_template

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return load_task(
        name,
        data_dir=options.data_dir,
        template=template(options, default_template(name)),
        labels=label_words(options.labels) if options.labels is not None else None,
        text_column=options.text_column,
        label_column=options.label_column,
        label_separator=options.label_separator,
        label_columns=split(options.label_columns) if options.label_columns else (),
        test_path=options.test,
        skip_bad_rows=options.skip_bad_rows,
    )


def template(options: TaskOptions, default: str | None) -> str | None:
    """Return the prompt format of the options, or the default. Raises I2CLError if two are given."""
    if options.chat and options.template:
        raise I2CLError("--chat and --template exclude each other: leave one of them out")
    if options.template is not None:
        return options.template.replace("\\n", "\n")
    return CHAT_PLACEHOLDER if options.chat else default


def texts(source: str, options: TaskOptions) -> Iterator[str]:
    """Yield the usable texts of a file. Reports the other rows at its end.

    Raises I2CLError if there are other rows, unless ``--skip-bad-rows`` is given.
    """
    from i2cl.tasks.rows import BadRows, read_queries

    bad, total = BadRows(source), 0
    for query in read_queries(source, column=options.text_column, skip=True):
        total += 1
        if query.error is None:
            yield query.text
        else:
            bad.add(query.error)
    bad.raise_unless_skipped(total, skip=options.skip_bad_rows)
    if bad.count:
        console.note(f"{source}: skipped {bad.count} rows without a usable text")


def label_words(typed: str) -> list[str] | dict[str, str]:
    """Parse ``--labels``: words, or NAME=CODE pairs as a dict from code to name.

    Raises I2CLError for a mixture of both, or for a code with two names.
    """
    parts = split(typed)
    pairs = [tuple(side.strip() for side in part.partition("=")) for part in parts]
    if not any(equals for _, equals, _ in pairs):
        return parts
    if bad := [part for part, pair in zip(parts, pairs, strict=True) if not all(pair)]:
        hint = "write all as NAME=CODE, such as --labels good=1,bad=0"
        raise I2CLError(f"--labels: {bad[0]!r} is not NAME=CODE: {hint}")
    words: dict[str, str] = {}
    for name, _, code in pairs:
        if words.setdefault(code, name) != name:
            raise I2CLError(f"--labels: {words[code]!r} and {name!r} have the same code {code!r}: choose one")
    return words


def task_names(names: str, model: str) -> list[str]:
    """Split task names; ``all`` means the reference model's tasks, or the paper's for any other model."""
    from i2cl.tasks import list_tasks

    if names != "all":
        return split(names)
    group = "reference" if model == "reference" else "paper"
    return [known.name for known in list_tasks() if known.group == group]


def split(names: str) -> list[str]:
    """Split names at commas and strip spaces."""
    return [name.strip() for name in names.split(",")]


def parse_settings(settings: Sequence[str] | None) -> dict[str, str]:
    """Parse the values of ``--set``. Raises I2CLError for a value that is not NAME=VALUE."""
    return parse_pairs(settings, "--set", "NAME=VALUE", "formula=add")


def parse_pairs(values: Sequence[str] | None, option: str, form: str, example: str) -> dict[str, str]:
    """Parse the values of a repeatable option, of which the last one of a name counts.

    Raises I2CLError for a value without an equals sign.
    """
    pairs: dict[str, str] = {}
    for text in values or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise I2CLError(f"{option} {text!r} is not {form}: write it like {option} {example}")
        pairs[name.strip()] = value.strip()
    return pairs
