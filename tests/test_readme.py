"""The README's Python snippet, links, extras and targets. tests/real plays the snippet on the real model."""

import re
import tomllib

import pytest
import yaml

from i2cl.version import __version__
from pages import ROOT, blocks

README = ROOT / "README.md"
INSTALL = ROOT / "docs" / "install.md"


def test_the_snippet_runs_on_the_bundled_model(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    snippet = next(one.text for one in blocks(README) if one.language == "python")
    assert snippet.count('"smollm2"') == 1
    assert len(re.findall(r"^(?!from |$)", snippet, re.MULTILINE)) <= 6, "five lines, as the page says"
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "readme"}
    exec(compile(snippet.replace('"smollm2"', '"reference"'), str(README), "exec"), names)
    assert set(names["tickets"].predict(names["texts"])) <= set(names["labels"])
    assert (tmp_path / "tickets" / "injection.safetensors").is_file()


def test_installation_names_every_extra_and_the_oldest_python():
    text = INSTALL.read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.search(r"\| extra: .*?\n\n", text, re.DOTALL)[0]
    named = re.findall(r"^\| `([\w-]+)` \|", extras, re.MULTILINE)
    assert sorted(named) == sorted(project["optional-dependencies"])
    oldest = f"Python {project['requires-python'].removeprefix('>=')} or newer"
    assert oldest in text
    assert oldest in README.read_text(encoding="utf-8")


def test_every_local_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README.read_text(encoding="utf-8"))
    assert links, "README.md has no local link"
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_citation_and_the_release_are_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (__version__, "Apache-2.0")
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert release["jobs"]["publish"]["needs"] == "test"
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text(encoding="utf-8"))
