"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[str, typer.Argument(help="'reference' (bundled), a model folder, or a hub id.")]
TaskName = Annotated[
    str, typer.Argument(help="A known task (`i2cl ls tasks`), or a CSV, TSV, JSONL, JSON or TOML file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Seed = Annotated[int, typer.Option(help="Seed of demonstrations, calibration and everything random.")]
NoSeed = Annotated[int, typer.Option(help="Accepted everywhere; nothing is random here.")]
Shots = Annotated[int | None, typer.Option(min=1, help="Demonstrations per class; default: the task's own.")]
Limit = Annotated[int, typer.Option(min=1, help="Queries per task.")]

DataDir = Annotated[
    Path | None,
    typer.Option(
        envvar="I2CL_DATA_DIR", help="Folder with TASK/train.jsonl and test.jsonl, instead of the hub."
    ),
]
FormatString = Annotated[
    str | None,
    typer.Option("--template", help="Such as 'Review: {text}\\nSentiment: {label}'; \\n is a newline."),
]
Labels = Annotated[str | None, typer.Option(help="Label words in the order of their ids, commas between.")]
TextColumn = Annotated[str, typer.Option(help="Column or key that holds the text.")]
LabelColumn = Annotated[str, typer.Option(help="Column or key that holds the label.")]
TestFile = Annotated[Path | None, typer.Option("--test", help="File with the test rows of your own task.")]

Executor = Annotated[Literal["local", "ray"], typer.Option(help="Here, or on Ray (i2cl\\[ray]).")]
Address = Annotated[str | None, typer.Option(help="Ray cluster; default: one started here.")]

Device = Annotated[
    str | None, typer.Option(help="Such as cpu or cuda:0; default: an accelerator if there is one.")
]
Dtype = Annotated[
    str | None, typer.Option(help="auto, float32, bfloat16 or float16; default: float32 on CPU, else auto.")
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help='auto, or JSON such as \'{"": "disk"}\' (both need accelerate), or tensor_parallel under '
        "torchrun (fit, eval, experiment)."
    ),
]
OffloadFolder = Annotated[
    Path | None, typer.Option(help="Where a device map's weights on 'disk' go, if they are copied.")
]
Quantization = Annotated[
    Literal["8bit", "4bit"] | None,
    typer.Option(help="Hold weights in 8 or 4 bits (i2cl\\[quant]); default: as the checkpoint is."),
]
Revision = Annotated[str | None, typer.Option(help="Hub branch, tag or commit of the model.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model repository brings.")
]

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Option of a method as NAME=VALUE, repeatable; `i2cl ls methods` lists them."),
]
Recipe = Annotated[
    Literal["paper", "released", "fast"],
    typer.Option(help="Calibrate as the paper's text says, as its released code does, or in few passes."),
]
