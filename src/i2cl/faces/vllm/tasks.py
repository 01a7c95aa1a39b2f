"""The front end's half: tasks by name, which requests are let in, and label words' log-probabilities."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, did_you_mean
from i2cl.export.folding import skeleton
from i2cl.export.sources import checkpoint_folder
from i2cl.faces.vllm.engine import DROP, LOAD
from i2cl.faces.vllm.slots import DIGEST, Packed
from i2cl.faces.vllm.support import NAME
from i2cl.models.batching import Ids
from i2cl.models.checkpoint import Files
from i2cl.models.decoder import Decoder
from i2cl.models.fingerprint import (
    ModelIdentity,
    named_weights,
    tensors_fingerprint,
    tokenizer_fingerprint,
    told_config,
)
from i2cl.models.scoring import Questions, biased, require_texts

MOST_TOKENS = 128
"""That vLLM tells log-probabilities of in one answer."""

Asked = tuple[Ids, tuple[int, ...]]
"""A prompt, and the tokens behind it whose log-probabilities are wanted."""


@dataclass(frozen=True)
class Answer:
    """What a text was classified as.

    Attributes:
        label: the most probable label word.
        scores: log-probability of each label, as `i2cl.Injection.scores` has it.
    """

    label: str
    scores: Float[Tensor, " labels"]


@dataclass(frozen=True)
class Served:
    """A task that is loaded.

    Attributes:
        name: as requests call it.
        packed: what the workers were given.
        questions: how it is asked.
        bias: of its labels, if any.
    """

    name: str
    packed: Packed
    questions: Questions
    bias: tuple[float, ...] | None

    @cached_property
    def wanted(self) -> dict[Ids, tuple[int, ...]]:
        """Tokens whose log-probabilities are wanted, by what stands between the query and them."""
        found: dict[Ids, dict[int, None]] = {}
        for ids in self._labels:
            for place, token in enumerate(ids):
                found.setdefault(ids[:place], {})[token] = None
        return {before: tuple(tokens) for before, tokens in found.items()}

    @property
    def _labels(self) -> tuple[Ids, ...]:
        labels = self.questions.labels
        return labels.ids if labels.full else tuple(ids[:1] for ids in labels.ids)

    def asked(self, query: Ids) -> list[Asked]:
        """What to ask the engine about one text."""
        return [
            (query + before, tokens[start : start + MOST_TOKENS])
            for before, tokens in self.wanted.items()
            for start in range(0, len(tokens), MOST_TOKENS)
        ]

    def answer(self, query: Ids, told: Mapping[Ids, Mapping[int, float]]) -> Answer:
        """The labels' scores from what the engine told of each prompt."""
        values = [
            math.fsum(told[query + ids[:place]][token] for place, token in enumerate(ids))
            for ids in self._labels
        ]
        scores = torch.tensor(values)
        if self.bias is not None:
            scores = biased(scores, torch.tensor(self.bias))
        return Answer(self.questions.task.labels[int(scores.argmax())], scores)


