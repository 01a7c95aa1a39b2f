"""Many tasks on one model: queries of different tasks in one batch, each under its own injection.

A batch gathers every row's vector and beta by the row's task, so tasks cost no loop and no model of
their own: 2 x layers x d numbers each.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.edits import Positions, RowsEdit
from i2cl.core.encoder_bias import EncoderBias, encoder_biases
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Site
from i2cl.models.scoring import Progress, Questions, label_log_probs, require_finite, require_texts, score
from i2cl.tasks import Task


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a batch needs of a task; never changed, so what was asked of it is not disturbed by a drop."""

    questions: Questions  # the task, as it is asked and read
    scaled: Float[Tensor, "layers sites d"]  # context vector times lambda, axes [layer, (mha, mlp), d]
    keep: Float[Tensor, "layers sites"]  # beta, axes [layer, (mha, mlp)]
    # site, whether labels are scored whole, positions, and the seed of random ones: tasks of one kind can
    # share a batch
    kind: tuple[Site, bool, Positions, int]
    bias: Float[Tensor, " labels"] | None  # a number for each label, in nats; None for none
    encoder: EncoderBias | None  # what a sentence encoder adds to it, text by text
    temperature: float  # what scores are divided by behind it

    def queries(self, texts: Sequence[str], *, cut: bool = True) -> "list[TaskQuery]":
        """Texts as they will be asked, each a row of any batch.

        ``cut`` shortens what exceeds the context, with a warning, instead of refusing it. Raises I2CLError on
        an empty text; a `TooLongError` on one that is to be refused.
        """
        each = zip(self.questions.queries(texts, cut=cut), texts, strict=True)
        return [TaskQuery(self, ids, text) for ids, text in each]


@dataclass(frozen=True, eq=False)
class TaskQuery:
    """A text of a task that was loaded when it came: an answer is of that one, whatever is loaded by then."""

    task: Loaded  # as it was loaded
    ids: Ids  # token ids of the query
    text: str  # for a sentence encoder

    @property
    def tokens(self) -> int:
        """Tokens that run, at most: of labels that are scored whole, the query with each."""
        labels = self.task.questions.labels
        return sum(len(self.ids) + len(label) - 1 for label in labels.ids) if labels.full else len(self.ids)


@dataclass(frozen=True, eq=False)
class RowScores:
    """Scores of one query.

    Attributes:
        log_probs: log-probabilities among the labels of the task, in their order.
        label_mass: probability of all labels together among everything that could follow the prompt, before
            biases and temperature; None for word-level scoring, which yields no probability.
    """

    log_probs: Float[Tensor, " labels"]
    label_mass: float | None


