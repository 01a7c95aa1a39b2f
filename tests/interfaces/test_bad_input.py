"""Bad input: one line that begins with "error:", exit code 2, nothing written; mostly without PyTorch."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import typer

import i2cl
from commands import jsonl, run
from i2cl import Decoder
from processes import Program, until
from tiny import tiny_folder

TEMPLATE = r"Review: {text}\nSentiment:{label}"
GOOD = [{"text": f"film {number}", "label": ("bad", "good")[number % 2]} for number in range(8)]


def tree(folder):
    """Return every path under a folder, with its size."""
    return {str(path): path.lstat().st_size for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Valid models and a valid artefact; tests corrupt copies of them."""
    folder = tmp_path_factory.mktemp("home")
    sizes = {"wider": {"hidden_size": 48}, "short": {"max_position_embeddings": 24}}
    for name, fields in ({"model": {}, "same_shape": {"seed": 1}} | sizes).items():
        tiny_folder(folder / name, **fields)
    jsonl(folder / "films.jsonl", GOOD)
    (folder / "deep.toml").write_text("name = " + "[" * 5000 + "]" * 5000)
    head = 'name = "mood"\nlabels = ["bad", "good"]\ntemplate = "{text}: {label}"\n'
    (folder / "null.toml").write_text(head + '[files]\ntrain = "a\\u0000.csv"\n')
    assert run(*fit(folder, "-o", folder / "artefact")) == 0
    return folder


def fit(home, *more, model=None, task=None):
    where = [str(model or home / "model"), str(task or home / "films.jsonl")]
    return ["fit", *where, "--template", TEMPLATE, "--shots", "2", "--set", "epochs=1", *map(str, more)]


@pytest.fixture
def refused(call, tmp_path):
    """Run a command that must fail with one line on stderr and change no file; return the line."""

    def refuse(*arguments):
        before = tree(tmp_path)
        code, out, err = call(*arguments)
        assert tree(tmp_path) == before
        assert code == 2
        assert not out or out.startswith("Rows: ")  # what only the model can tell comes behind the block
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        return line

    return refuse


FILES = {  # contents by file name; tests/tasks/test_rows.py tests every kind of bad row
    "one.jsonl": b'{"text": "a", "label": "good"}\n' * 3,
    "gap.txt": b"one\n\ntwo\n",
}


