"""Invalid demonstrations, texts, models and options."""

from dataclasses import replace

import pytest

from fitting import SHOWN, TEXTS, fit, new_decoder, raises
from i2cl import Example, Template, make_methods

NAMES = (
    "few_shot",
    "label_anchor",
    "icv",
    "linear_probe",
    "tfidf",
    "knn_prompting",
    "task_vector",
    "i2cl",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Example("x", -1), "demonstration 5 has label -1, task 'films' has labels 0 to 1"),
        (Example("x", 7), "demonstration 5 has label 7"),
        (Example("a \ud800", 0), "demonstration 5 contains a lone surrogate"),
    ],
)
def test_invalid_demonstrations_are_named(name, wrong, message, films, demonstrations):
    raises(message, fit, name, new_decoder("llama"), films, [*demonstrations, wrong])


ALL = [Example(text, label) for text, label in SHOWN]
MARKS = [Example("!!", 0), Example("??", 1)]
CACHE = "label_anchor does not support {!r}, which caches more"


@pytest.mark.parametrize(
    ("name", "case", "shown", "message"),
    [
        ("linear_probe", "llama", ALL[:1], "linear_probe needs demonstrations of at least two classes"),
        ("linear_probe", "llama", [], "no demonstrations: give at least one"),
        ("tfidf", "llama", ALL[:1], "tfidf needs demonstrations of at least two classes"),
        ("tfidf", "llama", [], "no demonstrations: give at least one"),
        ("tfidf", "llama", MARKS, "no demonstration contains a word for tfidf"),
        ("label_anchor", "deepseek_v32", ALL, CACHE.format("deepseek_v32")),
        ("label_anchor", "minimax_m3_vl_text", ALL, CACHE.format("minimax_m3_vl_text")),
        ("autocompressor", "gpt2", ALL, "autocompressor supports llama and opt, not 'gpt2'"),
        ("autocompressor", "llama", ALL, "the checkpoint of 'llama' has no autocompressor compressor"),
        ("cepe", "mistral", ALL, "cepe supports llama, not 'mistral'"),
        ("cepe", "llama", ALL, "the checkpoint of 'llama' has no cepe compressor: give a CEPE"),
        ("icae", "gpt2", ALL, "icae supports llama and mistral, not 'gpt2'"),
        ("icae", "llama", ALL, "icae needs a compressor for 'llama': give --set compressor=FILE or"),
    ],
)
def test_unsuitable_models_and_demonstrations_are_refused(name, case, shown, message, films):
    raises(message, fit, name, new_decoder(case), films, shown)


def test_i2cl_over_icl_requires_all_positions(films, demonstrations):
    expected, options = "injects at every token: leave out positions=last", {"positions": "last", "epochs": 1}
    raises(expected, fit, "i2cl_over_icl", new_decoder("llama"), films, demonstrations, **options)


@pytest.mark.parametrize("name", ["linear_probe", "tfidf", "knn_prompting", "few_shot"])
def test_empty_list_gives_no_scores_and_a_string_is_refused(name, films, demonstrations):
    predictor = fit(name, new_decoder("llama"), films, demonstrations)
    assert predictor.log_probs([]).shape == (0, 2)
    raises("texts is one string: give a list of texts", predictor.log_probs, "great")


@pytest.mark.parametrize("name", ["knn_prompting", "label_anchor"])
def test_prompts_without_a_common_prefix_are_not_cached(name, films):
    bare = replace(films, template=Template("{text} {label}"))
    assert fit(name, new_decoder("llama"), bare, []).log_probs(TEXTS).isfinite().all()


def test_methods_given_as_one_string_are_refused():
    raises(r"names is the string 'few_shot': give a list, such as \['few_shot'\]", make_methods, "few_shot")
