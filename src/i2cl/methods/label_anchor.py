"""Label anchor: few-shot with a cache pruned to the tokens of format and labels.

Source: paper, "Label-anchor" and its appendix; Wang et al. 2023, https://arxiv.org/abs/2305.14160.
"""

from dataclasses import dataclass
from typing import ClassVar

from i2cl.errors import I2CLError
from i2cl.methods.base import Cost, Method
from i2cl.methods.prompts import Pairs, PromptPredictor, common_prefix_ids, fit_to_context
from i2cl.models.decoder import Decoder
from i2cl.models.prefix import uses_alibi
from i2cl.models.scoring import LabelScorer
from i2cl.tasks import Examples, Task


@dataclass(frozen=True)
class LabelAnchor(Method):
    """Keeps the keys and values of template, separator and label tokens, at their original positions."""

    name: ClassVar[str] = "label_anchor"
    summary: ClassVar[str] = "few-shot whose cache keeps only template, newline and label tokens"
    row: ClassVar[str] = "Label-anchor"
    formula: ClassVar[str] = "2(M/K)DL"

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Run the demonstrations once and prune their cache to the anchors.

        Raises:
            I2CLError: if the context cannot hold one demonstration per class, the tokenizer does not report
                character offsets, or the model caches more than keys and values or has ALiBi.
        """
        scorer = LabelScorer(decoder, task)
        pairs = fit_to_context(scorer, demonstrations)
        ids = common_prefix_ids(scorer, pairs)
        config = decoder.model.config
        if not decoder.can_split or uses_alibi(config):
            reason = "has ALiBi" if decoder.can_split else "caches more than keys and values"
            hint = "use few_shot"
            raise I2CLError(f"label_anchor does not support {config.model_type!r}, which {reason}: {hint}")
        if not ids:
            return PromptPredictor(scorer, pairs)
        prefix = decoder.prefix(ids, whole=True).prune(anchors(decoder, task, pairs, len(ids)))
        return PromptPredictor(scorer, pairs, prefix, cost=Cost.of(prefix))


def anchors(decoder: Decoder, task: Task, pairs: Pairs, count: int) -> tuple[int, ...]:
    """Return the indices of the first ``count`` tokens that are not entirely text of a demonstration.

    Raises:
        I2CLError: if the tokenizer does not report character offsets.
    """
    if not decoder.tokenizer.is_fast:
        raise I2CLError("label_anchor needs a fast tokenizer: use a model with a tokenizer.json")
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
    return tuple(index for index in range(count) if index < front or not inside[index - front])
