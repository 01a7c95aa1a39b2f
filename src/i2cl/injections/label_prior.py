"""Label prior: a bias per label that corrects an injection's mean label probabilities.

Beyond the paper. Models often favour one label regardless of the text. The bias is measured once on
unlabelled texts; afterwards, texts can be classified one at a time.
"""

import math
import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.injection import LABEL_PRIOR, Injection
from i2cl.errors import I2CLError
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress

MIN_UNLABELLED = 32  # the mean over fewer texts is mostly noise
SUM_TOLERANCE = 0.01  # maximum difference of a prior's sum from 1


class FewTextsWarning(UserWarning):
    """A label prior was measured on fewer than `MIN_UNLABELLED` texts."""


def with_label_prior(
    injection: Injection,
    decoder: Decoder,
    texts: Sequence[str],
    prior: Sequence[float] | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Injection:
    """Return an injection with a `label_bias` of log(prior) - log(mean probability over the texts), in nats.

    The bias corrects the LLM, whether or not it is part of an ensemble. It replaces an existing bias. Results
    of the uncorrected injection (metrics, evaluation, command and temperature) are removed; an ensemble keeps
    its weights.

    Args:
        injection: the injection to correct.
        decoder: its model.
        texts: unlabelled texts from the distribution to classify.
        prior: true share of each label among these texts, in the order of the labels. Default: equal shares.
        force: see `Injection.require_base`.
        progress: called as texts finish.

    Raises:
        I2CLError: without texts, on an empty text, shares that are not one per label or do not sum to 1, or
            another model.
    """
    injection.task.require_single_label("a label prior", "fit it without unlabelled texts")
    injection = without_label_prior(injection).with_head(temperature=1.0)
    shares = None if prior is None else validate_prior(prior, injection.task.labels)
    if not texts:
        raise I2CLError(f"no texts were given: a label prior takes at least {MIN_UNLABELLED}")
    if len(texts) < MIN_UNLABELLED:
        message = (
            f"a label prior measured on {len(texts)} texts is unreliable: give at least {MIN_UNLABELLED}"
        )
        warnings.warn(message, FewTextsWarning, stacklevel=2)
    scores = injection.llm_alone().log_probs(decoder, texts, force=force, progress=progress)
    bias = prior_bias(shares, scores)
    record = {"texts": len(texts), "prior": None if prior is None else list(prior)}
    return _replace_bias(injection, tuple(bias.tolist()), injection.report.settings | {LABEL_PRIOR: record})


def without_label_prior(injection: Injection) -> Injection:
    """Return an injection without its `label_bias`, and without results that were measured with it.

    Raises I2CLError for a multi-label task, whose bias shifts each label's log-odds; see
    `i2cl.core.multi_label.frequency_bias`.
    """
    injection.task.require_single_label("a label prior", "leave out --drop-prior")
    if injection.head.bias is None:
        return injection
    settings = {name: value for name, value in injection.report.settings.items() if name != LABEL_PRIOR}
    return _replace_bias(injection, None, settings)


def prior_bias(
    prior: Float[Tensor, " labels"] | None, scores: Float[Tensor, "texts labels"]
) -> Float[Tensor, " labels"]:
    """Return log(prior) - log(mean probability), for `i2cl.models.scoring.add_label_bias`.

    Args:
        prior: share of each label. Default: equal shares.
        scores: log-probabilities of the labels, up to a constant per text.
    """
    prior = torch.full_like(scores[0], 1 / scores.shape[1]) if prior is None else prior
    return prior.log() - log_mean(scores)


def log_mean(scores: Float[Tensor, "texts labels"]) -> Float[Tensor, " labels"]:
    """Return the logarithm of each label's mean probability, clipped at 1e-12 to stay finite."""
    return scores.softmax(-1).mean(0).clamp(min=1e-12).log()


def validate_prior(prior: Sequence[float], labels: Sequence[str]) -> Float[Tensor, " labels"]:
    """Return the shares of a prior, normalized.

    Raises:
        I2CLError: unless there is one positive share per label and their sum is 1 up to `SUM_TOLERANCE`.
    """
    description = f"the prior {', '.join(f'{share:g}' for share in prior)}"
    if len(prior) != len(labels):
        hint = f"give one each for {', '.join(labels)}"
        raise I2CLError(f"{description} has {len(prior)} shares for {len(labels)} labels: {hint}")
    if not all(share > 0 for share in prior):
        raise I2CLError(f"{description} has a share that is not above 0: give each label a positive share")
    if not math.isclose(sum(prior), 1, abs_tol=SUM_TOLERANCE):
        raise I2CLError(f"{description} does not sum to 1: the shares sum to {sum(prior):g}, correct them")
    return torch.tensor(prior, dtype=torch.float32) / sum(prior)


def _replace_bias(
    injection: Injection, bias: tuple[float, ...] | None, settings: dict[str, object]
) -> Injection:
    """Set the label bias and reset everything that was measured with another one."""
    reset = injection.with_report(settings=settings, metrics={}, evaluation={}, command="")
    return reset.with_head(bias=bias, temperature=1.0)
