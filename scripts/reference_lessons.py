"""Training curriculum of the reference model: the documents and the learning rate of each step."""

import math
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from i2cl.tasks.generated import TASKS
from reference_documents import document

EXAMPLES_PER_STEP = 384
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 100
TARGET_ACCURACY = 0.93
MIN_LESSON_STEPS, MAX_LESSON_STEPS = 50, 1000


@dataclass(frozen=True)
class Lesson:
    """A stage of the curriculum: documents of the first `tasks` tasks, with a share of bare sentences."""

    tasks: int
    bare: float
    last: bool = False


LESSONS = (
    Lesson(tasks=2, bare=1.0),
    Lesson(tasks=4, bare=1.0),
    Lesson(tasks=8, bare=1.0),
    Lesson(tasks=16, bare=1.0),
    Lesson(tasks=16, bare=0.5),
    Lesson(tasks=16, bare=0.0, last=True),
)


@dataclass
class Course:
    """Training state. A lesson ends at its target accuracy, the last one after `last_steps` steps."""

    last_steps: int
    lesson_index: int = 0
    step: int = 0
    lesson_step: int = 0
    accuracy: float = 0.0

    @property
    def lesson(self) -> Lesson:
        """The current lesson."""
        return LESSONS[self.lesson_index]

    @property
    def finished(self) -> bool:
        """Whether the last lesson has ended."""
        return self.lesson.last and self.lesson_step >= self.last_steps

    @property
    def learning_rate(self) -> float:
        """Learning rate: linear warm-up, constant, and cosine decay to zero in the last lesson."""
        if self.lesson.last:
            return LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * self.lesson_step / self.last_steps))
        return LEARNING_RATE * min(1.0, (self.step + 1) / WARM_UP_STEPS)

    def advance(self, accuracy: float | None) -> None:
        """Count a step and its accuracy (None with few shots); start the next lesson if this one ended."""
        self.step += 1
        self.lesson_step += 1
        if accuracy is not None:
            self.accuracy = 0.9 * self.accuracy + 0.1 * accuracy
        learnt = self.accuracy >= TARGET_ACCURACY and self.lesson_step >= MIN_LESSON_STEPS
        if not self.lesson.last and (learnt or self.lesson_step >= MAX_LESSON_STEPS):
            self.lesson_index, self.lesson_step = self.lesson_index + 1, 0
            self.accuracy *= 0.5


@dataclass(frozen=True)
class Batch:
    """Documents with the same number of shots, padded on the right."""

    ids: Tensor
    tasks: Tensor
    shots: int
    named: bool


def draw_shape(rng: Random, course: Course) -> tuple[int, bool]:
    """Draw the number of shots of a step's documents, and whether they begin with the task's name."""
    if course.lesson.last:
        shots = rng.choice((1, 2)) if rng.random() < 0.5 else rng.randint(3, 24)
        return shots, rng.random() < 0.1
    turn = course.step % 3
    return rng.choice((4, 6, 8, 8, 10) if turn == 2 else (0, 1, 2)), turn == 0


def draw_batch(rng: Random, tokenizer: PreTrainedTokenizerFast, course: Course) -> Batch:
    """Draw the documents of the next step."""
    shots, named = draw_shape(rng, course)
    lesson = course.lesson
    tasks = [rng.randrange(lesson.tasks) for _ in range(EXAMPLES_PER_STEP // (shots + 1))]
    texts = [document(rng, TASKS[index], shots, named, bare=rng.random() < lesson.bare) for index in tasks]
    ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
    return Batch(ids, torch.tensor(tasks), shots, named)
