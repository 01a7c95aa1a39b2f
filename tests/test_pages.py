"""Run the commands of the README and the site unchanged, or check that the command line accepts them.

Commands after ``$`` and all Python snippets of a page run in order, in one temporary folder per page. Their
output must equal the output on the page, except for numbers. The word after a block's language is a package
that it needs, or ``real``, which means that tests/real runs it. All other commands are only parsed.
"""

import json
import re
import tomllib
from importlib.util import find_spec

import pytest
import yaml
from typer.main import get_command

import i2cl
from i2cl.interfaces.cli import app
from i2cl.version import __version__
from pages import ROOT, blocks, commands, pages, play

README = ROOT / "README.md"
PAGES = [page for page in pages() if page != README]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_runs_and_says_what_the_page_shows(page, tmp_path, monkeypatch):
    played = [one for one in blocks(page) if one.mark != "real" and (not one.mark or find_spec(one.mark))]
    play(played, tmp_path, monkeypatch)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_one_that_the_program_takes(page):
    for typed in () if page.name == "log.md" else commands(page):  # the log mentions removed commands
        command, words = get_command(app), list(typed)
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, typed
            command = command.commands[words.pop(0)]
        known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        value = {word.split("=")[0] for word in words if re.fullmatch(r"--[a-z-]+(=.*)?", word)}
        assert value <= known | {"--help"}, typed


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_referenced_programs_targets_extras_and_files_exist(page):
    text = page.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"`([^`\n]+)`", text) + [one.text for one in blocks(page)])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [one for one in re.findall(r"\bpython ([\w/]+\.py)", code) if not (ROOT / one).is_file()] == []
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"^make ([\w-]+)", code, re.MULTILINE)) <= targets
    extras = {one for group in re.findall(r"i2cl\[([\w,-]+)\]", code) for one in group.split(",")}
    assert extras <= project["optional-dependencies"].keys()


def test_settings_are_read_as_what_they_are():
    """TOML and JSON blocks; a grid or YAML is run by the page's own commands."""
    for page in pages():
        for one in blocks(page):
            if one.language in {"toml", "json"}:
                {"toml": tomllib.loads, "json": json.loads}[one.language](one.text)


def test_the_reference_lists_every_public_name_and_the_glossary_only_existing_ones():
    text = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\.\. auto\w+:: i2cl\.(\w+)$", text.replace("i2cl.export", ""), re.MULTILINE)
    assert sorted(shown) == sorted(i2cl.__all__)
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)\.(\w+)", text)
    assert len(named) > 10
    for owner, name in named:
        if owner in i2cl.__all__:
            known = getattr(i2cl, owner)
            fields = getattr(known, "model_fields", {}) | getattr(known, "__dataclass_fields__", {})
            assert hasattr(known, name) or name in fields, f"{owner}.{name}"


# Length and form


def words(page):
    """Count words outside tables, HTML comments and Sphinx directives; code counts."""
    text = page.read_text(encoding="utf-8")
    markup = r"<!--.*?-->|^```\{.*?^```$|^\|.*?$"
    return len(re.sub(markup, "", text, flags=re.DOTALL | re.MULTILINE).split())


def test_the_pages_can_be_read_in_an_hour_and_a_half():
    counts = {page: words(page) for page in pages() if page.name != "CONTRIBUTING.md"}
    assert sum(counts.values()) <= 20_000, sorted(counts.items(), key=lambda item: -item[1])[:5]
    log = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    assert len(log.split()) <= 4_000


GUIDES = [page for page in PAGES if page.parent.name == "guide" and page.stem != "extend"]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guides_start_with_code_that_works(page):
    _, second, third, *_ = page.read_text(encoding="utf-8").splitlines()
    assert second == ""
    assert third.startswith("```")


# The README; tests/real plays its snippet on the real model


def test_the_snippet_runs_on_the_bundled_model(tmp_path, monkeypatch):
    snippet = next(one.text for one in blocks(README) if one.language == "python")
    assert snippet.count('"smollm2"') == 1
    assert len(re.findall(r"^(?!from |$)", snippet, re.MULTILINE)) <= 6, "five lines, as the page says"
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "readme"}
    exec(compile(snippet.replace('"smollm2"', '"reference"'), str(README), "exec"), names)
    assert set(names["tickets"].predict(names["texts"])) <= set(names["labels"])
    assert (tmp_path / "tickets" / "injection.safetensors").is_file()


def test_the_readme_is_easy_to_read():
    text = README.read_text(encoding="utf-8")
    assert "docs/guide/label.md" in text.split("\n## ")[0], "where to start without labels"
    assert re.search(r"^\| use this instead \| when \|\n\|---\|---\|\n(\|.*\n){4}\n", text, re.MULTILINE)
    without_code = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    prose = re.sub(r"\]\([^)]*\)|<[^>]*>|^!\[.*$|^\|.*$", "", without_code, flags=re.MULTILINE)
    for paragraph in prose.split("\n\n"):
        assert len(re.findall(r"(?<![\w.-])\d[\d.,]*", paragraph)) <= 2, paragraph


def test_installation_names_every_extra_and_the_oldest_python():
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
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
