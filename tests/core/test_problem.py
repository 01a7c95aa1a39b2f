"""Memory that the derivatives of anchored calibration may take."""

import warnings

import pytest

from fitting import made
from i2cl import Example, I2CLError, Task, Template
from i2cl.core import problem as module
from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.core.problem import FEWEST, Problem, memory_taken
from i2cl.models.batching import MemoryWarning
from i2cl.models.scoring import Questions

LETTERS = Task("letters", tuple("abcdef"), Template("{text}\n{label}"))
SHOWN = tuple(Example(f"text {at}", at) for at in range(6))


def asked(decoder, memory):
    return Problem(Questions(decoder, LETTERS), SHOWN, "both", memory)


def test_as_many_columns_are_kept_as_the_memory_holds():
    decoder = made("llama")
    whole = asked(decoder, None)
    parameters = whole.scale.numel()
    assert whole.columns == 5
    for kept in range(FEWEST, 5):
        with pytest.warns(MemoryWarning, match=f"^{kept} derivatives of an example are kept in place of 5"):
            assert asked(decoder, memory_taken(6, kept + 1, parameters) - 1).columns == kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked(decoder, memory_taken(6, 5, parameters)).columns == 5
    with pytest.raises(I2CLError, match=r"they may: give more memory \(--memory\)"):
        asked(decoder, memory_taken(6, FEWEST, parameters) - 1)
    with pytest.raises(I2CLError, match=r"give fewer of each class \(--shots\) or more memory"):
        Problem(Questions(decoder, LETTERS), SHOWN * 2, "both", memory_taken(12, FEWEST, parameters) - 1)


@pytest.mark.parametrize("free", [0, 4 * 10**9])
def test_without_a_limit_it_is_a_quarter_of_what_is_free(free, monkeypatch):
    monkeypatch.setattr(module, "free_memory", lambda: free)
    assert asked(made("llama"), None).columns == 5
    monkeypatch.setattr(module, "free_memory", lambda: 4000)
    with pytest.raises(I2CLError, match="more than the 1e-06 GB that they may"):
        asked(made("llama"), None)


def test_the_limit_is_no_setting_of_the_artefact():
    configs = (AnchoredConfig(steps=1, memory=memory) for memory in (1.0, None))
    limited, free = (anchor(made("llama"), LETTERS, SHOWN, config) for config in configs)
    assert "memory" not in limited.settings
    assert limited.settings.keys() == free.settings.keys()
