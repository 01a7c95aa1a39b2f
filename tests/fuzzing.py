"""Damaged inputs: valid files of every kind with a few random errors, and the function that reads each kind.

A crash is anything but success and one `I2CLError`.
"""

import io
import json
import shutil
import tomllib
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st

from i2cl import I2CLError, Injection, Task, Template, load_task
from i2cl.experiments.library import load_experiment
from i2cl.experiments.report.document import build
from i2cl.experiments.store import Store, save_vectors
from i2cl.interfaces.cli import load, main
from i2cl.methods import make_methods
from i2cl.models.loading import resolve_name
from i2cl.tasks.files import ReadAsWarning
from i2cl.tasks.rows import read_labelled, read_queries

HALF_PAIR = json.loads(r'"\ud83d"')
WORDS = ["", " ", "a\nb", "\0", "../..", "/dev/null", "{text}", "=1+1", "é\u2028\u202e", "x" * 400]
NUMBERS = [0, -1, 10**30, 2**63, 0.5, 1e308, float("nan"), float("inf")]
DEEP: Any = reduce(lambda inner, _: (inner,), range(400), ())
LISTS = [(), (None,), ("a", "a"), DEEP]
"""Tuples, because they are immutable."""
ODD = st.sampled_from([None, True, *NUMBERS, *WORDS, HALF_PAIR, *LISTS]) | st.builds(dict, st.just([("", 0)]))

GOOD_ROWS = {
    ".csv": b'text,label\n"a, b",good\nc,bad\n',
    ".tsv": b"label\ttext\ngood\ta b\nbad\tc\n",
    ".jsonl": b'{"text": "a", "label": "good"}\n{"text": "b\\u00e9", "label": 1}\n',
    ".json": b'[{"text": "a", "label": "good", "n": [1]}, {"label": "bad", "text": "b"}]',
    ".txt": b"a film\nanother\r\n",
}
TASK_TOML = b"""name = "mood"
labels = ["good", "bad"]
template = "Review: {text}\\nSentiment: {label}"
separator = "\\n"
shots = 2
instruction = "Say how it is."
[files]
train = "rows.jsonl"
test = "rows.jsonl"
text = "text"
label = "label"
"""
GRID_TOML = b"""title = "one"
measures = "accuracy"
tasks = ["sst2", "trec"]
rows = [{ name = "I2CL", method = "i2cl", shots = [1, 2], options = { epochs = 1 } }, { name = "Zero-shot" }]
against = "I2CL"
skews = [1, 3]
views = ["tasks", "comparison"]
full = { seeds = 2, limit = 5 }
quick = { seeds = 1, tasks = 1, shots = 1 }
"""


@st.composite
def spoiled_bytes(draw, good):
    """A file with up to two bytes changed, pieces cut out, doubled or put in, or cut short."""
    data = bytearray(draw(good) if isinstance(good, st.SearchStrategy) else good)
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        how = draw(st.sampled_from(["flip", "cut", "double", "put", "end"]))
        more = draw(st.integers(1, 8))
        if how == "flip" and data:
            data[place] ^= draw(st.integers(1, 255))
        elif how == "cut":
            del data[place : place + more]
        elif how == "double":
            data[place:place] = data[place : place + more]
        elif how == "put":
            data[place:place] = draw(st.binary(min_size=1, max_size=6) | st.sampled_from(PIECES))
        elif how == "end":
            del data[place:]
    return bytes(data)


PIECES = [b"\xef\xbb\xbf", b"\0", b'"', b"\r", b"{", b"[[", b"\\ud83d", b"\xff", b"1e999", b"9" * 5000]


@st.composite
def swapped(draw, good):
    """A value of JSON with one or two parts replaced by others, left out or added."""
    value = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 2))):
        at, parents = value, []
        while isinstance(at, dict | list) and at and (not parents or draw(st.integers(0, 3))):
            key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            parents.append((at, key))
            at = at[key]
        if not parents:
            return draw(ODD)
        parent, key = parents[-1]
        how = draw(st.sampled_from(["swap", "swap", "swap", "drop", "add"]))
        if how == "drop":
            del parent[key]
        elif how == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(WORDS))] = draw(ODD)
        else:
            parent[key] = draw(ODD)
    return value


