"""Does a folded checkpoint answer as the injected model did?"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.export.checkpoint import generation_of
from i2cl.export.golden import Golden, GoldenPrompt
from i2cl.export.greedy import enough
from i2cl.export.peft import is_adapter, load_adapter
from i2cl.models.loading import load_model_and_tokenizer

SHOWN = 32  # characters of a prompt in the outcome's rows, at most
CLOSER = 4  # a wrong answer is told to be that without biases if it is this many times closer to it


@dataclass(frozen=True)
class Answer:
    """What a target says after one prompt."""

    labels: tuple[float | None, ...]  #: log-probability of each label's first token; None where not told
    floor: float | None = None  #: no token that was not told is more probable than this; None where all were
    top_logits: tuple[float, ...] = ()  #: of the golden prompt's top tokens, where logits are told
    whole: tuple[float, ...] = ()  #: log-probability of each label's whole sequence; empty where not told
    said: str = ""  #: the label that greedy decoding says, empty where it says none
    compared: bool = False  #: whether ``said`` is the most probable whole label, as the export's call has it


@dataclass(frozen=True)
class Verification:
    """The outcome."""

    golden: Golden  #: what was expected
    answers: tuple[Answer, ...]  #: what was found, prompt by prompt
    tolerance: float  #: largest relative difference that is accepted
    #: biases that are not there any more, or the writers without whose constants the target seems to run;
    #: None if there is no sign of that
    dropped: str | None = None
    retokenized: tuple[str, ...] = ()  #: prompts that the target's own tokenizer, if asked, splits otherwise
    searched: bool = False  #: whether what is told of greedy decoding is of a beam search over whole labels

    @property
    def differences(self) -> list[float]:
        """Largest relative difference of each prompt."""
        pairs = zip(self.golden.prompts, self.answers, strict=True)
        return [_difference(prompt, answer) for prompt, answer in pairs]

    @property
    def worst(self) -> float:
        """The largest of all; infinite where a value is not finite."""
        return max(self.differences)

    @property
    def greedy(self) -> list[bool]:
        """Whether greedy decoding says the label expected, prompt by prompt."""
        pairs = zip(self.golden.prompts, self.answers, strict=True)
        return [answer.said == prompt.prediction for prompt, answer in pairs]

    @property
    def says_labels(self) -> bool:
        """Whether enough of greedy decoding's answers are right."""
        return enough(self.greedy)

    @property
    def passed(self) -> bool:
        """Whether the worst is within the tolerance, prompts have the same tokens, and labels are said."""
        return self.worst <= self.tolerance and not self.retokenized and self.says_labels

    @property
    def compared(self) -> bool:
        """Whether what is told of greedy decoding is of whole labels' log-probabilities."""
        return all(answer.compared for answer in self.answers)

    @property
    def unchecked(self) -> str | None:
        """What the target could not be asked, if anything."""
        if not self.golden.sequences or all(answer.whole for answer in self.answers):
            return None
        return (
            "whole label sequences were not checked, and no label is named without them: the target tells no "
            "log-probabilities of a prompt's own tokens (echo)"
        )

    def rows(self) -> list[dict[str, object]]:
        """A line for each prompt."""
        each = zip(self.golden.prompts, self.answers, self.differences, strict=True)
        return [
            {
                "prompt": shorten(prompt.text.splitlines()[0], SHOWN, placeholder=" ..."),
                "expected": prompt.prediction,
                "found": self.golden.best(answer.whole if self.golden.sequences else answer.labels),
                "greedy": answer.said or "no label",
                "difference": f"{difference:.1e}",
            }
            for prompt, answer, difference in each
        ]


