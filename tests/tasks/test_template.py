import pytest

from fitting import raises
from i2cl.tasks import Template

REVIEW = Template("Review: {text}\nSentiment: {label}")


def test_prompts_are_built_from_the_parts_of_the_format():
    assert (REVIEW.head, REVIEW.middle, REVIEW.lead) == ("Review: ", "\nSentiment:", " ")
    assert REVIEW.query("fine") == "Review: fine\nSentiment:"
    assert REVIEW.continuation("positive") == " positive"
    assert REVIEW.exchange("fine", "positive") == "Review: fine\nSentiment: positive\n"
    template = Template("Q: {text} A:{label}", separator=" || ")
    assert template.lead == ""
    assert template.prompt([("a", "x"), ("b", "y")], "c") == "Q: a A:x || Q: b A:y || Q: c A:"
    assert template.prompt([], "c") == template.query("c")
    assert Template.plain().exchange("fine", "positive") == "fine positive\n"
    assert Template.plain().query("fine") == "fine"
    assert Template("{ {text} } => {label}").query("x") == "{ x } =>"  # lone braces are literal
    assert Template("{text} {label}") == Template.plain() != Template("{text} {label}", "\n\n")


@pytest.mark.parametrize("text", ["{label}", "{text}", "a {0} {} {{x}} }{", "%s \\1 $text"])
def test_user_text_is_never_formatted(text):
    assert REVIEW.exchange(text, "{text}") == "Review: " + text + "\nSentiment: {text}\n"


@pytest.mark.parametrize(
    "text_format",
    [
        *("Review: {label}", "{text} {text} {label}", "{text}", "{text} {label} {label}", "{label} {text}"),
        *("{text} {label}.", "{text} {label} ", "{text} {topic}: {label}", "{text} {}: {label}"),
        *("{{text}}: {label}", "Topic of {text}{label}"),
    ],
)
def test_invalid_format_is_refused_with_an_example(text_format):
    message = raises("it needs {text}, then some text, then {label} at the end", Template, text_format)
    assert "write it like" in message
