"""Exports that are refused before the base model is loaded."""

import sys
from dataclasses import replace

import pytest

from commands import listed
from export.cases import CASES, decoder_of, drawn, injection_for, saved
from i2cl.errors import I2CLError
from i2cl.export import EXPORTERS, fold, require_holdable
from i2cl.models.loading import load_model_and_tokenizer


def refusal(call, *arguments, **options):
    """The message of an I2CLError, or None if there is none."""
    try:
        call(*arguments, **options)
    except I2CLError as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused_early_is_refused_by_the_export_for_the_same_reason(case, tmp_path):
    decoder, injection = drawn(case)
    coefficients = injection.coefficients.clone()
    coefficients[..., 1] = 1  # an adapter cannot scale
    injection = replace(injection, coefficients=coefficients)
    early = {form: refusal(require_holdable, injection, form) for form in EXPORTERS}
    for form, message in early.items():
        if message is not None:
            late = refusal(EXPORTERS[form], decoder, injection, tmp_path / "out.gguf", golden=False)
            assert message == late
    # the export itself, which other tests run, refuses what the config cannot show
    refused = refusal(fold, decoder, injection)
    assert early["causal-lm"] == refused or case == "granitemoehybrid"  # its config has an infinite number


@pytest.mark.parametrize("form", EXPORTERS)
def test_export_of_a_model_that_cannot_hold_the_task_does_not_load_it(form, tmp_path, refused, monkeypatch):
    base, artefact = saved(decoder_of("gemma3_text"), tmp_path)
    loaded = []

    def load(*arguments, **options):
        loaded.append(arguments)
        return load_model_and_tokenizer(*arguments, **options)

    monkeypatch.setattr("i2cl.models.decoder.load_model_and_tokenizer", load)
    out = tmp_path / ("out.gguf" if form == "gguf" else "out")
    message = refused("export", artefact, out, "--model", base, "--to", form)
    assert "its blocks normalize the output of a sublayer" in message or "scale the output" in message
    assert not loaded
    assert sorted(listed(tmp_path)) == ["artefact", "base"]


def test_part_of_a_multimodal_model_is_refused_early():
    injection = injection_for(decoder_of("llama"))
    base = replace(injection.base, model_type="llava")
    message = refusal(require_holdable, replace(injection, base=base), "causal-lm")
    assert message.startswith("a 'llava' model cannot hold an injection in its weights: it is a part")


def test_unknown_model_type_is_left_to_the_export():
    injection = injection_for(decoder_of("llama"))
    base = replace(injection.base, model_type="new", config=injection.base.config | {"model_type": "new"})
    require_holdable(replace(injection, base=base), "causal-lm")


def test_verify_names_a_missing_llama_cpp_without_reading_the_file(tmp_path, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    (tmp_path / "out.gguf").write_bytes(b"not a GGUF file")
    assert "needs the package xllamacpp" in refused("verify", tmp_path / "out.gguf")