def verify(
    folder: str | Path,
    *,
    model: str | None = None,
    device: str | torch.device | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Load an export with transformers, an adapter with PEFT, and compare it with its golden values.

    Args:
        folder: a checkpoint, or a PEFT adapter.
        model: an adapter's base model; default: the one its config names.
        device: see `i2cl.Decoder.from_pretrained`. It runs in float32.
        tolerance: largest relative difference; default: the export's own.

    Raises:
        I2CLError: if it is no export or cannot be loaded, or has lost tensors.
    """
    golden = Golden.from_export(folder)
    loaded: Any
    if is_adapter(folder):
        loaded, state = load_adapter(folder, model, device)
        loaded.generation_config = generation_of(Path(folder)) or loaded.generation_config
    elif model is None:
        loaded, _ = load_model_and_tokenizer(str(folder), dtype="float32", device=device)
        state = loaded.state_dict()
    else:
        raise I2CLError(f"{str(folder)!r} is a whole model: leave out --model, which is for PEFT adapters")
    settings = loaded.generation_config = deepcopy(loaded.generation_config)
    golden.require_bias_in(settings, str(folder))
    if settings.pad_token_id is None:
        settings.pad_token_id = golden.end

    def logits(ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            batch = torch.tensor([ids], device=loaded.device)
            values: Tensor = loaded(input_ids=batch, use_cache=False).logits[0, -1].float().cpu()
        return values

    def said(prompt: GoldenPrompt) -> str:
        batch = torch.tensor([prompt.ids], device=loaded.device)
        inputs = {"input_ids": batch, "attention_mask": torch.ones_like(batch)}
        made = loaded.generate(**inputs, do_sample=False, max_new_tokens=golden.longest)
        return golden.said(made[0, len(prompt.ids) :].tolist())

    answers = [answer_of(golden, prompt, logits, said) for prompt in golden.prompts]
    lost = golden.lost({name for name in golden.biases if name in state and state[name].any()})
    return replace(compare(golden, answers, tolerance, lost), searched=golden.compared)


def answer_of(
    golden: Golden,
    prompt: GoldenPrompt,
    logits: Callable[[Sequence[int]], Float[Tensor, " vocab"]],
    said: Callable[[GoldenPrompt], str],
    *,
    compared: bool = False,
) -> Answer:
    """What a target that can be run here says after one prompt.
    ``golden``: which labels to ask for; ``prompt``: what to ask; ``logits``: of the token after some ids, in
    float32; ``said``: the label that greedy decoding says; ``compared``: the export's call compares whole
    labels, and greedy decoding is not asked.
    """
    after, start = cache(logits), tuple(prompt.ids)  # labels that begin alike are run once

    def whole(ids: Sequence[int]) -> float:
        steps = (after((*start, *ids[:place])).log_softmax(-1) for place in range(len(ids)))
        return float(sum(step[token] for step, token in zip(steps, ids, strict=True)))

    first = after(start)
    answer = Answer(
        tuple(first.log_softmax(-1)[golden.label_ids].tolist()),
        top_logits=tuple(first[prompt.top_ids].tolist()),
        whole=tuple(map(whole, golden.sequences)),
    )
    return by_whole_labels(golden, answer) if compared else replace(answer, said=said(prompt))


def by_whole_labels(golden: Golden, answer: Answer) -> Answer:
    """An answer that says its most probable whole label."""
    return replace(answer, said=golden.best(answer.whole), compared=True)


def compare(
    golden: Golden, answers: Sequence[Answer], tolerance: float | None = None, lost: Sequence[str] = ()
) -> Verification:
    """Compare answers with what was expected, and look for dropped biases if they differ.
    ``golden``: what was expected; ``answers``: what a target said, prompt by prompt; ``tolerance``: largest
    relative difference; default: the export's own; ``lost``: names of biases that are known to be dropped.
    Raises I2CLError if a target told nothing about any label.
    """
    measured = any(value is not None for answer in answers for value in answer.labels)
    if not measured and not all(answer.whole for answer in answers):
        raise I2CLError("the target told no label's probability: ask for more with --logprobs")
    outcome = Verification(golden, tuple(answers), golden.tolerance if tolerance is None else tolerance)
    if outcome.passed:
        return outcome
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    dropped = f"the bias {lost[0]}{more} is dropped" if lost else _as_if_dropped(outcome)
    return replace(outcome, dropped=dropped)


def _as_if_dropped(outcome: Verification) -> str | None:
    both = zip(outcome.golden.prompts, outcome.answers, strict=True)
    pairs = [(prompt, answer) for prompt, answer in both if prompt.dropped]
    distances = {
        name: max(_label_difference(prompt.dropped[name], answer) for prompt, answer in pairs)
        for name in outcome.golden.prompts[0].dropped
    }
    name = min(distances, key=distances.__getitem__)
    distance = max(_label_difference(prompt.labels, answer) for prompt, answer in pairs)
    problem = f"the target answers as if the biases of {name} were dropped"
    return problem if CLOSER * distances[name] < distance else None


def _difference(prompt: GoldenPrompt, answer: Answer) -> float:
    """Largest difference of a prompt's values, over the largest of the same kind, at least 1."""
    pairs = [(prompt.top_logits, answer.top_logits), (prompt.whole, answer.whole)]
    rest = [_relative(list(zip(expected, values, strict=True))) for expected, values in pairs if values]
    return max([_label_difference(prompt.labels, answer), *rest])


def _label_difference(expected: Sequence[float], answer: Answer) -> float:
    """The same of the labels' first tokens alone."""
    floor = math.inf if answer.floor is None else answer.floor  # below it, the closest value counts
    pairs = zip(expected, answer.labels, strict=True)
    return _relative([(wanted, min(wanted, floor) if value is None else value) for wanted, value in pairs])


def _relative(pairs: Sequence[tuple[float, float]]) -> float:
    size = max(1.0, *(abs(wanted) for wanted, _ in pairs))
    worst = [abs(wanted - value) / size for wanted, value in pairs]
    return max(worst) if all(map(math.isfinite, worst)) else math.inf
