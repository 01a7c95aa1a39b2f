"""Cross-validate fits: label scores of the demonstrations, to estimate accuracy and temperature.

    python benchmarks/refits.py smollm2 sst2,tickets --seeds 4 -o refits.jsonl

Appends a line of JSON per task and seed, with the label scores of each demonstration by the refit without it;
existing lines are not run again. The paper's nine tasks need I2CL_DATA_DIR or the hub.
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

from i2cl import Decoder, Example, Task, anchor, load_task
from i2cl.methods import Predictor
from i2cl.methods.cross_validation import FOLDS, cross_validate, fold_rows
from i2cl.methods.injecting import injection_predictor
from i2cl.models.label_tokens import ScoringWarning
from tables import measure_missing


def measured(decoder: Decoder, task: Task, seed: int, folds: int) -> dict[str, Any]:
    """Return the label scores of each demonstration by the refit without it, and the seconds."""
    demonstrations = task.sample(None, seed)

    def refit(rest: tuple[Example, ...]) -> Predictor:
        return injection_predictor(anchor(decoder, task, rest, seed=seed), decoder, task)

    wall, own = time.perf_counter(), time.process_time()
    held_out = cross_validate(task, demonstrations, refit, folds, seed)
    scores = held_out.log_probs([one.text for one in demonstrations])
    return {
        "folds": len(fold_rows(task, demonstrations, folds, seed)),
        "gold": [one.label for one in demonstrations],
        "scores": [[round(value, 5) for value in row] for row in scores.log_softmax(-1).tolist()],
        "seconds": round(time.perf_counter() - wall, 1),
        "cpu_seconds": round(time.process_time() - own, 1),
    }


def main() -> None:
    """Run what is missing in the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("tasks", help="separated by commas")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--folds", type=int, default=FOLDS)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore", ScoringWarning)
    decoder = Decoder.from_pretrained(given.model)

    def measure(task: str, seed: int) -> dict[str, Any]:
        return measured(decoder, load_task(task), seed, given.folds)

    measure_missing(given.output, given.tasks.split(","), given.seeds, measure)


if __name__ == "__main__":
    main()
