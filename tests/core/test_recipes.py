"""Calibration recipes."""

import math

import pytest
import torch
from pydantic import ValidationError

from fitting import decoder_of, raises
from i2cl.core.calibration import calibrate
from i2cl.core.recipe import RECIPES, CalibrationConfig

from .test_calibration import FAMILIES, SHOTS, TASK, context_of, fit


def test_learning_rates_match_the_paper_and_the_released_code():
    paper, released = (
        [config.rate(step, 100) for step in range(101)]
        for config in (CalibrationConfig(), CalibrationConfig.recipe("released"))
    )
    middle = 1e-5 + (1e-2 - 1e-5) * (1 + math.cos(math.pi / 4)) / 2
    assert [paper[at] for at in (0, 25, 50, 100)] == pytest.approx([1e-2, middle, (1e-2 + 1e-5) / 2, 1e-5])
    assert paper == sorted(paper, reverse=True)
    assert released[:6] == pytest.approx([0.0, 2e-3, 4e-3, 6e-3, 8e-3, 1e-2])
    assert released[6] == pytest.approx(1e-2 * (1 + math.cos(math.pi * 0.06)) / 2)
    assert released[100] == pytest.approx(0.0)
    assert released[5:] == sorted(released[5:], reverse=True)


@pytest.mark.parametrize(
    "config", [CalibrationConfig(epochs=4), CalibrationConfig.recipe("released", epochs=20)]
)
def test_optimizer_uses_the_learning_rate_schedule(monkeypatch, config):
    used = []

    class Watched(torch.optim.AdamW):
        def step(self, closure=None):
            used.extend((group["lr"], group["weight_decay"]) for group in self.param_groups)
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "AdamW", Watched)
    calibrate(decoder_of("llama"), TASK, SHOTS, context_of("llama"), config)
    steps = 4 * 3 if config.draw == "epoch" else 20 * 2
    assert used == [(config.rate(step, steps), config.weight_decay) for step in range(steps)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": -1}, "^option epochs=-1: Input should be greater than or equal to 0$"),
        ({"layers": (0, "x")}, r"^option layers=\(0, 'x'\): "),
        ({"layers": "0,,1"}, "^option layers='0,,1': "),
        ({"positions": "middle"}, "^option positions='middle': "),
        ({"warmup": 1.0}, "^option warmup=1.0: "),
        ({"noise": math.nan}, "^option noise=nan: "),
        (
            {"formula": "add", "init_lambda": 0.0},
            "^formula='add' cannot train init_lambda <= 0: start above 0$",
        ),
        ({"formula": "balance", "init_beta": -1.0}, "^formula='balance' cannot train init_beta"),
        ({"epoch": 1}, "^CalibrationConfig has no option 'epoch': did you mean 'epochs'"),
    ],
)
def test_invalid_setting_is_named_with_its_value(fields, message):
    raises(message, CalibrationConfig, **fields)
    raises(message, CalibrationConfig.recipe, "paper", **fields)


def test_settings_are_immutable():
    with pytest.raises(ValidationError):
        CalibrationConfig().lr = 1.0
    with pytest.raises(TypeError):
        RECIPES["released"]["warmup"] = 0.5


def test_recipes_change_only_the_named_settings():
    paper, released = CalibrationConfig(), CalibrationConfig.recipe("released")
    assert CalibrationConfig.recipe("paper") == paper
    changed = {name for name, value in released if value != getattr(paper, name)}
    assert released.model_dump(include=changed) == dict(RECIPES["released"])
    assert CalibrationConfig.recipe("released", epochs=3, warmup=0.1).warmup == 0.1
    assert (released.rounds, CalibrationConfig.recipe("fast", passes=3).rounds) == (100, 3)
    assert CalibrationConfig(layers=" 0, 3 ").layers == (0, 3)
    raises("choose one of paper, released, fast", CalibrationConfig.recipe, "quick")


def recipe_fit(case="llama", decoder=None, progress=None, **changes):
    config = CalibrationConfig.recipe("fast", **changes)
    given = (TASK, SHOTS, context_of(case), config)
    return calibrate(decoder or decoder_of(case), *given, seed=1, progress=progress)


@pytest.mark.parametrize("case", FAMILIES)
def test_fast_recipe_reduces_the_loss_in_few_passes(case):
    injection = recipe_fit(case, passes=12)
    assert 3 <= len(injection.history) <= 12
    assert min(injection.history) < 0.9 * injection.history[0]
    assert injection.settings["optimizer"] == "lbfgs"


def test_strong_regularization_keeps_the_coefficients():
    def far(pull):
        return (recipe_fit(pull=pull).coefficients - torch.tensor([0.1, 1.0])).norm()

    assert far(1.0) < 0.5 * far(0.0)


def test_fast_recipe_keeps_the_best_point_and_reports_progress():
    injection = recipe_fit(passes=7, pull=0.0, noise=0.0)
    once = {"passes": 1, "pull": 0.0, "noise": 0.0}
    again = fit(start=injection.coefficients, optimizer="lbfgs", **once)
    assert again.history[0] == pytest.approx(min(injection.history), rel=1e-4)
    seen = []
    injection = recipe_fit(passes=4, progress=lambda *at: seen.append(at))
    assert [at[:2] for at in seen] == [(number, 4) for number in range(1, len(injection.history) + 1)]
    raises("leave out batches", fit, batches=[[0]], optimizer="lbfgs")
