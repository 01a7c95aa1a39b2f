"""Demonstrations and texts that methods refuse, or that are none."""

from dataclasses import replace

import pytest

from fitting import TEXTS, fit, made, one_line
from i2cl import Example, I2CLError, Template

ASKED = ("few_shot", "label_anchor", "icv", "linear_probe", "tfidf", "knn_prompting", "task_vector", "i2cl")


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Example("x", -1), "demonstration 5 has label -1, task 'films' has labels 0 to 1"),
        (Example("x", 7), "demonstration 5 has label 7"),
        (Example("a \ud800", 0), "demonstration 5 holds half a surrogate pair"),
    ],
)
def test_demonstrations_that_are_none_are_named(name, wrong, message, films, demonstrations):
    one_line(message, fit, name, made("llama"), films, [*demonstrations, wrong])


@pytest.mark.parametrize("name", ["linear_probe", "tfidf"])
def test_a_classifier_needs_two_classes(name, films, demonstrations):
    with pytest.raises(I2CLError, match=f"{name} needs demonstrations of at least two classes"):
        fit(name, made("llama"), films, demonstrations[:1])
    one_line("no demonstrations were given", fit, name, made("llama"), films, [])


def test_tfidf_needs_a_word(films):
    with pytest.raises(I2CLError, match="tfidf finds no word in any demonstration"):
        fit("tfidf", made("llama"), films, [Example("!!", 0), Example("??", 1)])


@pytest.mark.parametrize("name", ["linear_probe", "tfidf", "knn_prompting", "few_shot"])
def test_no_texts_have_no_scores(name, films, demonstrations):
    assert fit(name, made("llama"), films, demonstrations).scores([]).shape == (0, 2)


@pytest.mark.parametrize("name", ["knn_prompting", "label_anchor"])
def test_without_anything_in_front_there_is_no_cache(name, films):
    bare = replace(films, template=Template("{text} {label}"))
    assert fit(name, made("llama"), bare, []).scores(TEXTS).isfinite().all()


def test_one_string_is_no_list_of_texts(decoder, films, demonstrations):
    with pytest.raises(I2CLError, match="texts is one string: give a list of texts"):
        fit("few_shot", decoder, films, demonstrations).scores("great")