def toml(value):
    """A value as TOML's one-line form; what TOML cannot say is left as JSON has it, which is wrong too."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return {"Infinity": "inf", "NaN": "nan"}.get(json.dumps(value), json.dumps(value))


@st.composite
def spoiled_toml(draw, good):
    """A TOML file spoiled as bytes or as values."""
    if draw(st.booleans()):
        return draw(spoiled_bytes(good))
    result = draw(swapped(tomllib.loads(good.decode())))
    if not isinstance(result, dict):
        return toml(result).encode()
    return "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in result.items()).encode()


ROWS = st.sampled_from(sorted(GOOD_ROWS)).flatmap(
    lambda suffix: st.tuples(st.just(suffix), spoiled_bytes(GOOD_ROWS[suffix]), st.booleans())
)
TEXTS = st.lists(
    st.sampled_from(["{text}", "{label}", "{", "}", "{{", " ", "\n", "Review: ", *WORDS, HALF_PAIR])
    | st.text(st.characters(), max_size=3),
    max_size=6,
).map("".join)
TEMPLATES = st.tuples(
    TEXTS | st.just("{text} {label}"), TEXTS, TEXTS, st.lists(TEXTS, max_size=3), st.text(max_size=5)
)
_SETTINGS = """epochs lr noise layers positions formula loss recipe optimizer passes pull batch_size sublayers
token separator init_lambda init_beta draw k x"""
SETTINGS = _SETTINGS.split()
VALUES = ["1", "-1", "many", "1e400", "nan", "[1]", "(0,)", "true", "None", "early", "9" * 400, "0,1", *WORDS]
OPTIONS = st.lists(
    st.tuples(st.sampled_from(SETTINGS), st.sampled_from(VALUES)).map("=".join) | TEXTS, max_size=3
)
METHODS_ASKED = st.lists(
    st.sampled_from(["i2cl", "anchored", "icv", "lora", "tfidf", "few_shot", "knn_prompting", "x", "i2cl+"])
)
FLAGS = (
    "--chunk --input-format --output-format --seed --dtype --device --keep --model --workers "
    "--text-column --revision"
)
GOOD_COMMANDS = [("ls", ["tasks"]), ("ls", ["methods", "--json"]), ("experiment", ["ls"]), ("--version", [])]
COMMANDS = st.sampled_from(GOOD_COMMANDS) | st.tuples(
    st.sampled_from(["predict", "export", "ls", "report", "verify", "push", "experiment", "check", ""]),
    st.lists(
        st.sampled_from(["tasks", "run", "pack", "./none", "--json", "--", "-", "-o", *FLAGS.split()])
        | st.sampled_from([word for word in WORDS if "\0" not in word])
        | st.sampled_from(["9" * 30, "-1", "nan", "csv", "[x]"]),
        max_size=5,
    ),
)


def read_rows(folder, result):
    """Rows as `fit` and `predict` read them."""
    suffix, data, words = result
    path = folder / f"rows{suffix}"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReadAsWarning)
        list(read_queries(str(path), kept=("label",) if suffix != ".txt" else ("text",)))
        if suffix != ".txt":
            read_labelled(path, ("good", "bad") if words else None)


def use_template(_folder, result):
    """A template and a task made of it, read back from what is written of them."""
    form, separator, opening, labels, text = result
    task = Task("mood", ("good", "bad", *labels), Template(form, separator, opening), title=text)
    prompt = task.template.prompt([(text, word) for word in task.labels], text)
    assert prompt.endswith(task.template.head + text + task.template.middle)
    assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task


def read_task(folder, data):
    """A task TOML with its rows."""
    (folder / "rows.jsonl").write_bytes(GOOD_ROWS[".jsonl"] * 3)
    (folder / "task.toml").write_bytes(data)
    task = load_task(folder / "task.toml")
    task.sample(seed=1)
    task.queries(1)


def read_grid(folder, data):
    """An experiment's TOML, and its first cells."""
    from i2cl.experiments.grid import Cell

    (folder / "grid.toml").write_bytes(data)
    experiment = load_experiment(folder / "grid.toml")
    for scale in (experiment.full, experiment.quick):
        for cell in islice(experiment.cells(Cell(model="reference", task=""), ("sst2",), scale), 20):
            assert len(cell.key) == 16


def methods_under(_folder, result):
    """Methods under ``--set``."""
    names, settings = result
    make_methods(names, load.parse_settings(settings))


