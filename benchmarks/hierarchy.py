"""Labels in two levels: one task with the lower labels, or one task per level.

    python benchmarks/hierarchy.py reference sentence_embeddings char_tfidf --seeds 4

Sixteen intents of CLINC150 in four groups, five examples each. "Flat" is one task with sixteen labels; the
probability of a group is the sum of its labels' probabilities. "Levels" is one task for the group, and one
for the label in each group. Prints the accuracy of the group and of the label, in percent, with the standard
deviation over seeds. Needs I2CL_DATA_DIR or the hub; ``anchored`` measures the LLM.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import torch

from i2cl import Decoder, Example, Task, load_task, make_methods
from i2cl.encoders import MINILM
from i2cl.methods import Method

GROUPS = {
    "bank account": ("transfer", "balance", "pay bill", "report fraud"),
    "credit card": ("card declined", "credit limit", "new card", "report lost card"),
    "travel": ("book flight", "book hotel", "lost luggage", "travel alert"),
    "kitchen": ("recipe", "calories", "cook time", "meal suggestion"),
}
LABELS = tuple(label for group in GROUPS.values() for label in group)
GROUP_OF = torch.tensor([number for number, group in enumerate(GROUPS.values()) for _ in group])
SHOTS = 5


def measure(decoder: Decoder, task: Task, method: Method, seed: int) -> list[float]:
    """Return the accuracies of flat groups, flat labels, groups by level, and labels by level."""
    rows = [Example(row.text, LABELS.index(word)) for row, word in named(task, task.train)]
    shown = [
        row
        for label in range(len(LABELS))
        for row in Random(seed).sample([one for one in rows if one.label == label], SHOTS)
    ]
    test = [Example(row.text, LABELS.index(word)) for row, word in named(task, task.test)]
    gold, texts = torch.tensor([row.label for row in test]), [row.text for row in test]

    def log_probs(words: Sequence[str], examples: Sequence[Example]) -> torch.Tensor:
        own = replace(task, labels=tuple(words), train=(), test=())
        return method.fit(decoder, own, tuple(examples), seed).log_probs(texts).log_softmax(-1)

    flat = log_probs(LABELS, shown)
    group_probs = torch.stack([flat[:, group == GROUP_OF].exp().sum(1) for group in range(len(GROUPS))], 1)
    upper = log_probs(list(GROUPS), [replace(row, label=int(GROUP_OF[row.label])) for row in shown]).argmax(
        -1
    )
    lower = torch.empty_like(upper)
    for group, words in enumerate(GROUPS.values()):
        own = [
            replace(row, label=words.index(LABELS[row.label]))
            for row in shown
            if GROUP_OF[row.label] == group
        ]
        chosen = upper == group
        lower[chosen] = LABELS.index(words[0]) + log_probs(words, own).argmax(-1)[chosen]
    answers = (
        (group_probs.argmax(-1), GROUP_OF[gold]),
        (flat.argmax(-1), gold),
        (upper, GROUP_OF[gold]),
        (lower, gold),
    )
    return [100 * (answer == right).float().mean().item() for answer, right in answers]


def named(task: Task, rows: Sequence[Example]) -> list[tuple[Example, str]]:
    """Return the rows of the sixteen intents, with their label words."""
    return [(row, task.labels[row.label]) for row in rows if task.labels[row.label] in LABELS]


def main() -> None:
    """Print the means of each method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    decoder, task = Decoder.from_pretrained(given.model), load_task("clinc150")
    print("method", "flat group", "flat label", "levels group", "levels label", sep="\t")
    for method in make_methods(given.methods, {"encoder": MINILM}):
        runs = np.array([measure(decoder, task, method, seed) for seed in range(given.seeds)])
        cells = [
            f"{mean:.1f} ± {std:.1f}" for mean, std in zip(runs.mean(0), runs.std(0, ddof=1), strict=True)
        ]
        print(method.full_name, *cells, sep="\t")


if __name__ == "__main__":
    main()
