"""The prompt format of a task, taken apart once so that no user text is ever formatted."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from i2cl.errors import I2CLError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_FIELD = "{text}"
LABEL_FIELD = "{label}"
# Used by the command line, the server and I2CLClassifier for texts without a template of their own.
DEFAULT_TEMPLATE = "Text: {text}\nLabel: {label}"
_FIELD = re.compile(r"\{[^{}]*\}")
_CURE = "write it like 'Review: {text}\\nSentiment: {label}'"


@dataclass(frozen=True)
class Template:
    r"""A prompt format such as "Review: {text}\nSentiment: {label}", and what stands around its exchanges.

    An exchange is `head + text + middle + lead + label word`. `lead` is the whitespace before the label: a
    query stops before it, because most tokenizers join it to the label word. `separator` ends an exchange.
    `opening` stands once before all exchanges of a prompt, such as an instruction or a chat's system turn.

    Source: paper, appendix "Prompting Templates". Raises I2CLError for a format that cannot be used.
    """

    format: str
    separator: str = "\n"
    opening: str = ""
    head: str = field(init=False, repr=False, compare=False)
    middle: str = field(init=False, repr=False, compare=False)
    lead: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_format(self.format)
        head, rest = self.format.removesuffix(LABEL_FIELD).split(TEXT_FIELD)
        middle = rest.rstrip()
        vars(self).update(head=head, middle=middle, lead=rest[len(middle) :])  # past the frozen fields

    @classmethod
    def plain(cls) -> "Template":
        """The format without any words of its own, for the paper's ablation of the template."""
        return cls(f"{TEXT_FIELD} {LABEL_FIELD}")

    @classmethod
    def chat(cls, tokenizer: "PreTrainedTokenizerBase", instruction: str = "") -> "Template":
        """The tokenizer's own chat template: text as the user's turn, label as the assistant's.
        The instruction is the system's turn; where there is none that stands alone (Gemma, Llama 2), it is
        the first words of every user's turn. Demonstrations are worded as the query is, also where the chat
        template renders past turns in another way (Qwen 3 leaves out that there was no thinking). A BOS that
        the tokenizer puts in front by itself is left to it, and does not come again between turns (Llama 2).
        Source: https://huggingface.co/docs/transformers/chat_templating. Raises I2CLError if the tokenizer
        has no chat template, or one without such turns, or the instruction contains braces or special tokens.
        """
        if "{" in instruction or "}" in instruction:
            cure = "leave them out"
            raise I2CLError(f"the instruction {instruction!r} holds braces, which mark fields: {cure}")
        if not tokenizer.chat_template:
            what = f"the tokenizer of {tokenizer.name_or_path or 'this model'!r} has no chat template"
            raise I2CLError(f"{what}: leave out chat (--chat), or take an instruction-tuned model")
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        for special in sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True):
            if special in instruction:
                what = f"the instruction {instruction!r} contains the special token {special!r}"
                raise I2CLError(f"{what}: remove it")
        if instruction:
            with suppress(I2CLError):  # it has no system turn
                markup = _chat(tokenizer, [{"role": "system", "content": instruction}], "")
                if instruction in markup.opening:
                    return markup
        return _chat(tokenizer, [], f"{instruction}\n\n" if instruction else "")

    def instructed(self, instruction: str) -> "Template":
        """The same after an instruction and a newline."""
        return Template(self.format, self.separator, f"{instruction}\n" if instruction else "")

    def query(self, text: str) -> str:
        """Everything before the label and its leading whitespace."""
        return self.opening + self.head + text + self.middle

    def continuation(self, label_word: str) -> str:
        """What follows a query when the answer is `label_word`."""
        return self.lead + label_word

    def demonstration(self, text: str, label_word: str, separator: bool = True) -> str:
        """A query with its answer, ended by the separator unless told otherwise."""
        return self.opening + self.exchange(text, label_word, separator)

    def exchange(self, text: str, label_word: str, separator: bool = True) -> str:
        """A demonstration without the opening, as it stands behind others."""
        end = self.separator if separator else ""
        return self.head + text + self.middle + self.continuation(label_word) + end

    def prompt(self, demonstrations: Sequence[tuple[str, str]], text: str) -> str:
        """The few-shot prompt: every (text, label word) with its separator, then the query for `text`."""
        shown = "".join(self.exchange(shown_text, word) for shown_text, word in demonstrations)
        return self.opening + shown + self.head + text + self.middle


