"""Measure how often greedy decoding with a default fit generates a label, and the correct one.

    python benchmarks/greedy.py smollm2 sst2,tickets --seeds 4 --limit 200 -o greedy.jsonl

Appends a line of JSON per fit; existing lines are not run again. The paper's nine tasks need I2CL_DATA_DIR or
the hub. With --store, predictions are compared with those of the same cells in a store. With --keep, each
artefact and its scores on the queries are saved to a folder.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from i2cl import Decoder, Task, load_task
from i2cl.experiments.grid import Cell
from i2cl.experiments.store import Store
from i2cl.methods import make_methods
from i2cl.models.scoring import LabelScorer, next_token_log_probabilities, score
from tables import measure_missing


def measured(
    decoder: Decoder, task: Task, seed: int, limit: int, stored: list[int] | None, keep: Path | None
) -> dict[str, Any]:
    """Fit one task, and measure the accuracy among the labels and of greedy decoding."""
    demonstrations, queries = task.sample(None, seed), task.queries(limit)
    (method,) = make_methods(["anchored"], {})
    start = time.perf_counter()
    injection = method.fit_injection(decoder, task, demonstrations, seed)
    seconds = time.perf_counter() - start
    scorer = LabelScorer(decoder, task, injection.scoring)
    labels, edit = scorer.labels, injection.edit()
    prompts = scorer.queries([query.text for query in queries])
    gold = torch.tensor([query.label for query in queries])
    generated: list[list[int]] = [[] for _ in prompts]
    longest = max(map(len, labels.sequences)) if labels.full_sequences else 1
    for place in range(longest):
        so_far = [ids + tuple(tokens) for ids, tokens in zip(prompts, generated, strict=True)]
        result = next_token_log_probabilities(decoder, so_far, edit=edit)
        if not place:
            # as in the LM head of an export
            first = result = labels.at_representatives(result).log_softmax(-1)
        for tokens, token in zip(generated, result.argmax(-1).tolist(), strict=True):
            tokens.append(token)
    chosen = list(labels.representatives)
    scores = score(decoder, prompts, labels, edit=edit) if labels.full_sequences else first[:, chosen]
    wanted = [labels.target(label) for label in range(len(task.labels))]
    spoken = torch.tensor(
        [
            next((at for at, ids in enumerate(wanted) if tuple(one[: len(ids)]) == ids), -1)
            for one in generated
        ]
    )
    answers = scores.argmax(-1)
    if keep:
        injection.save_pretrained(keep / f"{task.name}-{seed}")
        save_file({"scores": scores, "gold": gold}, keep / f"{task.name}-{seed}.safetensors")
    mass = scores.logsumexp(-1).exp().mean().item()
    same = None if stored is None else (answers == torch.tensor(stored)).float().mean().item()
    return {
        "accuracy": (answers == gold).float().mean().item(),
        "greedy_right": (spoken == gold).float().mean().item(),
        "greedy_is_a_label": (spoken >= 0).float().mean().item(),
        "label_mass": mass,
        "confidence": scores.softmax(-1).amax(-1).mean().item(),
        "same_as_stored": same,
        "fit_seconds": seconds,
        "losses": injection.history,
    }


def main() -> None:
    """Run what is missing in the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("tasks", help="separated by commas")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--limit", type=int, default=200, help="queries per task")
    parser.add_argument("--store", type=Path, help="of `i2cl experiment run real`")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    records = Store.open(given.store).records if given.store else {}
    decoder = Decoder.from_pretrained(given.model)

    def measure(task: str, seed: int) -> dict[str, Any]:
        cell = Cell(model=given.model, task=task, method="anchored", seed=seed, limit=given.limit)
        record = records.get(cell.key)
        stored = list(record.outcome.predictions) if record and record.outcome else None
        return measured(decoder, load_task(task), seed, given.limit, stored, given.keep)

    measure_missing(given.output, given.tasks.split(","), given.seeds, measure)


if __name__ == "__main__":
    main()
