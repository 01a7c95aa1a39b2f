"""The front end's half: tasks by name, which requests are let in, and label words' log-probabilities."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, did_you_mean
from i2cl.export.checkpoint import checkpoint_folder
from i2cl.export.folding import skeleton
from i2cl.interfaces.batch_prediction.prediction import digest as content_digest
from i2cl.interfaces.vllm.engine import DROP, LOAD
from i2cl.interfaces.vllm.prompts import Edge, LabelPrompts, Prompt, Reach
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
from i2cl.models.precision import dtype_name
from i2cl.models.scoring import Questions, label_log_probs, require_texts

CLASSIFY_PATH = "/v1/i2cl/classify"


@dataclass(frozen=True)
class Answer:
    """What a text was classified as."""

    label: str  # the most probable label word
    scores: Float[Tensor, " labels"]  # log-probability of each label, as `i2cl.Injection.scores` has it


@dataclass(frozen=True)
class Served:
    """A task that is loaded."""

    name: str  # as requests call it
    packed: Packed  # what the workers were given
    version: str  # digest of all that its answers depend on; tasks that differ in their prior share `packed`
    questions: Questions  # how it is asked
    bias: tuple[float, ...] | None  # of its labels, if any
    temperature: float  # of its labels

    @cached_property
    def label_prompts(self) -> LabelPrompts:
        """Its labels, as far as they are scored."""
        labels = self.questions.labels
        return LabelPrompts(labels.ids if labels.full else tuple((token,) for token in labels.read))

    def answer(self, edges: Mapping[Edge, float]) -> Answer:
        """The labels' scores from what the engine told of a text."""
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
    """In a request's extra arguments, where no client can put one: the version of its first part's task."""

    name: str
    digest: str


@dataclass
class ServedTasks:
    """The tasks of a front end by name. One process serves one engine."""

    served: dict[str, Served] = field(default_factory=dict)  # by name
    _bases: dict[str, ModelIdentity] = field(default_factory=dict)
    _held: Counter[str] = field(default_factory=Counter)
    _gone: dict[str, None] = field(default_factory=dict)

    def get(self, name: Any) -> Served:
        """A task by what a request calls it. Raises I2CLError if there is none of that name."""
        if not isinstance(name, str):
            raise I2CLError(f"the task has to be a name, not {name!r}: send the name of a loaded task")
        if name not in self.served:
            hint = did_you_mean(name, self.served)
            raise I2CLError(f"no task {name[:80]!r} is loaded (of {len(self.served)}): {hint}load it first")
        return self.served[name]

    def admit(self, params: Any) -> None:
        """Write the digest of a request's task into its parameters, a ``SamplingParams``.

        The parameters are the caller's, who may use them again: what they hold is not changed in place.
        Raises I2CLError if its task is not loaded, or no name.
        """
        extra = params.extra_args or {}
        named = extra.get(NAME)
        if isinstance(named, Bound):
            params.extra_args = {**extra, NAME: named.name, DIGEST: named.digest}
        elif NAME in extra:
            params.extra_args = {**extra, DIGEST: self.get(extra[NAME]).packed.digest}
        elif DIGEST in extra:
            raise I2CLError(f"{DIGEST} is not yours to send: name a loaded task as {NAME}")

    def prepare(
        self, name: str, injection: Injection, config: Any, tokenizer: PreTrainedTokenizerBase, *, force: bool
    ) -> Served:
        """Check an injection, and find its label tokens.

        ``config``: the engine's ``ModelConfig``; ``tokenizer``: the engine's; ``force``: accept other weights
        of the same sizes. Raises I2CLError if it was made on another model, or cannot be served here.
        """
        if not name.strip():
            raise I2CLError("a task needs a name: give it one")
        packed = Packed.of_injection(injection)
        if config.model not in self._bases:
            self._bases[config.model] = base_of(config, tokenizer)
        injection.require_base(self._bases[config.model], force=force)
        asker = Decoder(skeleton(config.hf_config), tokenizer, token_budget=1)  # asks, and cannot answer
        asker.max_length = min(asker.max_length or config.max_model_len, config.max_model_len - 1)
        questions = injection.questions(asker)
        _ = questions.labels  # labels that cannot be asked for are refused now
        return Served(
            name, packed, content_digest(injection), questions, injection.label_bias, injection.temperature
        )

    def add(self, served: Served) -> None:
        """Let requests in that name a task, from now on this version of it."""
        before = self.served.get(served.name)
        self.served[served.name] = served
        if before is not None:
            self._gone[before.packed.digest] = None

    def remove(self, name: str) -> None:
        """Let no more requests in that name a task. Raises I2CLError if there is none of that name."""
        self._gone[self.get(name).packed.digest] = None
        del self.served[name]

    @contextmanager
    def held(self, served: Served) -> Iterator[None]:
        """Keep a version of a task while requests with it may still come from the block."""
        edit = served.packed.digest
        self._held[edit] += 1
        try:
            yield
        finally:
            self._held[edit] -= 1

    def unneeded(self) -> list[str]:
        """Digests that the engine may drop, each told once."""
        used = {one.packed.digest for one in self.served.values()}
        self._gone = {digest: None for digest in self._gone if digest not in used}
        free = [digest for digest in self._gone if not self._held[digest]]
        for digest in free:
            del self._gone[digest]
        self._held = +self._held
        return free


