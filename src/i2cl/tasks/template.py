"""Prompt templates. A format is split once, so that user texts never pass through `str.format`."""

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
# Used by the command line, the server and I2CLClassifier if no template is given.
DEFAULT_TEMPLATE = "Text: {text}\nLabel: {label}"
_FIELD = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True)
class Template:
    r"""A prompt format such as "Review: {text}\nSentiment: {label}".

    A prompt is the opening, one exchange per demonstration, and the query. An exchange is ``head + text +
    middle + lead + label word + separator``; the query stops after ``middle``.

    Source: paper, appendix "Prompting Templates".

    Attributes:
        format: the format, with the fields ``{text}`` and ``{label}``.
        separator: end of an exchange.
        opening: text at the beginning of a prompt, such as an instruction or the system turn of a chat.
        head: part of the format before the text.
        middle: part between text and label, without trailing whitespace.
        lead: whitespace before the label. It is not part of the query, because most tokenizers merge it with
            the label word.

    Raises:
        I2CLError: if the format is invalid.
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
        vars(self).update(head=head, middle=middle, lead=rest[len(middle) :])  # the dataclass is frozen

    @classmethod
    def plain(cls) -> "Template":
        """Return "{text} {label}", for the paper's ablation of the template."""
        return cls(f"{TEXT_FIELD} {LABEL_FIELD}")

    @classmethod
    def chat(cls, tokenizer: "PreTrainedTokenizerBase", instruction: str = "") -> "Template":
        """Convert the tokenizer's chat template: text as the user's turn, label as the assistant's turn.

        Demonstrations have the same format as the query, even where the chat template renders past turns
        differently (Qwen 3 omits the empty thinking block). A BOS token that the tokenizer itself adds is
        left out of the template, and is not repeated between turns (Llama 2).

        Source: https://huggingface.co/docs/transformers/chat_templating.

        Args:
            tokenizer: the tokenizer.
            instruction: system turn. If the template has no separate system turn (Gemma, Llama 2), it is put
                at the beginning of every user turn.

        Raises:
            I2CLError: if there is no chat template, it cannot be split into turns, or the instruction
                contains braces or special tokens.
        """
        if "{" in instruction or "}" in instruction:
            raise I2CLError(
                f"the instruction {instruction!r} contains braces, which mark fields: leave them out"
            )
        if not tokenizer.chat_template:
            raise I2CLError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'!r} has no chat template: leave "
                "out chat (--chat), or use an instruction-tuned model"
            )
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        for special in sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True):
            if special in instruction:
                raise I2CLError(
                    f"the instruction {instruction!r} contains the special token {special!r}: remove it"
                )
        if instruction:
            with suppress(I2CLError):  # raised by templates without a system turn
                template = _split_chat_template(tokenizer, [{"role": "system", "content": instruction}], "")
                if instruction in template.opening:  # some templates ignore the system turn
                    return template
        return _split_chat_template(tokenizer, [], f"{instruction}\n\n" if instruction else "")

    def with_instruction(self, instruction: str) -> "Template":
        """Return the template with an instruction and a newline as opening."""
        return Template(self.format, self.separator, f"{instruction}\n" if instruction else "")

    def query(self, text: str) -> str:
        """Return the zero-shot prompt: everything before the label and its leading whitespace."""
        return self.opening + self.head + text + self.middle

    def continuation(self, label_word: str) -> str:
        """Return the text after a query if the answer is ``label_word``, including leading whitespace."""
        return self.lead + label_word

    def demonstration(self, text: str, label_word: str, separator: bool = True) -> str:
        """Return a prompt of a single exchange: opening, text and answer."""
        return self.opening + self.exchange(text, label_word, separator)

    def exchange(self, text: str, label_word: str, separator: bool = True) -> str:
        """Return text and answer in the format, without the opening."""
        end = self.separator if separator else ""
        return self.head + text + self.middle + self.continuation(label_word) + end

    def prompt(self, demonstrations: Sequence[tuple[str, str]], text: str) -> str:
        """Return the few-shot prompt: an exchange per (text, label word), then the query for ``text``."""
        exchanges = "".join(self.exchange(shown_text, word) for shown_text, word in demonstrations)
        return self.opening + exchanges + self.head + text + self.middle


# Placeholders start with a Unicode noncharacter, so that they cannot occur in a chat template.
_FIRST, _ANSWER, _SECOND = "\ufdd1FirstText", "\ufdd2AnswerOfAll", "\ufdd3SecondText"


def _split_chat_template(
    tokenizer: "PreTrainedTokenizerBase", system: list[dict[str, str]], user_prefix: str
) -> Template:
    """Render two exchanges of placeholders with a chat template, and split the result into a `Template`.

    Args:
        tokenizer: the tokenizer.
        system: messages before the first exchange.
        user_prefix: text at the beginning of every user turn.

    Raises:
        I2CLError: if the template cannot be split.
    """
    apply = partial(tokenizer.apply_chat_template, tokenize=False, enable_thinking=False)

    def render(*turns: str, ask: bool) -> str:
        messages = system + [
            {"role": role, "content": user_prefix + turn if role == "user" else turn}
            for role, turn in zip(("user", "assistant", "user"), turns, strict=False)
        ]
        try:
            return str(apply(messages, add_generation_prompt=ask))
        except (TemplateError, ValueError) as error:
            raise I2CLError(
                f"the chat template rejects user and assistant turns ({error}): leave out chat (--chat)"
            ) from None

    query = render(_FIRST, ask=True)
    exchange = render(_FIRST, _ANSWER, ask=False)
    two_exchanges = render(_FIRST, _ANSWER, _SECOND, ask=True)
    try:
        before, start = query.split(_FIRST)
        question, end = exchange.split(_ANSWER)
        _, rest = two_exchanges.split(_ANSWER)
        between, _ = rest.split(_SECOND)
    except ValueError:
        raise I2CLError("the chat template does not render each turn once: leave out chat (--chat)") from None
    head = between.removeprefix(end)
    if not (between.startswith(end) and before.endswith(head)):
        raise I2CLError("the chat template's turns are not independent: leave out chat (--chat)")
    # some templates add whitespace before the answer of a past turn, but not to the generation prompt
    past_start = question.split(_FIRST)[1]
    only_adds_whitespace = past_start.startswith(start) and not past_start.removeprefix(start).strip()
    middle = past_start if only_adds_whitespace else start
    opening = before.removesuffix(head)
    bos = tokenizer.bos_token
    if bos and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:  # it adds BOS itself
        head = head if opening else head.removeprefix(bos)
        opening = opening.removeprefix(bos)
    return Template(head + TEXT_FIELD + middle + LABEL_FIELD, end, opening)


def _check_format(text_format: str) -> None:
    fields_are_valid = _FIELD.findall(text_format) == [TEXT_FIELD, LABEL_FIELD]
    # without text in between, a token could span the end of a text and the label
    ends_are_valid = text_format.endswith(LABEL_FIELD) and not text_format.endswith(TEXT_FIELD + LABEL_FIELD)
    if not (fields_are_valid and ends_are_valid) or "{{" in text_format or "}}" in text_format:
        raise I2CLError(
            f"template {text_format!r} is invalid: it needs {{text}}, then some text, then {{label}} at the "
            "end, each once and no other fields: write it like 'Review: {text}\\nSentiment: {label}'"
        )
