"""Options by letter: the prompt of a `choice` question in vLLM's decision API, as a baseline.

The label words are listed after the text as "A: ...", "B: ...", and the model answers with a letter. The
answer depends on the order of the options.

Source: vLLM 0.32, https://github.com/vllm-project/vllm, ``entrypoints/generate/structured_decisions``.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pydantic import Field

from i2cl.errors import I2CLError
from i2cl.methods.base import Method, Predictor
from i2cl.methods.postprocessing import PostProcessedPredictor
from i2cl.methods.prompting import PromptPredictor, few_shot_predictor
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import LabelScorer
from i2cl.models.training import Settings
from i2cl.tasks import Example, Examples, Task, Template

LETTERS = string.ascii_uppercase  # vLLM takes at most 26 options
_QUESTION = "Question: Which option fits the text?"
_REPLY = "Answer with the letter of one option only."


class MenuConfig(Settings):
    """Options of the prompt.

    Attributes:
        order: 0 lists the labels in the order of the task; any other number shuffles them with that seed.
    """

    order: int = Field(0, ge=0)


@dataclass(frozen=True)
class Menu(Method):
    """Lists the labels by letter after the text and scores the letters."""

    name = "menu"
    summary = "options by letter in the prompt, as in vLLM's decision API"
    is_stochastic = False
    needs = "nothing"
    settings = (MenuConfig,)
    config: MenuConfig = field(default_factory=MenuConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Return a predictor that scores the labels' letters. Raises I2CLError for more than 26 labels."""
        order = label_order(len(task.labels), self.config.order)
        scorer = LabelScorer(decoder, menu_task(decoder, task, order))
        letters = self.predictor(scorer, tuple(menu_examples(demonstrations, order)))
        columns = [order.index(label) for label in range(len(order))]
        return PostProcessedPredictor(letters, lambda scores, _: scores[:, columns], letters.cost)

    def predictor(self, scorer: LabelScorer, demonstrations: Examples) -> PromptPredictor:
        """Return the predictor of letters; demonstrations are not used."""
        return PromptPredictor(scorer)


@dataclass(frozen=True)
class MenuFewShot(Menu):
    """The menu prompt after demonstrations in the same form."""

    name = "menu_few_shot"
    summary = "options by letter, after demonstrations of the same form"
    is_stochastic = True
    needs = "demonstrations"

    def predictor(self, scorer: LabelScorer, demonstrations: Examples) -> PromptPredictor:
        """Cache the demonstrations. Raises I2CLError if the context cannot hold one per class."""
        return few_shot_predictor(scorer, demonstrations)


def label_order(count: int, seed: int) -> list[int]:
    """Return the label of each option: the task's order for seed 0, else a shuffled one."""
    order = list(range(count))
    if seed:
        random.Random(seed).shuffle(order)
    return order


def menu_examples(examples: Examples, order: Sequence[int]) -> list[Example]:
    """Return the examples with the index of their letter as label."""
    return [replace(example, label=order.index(example.label)) for example in examples]


def menu_task(decoder: Decoder, task: Task, order: Sequence[int]) -> Task:
    """Return a task whose labels are letters and whose template lists the options after the text.

    The prompt is a user turn of the chat template, or plain text without one. Raises I2CLError for more
    than 26 labels.
    """
    if len(order) > len(LETTERS):
        raise I2CLError(
            f"menu lists at most {len(LETTERS)} options by letter, and {task.name} has {len(order)} labels: "
            "use another method"
        )
    letters = LETTERS[: len(order)]
    options = [f"{letter}: {task.labels[label]}" for letter, label in zip(letters, order, strict=True)]
    menu = "\n".join([_QUESTION, *options, _REPLY])
    if decoder.tokenizer.chat_template:
        template = Template.chat(decoder.tokenizer)
    else:
        template = Template("{text}\nAnswer: {label}", separator="\n\n")
    template = replace(template, format=template.format.replace("{text}", f"{{text}}\n\n{menu}", 1))
    return replace(task, labels=tuple(letters), template=template, train=(), test=())
