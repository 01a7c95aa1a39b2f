"""Serve many tasks on one model: a batch can contain queries of different tasks.

The vector and beta of each row are gathered by its task, so a task needs neither a separate forward pass nor
a copy of the model, only 2 x layers x d numbers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.ablations import Positions, at_positions
from i2cl.core.injection import Injection, LabelHead
from i2cl.errors import I2CLError, require_type
from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import AffineEdit, Edit, HookPoint, RecordMean
from i2cl.models.scoring import LabelScorer, Progress, require_finite, require_texts, score
from i2cl.tasks import Task


@dataclass(frozen=True, eq=False)
class LoadedTask:
    """An injection prepared for prediction.

    Immutable: queries that were encoded for it still use it after it is replaced or dropped from the pool.
    """

    scorer: LabelScorer
    edit: AffineEdit  # on the device of the model
    head: LabelHead  # without the LLM, the edit is not used, and no forward pass runs
    positions: Positions = "all"
    seed: int = 0  # of random positions

    @cached_property
    def kind(self) -> tuple[HookPoint, bool, Positions, int]:
        """Key for batching: only tasks of the same kind can share a batch."""
        return self.edit.hook_point, self.scorer.labels.full_sequences, self.positions, self.seed

    def queries(self, texts: Sequence[str], *, cut: bool = True) -> "list[TaskQuery]":
        """Encode texts; without the LLM, whole texts without the prompt, to count their tokens.

        Args:
            texts: the texts.
            cut: truncate texts that exceed the context, with a warning.

        Raises:
            I2CLError: on an empty text.
            TooLongError: without ``cut``, on a text that exceeds the context.
        """
        if self.head.uses_llm:
            queries = self.scorer.queries(texts, cut=cut)
        else:
            require_texts(texts)
            queries = [self.scorer.decoder.encoder.plain_ids(text) for text in texts]
        return [TaskQuery(self, ids, text) for ids, text in zip(queries, texts, strict=True)]


@dataclass(frozen=True, eq=False)
class TaskQuery:
    """An encoded text, and the version of its task that was loaded when the text was encoded."""

    task: LoadedTask
    ids: Ids  # token ids of the query
    text: str  # for the text experts

    @property
    def tokens(self) -> int:
        """Maximum number of tokens that run; full-sequence scoring may run the query with each label."""
        if not self.task.head.uses_llm or not self.task.scorer.labels.full_sequences:
            return len(self.ids)
        labels = self.task.scorer.labels
        return sum(len(self.ids) + len(label) - 1 for label in labels.sequences)


@dataclass(frozen=True, eq=False)
class RowScores:
    """Scores of one query.

    Attributes:
        log_probs: log-probabilities among the labels of the task, in their order; of each label, in a
            multi-label task.
        label_mass: probability of all labels together among everything that could follow the prompt, before
            biases and temperature; None for word-level scoring, which yields no probability, and without the
            LLM.
    """

    log_probs: Float[Tensor, " labels"]
    label_mass: float | None


class InjectionPool:
    """Injections by name on one model.

    Loading and dropping take constant time and are safe while other threads predict: running batches keep
    their tasks.

    Args:
        decoder: the model that all injections were fitted on.
        injections: injections to load, by name.
    """

    def __init__(self, decoder: Decoder, injections: Mapping[str, Injection] | None = None) -> None:
        self.decoder = decoder
        self._loaded: dict[str, LoadedTask] = {}
        for name, injection in (injections or {}).items():
            self.load(name, injection)

    def load(self, name: str, injection: Injection, *, force: bool = False) -> None:
        """Add an injection, or replace the one with this name.

        Args:
            name: name of the task.
            injection: the injection.
            force: accept an injection of another model of the same shape.

        Raises:
            I2CLError: if it is not an `Injection` or was fitted on another model (without the LLM, any model
                will do), or its sentence encoder is not installed.
        """
        require_type(f"injection {name!r}", injection, Injection, "load it with Injection.from_pretrained")
        if injection.head.uses_llm:
            injection.require_base(self.decoder, force=force)
        device = self.decoder.device
        if injection.head.embeddings is not None:
            injection.head.embeddings.require_encoder(str(device))
        scorer, edit = injection.scorer(self.decoder), injection.affine_edit()
        if injection.head.uses_llm:
            _ = scorer.labels  # invalid labels raise here, before the first query
        self._loaded[name] = LoadedTask(
            scorer,
            AffineEdit(edit.shift.to(device), edit.scale.contiguous().to(device), edit.hook_point),
            injection.head,
            injection.positions,
            injection.seed if injection.positions == "random" else 0,
        )

    def drop(self, name: str) -> None:
        """Remove an injection; running batches are not affected. Raises I2CLError if it is not loaded."""
        if self._loaded.pop(name, None) is None:
            raise self._not_loaded(name)

    def __len__(self) -> int:
        """Number of loaded injections."""
        return len(self._loaded)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the loaded injections."""
        return iter(tuple(self._loaded))

    def __contains__(self, name: object) -> bool:
        """Whether an injection is loaded under a name."""
        return name in self._loaded

    def log_probs(
        self, texts: Sequence[str], task_ids: Sequence[str], *, progress: Progress | None = None
    ) -> list[Float[Tensor, " labels"]]:
        """Return the log-probabilities of the labels of each text's task, as `i2cl.Injection.log_probs`.

        Args:
            texts: the texts.
            task_ids: name of the injection of each text.
            progress: called as texts finish.

        Raises:
            I2CLError: on an unknown name, an empty text, lists of different lengths, or one string instead of
                a list.
        """
        rows = self.score_rows(self._queries(texts, task_ids), progress=progress)
        return [row.log_probs for row in rows]

    def predict(self, texts: Sequence[str], task_ids: Sequence[str]) -> list[str]:
        """Return the most probable label word of each text.

        Raises I2CLError as `log_probs`, and for multi-label tasks.
        """
        queries = self._queries(texts, task_ids)
        for task in {query.task for query in queries}:
            task.scorer.task.require_single_label("InjectionPool.predict", "use Injection.predict")
        pairs = zip(queries, self.score_rows(queries), strict=True)
        return [query.task.scorer.task.labels[int(row.log_probs.argmax())] for query, row in pairs]

    def task(self, name: str) -> LoadedTask:
        """Return the task that is currently loaded under a name. Raises I2CLError if there is none."""
        if (task := self._loaded.get(name)) is None:
            raise self._not_loaded(name)
        return task

    def plain(self, task: Task) -> LoadedTask:
        """Prepare a task without an injection, for zero-shot scores in the same batches as other tasks.

        It is not loaded under a name. Raises I2CLError if the labels cannot be scored.
        """
        scorer = LabelScorer(self.decoder, task)
        _ = scorer.labels
        layers, width, device = self.decoder.layers, self.decoder.d_model, self.decoder.device
        shift, scale = torch.zeros(layers, 2, width, device=device), torch.ones(layers, 2, device=device)
        return LoadedTask(scorer, AffineEdit(shift, scale), LabelHead())

    def score_rows(
        self, queries: Sequence[TaskQuery], *, progress: Progress | None = None
    ) -> list[RowScores]:
        """Score encoded queries; their tasks may have been dropped since.

        Raises:
            I2CLError: if a single row does not fit into memory, or a score is NaN.
        """
        scores: dict[int, RowScores] = {}
        text_scores = self._text_scores(queries)
        by_kind = defaultdict(list)
        for row, query in enumerate(queries):
            if query.task.head.uses_llm:
                by_kind[query.task.kind].append(row)
            else:
                scores[row] = RowScores(query.task.head.log_probs(None, text_scores[row]), None)
                if progress is not None:
                    progress(1)
        for rows in by_kind.values():
            tasks = [queries[row].task for row in rows]
            ids, labels = [queries[row].ids for row in rows], [task.scorer.labels for task in tasks]
            edit = _make_edit(tasks)
            layers = {task.head.states.layer for task in tasks if task.head.states is not None}
            if layers:
                edit = RecordMean(edit, layers, len(rows), self.decoder.d_model)
            values = score(self.decoder, ids, labels, edit=edit, progress=progress)
            require_finite(values, self.decoder)
            for index, (row, task, padded) in enumerate(zip(rows, tasks, values, strict=True)):
                row_labels, expert = task.scorer.labels, task.head.states
                label_scores = padded[: len(row_labels.sequences)]
                states = None
                if expert is not None and isinstance(edit, RecordMean):
                    states = edit.states[expert.layer][index]
                log_probs = task.head.log_probs(label_scores, text_scores.get(row), states)
                mass = None if row_labels.word_tokens else float(label_scores.logsumexp(-1).exp())
                scores[row] = RowScores(log_probs, mass)
        return [scores[row] for row in range(len(queries))]

    def _text_scores(self, queries: Sequence[TaskQuery]) -> dict[int, Float[Tensor, "experts labels"]]:
        """Return the label scores of the text experts by row, for queries whose task has text experts."""
        by_head = defaultdict(list)
        for row, query in enumerate(queries):
            by_head[query.task.head].append(row)
        scores: dict[int, Tensor] = {}
        for head, rows in by_head.items():
            values = head.text_scores([queries[row].text for row in rows], self.decoder.device)
            if values is not None:
                scores |= zip(rows, values, strict=True)
        return scores

    def _queries(self, texts: Sequence[str], task_ids: Sequence[str]) -> list[TaskQuery]:
        if isinstance(task_ids, str):
            raise I2CLError(f"task_ids is the string {task_ids!r}: give a list with a name for each text")
        if len(texts) != len(task_ids):
            raise I2CLError(f"{len(texts)} texts, but {len(task_ids)} task ids: give one per text")
        require_texts(texts)
        by_task = defaultdict(list)
        for row, name in enumerate(task_ids):
            by_task[name].append(row)
        tasks = {name: self.task(name) for name in by_task}  # raises before anything is encoded
        queries: dict[int, TaskQuery] = {}
        for name, rows in by_task.items():
            queries |= zip(rows, tasks[name].queries([texts[row] for row in rows]), strict=True)
        return [queries[row] for row in range(len(texts))]

    def _not_loaded(self, name: str) -> I2CLError:
        return I2CLError(f"no injection {name!r} is loaded (of {len(self)}): load it first")


