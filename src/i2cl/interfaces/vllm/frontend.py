"""Front-end side of the plugin: loaded tasks, request admission, and label scores from few prompts.

Does not import vLLM, except in functions that take a ``vllm.LLM``.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from i2cl.core.injection import Injection, LabelHead
from i2cl.errors import I2CLError, did_you_mean
from i2cl.export.folding import skeleton
from i2cl.interfaces.batch_prediction import digest as artefact_digest
from i2cl.interfaces.server.refusals import RefusalError
from i2cl.interfaces.vllm.engine import DROP, LOAD
from i2cl.interfaces.vllm.support import DIGEST, NAME
from i2cl.interfaces.vllm.worker import PackedEdit
from i2cl.models.batching import Ids
from i2cl.models.checkpoint import CheckpointFiles
from i2cl.models.decoder import Decoder
from i2cl.models.fingerprint import (
    ModelIdentity,
    inference_config,
    named_weights,
    tensors_fingerprint,
    tokenizer_fingerprint,
)
from i2cl.models.loading import resolve_name
from i2cl.models.precision import dtype_name
from i2cl.models.scoring import LabelScorer, require_texts
from i2cl.storage.card import describe_llm_alone
from i2cl.storage.hub import download_model

MAX_LABEL_TOKENS = 128  # vLLM's limit on ``logprob_token_ids`` per prompt
Edge = tuple[Ids, int]  # of the trie of label tokens: a label prefix, and a token that follows it


@dataclass(frozen=True)
class Prompt:
    """A prompt that scores edges of the label trie: some tokens after a query and a label prefix."""

    query: Ids
    prefix: Ids
    tokens: tuple[int, ...]

    @property
    def ids(self) -> Ids:
        """Token ids of the whole prompt."""
        return self.query + self.prefix

    def edges(self, output: Any) -> dict[Edge, float]:
        """Return log-probabilities by edge, from vLLM's ``RequestOutput``.

        Raises RefusalError (503) if the engine ended the request without answering it.
        """
        (completion,) = output.outputs
        if completion.finish_reason in {"abort", "error"}:
            message = "the engine ended this request: it was paused or put to sleep, or the task was dropped"
            headers = {"Retry-After": "5"}
            raise RefusalError(503, "interrupted", message, "retry once the engine runs", headers=headers)
        return {(self.prefix, token): value.logprob for token, value in completion.logprobs[0].items()}


@dataclass(frozen=True)
class Answer:
    """Classification of a text.

    Attributes:
        label: most probable label.
        log_probs: log-probability of each label, as `i2cl.Injection.log_probs`.
        label_mass: see `i2cl.injections.pool.RowScores`.
    """

    label: str
    log_probs: Float[Tensor, " labels"]
    label_mass: float | None


@dataclass(frozen=True)
class ServedTask:
    """A version of a task, prepared for an engine."""

    name: str  # as used in requests
    edit: PackedEdit  # shared by tasks that differ only in their head
    digest: str  # of the whole artefact
    scorer: LabelScorer  # builds the prompts
    head: LabelHead  # turns label scores into log-probabilities

    @property
    def labels(self) -> tuple[str, ...]:
        """Label words, in the order of scores."""
        return self.scorer.task.labels

    @cached_property
    def _label_ids(self) -> tuple[Ids, ...]:
        """Label tokens that are scored: full sequences, or single tokens after the query."""
        labels = self.scorer.labels
        return labels.sequences if labels.full_sequences else tuple((token,) for token in labels.tokens)

    @cached_property
    def _next_tokens(self) -> dict[Ids, tuple[int, ...]]:
        """Next tokens of every label prefix."""
        following: dict[Ids, dict[int, None]] = {}
        for ids in self._label_ids:
            for place, token in enumerate(ids):
                following.setdefault(ids[:place], {})[token] = None
        return {prefix: tuple(tokens) for prefix, tokens in following.items()}

    def prompts(self, query: Ids) -> list[Prompt]:
        """Return prompts that score all labels after a query. They share the query's prefix-cache blocks."""
        return [
            Prompt(query, prefix, tokens[start : start + MAX_LABEL_TOKENS])
            for prefix, tokens in self._next_tokens.items()
            for start in range(0, len(tokens), MAX_LABEL_TOKENS)
        ]

    def parameters(self, prompt: Prompt) -> Any:
        """Return the ``SamplingParams`` that score a prompt's edges under this version of the task."""
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            logprob_token_ids=list(prompt.tokens),
            extra_args={NAME: TaskVersion(self.name, self.edit.digest)},
        )

    def answer(self, edges: Mapping[Edge, float]) -> Answer:
        """Compute the answer for a text from the log-probabilities of all edges of the label trie."""
        tokens = self.scorer.labels
        sums = [
            math.fsum(edges[ids[:place], token] for place, token in enumerate(ids)) for ids in self._label_ids
        ]
        scores = tokens.scores_from_tokens(torch.tensor(sums))
        mass = None if tokens.word_tokens else float(scores.logsumexp(-1).exp())
        log_probs = self.head.log_probs(scores)
        return Answer(self.labels[int(log_probs.argmax())], log_probs, mass)


