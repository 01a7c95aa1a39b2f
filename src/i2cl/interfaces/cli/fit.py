"""`i2cl fit`: its options, what it prints, and the command line that a model card repeats."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import typer
from typer import Argument, Option

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions, opt
from i2cl.storage.atomic import public_name, require_writable
from i2cl.storage.layout import own_files

if TYPE_CHECKING:
    from i2cl.core.injection import Injection
    from i2cl.experiments.draw import Draw, Shots
    from i2cl.experiments.evidence.fit_evaluation import EvaluationPlan, FitRequest
    from i2cl.injections.ensemble import EnsembleConfig
    from i2cl.methods import Injector, Method
    from i2cl.models.decoder import Decoder
    from i2cl.tasks import Task
    from i2cl.tasks.survey import Survey

_NAME_OR_PATH = ("model", "task", "artefact", "encoder")  # parameters of type str that may be paths
MAX_CONTRADICTIONS = 5  # texts with several labels that are printed
MAX_SNIPPET = 50  # characters of such a text
MAX_CODES = 4  # label codes in a suggested --labels


def _shots(value: str) -> str:
    """Check that ``--shots`` is ``all`` or a positive integer."""
    if value != "all" and not (value.isascii() and value.isdigit() and int(value)):
        raise typer.BadParameter(f"{value!r} is neither a positive integer nor 'all'")
    return value


def _target_accuracy(value: float | None) -> float | None:
    if value is not None and not 0.5 <= value < 1:
        raise typer.BadParameter(f"target accuracy must be at least 0.5 and below 1, got {value!r}")
    return value


@dataclass(frozen=True)
class DrawOptions:
    """Choice of the demonstrations."""

    shots: str | None = opt(
        None,
        "Demonstrations per class, or 'all' rows; default: the task's own number, or for a file up to 20, "
        "as many as can be fitted in about five minutes; without the LLM, all that are not held out.",
        parser=_shots,
        metavar="INTEGER|all",
    )
    seed: options.Seed = 0
    keep_back: int | None = opt(
        None,
        "Hold out one row in this many for evaluation, in each class of your file with at least 10 rows; "
        "0 for none; default: 5 without --shots and --test.",
        min=0,
    )

    keep_examples: bool = opt(
        False,
        "Store the demonstrations in the folder, for `i2cl update`; their texts may be private.",
        "--keep-examples",
    )

    @property
    def number(self) -> "Shots":
        """The number of shots, ``"all"``, or None if not given."""
        return "all" if self.shots == "all" else int(self.shots) if self.shots else None


@dataclass(frozen=True)
class MethodOptions:
    """Method of the fit, and its options."""

    PANEL: ClassVar[str] = options.METHOD

    method: Literal["anchored", "i2cl"] | None = opt(
        None,
        "How the LLM is fitted. anchored: a vector at every attention and MLP output; i2cl: the paper's "
        "method. Default: anchored, or the method of the given recipe or option.",
    )
    experts: str | None = opt(
        None,
        "Classifiers that are combined, separated by commas: llm, and logistic regression on states (hidden "
        "states of the LLM), embeddings (of a sentence encoder) or tfidf (character n-grams). Without llm, "
        "the model never runs. Default: llm,embeddings,tfidf; embeddings only if i2cl\\[embeddings] and an "
        "encoder are installed.",
    )
    recipe: options.OwnRecipe = None
    settings: options.Settings = None
    class_weight: str | None = opt(
        None,
        "'balanced' weights each class inversely to its frequency among the examples; or weights by label, "
        "such as 'spam=5,ham=1'; default: equal weights.",
        metavar="balanced|LABEL=WEIGHT,...",
    )
    memory: float | None = opt(
        None,
        "Memory in GB, besides the model, for the Jacobian of anchored calibration; default: a quarter of "
        "the free memory.",
    )
    unlabelled: Path | None = opt(
        None,
        "File of 32 or more unlabelled texts, typical of later queries, to estimate a label prior on; read "
        "like the input of `predict`.",
    )
    prior: str | None = opt(
        None,
        "Shares of the labels in the unlabelled texts, in label order, separated by commas; default: equal.",
    )


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation of the fit."""

    evaluate: int = opt(
        160,
        "Evaluate the fit beside baselines on up to this many held-out rows (at least one per label): test "
        "rows, or training rows that are not demonstrations. If a label has no such row, a cross-validation "
        "runs instead. 0 for no evaluation.",
        min=0,
    )
    compare: str | None = opt(
        None,
        "Further methods for the table of baselines, separated by commas, such as menu,few_shot+label_prior; "
        "`i2cl ls methods` lists them.",
    )
    threshold: Literal["0.5", "f1"] | None = opt(
        None,
        "Multi-label tasks: give a text every label with a probability of at least 0.5, or of the threshold "
        "per label with the highest F1 on the held-out rows (default).",
    )
    target_accuracy: float | None = opt(
        None,
        "Find the confidence threshold above which answers reach this accuracy, such as 0.95, on the "
        "held-out rows.",
        callback=_target_accuracy,
    )


