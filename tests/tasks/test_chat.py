"""`Template.chat` must produce the same prompts as `apply_chat_template`."""

import pytest

from fitting import raises
from i2cl.tasks import Template
from tiny import tiny_tokenizer

CHATML = (
    "{% if messages[0].role != 'system' %}<|a|>system\nBe kind.<|b|>\n{% endif %}"
    "{% for one in messages %}<|a|>{{ one.role }}\n{{ one.content }}<|b|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|a|>assistant\n{% endif %}"
)
TRIMMED = (
    "{{ bos_token }}{% for one in messages %}<|h|>{{ one.role }}<|/h|>\n\n{{ one.content | trim }}<|b|>"
    "{% endfor %}{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for one in messages %}<t>{{ 'model' if one.role == 'assistant' else one.role }}\n"
    "{{ one.content }}</t>\n{% endfor %}{% if add_generation_prompt %}<t>model\n{% endif %}"
)
SYSTEM_IN_USER_TURN = (
    "{% set at = 1 if messages[0].role == 'system' else 0 %}{% for one in messages[at:] %}"
    "{% if one.role == 'user' %}[INST] {% if loop.first and at %}<<{{ messages[0].content }}>> {% endif %}"
    "{{ one.content }} [/INST]{% else %} {{ one.content }} </s>{% endif %}{% endfor %}"
)
SYSTEM_IGNORED = CHATML.replace("for one in messages", "for one in messages if one.role != 'system'")
NUMBERED_TURNS = "{% for one in messages %}{{ loop.index }}{{ one.content }}{% endfor %}"
WITH_SYSTEM_TURN = {CHATML, TRIMMED}
ALL = [CHATML, TRIMMED, NO_SYSTEM, SYSTEM_IN_USER_TURN, SYSTEM_IGNORED]
NAMES = ["chatml", "trimmed", "no system", "system inside", "system ignored"]


def tokenizer(template, bos=None):
    result = tiny_tokenizer()
    result.chat_template = template
    if bos is not None:
        result.bos_token = bos
    return result


def messages(template, instruction, *turns):
    own = template in WITH_SYSTEM_TURN
    front = [{"role": "system", "content": instruction}] if own and instruction else []
    before = f"{instruction}\n\n" if instruction and not own else ""
    roles = ("user", "assistant") * 2
    for role, turn in zip(roles, turns, strict=False):
        front.append({"role": role, "content": before + turn if role == "user" else turn})
    return front


@pytest.mark.parametrize("instruction", ["", "Say up or down."])
@pytest.mark.parametrize("source", ALL, ids=NAMES)
def test_prompts_equal_apply_chat_template(source, instruction):
    made = tokenizer(source, "<|endoftext|>")
    result = Template.chat(made, instruction)

    def render(*turns, ask):
        turn_messages = messages(source, instruction, *turns)
        return made.apply_chat_template(turn_messages, tokenize=False, add_generation_prompt=ask)

    assert result.query("It rises.") == render("It rises.", ask=True).rstrip()
    assert result.opening + result.exchange("It rises.", "up") == render("It rises.", "up", ask=False)
    prompt = result.prompt([("It falls.", "down")], "It rises.")
    assert prompt == render("It falls.", "down", "It rises.", ask=True).rstrip()
    assert (instruction in result.opening) is (source in WITH_SYSTEM_TURN or not instruction)


def test_a_bos_token_that_the_tokenizer_adds_is_not_repeated_in_the_template():
    made = tokenizer(TRIMMED, "<|endoftext|>")
    assert Template.chat(made).query("x").startswith("<|endoftext|><|h|>user")
    plain = made.__class__.__call__

    class BosTokenizer(made.__class__):
        def __call__(self, text, add_special_tokens=True, **options):
            result = plain(self, text, add_special_tokens=False, **options)
            return {"input_ids": [self.bos_token_id, *result["input_ids"]]} if add_special_tokens else result

    made.__class__ = BosTokenizer
    assert Template.chat(made).query("x").startswith("<|h|>user")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "has no chat template: leave out chat"),
        ("{{ raise_exception('tools only') }}", "rejects user and assistant turns .tools only.: leave out"),
        ("{{ messages[-1].content }}", "does not render each turn once: leave out chat"),
        (NUMBERED_TURNS, "turns are not independent: leave out chat"),
        ({"tools": CHATML}, "leave out chat"),  # named templates without a default
    ],
    ids=str,
)
def test_unsupported_chat_template_is_refused(source, message):
    raises(message, Template.chat, tokenizer(source), "Say it.")


def test_instruction_is_put_once_before_a_plain_template():
    result = Template("Text: {text}\nLabel: {label}").with_instruction("Say up or down.")
    assert result.prompt([("a", "up")], "b") == "Say up or down.\nText: a\nLabel: up\nText: b\nLabel:"
    assert result.with_instruction("") == Template("Text: {text}\nLabel: {label}")


def test_instruction_with_braces_is_refused():
    raises(r"the instruction 'Use \{a\}' contains braces", Template.chat, tokenizer(CHATML), "Use {a}")


def test_instruction_with_a_special_token_is_refused():
    message = r"the instruction 'Say <\|endoftext\|>' contains the special token '<\|endoftext\|>': remove it"
    raises(message, Template.chat, tokenizer(CHATML), "Say <|endoftext|>")