@dataclass
class Tasks:
    """The tasks of a front end by name. One process serves one engine.

    Attributes:
        served: by name.
    """

    served: dict[str, Served] = field(default_factory=dict)
    _bases: dict[str, ModelIdentity] = field(default_factory=dict)

    def get(self, name: Any) -> Served:
        """A task by what a request calls it.

        Raises:
            I2CLError: if there is none of that name.
        """
        if not isinstance(name, str):
            raise I2CLError(f"the task has to be a name, not {name!r}: send the name of a loaded task")
        if name not in self.served:
            hint = did_you_mean(name, self.served)
            raise I2CLError(f"no task {name[:80]!r} is loaded (of {len(self.served)}): {hint}load it first")
        return self.served[name]

    def admit(self, params: Any) -> None:
        """Write the digest of a request's task into its parameters, a ``SamplingParams``.

        The parameters are the caller's, who may use them again: what they hold is not changed in place.

        Raises:
            I2CLError: if its task is not loaded, or no name.
        """
        extra = params.extra_args or {}
        if NAME in extra:
            params.extra_args = {**extra, DIGEST: self.get(extra[NAME]).packed.digest}
        elif DIGEST in extra:
            raise I2CLError(f"{DIGEST} is not yours to send: name a loaded task as {NAME}")

    def prepare(
        self, name: str, injection: Injection, config: Any, tokenizer: PreTrainedTokenizerBase, *, force: bool
    ) -> Served:
        """Check an injection, and find its label tokens.

        Args:
            name: of the task.
            injection: to be loaded.
            config: the engine's ``ModelConfig``.
            tokenizer: the engine's.
            force: accept other weights of the same sizes.

        Raises:
            I2CLError: if it was made on another model, or cannot be served here.
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
        return Served(name, packed, questions, injection.label_bias)

    def add(self, served: Served) -> str | None:
        """Let requests in that name a task; the digest that nobody needs any more, if it replaced one."""
        before = self.served.get(served.name)
        self.served[served.name] = served
        return None if before is None else self._unused(before)

    def remove(self, name: str) -> str | None:
        """Let no more requests in that name a task; the digest that nobody needs any more.

        Raises:
            I2CLError: if there is none of that name.
        """
        found = self.get(name)
        del self.served[name]
        return self._unused(found)

    def _unused(self, gone: Served) -> str | None:
        used = any(one.packed.digest == gone.packed.digest for one in self.served.values())
        return None if used else gone.packed.digest


TASKS = Tasks()
"""Those of this process."""


def verified(original: Callable[..., None], refusal: type[I2CLError] = I2CLError) -> Callable[..., None]:
    """``SamplingParams.verify``: a task that is not loaded is its request's error, in the front end.

    Args:
        original: vLLM's.
        refusal: what is raised, of which vLLM's server makes a 400.
    """

    def verify(params: Any, *args: Any, **more: Any) -> None:
        original(params, *args, **more)
        try:
            TASKS.admit(params)
        except I2CLError as error:
            raise refusal(str(error)) from None

    return verify


def base_of(config: Any, tokenizer: PreTrainedTokenizerBase) -> ModelIdentity:
    """Which model an engine runs, from its files, which are read once.

    Args:
        config: the engine's ``ModelConfig``.
        tokenizer: the engine's.

    Raises:
        I2CLError: if its files cannot be found or read.
    """
    folder = checkpoint_folder(config.model, config.revision)
    empty = skeleton(config.hf_config)
    files = Files(Path(folder), empty, "lm_head")
    names = [name for name, _ in named_weights(empty)]
    text = config.hf_text_config
    return ModelIdentity(
        name=str(config.model),
        revision=config.revision,
        model_type=text.model_type,
        layers=text.num_hidden_layers,
        d_model=text.hidden_size,
        weights=tensors_fingerprint((name, files.read(name)) for name in names),
        tokenizer=tokenizer_fingerprint(tokenizer),
        dtype=str(config.dtype).removeprefix("torch."),
        config=told_config(config.hf_config),
    )


def load(llm: Any, name: str, injection: Injection, *, force: bool = False) -> None:
    """Add a task to an engine, or replace the one of that name; requests that run end as they began.

    Args:
        llm: a ``vllm.LLM`` that runs the plugin.
        name: as requests call it.
        injection: made on the engine's model.
        force: accept one made on other weights of the same sizes.

    Raises:
        I2CLError: if it was made on another model, cannot be served here, or all slots are taken.
    """
    served = TASKS.prepare(name, injection, llm.llm_engine.model_config, llm.get_tokenizer(), force=force)
    llm.collective_rpc(LOAD, args=(served.packed.rows, served.packed.scales))
    _forget(llm, TASKS.add(served))


def drop(llm: Any, name: str) -> None:
    """Let no more requests name a task; those that run end as they began.

    Raises:
        I2CLError: if there is none of that name.
    """
    _forget(llm, TASKS.remove(name))


def _forget(llm: Any, digest: str | None) -> None:
    if digest is not None:
        llm.collective_rpc(DROP, args=(digest,))


def classify(llm: Any, texts: Sequence[str], tasks: Sequence[str]) -> list[Answer]:
    """The label of each text under its own task, in shared batches.

    Args:
        llm: a ``vllm.LLM`` that runs the plugin.
        texts: what to classify.
        tasks: the name of each text's task.

    Raises:
        I2CLError: on an unknown name, an empty text, or lists of different lengths.
    """
    if len(texts) != len(tasks):
        raise I2CLError(f"{len(texts)} texts, but {len(tasks)} tasks: name a task for every text")
    require_texts(texts)
    served = [TASKS.get(name) for name in tasks]
    queries = [one.questions.queries([text])[0] for one, text in zip(served, texts, strict=True)]
    asked = [(one, *each) for one, query in zip(served, queries, strict=True) for each in one.asked(query)]
    outputs = llm.generate(
        [{"prompt_token_ids": list(ids)} for _, ids, _ in asked],
        [parameters(one.name, tokens) for one, _, tokens in asked],
        use_tqdm=False,
    )
    told = collect(
        (one.name, ids, told_by(output)) for (one, ids, _), output in zip(asked, outputs, strict=True)
    )
    return [one.answer(query, told[one.name]) for one, query in zip(served, queries, strict=True)]


def parameters(name: str, tokens: Sequence[int]) -> Any:
    """``SamplingParams`` that ask for log-probabilities of some next tokens under a task."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        logprob_token_ids=list(tokens),
        extra_args={NAME: name},
    )


def told_by(output: Any) -> dict[int, float]:
    """Log-probabilities of the first new token, from vLLM's ``RequestOutput``."""
    return {token: found.logprob for token, found in output.outputs[0].logprobs[0].items()}


def collect(
    told: Iterable[tuple[str, Ids, Mapping[int, float]]],
) -> dict[str, dict[Ids, dict[int, float]]]:
    """What the engine told, by task and prompt."""
    found: dict[str, dict[Ids, dict[int, float]]] = {}
    for name, ids, values in told:
        found.setdefault(name, {}).setdefault(ids, {}).update(values)
    return found
