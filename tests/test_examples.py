"""Run the scripts and the notebook in examples/, unchanged, on the bundled model."""

import json
import os
import re
import runpy
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from types import SimpleNamespace

import pytest

from pages import ROOT, alike
from processes import Program, until

FOLDER = ROOT / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

SAID = {
    "own_csv": r"(billing|delivery) +There is a payment",
    "pipeline": r"fold 3: (0\.[89]\d|1\.00)\n\['blue'\]",
    "many_tasks": r"mood-colour-1 +blue\n.*each task stores 768 numbers",
    "serve_and_call": r"(positive|negative) \{.*\}\n\['films'\]\nexit code 0",
    "table1_cell": r"zero_shot .*\nfew_shot .*\ni2cl .*\nthe paper has no such cell",
}
"""What each script prints, at the least."""

TAKES = {"pipeline": "sklearn", "serve_and_call": "uvicorn"}


class Forked(Program):
    """Stands in for `subprocess.Popen` of ``python -c CODE``, without the seconds that imports take."""

    def __init__(self, command, **_):
        super().__init__(*command[2:])
        self.stdout = SimpleNamespace(readline=lambda: until(self._first_line, program=self))

    def _first_line(self):
        line, newline, _ = self.out.read_text(encoding="utf-8").partition("\n")
        return line + newline if newline else ""

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def wait(self, timeout=60):
        return super().wait(timeout)[0]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_runs_and_prints_what_it_is_for(script, tmp_path, monkeypatch):
    if find_spec(TAKES.get(script.stem, "i2cl")) is None:
        pytest.skip(f"no package {TAKES[script.stem]}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script)])
    monkeypatch.setattr("subprocess.Popen", Forked)
    with redirect_stdout(StringIO()) as message:
        runpy.run_path(str(script), run_name="__main__")
    assert re.search(SAID[script.stem], message.getvalue(), re.DOTALL), message.getvalue()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_print_what_it_shows(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            with redirect_stdout(StringIO()) as message:
                exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
            shown = "".join(line for one in cell["outputs"] for line in one["text"])
            assert alike(message.getvalue()) == alike(shown)


def test_the_list_names_all_of_them_and_nothing_else():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \[([\w.]+)\]\(\1\)", text, re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in (*SCRIPTS, *NOTEBOOKS))
    assert sorted(SAID) == [path.stem for path in SCRIPTS]