TASKS = ServedTasks()  # those of this process


def wrap_verify(
    original: Callable[..., None], params: Any, *args: Any, refusal: type[I2CLError] = I2CLError, **more: Any
) -> None:
    """``SamplingParams.verify``: a task that is not loaded is its request's error, in the front end."""
    original(params, *args, **more)
    try:
        TASKS.admit(params)
    except I2CLError as error:
        raise refusal(str(error)) from None


def wrap_beam_search(
    original: Callable[..., Any], request: Any, *args: Any, refusal: type[I2CLError] = I2CLError, **more: Any
) -> Any:
    """``to_beam_search_params`` of a request of the server: beam search would forget the task."""
    if NAME in (request.vllm_xargs or {}):
        raise refusal("beam search takes no task: leave use_beam_search out, or the task")
    return original(request, *args, **more)


async def wrap_check_model(original: Callable[..., Any], serving: Any, request: Any) -> Any:
    """``BaseServing._check_model``, which every route calls: refuse a task that vLLM would ignore."""
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


def base_of(config: Any, tokenizer: PreTrainedTokenizerBase) -> ModelIdentity:
    """Which model an engine runs, from its files, which are read once. Raises I2CLError if they cannot be."""
    empty, text = skeleton(config.hf_config), config.hf_text_config
    files = CheckpointFiles(checkpoint_folder(config.model, config.revision), empty, "lm_head")
    weights = tensors_fingerprint((name, files.read(name)) for name, _ in named_weights(empty))
    sizes = text.model_type, text.num_hidden_layers, text.hidden_size
    prints = weights, tokenizer_fingerprint(tokenizer)
    more: Any = {"dtype": dtype_name(config.dtype), "config": inference_config(config.hf_config)}
    return ModelIdentity(str(config.model), config.revision, *sizes, *prints, **more)


def load(llm: Any, name: str, injection: Injection, *, force: bool = False) -> None:
    """Add a task to an engine, or replace the one of that name; requests that run end as they began.

    ``llm``: a ``vllm.LLM`` that runs the plugin; ``name``: as requests call it; ``injection``: made on the
    engine's model; ``force``: accept one made on other weights of the same sizes. Raises I2CLError if it was
    made on another model, cannot be served here, or all slots are taken.
    """
    served = TASKS.prepare(name, injection, llm.llm_engine.model_config, llm.get_tokenizer(), force=force)
    llm.collective_rpc(LOAD, args=(served.packed.rows, served.packed.scales))
    TASKS.add(served)
    _forget(llm)


def drop(llm: Any, name: str) -> None:
    """Let no request name a task; those that run end as they began. Raises I2CLError on another name."""
    TASKS.remove(name)
    _forget(llm)


def _forget(llm: Any) -> None:
    for digest in TASKS.unneeded():
        llm.collective_rpc(DROP, args=(digest,))


def classify(llm: Any, texts: Sequence[str], tasks: Sequence[str]) -> list[Answer]:
    """The label of each text under its own task, in shared batches.

    ``llm``: a ``vllm.LLM`` that runs the plugin; ``tasks``: the name of each text's task. Raises I2CLError on
    an unknown name, an empty text, or lists of different lengths.
    """
    if len(texts) != len(tasks):
        raise I2CLError(f"{len(texts)} texts, but {len(tasks)} tasks: name a task for every text")
    require_texts(texts)
    served = [TASKS.get(name) for name in tasks]
    reach = Reach.of(llm.llm_engine.vllm_config)
    prompts: list[tuple[int, Prompt]] = []
    for row, (one, text) in enumerate(zip(served, texts, strict=True)):
        (query,) = one.questions.queries([text])
        prompts += [(row, each) for each in one.label_prompts.prompts(query, reach)]
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
    """``SamplingParams`` that ask for some edges' log-probabilities under a version of a task."""
    from vllm import SamplingParams

    asks = {"logprob_token_ids": list(prompt.tokens), "prompt_logprobs": 0 if prompt.along else None}
    extra = {NAME: Bound(served.name, served.packed.digest)}
    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra, **asks)
