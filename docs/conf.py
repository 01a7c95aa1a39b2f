"""Sphinx's settings of the documentation site: `make docs`, which treats every warning as an error."""

import re
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx
from typer.main import get_command

from i2cl.interfaces.cli import app as program
from i2cl.version import __version__

project = "i2cl"
author = "the authors of i2cl"
copyright = ""  # noqa: A001 - Sphinx's name; the licence is a file of the repository
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
needs_sphinx = "9.0"

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
suppress_warnings = ["config.cache"]

smartquotes = False
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"i2cl\..*\.[A-Z]"),  # type variables
    (r"py:.*", r"i2cl\.(core\.weights|injections\.ensemble)\._\w+"),  # validators in an annotated type
    (r"py:.*", r"i2cl\.models\.training\.Settings"),  # base class of the settings, which are all documented
    (r"py:.*", r"(?!i2cl\.).*"),  # of other libraries: their inventories are a request each
]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = f"i2cl {version}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False


def _commands(group: Any, prefix: str) -> Iterator[str]:
    """Every command of the program: what it does, and its arguments and options in a table."""
    for name, command in group.commands.items():
        called = f"{prefix} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command, called)
            continue
        example = command.epilog.removeprefix("Example: ")
        yield f"\n## {called}\n\n{command.help}\n\n```console\n{example}\n```\n"
        yield "| option | what | default |\n|---|---|---|"
        for one in command.params:
            names = (
                ", ".join(f"`{word}`" for word in one.opts)
                if one.opts[0] != one.name
                else f"`{one.name.upper()}`"
            )
            default = "" if one.default in (None, False) or callable(one.default) else f"`{one.default}`"
            said = (getattr(one, "help", "") or "").replace("|", "\\|")
            yield f"| {names} | {said} | {default} |"


_ASIDE = re.compile(r"ablations|log|experiments/.*/?report|experiments/real_files")
"""Pages that others link to, and that the navigation leaves out."""


def setup(app: Sphinx) -> None:
    """Put the program's own help into the page of commands, and name folders that the site does not hold."""

    def fill(_: Sphinx, name: str, source: list[str]) -> None:
        if _ASIDE.fullmatch(name):
            source[0] = f"---\norphan: true\n---\n\n{source[0]}"
        if name == "reference/commands":
            source[0] = source[0].replace(
                "<!-- commands -->", "\n".join(_commands(get_command(program), "i2cl"))
            )
        source[0] = re.sub(r"\[[^]]*\]\((experiments/(?:\w+/)?store)\)", r"`docs/\1`", source[0])

    app.connect("source-read", fill)