class InjectionPool:
    """Injections by name, all made on one ``decoder``.

    Loading and dropping one costs the same however many there are. Both are safe while other threads predict:
    a batch keeps what it began with.
    """

    def __init__(self, decoder: Decoder, injections: Mapping[str, Injection] | None = None) -> None:
        self.decoder = decoder
        self._loaded: dict[str, Loaded] = {}
        for name, injection in (injections or {}).items():
            self.load(name, injection)

    def load(self, name: str, injection: Injection, *, force: bool = False) -> None:
        """Add an injection, or replace the one of that name.

        ``force`` accepts one made on other weights of the same sizes. Raises I2CLError if it was made on
        another model, or needs a sentence encoder that is not here.
        """
        injection.require_base(self.decoder, force=force)
        if injection.encoder_bias is not None:
            injection.encoder_bias.require_encoder(str(self.decoder.device))
        questions = injection.questions(self.decoder)
        # labels that cannot be asked for are refused now, not by the first text
        whole = questions.labels.full
        amount, keep = injection.coefficients.unbind(-1)
        seed = injection.seed if injection.positions == "random" else 0
        self._loaded[name] = Loaded(
            questions=questions,
            scaled=(amount[..., None] * injection.context.values).to(self.decoder.device),
            keep=keep.contiguous().to(self.decoder.device),
            kind=(injection.context.config.site, whole, injection.positions, seed),
            bias=None if injection.label_bias is None else torch.tensor(injection.label_bias),
            encoder=injection.encoder_bias,
            temperature=injection.temperature,
        )

    def drop(self, name: str) -> None:
        """Forget an injection; running batches end as they began. Raises I2CLError if there is none of it."""
        if self._loaded.pop(name, None) is None:
            raise self._unknown(name)

    def __len__(self) -> int:
        """How many are loaded."""
        return len(self._loaded)

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(tuple(self._loaded))

    def __contains__(self, name: object) -> bool:
        """Whether one of that name is loaded."""
        return name in self._loaded

    def scores(
        self, texts: Sequence[str], task_ids: Sequence[str], *, progress: Progress | None = None
    ) -> list[Float[Tensor, " labels"]]:
        """Log-probability of each label of each text's own task, as `i2cl.Injection.scores` has it.

        ``task_ids`` has the name of each text's injection; ``progress`` is called as texts finish. Raises
        I2CLError on an unknown name, an empty text, or lists of different lengths.
        """
        return self.answers(self._queries(texts, task_ids), progress=progress)

    def predict(self, texts: Sequence[str], task_ids: Sequence[str]) -> list[str]:
        """The most probable label word of each text. Raises I2CLError as `scores`."""
        queries = self._queries(texts, task_ids)
        each = zip(queries, self.answers(queries), strict=True)
        return [one.task.questions.task.labels[int(row.argmax())] for one, row in each]

    def task(self, name: str) -> Loaded:
        """A task as it is loaded now. Raises I2CLError if there is none of that name."""
        if (task := self._loaded.get(name)) is None:
            raise self._unknown(name)
        return task

    def answers(
        self, queries: Sequence[TaskQuery], *, progress: Progress | None = None
    ) -> list[Float[Tensor, " labels"]]:
        """Compute `scores` of queries, whose tasks may have been dropped meanwhile. Raises I2CLError if a
        single row does not fit into memory, or a score is NaN.
        """
        return [row.log_probs for row in self.score_rows(queries, progress=progress)]

    def plain(self, task: Task) -> Loaded:
        """Prepare a task without an injection, for zero-shot scores in the same batches as other tasks. It is
        not loaded under a name. Raises I2CLError if the labels cannot be scored.
        """
        questions = Questions(self.decoder, task)
        layers, width, device = self.decoder.layers, self.decoder.d_model, self.decoder.device
        return Loaded(
            questions=questions,
            scaled=torch.zeros(layers, 2, width, device=device),
            keep=torch.ones(layers, 2, device=device),
            kind=("writers", questions.labels.full, "all", 0),
            bias=None,
            encoder=None,
            temperature=1.0,
        )

    def score_rows(
        self, queries: Sequence[TaskQuery], *, progress: Progress | None = None
    ) -> list[RowScores]:
        """Compute `answers` with the total probability of the labels. Raises I2CLError as `answers`."""
        scores: dict[int, RowScores] = {}
        by_text = self._by_text(queries)
        by_kind = defaultdict(list)
        for row, one in enumerate(queries):
            by_kind[one.task.kind].append(row)
        for rows in by_kind.values():
            chosen = [queries[row].task for row in rows]
            texts, labels = [queries[row].ids for row in rows], [one.questions.labels for one in chosen]
            values = score(self.decoder, texts, labels, edit=_edit(chosen), progress=progress)
            require_finite(values, self.decoder)
            for row, task, line in zip(rows, chosen, values, strict=True):
                labels_of_row = task.questions.labels
                label_scores = line[: len(labels_of_row.ids)]
                log_probs = label_log_probs(label_scores, by_text.get(row, task.bias), task.temperature)
                mass = None if labels_of_row.words else float(label_scores.logsumexp(-1).exp())
                scores[row] = RowScores(log_probs, mass)
        return [scores[row] for row in range(len(queries))]

    def _by_text(self, queries: Sequence[TaskQuery]) -> dict[int, Float[Tensor, " labels"]]:
        """Biases by row, where a sentence encoder has a say."""
        rows = {row: one.task.encoder for row, one in enumerate(queries) if one.task.encoder is not None}
        texts, fixed = [queries[row].text for row in rows], [queries[row].task.bias for row in rows]
        values = encoder_biases([*rows.values()], texts, str(self.decoder.device))
        each = zip(values, fixed, strict=True)
        return dict(zip(rows, (one if more is None else one + more for one, more in each), strict=True))

    def _queries(self, texts: Sequence[str], task_ids: Sequence[str]) -> list[TaskQuery]:
        if len(texts) != len(task_ids):
            raise I2CLError(f"{len(texts)} texts, but {len(task_ids)} task ids: give every text its own")
        require_texts(texts)
        by_task = defaultdict(list)
        for row, name in enumerate(task_ids):
            by_task[name].append(row)
        known = {name: self.task(name) for name in by_task}  # looked up once for all rows
        queries: dict[int, TaskQuery] = {}
        for name, rows in by_task.items():
            queries |= zip(rows, known[name].queries([texts[row] for row in rows]), strict=True)
        return [queries[row] for row in range(len(texts))]

    def _unknown(self, name: str) -> I2CLError:
        return I2CLError(f"no injection {name!r} is loaded (of {len(self)}): load it first")


def predict(
    decoder: Decoder, texts: Sequence[str], injections: Mapping[str, Injection], task_ids: Sequence[str]
) -> list[str]:
    """The most probable label word of each text under its own task's injection.

    Rows of different tasks share batches. Keep an `InjectionPool` to do this more than once. ``injections``
    are by name, of which ``task_ids`` has one for each text; the others are not used. Raises I2CLError on an
    unknown name, an injection of another model, an empty text, or lists of different lengths.
    """
    named = {name: injections[name] for name in dict.fromkeys(task_ids) if name in injections}
    return InjectionPool(decoder, named).predict(texts, task_ids)


def _edit(rows: Sequence[Loaded]) -> RowsEdit:
    place = {task: number for number, task in enumerate(dict.fromkeys(rows))}
    scaled, keep = torch.stack([task.scaled for task in place]), torch.stack([task.keep for task in place])
    places = torch.tensor([place[task] for task in rows], device=scaled.device)
    site, _, positions, seed = rows[0].kind
    return RowsEdit(scaled, keep, places, site=site, positions=positions, seed=seed)
