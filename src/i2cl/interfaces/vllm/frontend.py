"""Front-end side of the plugin: loaded tasks, request admission and label scores."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, did_you_mean
from i2cl.export.folding import skeleton
from i2cl.interfaces.batch_prediction.prediction import digest as content_digest
from i2cl.interfaces.vllm.engine import DROP, LOAD
from i2cl.interfaces.vllm.prompts import Edge, EngineLimits, LabelPrompts, Prompt
from i2cl.interfaces.vllm.slots import DIGEST, Packed
from i2cl.interfaces.vllm.support import NAME
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
from i2cl.models.scoring import LabelScorer, label_log_probs, require_texts

CLASSIFY_PATH = "/v1/i2cl/classify"


@dataclass(frozen=True)
class Answer:
    """Classification of a text."""

    label: str  # most probable label
    scores: Float[Tensor, " labels"]  # log-probability of each label, as in `i2cl.Injection.log_probs`


@dataclass(frozen=True)
class Served:
    """A loaded task."""

    name: str  # as used in requests
    packed: Packed  # edit; shared by tasks that differ only in their label bias or temperature
    version: str  # digest of the whole artefact
    questions: LabelScorer  # builds the prompts
    bias: tuple[float, ...] | None  # label bias
    temperature: float  # temperature scaling of the label scores

    @cached_property
    def label_prompts(self) -> LabelPrompts:
        """Prompts for the label tokens that are scored: all tokens, or only the first one."""
        labels = self.questions.labels
        return LabelPrompts(labels.ids if labels.full else tuple((token,) for token in labels.read))

    def answer(self, edges: Mapping[Edge, float]) -> Answer:
        """Compute the label scores of a text from the log-probabilities of the trie's edges."""
        log_probabilities = (
            [edges[ids[:place], token] for place, token in enumerate(ids)]
            for ids in self.label_prompts.labels
        )
        values = self.questions.labels.mean(torch.tensor(list(map(math.fsum, log_probabilities))))
        bias = None if self.bias is None else torch.tensor(self.bias)
        scores = label_log_probs(values, bias, self.temperature)
        return Answer(self.questions.task.labels[int(scores.argmax())], scores)


@dataclass(frozen=True)
class Bound:
    """Fixed version of a task in a request's extra arguments. Clients cannot send this type.

    All prompts of a request use the same version, even if the task is replaced meanwhile.
    """

    name: str
    digest: str