def run_command(_folder, result):
    """A command that cannot do anything: it must say so in its own way."""
    command, words = result
    offline = patch("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with offline, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as printed:
        try:
            main([command, *words])
        except SystemExit as stop:
            code = stop.code
    if code:
        (line,) = printed.getvalue().splitlines()
        assert (code, line[:7]) == (2, "error: ")
        raise I2CLError(line)


@dataclass
class Spoiled:
    """What is done to one file of a folder: other content, none, or a link to somewhere."""

    name: str
    how: str
    data: bytes


LINKS = {"itself": None, "nothing": "none", "folder": ".", "above": "..", "null": "/dev/null"}


@st.composite
def spoiled_file(draw, folder, names, values=None):
    """A file of a good folder: bytes, JSON types, tensor headers, or links."""
    name = draw(st.sampled_from(names))
    how = draw(st.sampled_from(["bytes", "values", "values", "header", "gone", *LINKS]))
    data = (folder / name).read_bytes()
    if how == "values" and name.endswith(".json"):
        data = json.dumps(draw(swapped(json.loads(data)))).encode()
    elif how == "values" and name.endswith(".jsonl"):
        first, _, rest = data.partition(b"\n")
        data = json.dumps(draw(swapped(json.loads(first)))).encode() + b"\n" + rest
    elif name.endswith(".safetensors") and how in {"values", "header"}:
        size = int.from_bytes(data[:8], "little")
        header = json.dumps(draw(lying(json.loads(data[8 : 8 + size])))).encode()
        value = draw(st.sampled_from([len(header)] * 4 + [len(header) + 8, 0, 2**63, 2**64 - 1]))
        data = value.to_bytes(8, "little") + header + data[8 + size :]
    else:
        data = draw(spoiled_bytes(data))
    return Spoiled(name, how, data)


@st.composite
def lying(draw, header):
    """A safetensors header that says something else of its tensors, and may still fit their bytes."""
    name = draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
    entry = header[name]
    how = draw(st.sampled_from(["dtype", "shape", "name", "offsets", "swap"]))
    if how == "dtype":
        entry["dtype"] = draw(st.sampled_from(["I32", "U32", "F16", "BOOL", "F8_E4M3", "C64", "F99"]))
    elif how == "shape":
        entry["shape"] = draw(
            st.sampled_from([entry["shape"][::-1], [-1], [0], [2**62, 4], [*entry["shape"], 1]])
        )
    elif how == "name":
        header[draw(st.sampled_from([*WORDS, f"{name}.a.b"]))] = header.pop(name)
    elif how == "offsets":
        entry["data_offsets"] = draw(st.sampled_from([[0, 0], [8, 4], [-1, 4], [0, 2**62]]))
    else:
        return draw(swapped(header))
    return header


def placed(folder, good, spoiled):
    """A copy of the good folder with that file spoiled."""
    target = folder / "copy"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(good, target)
    path = target / spoiled.name
    if spoiled.how == "gone" or spoiled.how in LINKS:
        path.unlink()
        if spoiled.how in LINKS:
            path.symlink_to(LINKS[spoiled.how] or path.name)
    else:
        path.write_bytes(spoiled.data)
    return target


class Folders:
    """Good folders, made once, and what reads spoiled copies of them."""

    def __init__(self, home: Path, injection, decoder, records, experiment) -> None:
        self.decoder, self.experiment = decoder, experiment
        self.artefact, self.store = home / "artefact", home / "store"
        injection.save_pretrained(self.artefact)
        self.store.mkdir()
        with Store.writing(self.store) as store:
            for record in records:
                store.append(record)
        values = injection.context.numpy()
        save_vectors(self.store / "vectors", records[0].key, {"context_vector": values})
        self.artefacts = spoiled_file(self.artefact, ["injection.json", "injection.safetensors"])
        kept = f"vectors/{records[0].key}.safetensors"
        self.stores = spoiled_file(self.store, ["cells.jsonl", "cells.jsonl", kept])

    def read_artefact(self, folder, spoiled):
        """An artefact, which must then predict."""
        injection = Injection.from_pretrained(placed(folder, self.artefact, spoiled))
        resolve_name(injection.base.name)
        assert len(injection.predict(self.decoder, ["a film"], force=True)) == 1

    def read_store(self, folder, spoiled):
        """A store, which must then make a report."""
        store = Store.open(placed(folder, self.store, spoiled))
        build([self.experiment], list(store.records.values()), store.vectors(), figures=False)


def targets(folders):
    """By name: inputs, and what reads one in a folder."""
    return {
        "rows": (ROWS, read_rows),
        "templates": (TEMPLATES, use_template),
        "task TOML": (spoiled_toml(TASK_TOML), read_task),
        "grid TOML": (spoiled_toml(GRID_TOML), read_grid),
        "options": (st.tuples(METHODS_ASKED, OPTIONS), methods_under),
        "command lines": (COMMANDS, run_command),
        "artefacts": (folders.artefacts, folders.read_artefact),
        "stores": (folders.stores, folders.read_store),
    }


def refused(work):
    """Whether it was refused; anything else but success is a crash."""
    try:
        work()
    except I2CLError:
        return True
    return False
