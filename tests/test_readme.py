"""The README's Python snippet runs and does what it says (in fewer epochs)."""

import re
from functools import partial
from pathlib import Path

from i2cl import CalibrationConfig

README = Path(__file__).parents[1] / "README.md"


def test_the_snippet_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks, "README.md has no Python snippet"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("i2cl.core.calibration.CalibrationConfig", partial(CalibrationConfig, epochs=2))
    exec(compile(blocks[0], str(README), "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert (tmp_path / "mood" / "injection.safetensors").is_file()
    assert re.search(r"\[('\w+'(, )?)+\]", printed), printed


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