@dataclass
class ServedTasks:
    """Loaded tasks of a front end. A process serves one engine."""

    served: dict[str, Served] = field(default_factory=dict)  # by name
    _models: dict[str, ModelIdentity] = field(default_factory=dict)
    _uses: Counter[str] = field(default_factory=Counter)
    _removed: dict[str, None] = field(default_factory=dict)

    def get(self, name: Any) -> Served:
        """Return a task by name. Raises I2CLError if it is not loaded."""
        if not isinstance(name, str):
            raise I2CLError(f"{name!r} is not a task name: send the name of a loaded task")
        if name not in self.served:
            hint = did_you_mean(name, self.served)
            raise I2CLError(f"no task {name[:80]!r} is loaded (of {len(self.served)}): {hint}load it first")
        return self.served[name]

    def admit(self, params: Any) -> None:
        """Add the digest of a request's task to its ``SamplingParams``.

        Replaces ``extra_args`` instead of changing it in place, because the caller may reuse it. Raises
        I2CLError if the task is not loaded, or the client sent a digest itself.
        """
        extra = params.extra_args or {}
        named = extra.get(NAME)
        if isinstance(named, Bound):
            params.extra_args = {**extra, NAME: named.name, DIGEST: named.digest}
        elif NAME in extra:
            params.extra_args = {**extra, DIGEST: self.get(extra[NAME]).packed.digest}
        elif DIGEST in extra:
            raise I2CLError(f"{DIGEST} cannot be set by clients: send the name of a loaded task as {NAME}")

    def prepare(
        self, name: str, injection: Injection, config: Any, tokenizer: PreTrainedTokenizerBase, *, force: bool
    ) -> Served:
        """Check that the engine can serve an injection, and tokenize its labels.

        Args:
            name: task name, as used in requests.
            injection: the injection to serve.
            config: the engine's ``ModelConfig``.
            tokenizer: the engine's tokenizer.
            force: accept an injection fitted on other weights of the same sizes.

        Raises:
            I2CLError: if the injection was fitted on another model, or cannot be served by the plugin.
        """
        if not name.strip():
            raise I2CLError("the task name is empty: a task needs a name")
        packed = Packed.of_injection(injection)
        if config.model not in self._models:
            self._models[config.model] = model_identity(config, tokenizer)
        injection.require_base(self._models[config.model], force=force)
        decoder = Decoder(skeleton(config.hf_config), tokenizer, token_budget=1)  # no weights: prompts only
        decoder.max_length = min(decoder.max_length or config.max_model_len, config.max_model_len - 1)
        questions = injection.scorer(decoder)
        _ = questions.labels  # raises now if the labels cannot be scored
        return Served(
            name, packed, content_digest(injection), questions, injection.label_bias, injection.temperature
        )

    def add(self, served: Served) -> None:
        """Admit requests for a task, replacing its previous version."""
        before = self.served.get(served.name)
        self.served[served.name] = served
        if before is not None:
            self._removed[before.packed.digest] = None

    def remove(self, name: str) -> None:
        """Stop admitting requests for a task. Raises I2CLError if it is not loaded."""
        self._removed[self.get(name).packed.digest] = None
        del self.served[name]

    @contextmanager
    def in_use(self, served: Served) -> Iterator[None]:
        """Context manager that keeps a version of a task loaded for the prompts sent inside it."""
        edit = served.packed.digest
        self._uses[edit] += 1
        try:
            yield
        finally:
            self._uses[edit] -= 1

    def pop_unused(self) -> list[str]:
        """Return the digests that the engine may drop. Each is returned once."""
        used = {one.packed.digest for one in self.served.values()}
        self._removed = {digest: None for digest in self._removed if digest not in used}
        free = [digest for digest in self._removed if not self._uses[digest]]
        for digest in free:
            del self._removed[digest]
        self._uses = +self._uses
        return free


TASKS = ServedTasks()  # tasks of this process


def wrap_verify(
    original: Callable[..., None], params: Any, *args: Any, refusal: type[I2CLError] = I2CLError, **more: Any
) -> None:
    """Wrap ``SamplingParams.verify`` to reject requests for unknown tasks in the front end."""
    original(params, *args, **more)
    try:
        TASKS.admit(params)
    except I2CLError as error:
        raise refusal(str(error)) from None


def wrap_beam_search(
    original: Callable[..., Any], request: Any, *args: Any, refusal: type[I2CLError] = I2CLError, **more: Any
) -> Any:
    """Wrap ``to_beam_search_params`` to reject tasks, because beam search drops extra arguments."""
    if NAME in (request.vllm_xargs or {}):
        raise refusal("beam search does not support tasks: remove use_beam_search or the task")
    return original(request, *args, **more)


async def wrap_check_model(original: Callable[..., Any], serving: Any, request: Any) -> Any:
    """Wrap ``BaseServing._check_model``, called by every route, to reject tasks that vLLM would ignore."""
    error = await original(serving, request)
    problem = ignored_task(request, unknown_model=error is not None)
    return error if problem is None else serving.create_error_response(problem)


