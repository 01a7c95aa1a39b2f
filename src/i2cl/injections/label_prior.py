"""A label prior: numbers, one a label, that set an injection's mean label probabilities right.

Beyond the paper. A model often says one label too often whatever the text. How often it says each is
measured on texts without labels, once; single queries are served afterwards.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.injection import LABEL_PRIOR, Injection
from i2cl.errors import I2CLError
from i2cl.injections.temperature import TYPICAL
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress

FEWEST_UNLABELLED = 32  # with fewer, the mean is little more than chance
ROUNDED = 0.01  # how far the shares of a prior may be from a sum of 1


class FewTextsWarning(UserWarning):
    """A label prior is measured on fewer than `FEWEST_UNLABELLED` texts."""


def with_label_prior(
    injection: Injection,
    decoder: Decoder,
    texts: Sequence[str],
    prior: Sequence[float] | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Injection:
    """The same injection with a `label_bias`: log(prior) - log(mean probability over the texts), in nats.

    Beside a sentence encoder it is 2.4 times that, since both models' product is divided by as much.
    It is one step: the means over the texts are near the prior afterwards, and not equal to it. A bias that
    the injection has is replaced; what was measured without it (metrics, worth, command, temperature) is left
    out. ``texts`` are without labels, as they will come; ``prior`` is each label's share among such texts, in
    the labels' order, by default all equal. For ``force`` see `Injection.require_base`; ``progress`` is
    called as texts finish. Raises I2CLError without texts, on an empty one, a prior that is no shares of the
    labels, or another model.
    """
    scale = _scale(injection)
    injection = replace(without_label_prior(injection), temperature=scale)
    shares = None if prior is None else require_shares(prior, injection.task.labels)
    if not texts:
        raise I2CLError(f"no texts were given: a label prior takes at least {FEWEST_UNLABELLED}")
    if len(texts) < FEWEST_UNLABELLED:
        message = f"a label prior from {len(texts)} texts is little more than chance"
        warnings.warn(f"{message}: give at least {FEWEST_UNLABELLED}", FewTextsWarning, stacklevel=2)
    scores = injection.scores(decoder, texts, force=force, progress=progress)
    bias = scale * bias_towards(shares, scores)
    record = {"texts": len(texts), "prior": None if prior is None else list(prior)}
    return _unmeasured(injection, tuple(bias.tolist()), injection.settings | {LABEL_PRIOR: record})


def without_label_prior(injection: Injection) -> Injection:
    """The same injection without its `label_bias`, and without what was measured with it."""
    if injection.label_bias is None:
        return injection
    settings = {name: value for name, value in injection.settings.items() if name != LABEL_PRIOR}
    return _unmeasured(injection, None, settings)


def bias_towards(
    prior: Float[Tensor, " labels"] | None, scores: Float[Tensor, "texts labels"]
) -> Float[Tensor, " labels"]:
    """Return the bias for `i2cl.models.scoring.add_label_bias`, in nats; 0 where a mean is as the prior.

    ``prior``: share of each label; None: all equal; ``scores``: log-probabilities of the labels, up to a
    constant a text.
    """
    prior = torch.full_like(scores[0], 1 / scores.shape[1]) if prior is None else prior
    return prior.log() - log_mean(scores)


def log_mean(scores: Float[Tensor, "texts labels"]) -> Float[Tensor, " labels"]:
    """Logarithm of each label's mean probability among the labels, finite also for a label that has none."""
    return scores.softmax(-1).mean(0).clamp(min=1e-12).log()


def require_shares(prior: Sequence[float], labels: Sequence[str]) -> Float[Tensor, " labels"]:
    """Shares that sum to 1. Raises I2CLError unless one above 0 a label, with a sum of 1 to `ROUNDED`."""
    named = f"the prior {', '.join(f'{share:g}' for share in prior)}"
    if len(prior) != len(labels):
        cure = f"give one each for {', '.join(labels)}"
        raise I2CLError(f"{named} has {len(prior)} shares for {len(labels)} labels: {cure}")
    if not all(share > 0 for share in prior):
        raise I2CLError(f"{named} has a share that is not above 0: give every label one above 0")
    if not math.isclose(sum(prior), 1, abs_tol=ROUNDED):
        raise I2CLError(f"{named} has shares that sum to {sum(prior):g}: give some that sum to 1")
    return torch.tensor(prior, dtype=torch.float32) / sum(prior)


def _scale(injection: Injection) -> float:
    """What scores are divided by where no temperature was measured: both models' product is divided."""
    return 1.0 if injection.encoder_bias is None else TYPICAL


def _unmeasured(
    injection: Injection, bias: tuple[float, ...] | None, settings: dict[str, object]
) -> Injection:
    fresh: Any = {"metrics": {}, "worth": {}, "command": "", "temperature": _scale(injection)}
    return replace(injection, label_bias=bias, settings=settings, **fresh)
