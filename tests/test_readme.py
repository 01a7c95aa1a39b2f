"""The README's Python snippet runs and does what it says (in fewer epochs)."""

import ast
import re
import tomllib
from functools import partial
from pathlib import Path

from i2cl import CalibrationConfig

README = Path(__file__).parents[1] / "README.md"


def test_the_snippet_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks, "README.md has no Python snippet"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("i2cl.core.calibration.CalibrationConfig", partial(CalibrationConfig, epochs=2))
    exec(compile(blocks[0], str(README), "exec"), names := {"__name__": "readme"})
    printed = capsys.readouterr().out
    task, query = names["task"], names["query"]
    said = re.search(r"# (.*), as it should", blocks[0])[1]
    assert [[task.labels[one.label]] for one in task.test if one.text == query] == [ast.literal_eval(said)]
    assert printed == f"{said}\n"
    assert (tmp_path / "mood" / "injection.safetensors").is_file()


def test_installation_names_every_extra_and_the_oldest_python():
    text = README.read_text(encoding="utf-8")
    project = tomllib.loads((README.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.search(r"\| extra: .*?\n\n", text, re.DOTALL)[0]
    named = re.findall(r"^\| `([\w-]+)` \|", extras, re.MULTILINE)
    assert sorted(named) == sorted(project["optional-dependencies"])
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in text


def test_every_local_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README.read_text(encoding="utf-8"))
    assert links, "README.md has no local link"
    missing = [link for link in links if not (README.parent / link).exists()]
    assert not missing


def test_the_make_targets_it_names_exist():
    targets = set(re.findall(r"\bmake (\w+)", README.read_text(encoding="utf-8")))
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