def ignored_task(request: Any, *, unknown_model: bool) -> str | None:
    """Return an error message if a request names a task where its route ignores it; None otherwise.

    Routes such as /v1/systemone and /generative_scoring have no ``vllm_xargs``: vLLM ignores fields that it
    does not know, and would answer with the plain model.

    Args:
        request: body of a route, a pydantic model of vLLM.
        unknown_model: whether vLLM does not serve the request's ``model``.
    """
    unknown_fields = request.model_extra or {}
    xargs = unknown_fields.get("vllm_xargs")
    if isinstance(xargs, dict) and NAME in xargs:
        problem = "this route ignores tasks (vllm_xargs)"
    elif NAME in unknown_fields:
        problem = f"{NAME!r} is not a field of this route"
    elif unknown_model and (name := getattr(request, "model", None)) in TASKS.served:
        problem = f"{name!r} is a task, not a model"
    else:
        return None
    hint = f"send the texts to {CLASSIFY_PATH}"
    if "vllm_xargs" in type(request).model_fields:
        hint += f', or name the task in "vllm_xargs": {{"{NAME}": "..."}}'
    return f"{problem}: {hint}"


def model_identity(config: Any, tokenizer: PreTrainedTokenizerBase) -> ModelIdentity:
    """Identify the engine's model by its checkpoint files. Raises I2CLError if they cannot be read."""
    empty, text = skeleton(config.hf_config), config.hf_text_config
    files = CheckpointFiles(checkpoint_folder(config.model, config.revision), empty, "lm_head")
    weights = tensors_fingerprint((name, files.read(name)) for name, _ in named_weights(empty))
    sizes = text.model_type, text.num_hidden_layers, text.hidden_size
    prints = weights, tokenizer_fingerprint(tokenizer)
    more: Any = {"dtype": dtype_name(config.dtype), "config": inference_config(config.hf_config)}
    return ModelIdentity(str(config.model), config.revision, *sizes, *prints, **more)


def checkpoint_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder of a bundled, local or hub model. Raises I2CLError if there is none."""
    folder = Path(resolve_name(name))
    if not folder.is_dir():
        try:
            allowed = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
            ignored: Any = {"ignore_patterns": ["*/*", "consolidated*"]}
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=allowed, **ignored))
        except (OSError, ValueError) as error:
            reason = f"no such folder, and the hub says {type(error).__name__}"
            raise I2CLError(f"no model at {name!r}: {reason}") from None
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
    served = TASKS.prepare(name, injection, llm.llm_engine.model_config, llm.get_tokenizer(), force=force)
    llm.collective_rpc(LOAD, args=(served.packed.rows, served.packed.scales))
    TASKS.add(served)
    _drop_unused(llm)


def drop(llm: Any, name: str) -> None:
    """Drop a task. Running requests finish with it. Raises I2CLError if it is not loaded."""
    TASKS.remove(name)
    _drop_unused(llm)


def _drop_unused(llm: Any) -> None:
    for digest in TASKS.pop_unused():
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
    limits = EngineLimits.of(llm.llm_engine.vllm_config)
    prompts: list[tuple[int, Prompt]] = []
    for row, (one, text) in enumerate(zip(served, texts, strict=True)):
        (query,) = one.questions.queries([text])
        prompts += [(row, each) for each in one.label_prompts.prompts(query, limits)]
    outputs = llm.generate(
        [{"prompt_token_ids": list(each.ids)} for _, each in prompts],
        [parameters(served[row], each) for row, each in prompts],
        use_tqdm=False,
    )
    edges: list[dict[Edge, float]] = [{} for _ in texts]
    for (row, each), output in zip(prompts, outputs, strict=True):
        edges[row] |= each.edges(output)
    return [one.answer(values) for one, values in zip(served, edges, strict=True)]


def parameters(served: Served, prompt: Prompt) -> Any:
    """Return the ``SamplingParams`` that score a prompt's edges under a fixed version of a task."""
    from vllm import SamplingParams

    scoring = {"logprob_token_ids": list(prompt.tokens), "prompt_logprobs": 0 if prompt.with_prefix else None}
    extra = {NAME: Bound(served.name, served.packed.digest)}
    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra, **scoring)
