import pytest

from fitting import one_line
from i2cl.tasks import Template

REVIEW = Template("Review: {text}\nSentiment: {label}")


def test_prompts_are_built_from_the_parts_of_the_format():
    assert (REVIEW.head, REVIEW.middle, REVIEW.lead) == ("Review: ", "\nSentiment:", " ")
    assert REVIEW.query("fine") == "Review: fine\nSentiment:"
    assert REVIEW.continuation("positive") == " positive"
    assert REVIEW.demonstration("fine", "positive") == "Review: fine\nSentiment: positive\n"
    assert REVIEW.demonstration("fine", "positive", separator=False) == "Review: fine\nSentiment: positive"
    template = Template("Q: {text} A:{label}", separator=" || ")
    assert template.lead == ""
    assert template.prompt([("a", "x"), ("b", "y")], "c") == "Q: a A:x || Q: b A:y || Q: c A:"
    assert template.prompt([], "c") == template.query("c")
    assert Template.plain().demonstration("fine", "positive") == "fine positive\n"
    assert Template.plain().query("fine") == "fine"
    assert Template("{ {text} } => {label}").query("x") == "{ x } =>"  # lone braces are literal
    assert Template("{text} {label}") == Template.plain() != Template("{text} {label}", "\n\n")


@pytest.mark.parametrize("text", ["{label}", "{text}", "a {0} {} {{x}} }{", "%s \\1 $text"])
def test_user_text_is_never_formatted(text):
    assert REVIEW.demonstration(text, "{text}") == "Review: " + text + "\nSentiment: {text}\n"


@pytest.mark.parametrize(
    ("text_format", "message"),
    [
        *(("Review: {label}", "{text} 0 times"), ("{text} {text} {label}", "{text} 2 times")),
        *(("{text}", "{label} 0 times"), ("{text} {label} {label}", "{label} 2 times")),
        ("{label} {text}", "{label} before {text}"),
        *((f"{{text}} {{label}}{end}", "does not end with {label}") for end in (".", " ")),
        ("{text} {topic}: {label}", "unknown fields {topic}"),
        ("{text} {}: {label}", "unknown fields {}"),
        ("{{text}}: {label}", "contains double braces"),
        ("Topic of {text}{label}", "has nothing between {text} and {label}"),
    ],
)
def test_invalid_format_is_refused_with_an_example(text_format, message):
    assert message in one_line("write it like", Template, text_format)