FIT = [*fit(Path("{}")), "-o", "{new}"]
UNLABELLED = [*FIT, "--unlabelled", "{films}"]
SEEN, OWN, ASK = "mood-colour-1", ["-o", "{new}"], ["predict", "{artefact}"]
WRONG = {  # `CASES` has mistakes that are found without PyTorch
    "rows of one class": ([*fit(Path("{}"), task="one.jsonl"), *OWN], "every label is 'good'"),
    "labels of other rows": ([*FIT, "--labels", "up,down"], "label 'bad' is not one of up, down"),
    "a label without rows": (
        [*fit(Path("{}"), task="one.jsonl"), *OWN, "--labels", "bad,good"],
        "no text has the label 'bad': add texts with it, or leave it out of the labels",
    ),
    "an empty text": ([*ASK, "gap.txt", *OWN], "line 2: the text is empty"),
    "a device that is not there": ([*FIT, "--device", "cuda:7"], "cannot use device 'cuda:7'"),
    "half a description": (["predict", "half json", "{films}"], "injection.json cannot be read"),
    "half the tensors": (["predict", "half safetensors", "{films}"], "injection.safetensors is damaged"),
    "unknown task": (["fit", "{model}", "sst3", "-o", "{new}"], "did you mean 'sst"),
    "an option of other commands": (["check", "{model}", "--device-map", "auto"], "--device-map"),
    "unknown method": (["eval", "{model}", "synthetic", "--method", "zero_shto"], "did you mean 'zero_shot'"),
    "unknown option": ([*FIT, "--set", "epoch=3"], "no chosen method has the option"),
    "value out of range": ([*FIT, "--set", "epochs=-1"], "epochs='-1'"),
    "experts given twice": (
        [*FIT, "--experts", "llm", "--set", "experts=tfidf"],
        "--experts and --set experts give the same option",
    ),
    "unknown layer": ([*FIT, "--set", "layers=9"], "0 to 1"),
    "a seed beyond 32 bits": ([*FIT, "--seed", str(2**32)], "--seed"),
    "no memory": (["fit", "reference", SEEN, "--memory", "1e-9", *OWN], "raise the limit (--memory)"),
    "memory of another method": ([*FIT, "--memory", "1"], "has the option"),
    "a prior of no texts": ([*FIT, "--prior", "0.5,0.5"], "with --unlabelled"),
    "a prior of three": ([*UNLABELLED, "--prior", "0.5,0.3,0.2"], "3 shares for 2 labels"),
    "a prior above one": ([*UNLABELLED, "--prior", "0.9,0.9"], "sum to 1.8"),
    "unknown flag": (["ls", "tasks", "--jsn"], "--jsn"),
    "unknown command": (["train"], "No such command 'train': see i2cl --help"),
    "no task": (["fit", "{model}"], "see i2cl fit --help"),
    "no test rows": (["eval", "{model}", "{films}", "--template", TEMPLATE, "--shots", "2"], "no test"),
    "a list of devices": ([*FIT, "--device-map", '["cpu"]'], "is not an object"),
    "a map to no device": ([*FIT, "--device-map", '{"": "abacus"}'], "cannot use device 'abacus'"),
    "half a device map": ([*FIT, "--device-map", '{"model.layers.0": "disk"}'], "does not give any device"),
    "a deep device map": (
        ["predict", "{artefact}", "{films}", "--device-map", "[" * 5000],
        "is not valid JSON",
    ),
    "a name too long for a task": (["fit", "{model}", "x" * 5000, "-o", "{new}"], "name too long"),
    "a name too long for an artefact": (["predict", "x" * 5000, "{films}"], "name too long"),
    "a name too long for an output": (["predict", "{artefact}", "{films}", "-o", "x" * 255], "name too long"),
    "a deep task": (["fit", "{model}", "{home}/deep.toml", "-o", "{new}"], "is not valid TOML"),
    "a file with a null byte": (["fit", "{model}", "{home}/null.toml", "-o", "{new}"], "null byte"),
    "a column of the name of another": ([*ASK, "{films}", "--keep", "row", "--row-number"], "leave one out"),
    "unknown experiment": (["experiment", "run", "mian"], "did you mean 'main'"),
    "tasks that no experiment has": (["experiment", "run", "main", "--tasks", "sst3"], "unknown task"),
    "no such format": (["report", ".", "--formats", "pdf"], "use one or more of md, csv, html"),
    "two tasks of a name": (["eval", "reference", f"{SEEN},{SEEN}"], "two tasks are named 'mood-colour-1'"),
    "two methods of a name": (["eval", "reference", SEEN, "--method", "i2cl,i2cl"], "two methods are named"),
    "a restart of nothing": (["predict", "{artefact}", "{films}", "--restart"], "--restart needs -o FILE"),
    "chunk of nothing": (["predict", "{artefact}", "{films}", "--chunk", "0"], "--chunk"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_arguments_are_rejected(refused, home, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments, message = WRONG[case]
    for name, content in FILES.items():
        if name in arguments:
            (tmp_path / name).write_bytes(content)
    for half in (part for part in arguments if part.startswith("half ")):
        folder = shutil.copytree(home / "artefact", tmp_path / half)
        path = folder / f"injection.{half.split()[1]}"
        path.write_bytes(path.read_bytes()[:100])
    names = {"{model}": "model", "{artefact}": "artefact", "{films}": "films.jsonl"}
    names |= {f"{{home}}/{name}.toml": f"{name}.toml" for name in ("deep", "null")}
    places = {name: str(home / path) for name, path in names.items()} | {"{new}": str(tmp_path / "new")}
    filled = [places.get(part, part.replace("{}", str(home))) for part in arguments]
    assert message in refused(*filled)


def test_predict_does_not_overwrite_its_inputs(refused, home, tmp_path):
    artefact = shutil.copytree(home / "artefact", tmp_path / "artefact")
    (tmp_path / "t.txt").write_text("one\n")
    for output in ("t.txt", "artefact/injection.json"):
        line = refused("predict", artefact, tmp_path / "t.txt", "-o", tmp_path / output)
        assert "is also an input: choose another output" in line


def test_long_text_is_truncated_with_one_warning(call, home, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 20_000 + "\nshort\n", encoding="utf-8")
    code, out, err = call("predict", home / "artefact", tmp_path / "long.txt")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert err == "warning: 1 of 2 texts were cut to fit 1,024 tokens of context\n"


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "boom")


CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
DEEP = '{"model_type": ' + "[" * 5000 + "]" * 5000 + "}"
SPOILED = {  # what is done to a copy of the model, and what is said then
    "no config": (lambda at, _: (at / CONFIG).unlink(), "it has no config.json"),
    "broken config": (lambda at, _: (at / CONFIG).write_text("{"), "cannot load"),
    "deep config": (lambda at, _: (at / CONFIG).write_text(DEEP), "cannot load"),
    "other sizes": (
        lambda at, home: shutil.copy(home / "wider" / CONFIG, at),
        "one of the two files belongs to another model",
    ),
    "unknown type": (lambda at, _: (at / CONFIG).write_text('{"model_type": "abacus"}'), "abacus"),
    "no tokenizer": (lambda at, _: [path.unlink() for path in at.glob("tok*")], "cannot load the tokenizer"),
    "truncated": (lambda at, _: os.truncate(at / WEIGHTS, 3000), "damaged weights"),
    "no weights": (lambda at, _: (at / WEIGHTS).unlink(), "has no weights"),
    "pickle only": (
        lambda at, _: (at / WEIGHTS).rename(at / PICKLE),
        "only pickle weights (pytorch_model.bin)",
    ),
}


@pytest.mark.parametrize("how", SPOILED)
def test_damaged_model_is_rejected(refused, home, tmp_path, how):
    spoil, message = SPOILED[how]
    folder = shutil.copytree(home / "model", tmp_path / "spoiled")
    spoil(folder, home)
    if how == "pickle only":
        (folder / PICKLE).write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    assert message in refused(*fit(home, "-o", tmp_path / "new", model=folder))
    assert not (tmp_path / "boom").exists()


def predicted(home, *more):
    return ["predict", home / "artefact", home / "films.jsonl", *more]


def test_other_model_needs_force_and_the_same_shape(call, refused, home):
    line = refused(*predicted(home, "--model", home / "same_shape"))
    assert ("weights" in line, "--force" in line) == (True, True)
    code, out, err = call(*predicted(home, "--model", home / "same_shape", "--force"))
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 1 + len(GOOD)
    for force in ([], ["--force"]):
        line = refused(*predicted(home, "--model", home / "wider", *force))
        assert ("d_model 32 and not 48" in line, "--force" in line) == (True, False)


def test_moved_base_model_is_reported_with_model_option(refused, home, tmp_path):
    shutil.copytree(home / "artefact", tmp_path / "artefact")
    description = tmp_path / "artefact" / "injection.json"
    description.write_text(description.read_text().replace(str(home / "model"), str(home / "gone")))
    line = refused("predict", tmp_path / "artefact", home / "films.jsonl")
    assert (str(home / "gone") in line, "--model" in line) == (True, True)


def test_unwritable_outputs_are_rejected(refused, home, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "new", "/proc/none/new"):
        assert "cannot write" in refused(*fit(home, "-o", place))
        assert "cannot write" in refused(*predicted(home, "-o", place))
    assert "is a file" in refused(*fit(home, "-o", tmp_path / "file"))
    assert "cannot write" in refused(*predicted(home, "-o", tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("irreplaceable")
    assert "holds other files" in refused(*fit(home, "-o", tmp_path / "mine"))
    monkeypatch.setattr("i2cl.models.decoder.Decoder.from_pretrained", None)  # before any work
    assert "cannot write" in refused(*fit(home, "-o", tmp_path / "file" / "new"))


def test_demonstrations_above_the_context_are_rejected(refused, home):
    films = home / "films.jsonl"
    task = [films, "--test", films, "--template", TEMPLATE, "--shots", "2"]
    line = refused("eval", home / "short", *task, "--method", "few_shot", "--workers", "1")
    assert ("tokens" in line, "holds 24" in line) == (True, True)


def test_ctrl_c_before_saving_leaves_no_files(call, home, tmp_path, monkeypatch):
    for place in ("i2cl.methods.i2cl.calibrate", "i2cl.core.artefact.save_file"):
        with monkeypatch.context() as patch:
            patch.setattr(place, Mock(side_effect=KeyboardInterrupt))
            code, out, err = call(*fit(home, "-o", tmp_path / "new"))
        assert (code, "Saved" in out) == (130, False)
        assert err.splitlines() == ["error: interrupted: no file was written"]
        assert tree(tmp_path) == {}


@pytest.mark.parametrize("error", [typer.Abort, KeyboardInterrupt])
def test_interrupt_exit_code_in_every_version_of_typer(call, monkeypatch, error):
    monkeypatch.setattr("i2cl.interfaces.cli.app", Mock(side_effect=error))
    assert call("ls", "tasks") == (130, "", "error: interrupted: no file was written\n")


TOLD = """
from i2cl.interfaces.cli import console, main
epoch = console.Bar.epoch
def told(*arguments):
    print("calibrating", flush=True)
    epoch(*arguments)
console.Bar.epoch = told
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_sigint_ends_calibration(home, tmp_path):
    output = tmp_path / "new"
    program = Program(TOLD, *fit(home, "-o", output), "--set", "epochs=5000")
    until(lambda: "calibrating\n" in program.out.read_text(), program=program)
    os.kill(program.process.pid, signal.SIGINT)
    code, _, err = program.wait()
    *hints, last = err.splitlines()
    assert (code, last) == (130, "error: interrupted: no file was written")
    assert len(hints) <= 1  # a signal that comes late finds the hint printed
    assert all(hint.endswith("--recipe fast fits several times faster") for hint in hints)
    assert tree(tmp_path) == {}


def test_out_of_memory_is_a_one_line_error(call, monkeypatch):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
    monkeypatch.setattr(Decoder, "prefix", Mock(side_effect=full))
    code, _, err = call("eval", "reference", "mood-colour-1", "--method", "few_shot", "--limit", 2)
    assert code == 2
    assert err.splitlines()[-1].startswith("error: out of memory: take a smaller model")


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

EARLY_FILES = {
    "good.csv": "text,label\nwarm,x\ncold,y\n",
    "named.csv": "body,label\nwarm,x\ncold,y\n",
    "gap.csv": "text,label\nwarm,x\n,y\n",
    "mood/injection.json": "{}",
}
EARLY_FIT = "fit reference good.csv -o new"
CASES = {
    "fit: missing file": ("fit reference none.csv -o new", "none.csv does not exist"),
    "fit: wrong column": ("fit reference named.csv -o new", "no text column 'text'"),
    "fit: bad row": ("fit reference gap.csv -o new", "row 3: the text is empty"),
    "fit: unknown task": ("fit reference sst3 -o new", "unknown task 'sst3'"),
    "fit: missing model": ("fit ./none good.csv -o new", "model folder './none' does not exist"),
    "fit: missing test rows": (f"{EARLY_FIT} --test none.csv", "none.csv does not exist"),
    "fit: missing unlabelled texts": (f"{EARLY_FIT} --unlabelled none.txt", "none.txt does not exist"),
    "fit: output is a file": ("fit reference good.csv -o good.csv", "is a file: give a folder"),
    "fit: unwritable output": ("fit reference good.csv -o /proc/none/new", "cannot write"),
    "fit: bad template": (
        f"{EARLY_FIT} --template {{text}}",
        "it needs {text}, then some text, then {label} at the end",
    ),
    "fit: bad labels": (f"{EARLY_FIT} --labels a=x,y", "is not NAME=CODE"),
    "fit: bad dtype": (f"{EARLY_FIT} --dtype int3", "'--dtype': 'int3' is not one of"),
    "fit: bad device map": (f"{EARLY_FIT} --device-map [", "is not valid JSON"),
    "fit: bad method option": (f"{EARLY_FIT} --set epochs", "is not NAME=VALUE"),
    "fit: bad target accuracy": (
        f"{EARLY_FIT} --target-accuracy 3",
        "target accuracy must be at least 0.5 and below 1, got 3.0",
    ),
    "fit: unknown option": (f"{EARLY_FIT} --none", "No such option"),
    "predict: missing file": ("predict mood none.csv", "none.csv does not exist"),
    "predict: wrong column": ("predict mood named.csv", "no text column 'text'"),
    "predict: bad row": ("predict mood gap.csv", "row 3: the text is empty"),
    "predict: missing kept column": ("predict mood good.csv --keep id", "no column 'id' to keep"),
    "predict: unwritable output": ("predict mood good.csv -o /proc/none/new.csv", "cannot write"),
    "predict: missing artefact": ("predict ./none good.csv", "no injection at './none'"),
    "predict: no artefact": ("predict . good.csv", "it has no injection.json"),
    "predict: bad threshold": ("predict mood good.csv --min-confidence 3", "is not a probability"),
    "eval: missing file": ("eval reference none.csv", "none.csv does not exist"),
    "eval: wrong column": ("eval reference named.csv", "no text column 'text'"),
    "eval: unknown task": ("eval reference sst3", "unknown task 'sst3'"),
    "export: missing artefact": ("export ./none new", "no injection at './none'"),
    "export: wrong ending": ("export mood new --to gguf", "end it with .gguf"),
    "verify: missing export": ("verify none", "'none' does not exist"),
    "serve: task instead of its folder": ("serve reference --tasks mood", "--tasks mood is a task: give the"),
    "push: missing artefact": ("push none name/none", "'none' is not a folder"),
    "report: missing store": ("report none", "no store at 'none'"),
    "experiment pack: missing store": ("experiment pack none packed", "no store at 'none'"),
    "ls: unknown list": ("ls mood", "'what': 'mood' is not one of 'tasks', 'architectures', 'methods'"),
    "check: missing model": ("check ./none", "model folder './none' does not exist"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run all cases in one process; return the exit code, the error, and whether torch was imported."""
    folder = tmp_path_factory.mktemp("home")
    for name, content in EARLY_FILES.items():
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