_FIRST, _ANSWER, _SECOND = "\ufdd1FirstText", "\ufdd2AnswerOfAll", "\ufdd3SecondText"


def _chat(tokenizer: "PreTrainedTokenizerBase", front: list[dict[str, str]], before_text: str) -> Template:
    """Take a chat template apart by rendering two exchanges of words that it cannot hold itself."""
    apply = partial(tokenizer.apply_chat_template, tokenize=False, enable_thinking=False)

    def rendered(*turns: str, ask: bool) -> str:
        messages = front + [
            {"role": role, "content": before_text + turn if role == "user" else turn}
            for role, turn in zip(("user", "assistant", "user"), turns, strict=False)
        ]
        try:
            return str(apply(messages, add_generation_prompt=ask))
        except (TemplateError, ValueError) as error:
            cure = "leave out chat (--chat)"
            raise I2CLError(f"the chat template refuses such turns ({error}): {cure}") from None

    query = rendered(_FIRST, ask=True)
    exchange = rendered(_FIRST, _ANSWER, ask=False)
    several = rendered(_FIRST, _ANSWER, _SECOND, ask=True)
    try:
        before, start = query.split(_FIRST)
        question, end = exchange.split(_ANSWER)
        _, rest = several.split(_ANSWER)
        between, _ = rest.split(_SECOND)
    except ValueError:
        raise I2CLError("the chat template does not show each turn once: leave out chat (--chat)") from None
    head = between.removeprefix(end)
    if not (between.startswith(end) and before.endswith(head)):
        raise I2CLError("the chat template's turns are not independent: leave out chat (--chat)")
    shown = question.split(_FIRST)[1]
    middle = shown if shown.startswith(start) and not shown.removeprefix(start).strip() else start
    opening = before.removesuffix(head)
    bos = tokenizer.bos_token
    if bos and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        if opening:
            opening = opening.removeprefix(bos)
        else:
            head = head.removeprefix(bos)
    return Template(head + TEXT_FIELD + middle + LABEL_FIELD, end, opening)


def _check_format(text_format: str) -> None:
    for name in (TEXT_FIELD, LABEL_FIELD):
        if (count := text_format.count(name)) != 1:
            raise I2CLError(f"template {text_format!r} has {name} {count} times, once is needed: {_CURE}")
    if "{{" in text_format or "}}" in text_format:
        raise I2CLError(f"template {text_format!r} doubles its braces, single ones are needed: {_CURE}")
    if others := sorted({*_FIELD.findall(text_format)} - {TEXT_FIELD, LABEL_FIELD}):
        raise I2CLError(f"template {text_format!r} has unknown fields {', '.join(others)}: {_CURE}")
    if text_format.index(TEXT_FIELD) > text_format.index(LABEL_FIELD):
        raise I2CLError(f"template {text_format!r} has {LABEL_FIELD} before {TEXT_FIELD}: {_CURE}")
    if not text_format.endswith(LABEL_FIELD):
        raise I2CLError(f"template {text_format!r} does not end with {LABEL_FIELD}: {_CURE}")
    if text_format.endswith(TEXT_FIELD + LABEL_FIELD):  # a token could span the end of a text and the label
        raise I2CLError(
            f"template {text_format!r} has nothing between {TEXT_FIELD} and {LABEL_FIELD}: {_CURE}"
        )
