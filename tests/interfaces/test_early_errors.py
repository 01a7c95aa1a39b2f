"""Mistakes on the command line are reported before PyTorch, which takes seconds, is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import i2cl

RUN_ALL = """
import contextlib, io, json, sys
from i2cl.interfaces.cli import main
for name, words in json.load(sys.stdin).items():
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(words)
        except SystemExit as stop:
            print(json.dumps([name, stop.code, err.getvalue(), "torch" in sys.modules]))
"""

FILES = {
    "good.csv": "text,label\nwarm,x\ncold,y\n",
    "named.csv": "body,label\nwarm,x\ncold,y\n",
    "gap.csv": "text,label\nwarm,x\n,y\n",
    "mood/injection.json": "{}",
}
FIT = "fit reference good.csv -o new"
CASES = {
    "fit: missing file": ("fit reference none.csv -o new", "none.csv does not exist"),
    "fit: wrong column": ("fit reference named.csv -o new", "no text column 'text'"),
    "fit: bad row": ("fit reference gap.csv -o new", "row 3: the text is empty"),
    "fit: unknown task": ("fit reference sst3 -o new", "unknown task 'sst3'"),
    "fit: missing model": ("fit ./none good.csv -o new", "model folder './none' does not exist"),
    "fit: missing test rows": (f"{FIT} --test none.csv", "none.csv does not exist"),
    "fit: missing unlabelled texts": (f"{FIT} --unlabelled none.txt", "none.txt does not exist"),
    "fit: output is a file": ("fit reference good.csv -o good.csv", "is a file: give a folder"),
    "fit: unwritable output": ("fit reference good.csv -o /proc/none/new", "cannot write"),
    "fit: bad template": (
        f"{FIT} --template {{text}}",
        "it needs {text}, then some text, then {label} at the end",
    ),
    "fit: bad labels": (f"{FIT} --labels a=x,y", "is not NAME=CODE"),
    "fit: bad dtype": (f"{FIT} --dtype int3", "'int3' is not one of"),
    "fit: bad device map": (f"{FIT} --device-map [", "is not valid JSON"),
    "fit: bad method option": (f"{FIT} --set epochs", "is not NAME=VALUE"),
    "fit: bad folds": (f"{FIT} --folds 1", "give 2 or more"),
    "fit: bad target accuracy": (
        f"{FIT} --target-accuracy 3",
        "target accuracy must be at least 0.5 and below 1, got 3.0",
    ),
    "fit: unknown option": (f"{FIT} --none", "No such option"),
    "predict: missing file": ("predict mood none.csv", "none.csv does not exist"),
    "predict: wrong column": ("predict mood named.csv", "no text column 'text'"),
    "predict: bad row": ("predict mood gap.csv", "row 3: the text is empty"),
    "predict: missing kept column": ("predict mood good.csv --keep id", "no column 'id' to keep"),
    "predict: unwritable output": ("predict mood good.csv -o none/new.csv", "cannot write"),
    "predict: missing artefact": ("predict ./none good.csv", "no injection at './none'"),
    "predict: no artefact": ("predict . good.csv", "it has no injection.json"),
    "predict: bad threshold": ("predict mood good.csv --min-confidence 3", "is not a probability"),
    "eval: missing file": ("eval reference none.csv", "none.csv does not exist"),
    "eval: wrong column": ("eval reference named.csv", "no text column 'text'"),
    "eval: unknown task": ("eval reference sst3", "unknown task 'sst3'"),
    "export: missing artefact": ("export ./none new", "no injection at './none'"),
    "export: wrong ending": ("export mood new --to gguf", "end it with .gguf"),
    "verify: missing export": ("verify none", "'none' does not exist"),
    "push: missing artefact": ("push none name/none", "'none' is not a folder"),
    "report: missing store": ("report none", "no store at 'none'"),
    "experiment pack: missing store": ("experiment pack none packed", "no store at 'none'"),
    "check: missing model": ("check ./none", "model folder './none' does not exist"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Exit code, error and whether torch was imported, of each case. All run in one process."""
    folder = tmp_path_factory.mktemp("home")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(Path(i2cl.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    cases = json.dumps({name: words.split() for name, (words, _) in CASES.items()})
    given = {"input": cases, "cwd": folder, "env": environment, "capture_output": True, "text": True}
    before = sorted(folder.rglob("*"))
    done = subprocess.run([sys.executable, "-c", RUN_ALL], check=True, **given)
    assert sorted(folder.rglob("*")) == before
    return {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES)
def test_mistake_is_reported_before_torch_is_imported(outcomes, case):
    code, message, torch_imported = outcomes[case]
    assert code == 2
    assert CASES[case][1] in message
    assert message.count("\n") == 1
    assert not torch_imported
