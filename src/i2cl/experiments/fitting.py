"""Fit a task and evaluate the fit: what the command line, the server and `I2CLClassifier` share."""

import time
from collections.abc import Callable
from dataclasses import replace

from i2cl.core.experts import EmbeddingsExpert, StatesExpert
from i2cl.core.injection import Injection
from i2cl.core.language import warn_of_language
from i2cl.errors import I2CLError
from i2cl.experiments.evidence.fit_evaluation import (
    EvaluationPlan,
    FitObserver,
    FitRequest,
    evaluate_fit,
    refitting,
    typical_temperature,
)
from i2cl.experiments.evidence.multi_label import evaluate_multi_label
from i2cl.injections.ensemble import fit_ensemble, plain_injection, with_states_expert
from i2cl.injections.label_prior import with_label_prior
from i2cl.methods.anchored import Anchored
from i2cl.methods.ensemble import llm_prior
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress
from i2cl.tasks import Examples, Task


def fit_task(
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    request: FitRequest,
    plan: EvaluationPlan,
    observer: FitObserver | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Injection:
    """Fit a task to its demonstrations, evaluate the fit, and choose the weights of the experts.

    Args:
        decoder: the frozen model.
        task: with the rows that the plan refers to.
        demonstrations: labelled examples to fit.
        request: method and options.
        plan: rows to evaluate on, see `i2cl.experiments.evidence.fit_evaluation.plan_evaluation`.
        observer: receives progress.
        clock: seconds, to time the fit with.

    Raises:
        I2CLError: if the method refuses these demonstrations or this model, the rows are too few for the
            target accuracy, or as `require_supported`.
    """
    observer = observer or FitObserver()
    require_supported(task, request)
    if request.ensemble.uses_llm:
        warn_of_language(decoder, [row.text for row in demonstrations])
    started = clock()
    injection = _fit(decoder, task, demonstrations, request, observer)
    seconds = clock() - started
    observer.fitted(injection, seconds)
    if not plan.rows:
        return injection

    def refit(rest: Examples) -> Injection:
        again = refitting(request.method, injection)(decoder, task, rest, request.seed, observer.refit_step)
        again = _with_label_prior(again, decoder, request)
        return again if injection.head.states is None else _with_states_expert(again, decoder, rest, request)

    evaluate = evaluate_multi_label if task.multi_label else evaluate_fit
    return evaluate(
        injection,
        decoder,
        task,
        demonstrations,
        plan,
        request,
        seconds=seconds,
        refit=refit,
        observer=observer,
    )


def _fit(
    decoder: Decoder, task: Task, demonstrations: Examples, request: FitRequest, observer: FitObserver
) -> Injection:
    """Fit the LLM, its label prior and the text experts, at typical weights and temperature."""
    method = request.method
    if request.ensemble.uses_llm:
        injection = _fit_llm(decoder, task, demonstrations, request, observer)
    else:
        injection = plain_injection(decoder, task, demonstrations, request.seed)
    if request.keep_examples:
        injection = replace(injection, examples=tuple(demonstrations))
    weighted, device = method.weighted(task, demonstrations), str(decoder.device)
    if EmbeddingsExpert.name in request.ensemble.members():
        observer.stage("embedding texts", len(weighted))
    prior = llm_prior(method)
    injection = fit_ensemble(injection, request.ensemble, prior, weighted, device, observer.scored)
    if StatesExpert.name in request.ensemble.members():
        injection = _with_states_expert(injection, decoder, demonstrations, request)
    settings = injection.settings
    if injection.head.embeddings is not None:
        settings = settings | {"embeddings_c": request.ensemble.embeddings_c}
    if isinstance(method, Anchored):
        settings = settings | method.anchoring.model_dump(
            mode="json", include={"class_weight"}, exclude_none=True
        )
    return injection.with_report(command=request.command, settings=settings)


def _fit_llm(
    decoder: Decoder, task: Task, demonstrations: Examples, request: FitRequest, observer: FitObserver
) -> Injection:
    method = request.method
    injection = method.fit_injection(
        decoder, task, demonstrations, request.seed, observer.step, request.scoring
    )
    if request.unlabelled:
        observer.stage("scoring unlabelled texts", len(request.unlabelled))
        injection = _with_label_prior(injection, decoder, request, observer.scored)
    if temperature := typical_temperature(method, task, demonstrations):
        injection = injection.with_head(temperature=temperature)
    return injection


def _with_states_expert(
    injection: Injection, decoder: Decoder, demonstrations: Examples, request: FitRequest
) -> Injection:
    weighted = request.method.weighted(injection.task, demonstrations)
    return with_states_expert(injection, decoder, llm_prior(request.method), weighted)


def _with_label_prior(
    injection: Injection, decoder: Decoder, request: FitRequest, progress: Progress | None = None
) -> Injection:
    if not request.unlabelled:
        return injection
    return with_label_prior(injection, decoder, request.unlabelled, request.shares, progress=progress)


def require_supported(task: Task, request: FitRequest) -> None:
    """Raise I2CLError on an option that a multi-label task, or a fit without the LLM, does not support."""
    if not request.ensemble.uses_llm and (option := _option_of_llm(request)):
        hint = "add llm to --experts, or omit it"
        raise I2CLError(f"{option} is for the LLM, which is not among the experts: {hint}")
    if not task.multi_label:
        if request.threshold is not None:
            raise I2CLError(
                "--threshold is for multi-label tasks, and this one has one label per text: omit it"
            )
        return
    if type(request.method) is not Anchored:
        task.require_single_label(f"method {request.method.name}", "use the method anchored")
    for given, what in (
        (request.unlabelled, "a label prior (--unlabelled)"),
        (request.target is not None, "--target-accuracy"),
        (StatesExpert.name in request.ensemble.members(), f"the expert {StatesExpert.name!r}"),
        (isinstance(request.method, Anchored) and request.method.anchoring.class_weight, "--class-weight"),
    ):
        if given:
            raise I2CLError(
                f"{what} needs one label per text, and {task.name!r} is a multi-label task: omit it"
            )


def _option_of_llm(request: FitRequest) -> str:
    """Return an option that only the fit of the LLM uses, or "" if there is none."""
    if request.unlabelled:
        return "a label prior (--unlabelled)"
    if not isinstance(request.method, Anchored):
        return f"method {request.method.name}"
    config = request.method.anchoring
    changed = (
        name for name, field in type(config).model_fields.items() if getattr(config, name) != field.default
    )
    return next((name for name in changed if name != "class_weight"), "")
