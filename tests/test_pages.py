"""What the README and the site say to type: run as it stands, or held against the command line.

A command behind ``$`` and every Python snippet runs, page by page in order, in a folder of the page's own;
what is printed is what the page shows but for its numbers. Behind the language of a block may stand the
package that it takes, or ``real``: then the real model runs it (tests/real). All other commands are parsed.
"""

import json
import re
import tomllib
from importlib.util import find_spec

import pytest
from rich.console import Console
from typer.main import get_command

import i2cl
from i2cl.interfaces.cli import app, console
from pages import ROOT, blocks, commands, pages, play, said

PAGES = [page for page in pages() if page.name != "README.md"]
"""The README's snippet runs in tests/test_readme.py."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_runs_and_says_what_the_page_shows(page, tmp_path, monkeypatch):
    played = [one for one in blocks(page) if one.mark != "real" and (not one.mark or find_spec(one.mark))]
    play(played, tmp_path, monkeypatch)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_one_that_the_program_takes(page):
    for typed in () if page.name == "log.md" else commands(page):  # the log tells of commands that went
        command, words = get_command(app), list(typed)
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            assert words[0] in command.commands, typed
            command = command.commands[words.pop(0)]
        known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        told = {word.split("=")[0] for word in words if re.fullmatch(r"--[a-z-]+(=.*)?", word)}
        assert told <= known | {"--help"}, typed


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_targets_extras_and_files_it_names_exist(page):
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


def test_the_reference_has_every_public_name_and_the_glossarys_names_are_there():
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


def test_pages_are_as_wide_as_ever_whatever_the_terminal_was_when_the_program_started(tmp_path, monkeypatch):
    monkeypatch.setattr(console, "out", Console(highlight=False, width=40))  # as under COLUMNS=40
    page = tmp_path / "wide.md"
    shown = said("i2cl ls tasks").splitlines()
    monkeypatch.undo()
    play([], tmp_path, monkeypatch)
    wide = said("i2cl ls tasks").splitlines()
    page.write_text("```console\n$ i2cl ls tasks\n" + "\n".join(wide) + "\n```\n", encoding="utf-8")
    monkeypatch.undo()
    monkeypatch.setattr(console, "out", Console(highlight=False, width=40))
    assert len(shown) > len(wide)
    play(blocks(page), tmp_path, monkeypatch)