def predict(
    decoder: Decoder, texts: Sequence[str], injections: Mapping[str, Injection], task_ids: Sequence[str]
) -> list[str]:
    """Return the most probable label word of each text, for texts of different tasks.

    Rows of different tasks share batches. To do this more than once, keep an `InjectionPool`.

    Args:
        decoder: the model that all injections were fitted on.
        texts: the texts.
        injections: injections by name; those that ``task_ids`` does not name are ignored.
        task_ids: name of the injection of each text.

    Raises:
        I2CLError: on an unknown name, an injection of another model, an empty text, or lists of different
            lengths.
    """
    used = {name: injections[name] for name in dict.fromkeys(task_ids) if name in injections}
    return InjectionPool(decoder, used).predict(texts, task_ids)


def _make_edit(tasks: Sequence[LoadedTask]) -> Edit:
    """Return the edit of a batch of queries from the task of each."""
    index = {task: number for number, task in enumerate(dict.fromkeys(tasks))}
    shift = torch.stack([task.edit.shift for task in index])
    scale = torch.stack([task.edit.scale for task in index])
    rows = torch.tensor([index[task] for task in tasks], device=shift.device)
    edit = AffineEdit(shift, scale, tasks[0].edit.hook_point, rows)
    return at_positions(edit, tasks[0].positions, tasks[0].seed)
