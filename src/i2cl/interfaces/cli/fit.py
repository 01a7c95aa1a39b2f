"""`i2cl fit`, and the command line that a model card repeats."""

import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer
from typer import Argument, Option

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, data, load, options
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions, opt
from i2cl.storage.atomic import public_name, require_writable

if TYPE_CHECKING:
    from i2cl.core.injection import Injection
    from i2cl.experiments.draw import Shots
    from i2cl.methods import Injector
    from i2cl.models.decoder import Decoder
    from i2cl.models.training import StepProgress
    from i2cl.tasks import Example, Task

ACCURACY = "accuracy (95 %)"
CHANCE = 0.99  # of the entropy of equally likely labels: a loss from there on is that of a guess
_NAMES = ("model", "task")  # arguments that may be paths beside those that always are


def _shots(value: str) -> str:
    """``all``, or a number of shots."""
    if value != "all" and not (value.isascii() and value.isdigit() and int(value)):
        raise typer.BadParameter(f"{value!r} is neither a whole number above 0 nor 'all'")
    return value


@dataclass(frozen=True)
class DrawOptions:
    """Which rows become demonstrations."""

    shots: str | None = opt(
        None,
        "Demonstrations per class, or 'all' rows; default: the task's own, or of a file of yours up to 20, "
        "as many as take some five minutes.",
        parser=_shots,
        metavar="INTEGER|all",
    )
    seed: options.Seed = 0
    keep_back: int | None = opt(
        None,
        "Of classes of your file with 10 rows or more, one row in so many is kept back to score on, "
        "0 for none; default: 5 without --shots and --test.",
        min=0,
    )

    @property
    def number(self) -> "Shots":
        """The shots, where they are given."""
        return "all" if self.shots == "all" else int(self.shots) if self.shots else None


@dataclass(frozen=True)
class MethodOptions:
    """How the examples become a task."""

    PANEL: ClassVar[str] = options.METHOD

    method: Literal["anchored", "i2cl", "anchored+sentence_embeddings"] | None = opt(
        None,
        "A vector at every writer, fitted around the plain model among the labels; the paper's method; or "
        "the first together with a sentence encoder, a second, small model (--set encoder=minilm); "
        "default: anchored, or that which a recipe or an option is of.",
    )
    recipe: options.OwnRecipe = None
    settings: options.Settings = None
    class_weight: str | None = opt(
        None,
        "'balanced' weights each class inversely to its frequency among the examples; or weights by label, "
        "such as 'spam=5,ham=1'; default: all examples count the same.",
        metavar="balanced|LABEL=WEIGHT,...",
    )
    memory: float | None = opt(
        None,
        "Gigabytes beyond the model that the derivatives of anchored calibration may take; default: a "
        "quarter of what is free.",
    )
    unlabelled: Path | None = opt(
        None,
        "Texts as they will come, read as `predict` does, that the labels' mean probabilities are "
        "set right on; 32 or more.",
    )
    prior: str | None = opt(
        None, "Shares of the labels in those texts, in the labels' order, commas between; default: equal."
    )


@dataclass(frozen=True)
class ScoreOptions:
    """What is scored after the fit, and how."""

    evaluate: int = opt(
        160,
        "Score the fit beside zero-shot, few-shot and, where they are installed, sentence "
        "embeddings, on at most so many test rows or, without any, "
        "training rows that are no demonstrations; 0: not at all.",
        min=0,
    )
    folds: int = opt(
        3,
        "Where no such rows are left, refit so often, each time without one part of the examples, "
        "and score that part; 0: do not.",
        min=0,
    )
    target_accuracy: float | None = opt(
        None,
        "Find the confidence from which on answers are right so often, such as 0.95, on labelled "
        "rows that the fit does not use (at most --evaluate of them).",
    )