@dataclass(frozen=True)
class TaskVersion:
    """Fixed version of a task in a request's extra arguments. Clients cannot send this type.

    All prompts of a request use the same version, even if the task is replaced meanwhile.
    """

    name: str
    digest: str  # of the edit


@dataclass
class ServedTasks:
    """Loaded tasks of a front end, by name. A process serves one engine."""

    by_name: dict[str, ServedTask] = field(default_factory=dict)
    _identities: dict[str, ModelIdentity] = field(default_factory=dict)

    def get(self, name: Any) -> ServedTask:
        """Return a task. Raises RefusalError: 400 if ``name`` is not a string, 404 if it is not loaded."""
        if not isinstance(name, str):
            message = f"{name!r:.80} is not a task name"
            raise RefusalError(400, "bad_request", message, "send the name of a loaded task")
        if name not in self.by_name:
            message = f"no task {name[:80]!r} is loaded (of {len(self.by_name)})"
            raise RefusalError(
                404, "unknown_task", message, f"{did_you_mean(name, self.by_name)}load it first"
            )
        return self.by_name[name]

    def admit(self, params: Any) -> None:
        """Add the digest of a request's task to its ``SamplingParams``.

        Replaces ``extra_args`` instead of changing it in place, because the caller may reuse it. Raises
        I2CLError if the task is not loaded, or the client sent a digest itself.
        """
        extra = params.extra_args or {}
        task = extra.get(NAME)
        if isinstance(task, TaskVersion):
            params.extra_args = {**extra, NAME: task.name, DIGEST: task.digest}
        elif NAME in extra:
            params.extra_args = {**extra, DIGEST: self.get(task).edit.digest}
        elif DIGEST in extra:
            raise I2CLError(f"{DIGEST} cannot be set by clients: send the name of a loaded task as {NAME}")

    def prepare(
        self, name: str, injection: Injection, config: Any, tokenizer: PreTrainedTokenizerBase, *, force: bool
    ) -> ServedTask:
        """Check that the engine can serve an injection, and tokenize its labels.

        Args:
            name: task name, as used in requests.
            injection: the injection to serve; of an ensemble, the LLM alone, with a warning.
            config: the engine's ``ModelConfig``.
            tokenizer: the engine's tokenizer.
            force: accept an injection fitted on other weights of the same sizes.

        Raises:
            I2CLError: if the injection was fitted on another model, or cannot be served by the plugin.
        """
        if not name.strip():
            raise I2CLError("the task name is empty: a task needs a name")
        injection.task.require_single_label("the vLLM plugin", "serve it with `i2cl serve`")
        injection.require_llm()
        if alone := describe_llm_alone(injection.description()):
            warnings.warn(f"task {name!r} is served by {alone}", UserWarning, stacklevel=2)
        edit = PackedEdit.of_injection(injection)
        if config.model not in self._identities:
            self._identities[config.model] = model_identity(config, tokenizer)
        injection.require_base(self._identities[config.model], force=force)
        decoder = Decoder(skeleton(config.hf_config), tokenizer, token_budget=1)  # no weights: prompts only
        decoder.max_length = min(decoder.max_length or config.max_model_len, config.max_model_len - 1)
        scorer = injection.scorer(decoder)
        _ = scorer.labels  # raises now if the labels cannot be scored
        return ServedTask(name, edit, artefact_digest(injection), scorer, injection.llm_alone().head)

    def add(self, task: ServedTask) -> list[str]:
        """Admit requests for a task, replacing its previous version.

        Returns:
            Digests of edits that the engine may drop: no loaded task uses them any more.
        """
        before = self.by_name.get(task.name)
        self.by_name[task.name] = task
        return self._unused(before)

    def remove(self, name: str) -> list[str]:
        """Stop admitting requests for a task. Returns as `add`. Raises RefusalError as `get`."""
        before = self.get(name)
        del self.by_name[name]
        return self._unused(before)

    def _unused(self, before: ServedTask | None) -> list[str]:
        used = {task.edit.digest for task in self.by_name.values()}
        return [] if before is None or before.edit.digest in used else [before.edit.digest]


TASKS = ServedTasks()  # tasks of this process


