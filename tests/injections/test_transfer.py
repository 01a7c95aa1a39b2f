"""Transfer against a direct computation, on two model families."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from fitting import decoder_of, injected, raises
from i2cl import CalibrationConfig, ExtractConfig, Injection, TransferConfig, calibrate
from i2cl.injections.transfer import related, similarity, transfer
from i2cl.tasks import Example, Task, Template

FAMILIES = ("llama", "gpt2")
TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
OTHER = Task("moods", ("glad", "sad"), Template("Mood: {text}\nKind:{label}"))
SHOTS = (Example("a warm film", 0), Example("dull", 1), Example("funny and kind", 0), Example("no", 1))
QUICK = CalibrationConfig(epochs=2)
UNTRAINED = CalibrationConfig(epochs=0)


def anchor(coefficients, case="llama", *, sublayers="both", seed=0, **fields):
    """Return an injection of another task with these coefficients, or with one pair at every sublayer."""
    decoder = decoder_of(case)
    shape = (decoder.layers, 1 if sublayers == "hidden" else 2)
    values = torch.randn(*shape, decoder.d_model, generator=torch.Generator().manual_seed(seed))
    fields |= {"extraction": ExtractConfig(sublayers=sublayers), "demonstrations": 3}
    coefficients = torch.as_tensor(coefficients).expand(*shape, 2).contiguous()
    return Injection(values, coefficients, OTHER, fields.pop("base", decoder.base), **fields)


def at_angle(degrees, **arguments):
    """Return an anchor whose coefficients are at this angle from (1, 0)."""
    angle = math.radians(degrees)
    return anchor([3 * math.cos(angle), 3 * math.sin(angle)], **arguments)


NEW = anchor([1.0, 0.0])


def test_similarity_is_the_cosine_of_all_coefficients():
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(2, 2, 2, generator=generator) for _ in range(2))
    rows = [[number.item() for number in values.flatten()] for values in (one, other)]
    product = sum(a * b for a, b in zip(*rows, strict=True))
    lengths = [math.sqrt(sum(number**2 for number in row)) for row in rows]
    result = similarity(anchor(one), anchor(other))
    assert isinstance(result, float)
    assert result == pytest.approx(product / math.prod(lengths), abs=1e-7)
    assert similarity(anchor(one), anchor(-2 * one)) == pytest.approx(-1)
    assert similarity(at_angle(10), at_angle(70)) == pytest.approx(0.5)
    pair = anchor([0.1, 1.0]), anchor([0.1, 1.0], sublayers="hidden")
    raises(r"\(2, 2, 2\) and \(2, 1, 2\) cannot be compared: fit both", similarity, *pair)


@pytest.mark.parametrize("temperature", [0.5, 0.05, 100.0])
def test_weights_are_a_softmax_over_related_anchors(temperature):
    anchors = [at_angle(30), at_angle(60), at_angle(0), at_angle(20), at_angle(180)]
    result = related(NEW, anchors, TransferConfig(temperature=temperature))
    angles = {0: 30, 2: 0, 3: 20}
    powers = {index: math.exp(math.cos(math.radians(at)) / temperature) for index, at in angles.items()}
    assert [index for index, _ in result] == [0, 2, 3]
    for index, weight in result:
        assert weight == pytest.approx(powers[index] / sum(powers.values()), rel=1e-5)
    assert sum(weight for _, weight in result) == pytest.approx(1)


def test_default_threshold_and_temperature_are_the_papers():
    assert (TransferConfig().threshold, TransferConfig().temperature) == (0.8, 0.5)
    anchors = [at_angle(36), at_angle(37)]  # cosines 0.809 and 0.799
    assert related(NEW, anchors) == ((0, 1.0),)
    assert [index for index, _ in related(NEW, anchors, TransferConfig(threshold=0.79))] == [0, 1]
    # The threshold has to be exceeded.
    assert related(NEW, [at_angle(90)], TransferConfig(threshold=-0.1)) == ((0, 1.0),)
    assert related(anchor([0.0, 1.0]), [NEW], TransferConfig(threshold=0.0)) == ()
    assert related(NEW, []) == ()


def anchors_of(case):
    """Return two anchors related to coefficients near (0.1, 1.0), and between them one that is not."""
    drawn = torch.randn(2, 2, 2, 2, generator=torch.Generator().manual_seed(5)) * 0.05
    near = drawn + torch.tensor([0.1, 1.0])
    return [anchor(near[0], case, seed=1), anchor([1.0, -1.0], case, seed=2), anchor(near[1], case, seed=3)]


def direct(decoder, case, first, calibration, **arguments):
    """Compute weights, averages and the second calibration directly."""
    kept = [(index, one) for index, one in enumerate(anchors_of(case)) if index != 1]
    cosines = [
        torch.nn.functional.cosine_similarity(first.coefficients.flatten(), one.coefficients.flatten(), dim=0)
        for _, one in kept
    ]
    powers = torch.stack(cosines).div(0.5).exp()
    shares = (powers / powers.sum()).tolist()
    vector = sum(share * one.context for share, (_, one) in zip(shares, kept, strict=True))
    start = sum(share * one.coefficients for share, (_, one) in zip(shares, kept, strict=True))
    mean = replace(first, context=vector, demonstrations=6)
    return (0, 2), shares, calibrate(decoder, TASK, SHOTS, mean, calibration, start=start, **arguments)


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("calibration", [UNTRAINED, QUICK, CalibrationConfig.recipe("released", epochs=2)])
def test_average_of_related_anchors_is_calibrated_again(case, calibration):
    decoder = decoder_of(case)
    steps = []
    options = {"calibration": calibration, "seed": 4, "progress": lambda *at: steps.append(at)}
    result = transfer(decoder, TASK, SHOTS, anchors_of(case), **options)
    first = injected(decoder, TASK, SHOTS, calibration, seed=4)
    assert torch.equal(result.first.coefficients, first.coefficients)
    assert torch.equal(result.first.context, first.context)
    indices, shares, expected = direct(decoder, case, first, calibration, seed=4)
    assert tuple(index for index, _ in result.weights) == indices
    assert [weight for _, weight in result.weights] == pytest.approx(shares, rel=1e-5)
    injection = result.injection
    torch.testing.assert_close(injection.context, expected.context, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(injection.coefficients, expected.coefficients, atol=1e-5, rtol=1e-4)
    assert (injection.task, injection.base, injection.seed) == (TASK, decoder.base, 4)
    assert injection.demonstrations == 6
    assert len(steps) == 2 * calibration.epochs
    injection.require_base(decoder)
    assert injection.log_probs(decoder, ["a film"]).isfinite().all()


@pytest.mark.parametrize("sublayers", ["mha", "hidden"])
def test_anchors_with_other_sublayers_are_averaged(sublayers):
    decoder, extraction = decoder_of("llama"), ExtractConfig(sublayers=sublayers)
    anchors = [anchor([0.2, 0.9], sublayers=sublayers), anchor([0.1, 1.1], sublayers=sublayers, seed=1)]
    result = transfer(decoder, TASK, SHOTS, anchors, extraction=extraction, calibration=UNTRAINED)
    weights = torch.tensor([weight for _, weight in result.weights])
    expected = torch.stack([weights @ torch.tensor([0.2, 0.1]), weights @ torch.tensor([0.9, 1.1])])
    torch.testing.assert_close(result.injection.coefficients[0, 0], expected)
    assert result.injection.extraction.sublayers == sublayers
    if sublayers == "mha":  # untrained sublayers are unchanged
        assert torch.equal(result.injection.coefficients[:, 1], torch.tensor([[0.0, 1.0]] * 2))


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("anchors", [[], [[1.0, -1.0]]])
def test_first_injection_is_returned_without_related_anchors(case, anchors):
    anchors = [anchor(pair, case) for pair in anchors]
    result = transfer(decoder_of(case), TASK, SHOTS, anchors, calibration=QUICK)
    assert result.injection is result.first
    assert result.weights == ()
    assert (result.first.task, result.first.settings) == (
        TASK,
        QUICK.model_dump(mode="json", exclude={"class_weight"}),
    )


@pytest.mark.parametrize("case", FAMILIES)
def test_given_first_injection_is_not_fitted_again(case, monkeypatch):
    decoder = decoder_of(case)
    whole = transfer(decoder, TASK, SHOTS, anchors_of(case), calibration=QUICK)
    monkeypatch.setattr("i2cl.injections.transfer.extract", lambda *_, **__: pytest.fail("extracted again"))
    again = transfer(decoder, TASK, SHOTS, anchors_of(case), calibration=QUICK, first=whole.first)
    assert again.first is whole.first
    assert again.weights == whole.weights
    assert torch.equal(again.injection.coefficients, whole.injection.coefficients)


def test_scoring_of_the_first_injection_is_kept():
    decoder = decoder_of("llama")
    first = injected(decoder, TASK, SHOTS, UNTRAINED, scoring="sequence")
    result = transfer(decoder, TASK, SHOTS, anchors_of("llama"), calibration=UNTRAINED, first=first)
    assert result.injection.scoring == "sequence"


@pytest.fixture
def refused(monkeypatch):
    """Return `transfer` that must fail before any extraction or calibration."""
    worked = lambda *_, **__: pytest.fail("started to work")  # noqa: E731
    for name in ("extract", "calibrate"):
        monkeypatch.setattr(f"i2cl.injections.transfer.{name}", worked)
    return partial(transfer, decoder_of("llama"), TASK, SHOTS)


@pytest.mark.parametrize(
    ("case", "overrides"),
    [("gemma2", {}), ("llama", {"hidden_size": 16, "head_dim": 8}), ("llama", {"seed": 1})],
)
def test_anchors_of_another_model_are_refused(case, overrides, refused):
    """Other layers, another width, or only other weights."""
    wrong = anchor([0.1, 1.0], base=decoder_of(case, **overrides).base)
    message = r"anchor 2 \('moods'\) was fitted on '.*', not 'llama' \(.*\): fit it again on this model"
    raises(message, refused, [NEW, wrong])
    raises(message, related, NEW, [NEW, wrong])


@pytest.mark.parametrize("fields", [{"sublayers": "mha"}, {"sublayers": "hidden"}, {"positions": "last"}])
def test_anchors_with_other_sublayers_or_positions_are_refused(fields, refused):
    message = r"anchor 1 \('moods'\) has \(sublayers, positions\) \('.*'\), "
    message += r"the new task \('both', 'all'\): fit both"
    raises(message, refused, [anchor([0.1, 1.0], **fields)])
    raises(message, related, NEW, [anchor([0.1, 1.0], **fields)])


@pytest.mark.parametrize("formula", ["add", "balance"])
def test_formulas_other_than_linear_are_refused(formula, refused):
    config = CalibrationConfig(formula=formula)
    raises(f"formula='{formula}': use formula='linear'", refused, [NEW], calibration=config)


def test_mismatched_first_injection_is_refused(refused):
    raises(r"first injection \('moods'\) has other labels", refused, [NEW], first=NEW)
    mine = replace(NEW, task=TASK)
    last, other = replace(mine, positions="last"), replace(mine, base=decoder_of("gpt2").base)
    raises(r"positions='last', the calibration 'all': use the same for both", refused, [NEW], first=last)
    raises(r"first injection \('films'\) was fitted on 'gpt2'", refused, [NEW], first=other)
