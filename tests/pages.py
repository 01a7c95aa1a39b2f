"""Documentation pages: find their fenced code blocks, and run them."""

import re
import shlex
import subprocess
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console

from i2cl.experiments.library import load_experiment
from i2cl.interfaces.cli import console, main

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
"""Width of the terminal in which the output on pages was printed."""
FENCE = re.compile(r"^ *```(\w+)[ ]*(\S*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the word after the language, and its lines."""

    language: str
    mark: str
    text: str


def pages():
    """Return README, CONTRIBUTING and the site's pages, without generated reports."""
    site = sorted(path for path in (ROOT / "docs").rglob("*.md") if "report" not in path.parts)
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *site]


def blocks(page):
    """Return the fenced blocks of a page, in order."""
    return [Block(*result) for result in FENCE.findall(page.read_text(encoding="utf-8"))]


def commands(page):
    """Return the arguments of every ``i2cl`` command in its code."""
    text = page.read_text(encoding="utf-8")
    shown = "\n".join(one.text for one in blocks(page) if one.language == "console").replace("\\\n", " ")
    lines = [line for line in shown.splitlines() if re.search(r"(^|\$ |&& |--no-python )i2cl ", line)]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\\|", "|")
    inline = re.findall(r"`(i2cl [^`]+)`", prose)
    for line in (*lines, *inline):
        for part in re.split(r" && | \| ", line):
            if result := re.search(r"(?:^|\$ |--no-python )i2cl (.*)", " ".join(part.split())):
                yield shlex.split(result[1], comments=True)


def play(played, folder, monkeypatch):
    """Run the blocks of a page in a folder, and compare their output with the output that the page shows.

    A command whose output the page omits only has to succeed. Comments after ``print(...)`` in a Python
    block are its expected output.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(WIDTH))  # for programs that start; this one took its width when it did
    monkeypatch.setattr(console, "out", Console(highlight=False, width=WIDTH))
    monkeypatch.setattr(console, "HEARTBEAT_S", 3600.0)  # no lines that depend on speed
    monkeypatch.setattr(console, "SHORT_S", 3600.0)  # nor its estimate
    names = {"__name__": "page"}
    for one in played:
        if one.language == "console" and "$ " in one.text:
            for typed, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n?)*)", one.text, re.MULTILINE):
                message = stdout(typed)
                assert not message.startswith("error: ") or shown.startswith("error: "), message
                assert not shown.strip() or alike(message) == alike(shown), typed
        elif one.language == "python":
            with redirect_stdout(StringIO()) as message:
                exec(compile(one.text, "<page>", "exec"), names)
            expected = re.findall(r"^ *print\(.*\)  # (.*?)(?:: .*)?$", one.text, re.MULTILINE)
            if expected:
                assert message.getvalue().splitlines() == expected
        elif named := re.match(r"# ([\w/]+\.\w+)\n", one.text):
            path = folder / named[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(one.text, encoding="utf-8")
            if path.suffix == ".toml":
                assert load_experiment(path).rows


def stdout(typed):
    """Return what a command prints on stdout and stderr. ``i2cl`` runs in this process, others in a shell.

    Bars of progress, which are for a terminal, are left out.
    """
    if not typed.startswith("i2cl "):
        done = subprocess.run(typed, shell=True, text=True, capture_output=True, check=False)
        return done.stdout + done.stderr
    with redirect_stdout(StringIO()) as message, redirect_stderr(message), suppress(SystemExit):
        main(shlex.split(typed)[1:])
    bar = re.compile("it/s|s/it")  # tqdm's, of what is fast and what is slow
    return "".join(line for line in message.getvalue().splitlines(keepends=True) if not bar.search(line))


def alike(text):
    """Return the words of each line, without numbers and rules, which differ between machines."""
    text = re.sub(r"about [\d,]+ (s|minutes)\b", "about a while", text)
    lines = (re.sub(r"\d[\d.,:e+-]*\b|\.\.\.", "#", re.sub(r"─+", "", line)) for line in text.splitlines())
    return [" ".join(line.split()) for line in lines if line.strip()]