@options.expanded
def fit(
    context: typer.Context,
    model: options.Model,
    task: Annotated[
        str, Argument(help="A known task (`i2cl ls tasks`), or a CSV, TSV, JSONL, JSON or TOML file.")
    ],
    output: Annotated[Path, Option("--output", "-o", help="Folder for the artefact.")],
    *,
    drawing: DrawOptions,
    way: MethodOptions,
    rows: TaskOptions,
    scoring: ScoreOptions,
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Turn labelled examples into a task: a folder for predict, serve and export.

    It ends with whether the fit pays on rows that it has not seen.
    """
    load.libraries()
    from i2cl.core.artefact import own_files
    from i2cl.experiments.draw import draw, fitting
    from i2cl.experiments.evidence.baselines import labelled_rows, refitting
    from i2cl.experiments.evidence.selective import require_target
    from i2cl.injections.label_prior import with_label_prior
    from i2cl.methods.calibrated.folds import require_folds
    from i2cl.tasks.loaders import is_own

    seed = drawing.seed
    require_writable(output, own_files(output))
    if scoring.folds:
        require_folds(scoring.folds)
    chosen = _method_of(way)
    loaded = load.task(task, rows)
    choice: Any = {
        "shots": drawing.number,
        "keep_back": drawing.keep_back,
        "scored": scoring.evaluate > 0 and not loaded.test,
    }
    # sizes are checked before the model is read
    drawn = draw(loaded, chosen, seed=seed, from_file=is_own(task), **choice)
    texts, shares = _prior_of(way, rows.text_column, loaded)
    decoder = load.decoder(model, loading)
    loaded = loaded.worded(decoder.tokenizer, chat=rows.chat, instruction=rows.instruction)
    if drawn is None:
        with console.waiting("timing the model"):
            drawn = fitting(decoder, loaded, chosen.rounds, seed, **choice)
    demonstrations = drawn.demonstrations
    queries = labelled_rows(loaded, demonstrations, scoring.evaluate)
    if scoring.target_accuracy is not None:
        require_target(scoring.target_accuracy, len(queries))
    refits, unknown = (0, "") if queries else _refits(scoring, loaded, demonstrations, seed)
    of_rows = loaded, decoder, drawn, queries, max(0, refits - 1)
    survey, summary = data.surveyed(*of_rows) if is_own(task) else (None, "")
    if summary and not json:
        console.say(summary, wrapped=True)
    started = time.perf_counter()
    with console.progress(max(1, chosen.rounds), "extracting") as bar:
        injection = chosen.injection(decoder, loaded, demonstrations, seed, bar.epoch)
    if texts:
        with console.progress(len(texts), "scoring unlabelled texts") as bar:
            injection = with_label_prior(injection, decoder, texts, shares, progress=bar.advance)
    seconds = time.perf_counter() - started

    def make(rest: "Sequence[Example]", watch: "StepProgress | None" = None) -> "Injection":
        again = refitting(chosen, injection)(decoder, loaded, rest, seed, watch)
        return with_label_prior(again, decoder, texts, shares) if texts else again

    known: Any = {"shots": drawing.shots or drawn.shots, "keep_back": drawn.keep_back or None, "seed": seed}
    command = command_line(context, method=chosen.name, **known)
    injection = _saved(replace(injection, command=command), output)
    if scoring.evaluate and (queries or refits):
        given: Any = {"method": chosen, "seconds": seconds, "target": scoring.target_accuracy}
        with _whole(output):  # scoring may take longer than the fit
            injection = _measured(injection, decoder, loaded, demonstrations, queries, make, refits, **given)
        _saved(injection, output)
    _show_fit(injection, chosen.name, output, model, seconds, survey, unknown=unknown, json=json)


def _refits(
    scoring: ScoreOptions, task: "Task", demonstrations: "Sequence[Example]", seed: int
) -> tuple[int, str]:
    """How many refits score a fit where no other rows are left, or why that cannot be."""
    from i2cl.methods.calibrated.folds import fold_rows, unmeasurable

    if not scoring.evaluate:
        return 0, ""
    if not scoring.folds:
        return 0, "no labelled rows remain to score: fit with fewer --shots"
    if why := unmeasurable(task, demonstrations, scoring.folds, seed):
        return 0, why
    return len(fold_rows(task, demonstrations, scoring.folds, seed)), ""


def _saved(injection: "Injection", output: Path) -> "Injection":
    if console.FIRST:
        injection.save_pretrained(output)
    return injection


@contextmanager
def _whole(output: Path) -> Iterator[None]:
    """Say that Ctrl-C leaves the task that is saved there."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Abort(f"{output} is whole, and not scored: no temperature, no verdict") from None


def _prior_of(way: MethodOptions, column: str, task: "Task") -> tuple[list[str], list[float] | None]:
    """The texts of a label prior, and the shares that are asked for."""
    from i2cl.injections.label_prior import require_shares
    from i2cl.tasks.rows import read_queries

    if way.unlabelled is None:
        if way.prior is not None:
            raise I2CLError("--prior is of texts without labels: give them with --unlabelled FILE")
        return [], None
    try:
        shares = None if way.prior is None else [float(share) for share in load.split(way.prior)]
    except ValueError:
        raise I2CLError(f"--prior {way.prior!r} is no list of numbers: write it like 0.5,0.3,0.2") from None
    if shares is not None:
        require_shares(shares, task.labels)
    return [query.text for query in read_queries(str(way.unlabelled), column=column)], shares


def _measured(
    injection: "Injection",
    decoder: "Decoder",
    task: "Task",
    demonstrations: "Sequence[Example]",
    queries: "Sequence[Example]",
    make: "Callable[..., Injection]",
    folds: int,
    **timed: Any,
) -> "Injection":
    """The injection with whether it pays: by the queries, or else by so many refits."""
    from i2cl.experiments.evidence.baselines import baselines, with_folds, with_worth

    if not queries:
        console.note(
            f"no labelled rows remain to score: {folds} refits, each without one part of the demonstrations, "
            f"take some {(folds - 1) * timed['seconds']:.1f} s (--folds 0: none)"
        )
    rows = (len(queries) or len({one.text for one in demonstrations})) * (len(baselines()) + 1)
    with console.progress(rows, "scoring") as bar:
        timed |= {"watch": lambda method: bar.describe(f"scoring {method}"), "progress": bar.advance}
        if not queries:  # an accuracy to reach is refused without them
            del timed["target"]
            step = lambda done, most, _: bar.describe(f"refitting, step {done} of {most}")  # noqa: E731
            again = partial(make, watch=step)
            return with_folds(injection, decoder, task, demonstrations, again, folds=folds, **timed)
        return with_worth(injection, decoder, task, demonstrations, queries, **timed)


def _method_of(way: MethodOptions) -> "Injector":
    """What fits; an encoder that is not here is refused before the model is read."""
    from i2cl.core import encoder_bias
    from i2cl.methods import calibrating_method
    from i2cl.methods.anchored import AnchoredWithEmbeddings

    given = {"memory": way.memory, "class_weight": way.class_weight}
    named = {name: str(value) for name, value in given.items() if value is not None}
    chosen = calibrating_method(way.method, load.options(way.settings) | named, way.recipe)
    if isinstance(chosen, AnchoredWithEmbeddings):
        encoder_bias.encoder_source(chosen.embeddings.encoder)
    return chosen


def _show_fit(
    injection: "Injection",
    method: str,
    output: Path,
    model: str,
    seconds: float,
    rows: dict[str, Any] | None,
    *,
    unknown: str,
    json: bool,
) -> None:
    from i2cl.core.injection import LABEL_PRIOR
    from i2cl.methods.calibrated.folds import kept
    from i2cl.storage.card import confidence_words, prior_words, selection_words

    history, count = injection.history, injection.context.demonstrations
    first, last = (history[0], history[-1]) if history else (None, None)
    if json:
        record: dict[str, Any] = {"output": str(output), "model": model, "method": method}
        record |= {"task": injection.task.name, "labels": list(injection.task.labels)}
        record |= {"demonstrations": count, "rows": rows, "first_loss": first, "last_loss": last}
        record |= {"fit_seconds": seconds, "cached_values": kept(injection).cached_values}
        record |= {"coefficients": injection.coefficients.numel(), "label_bias": injection.label_bias}
        record |= {"temperature": injection.temperature, "metrics": injection.metrics}
        console.print_json(record | {"worth": injection.worth or None})
        return
    summary = f"loss {first:.3f} -> {last:.3f}" if first is not None else "not calibrated"
    what = f"{injection.task.name} by {method}, {count} demonstrations"
    console.say(f"Saved {output}: {what}, {summary}, {seconds:.1f} s.")
    guess = CHANCE * math.log(len(injection.task.labels))
    if last is not None and method.startswith("anchored") and last > guess:
        console.note("the loss is that of a guess: nothing was learned; give more rows, or another model")
    if injection.label_bias is not None:
        console.say(f"Label prior: {prior_words(injection.task.labels, injection.settings[LABEL_PRIOR])}")
    least = ""
    if injection.worth:
        _show_worth(injection.worth)
        console.say(f"Confidence: {confidence_words(injection.temperature, injection.worth['confidence'])}.")
        if summary := injection.worth["selection"]:
            console.say(f"Answers that are sure enough: {selection_words(summary)}.")
            least = f" --min-confidence {summary['threshold']:.6g}" if "threshold" in summary else ""
    elif unknown:
        console.say(f"Whether it pays is not known: {unknown}, or give other rows with --test FILE.")
    console.say(f"Next: i2cl predict {shlex.quote(str(output))} FILE{least}")


def _show_worth(worth: Mapping[str, Any]) -> None:
    from i2cl.core import encoder_bias
    from i2cl.storage.card import SCORED, TOGETHER

    rows: list[Mapping[str, object]] = [
        {"method": name, ACCURACY: f"{one['accuracy']:.3f} ({one['low']:.3f}–{one['high']:.3f})"}
        | {"fit s": f"{one['fit_seconds']:.1f}", "ms/query": f"{one['milliseconds_per_query']:.2f}"}
        | {"bytes": one["cached_bytes"]}
        for name, one in worth["methods"].items()
    ]
    rows += [dict.fromkeys(rows[0], "") | {"method": name, ACCURACY: "not run"} for name in worth["not_run"]]
    console.say(f"\nAccuracy with its 95 % interval on {worth['rows']} {SCORED[worth['split']]}:")
    console.print_table("", rows)
    for name, why in worth["not_run"].items():
        console.say(f"{name} was not run: {why}.")
    if any("batch_calibration" in name for name in worth["methods"]):
        console.say(TOGETHER)
    if {"anchored", "sentence_embeddings"} <= worth["methods"].keys():
        what = f"--set encoder={encoder_bias.local_encoder()}"
        console.say(
            f"sentence_embeddings takes no LLM; {what} keeps it and anchored in one task, multiplied."
        )
    console.say(f"\nWhether it pays: {worth['verdict']}.")


def _public(value: object) -> str:
    """The last part of a path, whether it is there or not; a name that may be a hub id as others know it."""
    return (value.name or value.resolve().name) if isinstance(value, Path) else public_name(str(value))


def _without_folders(value: str) -> str:
    name, mark, encoder = value.partition("=")
    return f"{name}={public_name(encoder)}" if mark and name == "encoder" else value


def command_line(context: typer.Context, **resolved: object) -> str:
    """The command that was given, for others: paths keep their last part, options of printing are left out.
    ``resolved``: values of options that are named in any case, typed or not.
    """
    words, named = context.command_path.split(), []
    for parameter in context.command.params:
        name = str(parameter.name)
        value = resolved.get(name, context.params.get(name))
        source = context.get_parameter_source(name)
        typed = source is not None and source.name != "DEFAULT"
        if name == "json" or value is None or not (typed or name in resolved):
            continue
        values = [
            _public(one) if isinstance(one, Path) or name in _NAMES else _without_folders(str(one))
            for one in (value if isinstance(value, list | tuple) else [value])
        ]
        if parameter.param_type_name == "argument":
            words += values
        elif isinstance(value, bool):
            named.append(parameter.opts[0])
        else:
            named += [word for one in values for word in (parameter.opts[0], one)]
    return shlex.join([*words, *named]).encode(errors="backslashreplace").decode()
