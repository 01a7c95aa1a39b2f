import pytest

from fitting import one_line
from i2cl.tasks import Template

REVIEW = Template("Review: {text}\nSentiment: {label}")


def test_parts_join_to_the_format_and_prompts_end_demonstrations_with_the_separator():
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
    ("text_format", "said"),
    [
        *(("Review: {label}", "{text} 0 times"), ("{text} {text} {label}", "{text} 2 times")),
        *(("{text}", "{label} 0 times"), ("{text} {label} {label}", "{label} 2 times")),
        ("{label} {text}", "{label} before {text}"),
        *((f"{{text}} {{label}}{end}", "does not end with {label}") for end in (".", " ")),
        ("{text} {topic}: {label}", "unknown fields {topic}"),
        ("{text} {}: {label}", "unknown fields {}"),
        ("{{text}}: {label}", "doubles its braces"),
        ("Topic of {text}{label}", "has nothing between {text} and {label}"),
    ],
)
def test_bad_formats_name_the_cure(text_format, said):
    assert said in one_line("write it like", Template, text_format)