def wrap_verify(
    original: Callable[..., None],
    params: Any,
    *args: Any,
    refusal: type[I2CLError] = I2CLError,
    **options: Any,
) -> None:
    """Wrap ``SamplingParams.verify`` to reject requests for unknown tasks in the front end."""
    original(params, *args, **options)
    try:
        TASKS.admit(params)
    except I2CLError as error:
        raise refusal(str(error)) from None


async def wrap_check_model(original: Callable[..., Any], serving: Any, request: Any) -> Any:
    """Wrap ``BaseServing._check_model``, called by every route, to reject tasks that vLLM would ignore.

    Beam search and routes without ``vllm_xargs``, such as ``/generative_scoring``, would answer without the
    task. Tasks are not served as models either.
    """
    error = await original(serving, request)
    unknown_fields = request.model_extra or {}
    is_model = error is not None and getattr(request, "model", None) in TASKS.by_name
    reads_xargs = "vllm_xargs" in type(request).model_fields and not getattr(
        request, "use_beam_search", False
    )
    xargs = None if reads_xargs else getattr(request, "vllm_xargs", None)
    if is_model or NAME in unknown_fields or (isinstance(xargs, dict) and NAME in xargs):
        return serving.create_error_response(
            "this request would be answered without its task: send texts to /v1/i2cl/classify or "
            f'/v1/decisions, or a prompt to /v1/completions with "vllm_xargs": {{"{NAME}": "TASK"}} and '
            "without beam search"
        )
    return error


def model_identity(config: Any, tokenizer: PreTrainedTokenizerBase) -> ModelIdentity:
    """Identify the engine's model by its checkpoint files. Raises I2CLError if they cannot be read."""
    empty, text = skeleton(config.hf_config), config.hf_text_config
    files = CheckpointFiles(checkpoint_folder(config.model, config.revision), empty, "lm_head")
    return ModelIdentity(
        str(config.model),
        config.revision,
        text.model_type,
        text.num_hidden_layers,
        text.hidden_size,
        tensors_fingerprint((name, files.read(name)) for name, _ in named_weights(empty)),
        tokenizer_fingerprint(tokenizer),
        dtype=dtype_name(config.dtype),
        config=inference_config(config.hf_config),
    )


def checkpoint_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder of a bundled, local or hub model. Raises I2CLError if there is none."""
    folder = Path(resolve_name(name))
    if not folder.is_dir():
        folder = download_model(name, revision)
    if not (folder / "config.json").is_file():
        raise I2CLError(f"{name!r} is not a model folder: it has no config.json")
    return folder


def load(llm: Any, name: str, injection: Injection, *, force: bool = False) -> None:
    """Load a task into an engine, or replace the task of the same name. Running requests keep their version.

    Args:
        llm: a ``vllm.LLM`` with the plugin enabled.
        name: task name, as used in requests.
        injection: an injection fitted on the engine's model.
        force: accept an injection fitted on other weights of the same sizes.

    Raises:
        I2CLError: if the injection was fitted on another model or is not supported, or no slot is free.
    """
    task = TASKS.prepare(name, injection, llm.llm_engine.model_config, llm.get_tokenizer(), force=force)
    llm.collective_rpc(LOAD, args=(task.edit.rows, task.edit.scales))
    for digest in TASKS.add(task):
        llm.collective_rpc(DROP, args=(digest,))


def drop(llm: Any, name: str) -> None:
    """Drop a task. Running requests finish with it. Raises I2CLError if it is not loaded."""
    for digest in TASKS.remove(name):
        llm.collective_rpc(DROP, args=(digest,))


def classify(llm: Any, texts: Sequence[str], tasks: Sequence[str]) -> list[Answer]:
    """Classify each text with its own task, in shared batches.

    Args:
        llm: a ``vllm.LLM`` with the plugin enabled.
        texts: texts to classify.
        tasks: task name of each text.

    Returns:
        One answer per text, in order.

    Raises:
        I2CLError: on an unknown task, an empty text, or lists of different lengths.
    """
    if len(texts) != len(tasks):
        raise I2CLError(f"{len(texts)} texts, but {len(tasks)} tasks: name a task for every text")
    require_texts(texts)
    served = [TASKS.get(name) for name in tasks]
    prompts: list[tuple[int, Prompt]] = []
    for row, (task, text) in enumerate(zip(served, texts, strict=True)):
        (query,) = task.scorer.queries([text])
        prompts += [(row, prompt) for prompt in task.prompts(query)]
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt.ids)} for _, prompt in prompts],
        [served[row].parameters(prompt) for row, prompt in prompts],
        use_tqdm=False,
    )
    edges: list[dict[Edge, float]] = [{} for _ in texts]
    for (row, prompt), output in zip(prompts, outputs, strict=True):
        edges[row] |= prompt.edges(output)
    return [task.answer(values) for task, values in zip(served, edges, strict=True)]
