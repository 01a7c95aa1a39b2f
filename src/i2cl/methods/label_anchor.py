"""Label anchor: few-shot with the cache cut down to the tokens that carry format and labels.

Source: paper, "Label-anchor" and its appendix; Wang et al. 2023, https://arxiv.org/abs/2305.14160.
"""

from dataclasses import dataclass
from typing import ClassVar

from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Method
from i2cl.methods.prompts import PromptPredictor, Shown, fitting, shared_ids
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Questions
from i2cl.tasks import Examples, Task


@dataclass(frozen=True)
class LabelAnchor(Method):
    """Keeps keys and values of template tokens, separators and label words, at their own positions."""

    name: ClassVar[str] = "label_anchor"
    summary: ClassVar[str] = "few-shot whose cache keeps only template, newline and label tokens"
    row: ClassVar[str] = "Label-anchor"
    formula: ClassVar[str] = "2(M/K)DL"

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Run all demonstrations once and keep the anchors' entries. Raises I2CLError if not one per class
        fits, the tokenizer cannot tell where a token stands, or the model caches more than keys and values.
        """
        questions = Questions(decoder, task)
        pairs = fitting(questions, demonstrations)
        ids = shared_ids(questions, pairs)
        if not decoder.can_split:
            why = f"{decoder.model.config.model_type!r}, whose cache holds more than keys and values"
            raise I2CLError(f"label_anchor cannot run on {why}: take few_shot")
        if not ids:
            return PromptPredictor(questions, pairs)
        prefix = decoder.prefix(ids, whole=True).kept_at(anchors(decoder, task, pairs, len(ids)))
        return PromptPredictor(questions, pairs, prefix, cost=Cost.of(prefix))


def anchors(decoder: Decoder, task: Task, pairs: Shown, count: int) -> tuple[int, ...]:
    """Places among the first ``count`` tokens that hold, in part at least, no text of a demonstration."""
    tokenizer = decoder.tokenizer
    if not tokenizer.is_fast:
        raise I2CLError(
            "label_anchor needs a fast tokenizer (tokenizer.json), which knows where tokens stand"
        )
    template = task.template
    prompt, texts = template.opening, []
    for text, word in pairs:
        start = len(prompt) + len(template.head)
        texts.append((start, start + len(text)))
        prompt += template.exchange(text, word)
    prompt += template.head
    inside = [
        any(start <= left and right <= end for start, end in texts)
        for left, right in decoder.encoder.spans(prompt)
    ]
    front = len(decoder.encoder.front)
    return tuple(place for place in range(count) if place < front or not inside[place - front])
