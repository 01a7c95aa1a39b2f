"""Context vectors per class match separate extraction."""

import pytest
import torch

from fitting import decoder_of, one_line
from i2cl import ContextVector, Example, ExtractConfig, Task, Template, extract, extract_classes

FAMILIES = ("llama", "gpt2", "gemma2")
TASK = Task("films", ("positive", "negative", "mixed"), Template("Review: {text}\nSentiment:{label}"))
TEXTS = ("a warm film", "dull", "warm and dull", "funny", "a lifeless film", "so so")
SHOTS = tuple(Example(text, row % 3) for row, text in enumerate(TEXTS))
UNEVEN = (*SHOTS, Example("the best of the year", 0))
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("config", [{}, {"writers": "hidden"}, {"token": "first"}, {"separator": False}])
@pytest.mark.parametrize("case", FAMILIES)
def test_class_vectors_match_separate_extraction(case, config):
    decoder, config = decoder_of(case), ExtractConfig(**config)
    vectors = extract_classes(decoder, TASK, UNEVEN, config)
    assert [one.demonstrations for one in vectors] == [3, 2, 2]
    for label, vector in enumerate(vectors):
        alone = extract(decoder, TASK, [shot for shot in UNEVEN if shot.label == label], config)
        assert torch.equal(vector.values, alone.values)
        assert vector.config == config
    whole = extract(decoder, TASK, UNEVEN, config)
    mean = ContextVector.mean(vectors, [one.demonstrations for one in vectors])
    torch.testing.assert_close(mean.values, whole.values, **CLOSE)


def test_class_without_demonstrations_is_refused():
    for shown, message in (
        (SHOTS[:2], "class 'mixed' of task 'films' has no demonstration"),
        ([], "no demonstrations: give at least one"),
        ([Example("a film", 3)], "demonstration 1 has label 3"),
    ):
        one_line(message, extract_classes, decoder_of("llama"), TASK, shown)