@options.expanded
def fit(
    context: typer.Context,
    model: options.Model,
    task: Annotated[
        str,
        Argument(
            help="A built-in task (`i2cl ls tasks`), or a CSV, TSV, JSONL, JSON, Parquet, Excel or TOML file."
        ),
    ],
    output: Annotated[Path, Option("--output", "-o", help="Folder for the artefact.")],
    *,
    draw_options: DrawOptions,
    method_options: MethodOptions,
    rows: TaskOptions,
    evaluation: EvaluationOptions,
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Fit a task to labelled examples and save it, for predict, serve and export.

    Reports the held-out accuracy of the fit and of baselines, and a verdict.
    """
    require_writable(output, own_files(output))
    load.require_options(loading, model, method_options.settings)
    local = load.local_task(task, rows)
    unlabelled = _unlabelled_texts(method_options, rows)

    load.libraries()
    from i2cl.experiments.evidence.fit_evaluation import plan_evaluation
    from i2cl.experiments.fitting import require_supported
    from i2cl.tasks.formats import is_row_file

    from_file, seed = is_row_file(task), draw_options.seed
    request = _request(draw_options, method_options, evaluation, unlabelled)
    method = request.method
    compare = _methods_to_compare(evaluation, request)
    loaded = local or load.task(task, rows)
    require_supported(loaded, request)
    if compare:
        loaded.require_single_label("--compare", "omit it")
    draw_rows = _draw(draw_options, loaded, request, from_file=from_file, scored=evaluation.evaluate > 0)
    shares = _prior_shares(method_options, loaded)

    decoder = load.decoder(model, load.with_default_dtype(loading))
    loaded = loaded.with_prompt_options(decoder.tokenizer, chat=rows.chat, instruction=rows.instruction)
    drawn = draw_rows(decoder, loaded)
    plan = plan_evaluation(loaded, drawn.demonstrations, evaluation.evaluate, seed=seed)
    plan = replace(plan, compare=compare)
    if rows.test is not None:
        _report_known_test_rows(loaded, drawn)
    if request.target is not None:
        plan.require_target(request.target)
    survey, summary = describe_rows(loaded, decoder, drawn, plan) if from_file else (None, "")
    expected_seconds = (drawn.seconds or 0) + drawn.evaluation_seconds(plan.rows, plan.folds)
    if summary and not json:
        console.say(summary, wrapped=True)
    elif not json and expected_seconds > console.SHORT_S:
        console.note(f"expected time: {_times(drawn, plan)}")
    command = command_line(
        context,
        method=method.name if request.ensemble.uses_llm else None,
        seed=seed,
        shots=draw_options.shots or drawn.shots,
        keep_back=drawn.keep_back or None,
    )
    request = replace(request, shares=shares, command=command)
    fit_and_show(decoder, loaded, drawn, request, plan, output, survey, json=json)


def _report_known_test_rows(task: "Task", drawn: "Draw") -> None:
    """Report test rows that the evaluation leaves out, because their text is a demonstration's."""
    texts = {row.text for row in drawn.demonstrations}
    if known := sum(row.text in texts for row in task.test):
        console.note(
            f"{known:,} of {len(task.test):,} rows of --test have the text of a demonstration: they are not "
            "evaluated"
        )


def _request(
    draw_options: DrawOptions,
    method_options: MethodOptions,
    evaluation: EvaluationOptions,
    unlabelled: list[str],
) -> "FitRequest":
    """Return the options of the fit, without what depends on its task.

    Raises I2CLError for a missing encoder, before the model loads.
    """
    from i2cl.experiments.evidence.fit_evaluation import FitRequest

    method, ensemble = _method_of(method_options)
    return FitRequest(
        method,
        ensemble,
        draw_options.seed,
        unlabelled=unlabelled,
        target=evaluation.target_accuracy,
        threshold=evaluation.threshold,
        keep_examples=draw_options.keep_examples,
    )


def _draw(
    chosen: DrawOptions, task: "Task", request: "FitRequest", *, from_file: bool, scored: bool
) -> "Callable[[Decoder, Task], Draw]":
    """Check the numbers of rows before the model is loaded.

    Returns:
        A function that draws the demonstrations of the task, in the wording for the loaded model, and
        estimates the duration of their fit, if it runs the model.
    """
    method = request.method if request.ensemble.uses_llm else None
    from i2cl.experiments.draw import draw, draw_within_budget, warn_of_small_classes

    choice: Any = {
        "shots": chosen.number,
        "keep_back": chosen.keep_back,
        "scored": scored and not task.test,
    }
    ensemble = request.ensemble
    early = draw(task, method, seed=chosen.seed, from_file=from_file, **choice)
    if from_file and isinstance(chosen.number, int):
        warn_of_small_classes(task, chosen.number)

    def timed(decoder: "Decoder", task: "Task") -> "Draw":
        if method is None:
            assert early is not None  # noqa: S101 - None only for a method
            return early
        with console.waiting("timing the model"):
            if early is None:
                return draw_within_budget(decoder, task, method, chosen.seed, **choice, ensemble=ensemble)
            return early.timed(decoder, task, method, ensemble)

    return timed


def fit_and_show(
    decoder: "Decoder",
    task: "Task",
    drawn: "Draw",
    request: "FitRequest",
    plan: "EvaluationPlan",
    output: Path,
    survey: dict[str, Any] | None,
    *,
    json: bool,
) -> None:
    """Fit the drawn rows with a progress bar, save the artefact, and print its evaluation."""
    from i2cl.experiments.fitting import fit_task

    uses_llm = request.ensemble.uses_llm
    rounds, name = (request.method.rounds, request.method.name) if uses_llm else (1, None)
    with console.progress(max(1, rounds), "extracting" if uses_llm else "fitting") as bar:
        observer = _observer(bar, plan, output)
        try:
            injection = fit_task(decoder, task, drawn.demonstrations, request, plan, observer)
        except (KeyboardInterrupt, I2CLError) as error:
            if not observer.saved:
                raise
            if isinstance(error, I2CLError):
                raise I2CLError(f"{error} ({output} is saved but not evaluated)") from None
            raise typer.Abort(f"{output} is saved but not evaluated: it has no verdict") from None
    if plan.rows:
        injection.save_pretrained(output)
    if json:
        record = _fit_record(injection, name, output, observer.seconds, decoder.name, survey)
        console.print_json(record)
    else:
        _show_fit(injection, name, output, observer.seconds, plan)


def _observer(bar: console.Bar, plan: "EvaluationPlan", output: Path) -> Any:
    """Show the progress of a fit in a bar, and save the fit before it is evaluated."""
    from i2cl.experiments.evidence.fit_evaluation import FitObserver

    class Observer(FitObserver):
        saved = False
        seconds = 0.0
        method = ""  # that is evaluated
        texts = 0.0  # embedded for its fit

        def stage(self, what: str, texts: int) -> None:
            bar.restart(texts, what)

        def step(self, done: int, total: int, loss: float) -> None:
            bar.epoch(done, total, loss)

        def fitted(self, injection: "Injection", seconds: float) -> None:
            injection.save_pretrained(output)  # the evaluation may take longer than the fit
            self.saved, self.seconds = True, seconds
            if plan.folds:
                console.note(
                    f"no held-out rows of every label: running {plan.folds}-fold cross-validation, up to "
                    f"{console.duration((plan.folds - 1) * seconds)} (--evaluate 0 skips it)"
                )
            if plan.rows:
                methods = _count_methods(plan, is_multi_label=injection.task.multi_label)
                bar.restart(len(plan.rows) * methods, "evaluating")

        def refit_step(self, done: int, total: int, _loss: float) -> None:
            bar.describe(f"refitting, step {done} of {total}")

        def evaluating(self, method: str) -> None:
            self.method, self.texts = method, 0.0
            bar.describe(f"evaluating {method}")

        def embedded(self, texts: float) -> None:
            self.texts += texts
            bar.describe(f"evaluating {self.method}, {self.texts:,.0f} texts embedded")

        def scored(self, rows: float) -> None:
            bar.advance(rows)

    return Observer()


def _count_methods(plan: "EvaluationPlan", *, is_multi_label: bool) -> int:
    """Return the maximum number of methods in an evaluation."""
    from i2cl.experiments.evidence.fit_evaluation import BASELINES
    from i2cl.experiments.evidence.multi_label import N_BASELINES

    return 1 + N_BASELINES if is_multi_label else 2 + len(BASELINES) + len(plan.compare)


def _show_fit(
    injection: "Injection", method: str | None, output: Path, seconds: float, plan: "EvaluationPlan"
) -> None:
    """Print a saved fit, its evaluation, and the next command."""
    from i2cl.core.injection import LABEL_PRIOR
    from i2cl.storage.card import describe_prior, describe_weights

    labels, history, count = injection.task.labels, injection.history, injection.demonstrations
    experts = " and ".join(expert.name for expert in injection.head.experts)
    if method is None:
        summary = f"{experts} without the LLM, {count} demonstrations"
    else:
        loss = f"loss {history[0]:.3f} -> {history[-1]:.3f}" if history else "not calibrated"
        summary = f"{' with '.join(filter(None, (method, experts)))}, {count} demonstrations, {loss}"
    console.say(f"Saved {output}: {injection.task.name} by {summary}, {seconds:.1f} s.")
    if LABEL_PRIOR in injection.settings:
        console.say(f"Label prior: {describe_prior(labels, injection.settings[LABEL_PRIOR])}")
    threshold = ""
    if injection.evaluation:
        threshold = _show_evaluation(injection)
    else:
        if plan.reason:
            console.say(f"Not evaluated: {plan.reason}, or give rows with --test FILE.")
        if injection.ensemble or injection.temperature != 1:
            weights = describe_weights(injection.description())
            console.say(f"Calibration: {weights} (typical of such fits, not measured).")
    console.say(f"Next: i2cl predict {shlex.quote(str(output))} FILE{threshold}")


def _fit_record(
    injection: "Injection",
    method: str | None,
    output: Path,
    seconds: float,
    model: str,
    rows: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return what ``i2cl fit --json`` prints."""
    from i2cl.methods.injecting import injection_cost

    history = injection.history
    return {
        "output": str(output),
        "model": model,
        "method": method,
        "task": injection.task.name,
        "labels": list(injection.task.labels),
        "demonstrations": injection.demonstrations,
        "rows": rows,
        "first_loss": history[0] if history else None,
        "last_loss": history[-1] if history else None,
        "fit_seconds": seconds,
        "cached_values": injection_cost(injection).cached_values,
        "coefficients": injection.coefficients.numel(),
        "label_bias": injection.label_bias,
        "temperature": injection.temperature,
        "metrics": injection.metrics,
        "ensemble": injection.ensemble,
        "evaluation": injection.evaluation or None,
    }


def _show_evaluation(injection: "Injection") -> str:
    """Print an evaluation. Return the option with its confidence threshold, if it has one, for `predict`."""
    from i2cl.storage.card import confidence_notes, score_notes, score_table

    evaluation = injection.evaluation
    heading, rows = score_table(evaluation)
    heads = {name: name for name in rows[0] if name != "bytes"}  # the table would exceed 80 columns
    if injection.task.multi_label:  # more scores
        heads["macro-F1"] = "macro"
    rows = [{head: row[name] for name, head in heads.items()} for row in rows]
    console.say(f"\n{heading}")
    console.print_table("", rows)
    for note in score_notes(evaluation):
        console.say(note)
    console.say(f"\nVerdict: {evaluation['verdict']}.")
    if evaluation["advice"]:
        console.say(f"Advice: {evaluation['advice']}.")
    for note in confidence_notes(injection.description()):
        console.say(note)
    threshold = evaluation.get("selection", {}).get("threshold")
    return "" if threshold is None else f" --min-confidence {threshold:.6g}"


def describe_rows(
    task: "Task", decoder: "Decoder", draw: "Draw", plan: "EvaluationPlan", *, updates: bool = False
) -> tuple[dict[str, Any], str]:
    """Describe the training rows, the draw and the evaluation: as a record, and as lines of text.

    ``updates`` says that the task exists already, so each text keeps having one label.
    """
    from i2cl.tasks.survey import Survey

    survey = Survey.from_task(task)
    kept_back = len(plan.rows) if plan.split == "train" else 0
    tokens = max(map(len, decoder.tokenizer(list(survey.longest))["input_ids"]))
    record = survey.record() | {"longest_tokens": tokens, "used": len(draw.demonstrations)}
    record |= {"shots": draw.shots, "kept_back": kept_back, "estimated_seconds": draw.seconds}
    evaluation_seconds = None if plan.compare else draw.evaluation_seconds(plan.rows, plan.folds)
    record |= {"estimated_evaluation_seconds": evaluation_seconds}
    window = f" (context: {decoder.max_length:,})" if decoder.max_length else ""
    distinct = "" if survey.distinct == survey.rows else f", {survey.distinct:,} of them distinct"
    first = f"Rows: {survey.rows:,}{distinct}; the longest text has {tokens:,} tokens{window}."
    lines = first, *_label_lines(survey, updates=updates), _usage_line(draw, kept_back, plan), ""
    return record, "\n".join(lines)


def _label_lines(survey: "Survey", *, updates: bool) -> Iterator[str]:
    counts = ", ".join(f"{word} {count:,}" for word, count in survey.labels.items())
    yield f"Labels: {counts}" + (f"; {survey.unlabelled:,} rows without one." if survey.unlabelled else ".")
    if survey.separator:
        fix = f"separate them with --label-separator {shlex.quote(survey.separator)}"
        fix = f"if they are, fit a new task from all rows, and {fix}" if updates else fix
        yield f"! Some labels look like several: {fix}."
    for word, other in survey.typos.items():
        rows = f"{survey.labels[word]} row{'s' * (survey.labels[word] != 1)}"
        yield f"! {word!r} has {rows}: did you mean {other!r}? They are treated as different labels."
    spellings = _one_spelling(survey)
    if len(spellings) < len(survey.labels) and not updates:
        yield f"! To merge labels that differ in case only: --labels {shlex.quote(','.join(spellings))}."
    for text, words in islice(survey.contradictions.items(), MAX_CONTRADICTIONS):
        snippet = text if len(text) <= MAX_SNIPPET else f"{text[:MAX_SNIPPET]}..."
        yield f"! {snippet!r} is labelled {' and '.join(words)}: keep one label."
    if (more := len(survey.contradictions) - MAX_CONTRADICTIONS) > 0:
        yield f"! {more:,} more {'text has' if more == 1 else 'texts have'} several labels."
    if survey.codes:
        codes = list(survey.labels)[:MAX_CODES]
        pairs = ",".join(f"NAME={code}" for code in codes) + ",..." * (len(survey.labels) > len(codes))
        yield f"! The labels are {survey.codes}: name them for the model with --labels '{pairs}'."


def _one_spelling(survey: "Survey") -> list[str]:
    """Return the labels without those that differ from a more frequent one in case only."""
    return [word for word in survey.labels if survey.typos.get(word, "").casefold() != word.casefold()]


def _usage_line(draw: "Draw", kept_back: int, plan: "EvaluationPlan") -> str:
    used = len(draw.demonstrations)
    line = f"All {used:,} rows used" if used == draw.rows else f"{used:,} of {draw.rows:,} rows used"
    if kept_back:
        line += f", {kept_back} held out to evaluate on"
    if draw.seconds is not None:
        line += f": {_times(draw, plan)}"
    if draw.more is None:
        return f"{line}."
    shots, rows, seconds = draw.more
    number = "all" if rows == draw.rows else f"{rows:,}"
    fit = " to fit" if plan.rows else ""
    return f"{line}; --shots {shots} uses {number}, {_about(seconds)}{fit}."


def _times(draw: "Draw", plan: "EvaluationPlan") -> str:
    """Describe the estimated times of a fit and of its evaluation."""
    if not plan.rows:
        return _about(draw.seconds)
    if plan.compare:  # their fits may take any time
        return f"{_about(draw.seconds)} to fit, then the evaluation"
    work = "cross-validate" if plan.folds else "evaluate"
    evaluation = _about(draw.evaluation_seconds(plan.rows, plan.folds))
    return f"{_about(draw.seconds)} to fit, then {evaluation} to {work}"


def _about(seconds: float | None) -> str:
    """Format an estimated time."""
    return f"about {console.duration(seconds or 0.0)}"


def _unlabelled_texts(method_options: MethodOptions, rows: TaskOptions) -> list[str]:
    """Read the file of ``--unlabelled``, once, as it may be a pipe; return an empty list without one."""
    if method_options.unlabelled is None:
        if method_options.prior is not None:
            raise I2CLError("--prior needs unlabelled texts: give them with --unlabelled FILE")
        return []
    return list(load.texts(str(method_options.unlabelled), rows))


def _prior_shares(method_options: MethodOptions, task: "Task") -> list[float] | None:
    """Parse ``--prior``; None without it."""
    from i2cl.injections.label_prior import validate_prior

    if method_options.prior is None:
        return None
    try:
        shares = [float(share) for share in load.split(method_options.prior)]
    except ValueError:
        raise I2CLError(
            f"--prior {method_options.prior!r} is not a list of numbers: write it like 0.5,0.3,0.2"
        ) from None
    validate_prior(shares, task.labels)
    return shares


def _method_of(method_options: MethodOptions) -> "tuple[Injector, EnsembleConfig]":
    """Return the method and the experts. Raises I2CLError for a missing encoder, before the model loads."""
    from i2cl.injections.ensemble import EnsembleConfig
    from i2cl.methods import make_injector

    settings = load.parse_settings(method_options.settings)
    for name in ("memory", "class_weight", "experts"):  # options that are also settings
        value = getattr(method_options, name)
        if value is not None:
            if name in settings:
                option = f"--{name.replace('_', '-')}"
                raise I2CLError(f"{option} and --set {name} give the same option: leave one of them out")
            settings[name] = str(value)
    ensemble, options = EnsembleConfig.take_from(settings)
    ensemble.members()  # raises if an encoder is missing
    return make_injector(method_options.method, options, method_options.recipe), ensemble


def _methods_to_compare(evaluation: EvaluationOptions, request: "FitRequest") -> "tuple[Method, ...]":
    """Parse ``--compare``. Raises I2CLError for an unknown method and for one that the table has anyway."""
    from i2cl.experiments.evidence.fit_evaluation import BASELINES, TEXT_METHODS, free_baselines
    from i2cl.methods import make_methods
    from i2cl.methods.ensemble import Ensemble
    from i2cl.methods.postprocessing import LabelPrior

    if evaluation.compare is None:
        return ()
    if not evaluation.evaluate:
        raise I2CLError("--compare needs an evaluation: leave out --evaluate 0")
    compare = make_methods(load.split(evaluation.compare))
    evaluated = LabelPrior(request.method) if request.unlabelled else request.method
    names = [*TEXT_METHODS, Ensemble.name, *free_baselines(uses_llm=request.ensemble.uses_llm)]
    if request.ensemble.uses_llm:
        names = list(dict.fromkeys([*names, *BASELINES, evaluated.full_name]))
    names += [other.full_name for other in compare]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise I2CLError(f"--compare: the table already has a row {duplicates[0]!r}: leave it out")
    return tuple(compare)


def method_of(injection: "Injection") -> "Injector":
    """Return the method that fitted an injection; without the LLM, only its class weights matter.

    Raises I2CLError if it is not anchored calibration.
    """
    from i2cl.methods.anchored import Anchored

    if injection.head.uses_llm and injection.settings.get("method") != Anchored.name:
        raise I2CLError("only tasks of the method anchored can be updated: fit it again from all rows")
    names = Anchored.options()
    settings = {name: value for name, value in injection.settings.items() if name in names}
    return cast("Injector", Anchored.from_options(settings))


def _public(value: object) -> str:
    """Return the last part of a path, or the public name of a model or task."""
    return (value.name or value.resolve().name) if isinstance(value, Path) else public_name(str(value))


def _without_folders(value: str) -> str:
    name, mark, encoder = value.partition("=")
    return f"{name}={public_name(encoder)}" if mark and name == "encoder" else value


def command_line(context: typer.Context, **resolved: object) -> str:
    """Reconstruct the command line for a model card, without folders and output options.

    Args:
        context: typer's context of the command.
        resolved: parameters whose values are shown even if the user did not give them.
    """
    words, option_words = context.command_path.split(), []
    for parameter in context.command.params:
        name = str(parameter.name)
        value = resolved.get(name, context.params.get(name))
        source = context.get_parameter_source(name)
        typed = source is not None and source.name != "DEFAULT"
        if name == "json" or value is None or not (typed or name in resolved):
            continue
        values = [
            _public(item) if isinstance(item, Path) or name in _NAME_OR_PATH else _without_folders(str(item))
            for item in (value if isinstance(value, list | tuple) else [value])
        ]
        if parameter.param_type_name == "argument":
            words += values
        elif isinstance(value, bool):
            option_words.append(parameter.opts[0])
        else:
            option_words += [word for item in values for word in (parameter.opts[0], item)]
    return shlex.join([*words, *option_words]).encode(errors="backslashreplace").decode()
