"""The prompt format of a task, taken apart once so that no user text is ever formatted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from i2cl.errors import I2CLError

TEXT_FIELD = "{text}"
LABEL_FIELD = "{label}"
_FIELD = re.compile(r"\{[^{}]*\}")
_CURE = "write it like 'Review: {text}\\nSentiment: {label}'"


@dataclass(frozen=True)
class Template:
    r"""A prompt format such as "Review: {text}\nSentiment: {label}", and the separator after a demonstration.

    A prompt is `head + text + middle + lead + label word`. `lead` is the whitespace before the label: a query
    stops before it, because most tokenizers join it to the label word.

    Source: paper, appendix "Prompting Templates". Raises I2CLError for a format that cannot be used.
    """

    format: str
    separator: str = "\n"
    head: str = field(init=False, repr=False, compare=False)
    middle: str = field(init=False, repr=False, compare=False)
    lead: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_format(self.format)
        head, rest = self.format.removesuffix(LABEL_FIELD).split(TEXT_FIELD)
        middle = rest.rstrip()
        object.__setattr__(self, "head", head)
        object.__setattr__(self, "middle", middle)
        object.__setattr__(self, "lead", rest[len(middle) :])

    @classmethod
    def plain(cls) -> "Template":
        """The format without any words of its own, for the paper's ablation of the template."""
        return cls(f"{TEXT_FIELD} {LABEL_FIELD}")

    def query(self, text: str) -> str:
        """Everything before the label and its leading whitespace."""
        return self.head + text + self.middle

    def continuation(self, label_word: str) -> str:
        """What follows a query when the answer is `label_word`."""
        return self.lead + label_word

    def demonstration(self, text: str, label_word: str, separator: bool = True) -> str:
        """A query with its answer, ended by the separator unless told otherwise."""
        end = self.separator if separator else ""
        return self.query(text) + self.continuation(label_word) + end

    def prompt(self, demonstrations: Sequence[tuple[str, str]], text: str) -> str:
        """The few-shot prompt: every (text, label word) with its separator, then the query for `text`."""
        shown = "".join(self.demonstration(shown_text, word) for shown_text, word in demonstrations)
        return shown + self.query(text)


def _check_format(text_format: str) -> None:
    for name in (TEXT_FIELD, LABEL_FIELD):
        count = text_format.count(name)
        if count != 1:
            raise I2CLError(f"template {text_format!r} has {name} {count} times, once is needed: {_CURE}")
    if "{{" in text_format or "}}" in text_format:
        raise I2CLError(f"template {text_format!r} doubles its braces, single ones are needed: {_CURE}")
    others = sorted({name for name in _FIELD.findall(text_format) if name not in (TEXT_FIELD, LABEL_FIELD)})
    if others:
        raise I2CLError(f"template {text_format!r} has unknown fields {', '.join(others)}: {_CURE}")
    if text_format.index(TEXT_FIELD) > text_format.index(LABEL_FIELD):
        raise I2CLError(f"template {text_format!r} has {LABEL_FIELD} before {TEXT_FIELD}: {_CURE}")
    if not text_format.endswith(LABEL_FIELD):
        raise I2CLError(f"template {text_format!r} does not end with {LABEL_FIELD}: {_CURE}")
