"""Reproduce a cell of the paper's Table 1: mean and standard deviation of I2CL on one task.

python examples/table1_cell.py                                          # the bundled model, fast recipe
python examples/table1_cell.py meta-llama/Llama-2-7b-hf sst2 paper 5    # the paper's cell: GPU and hub
"""

import statistics
import sys

from i2cl import Decoder, evaluate, load_task, make_methods
from i2cl.experiments.report.printed import printed_for


def main(
    model: str = "reference", task_name: str = "mood-colour-1", recipe: str = "fast", seeds: str = "2"
) -> None:
    """Print zero-shot, few-shot and I2CL on one task, and the paper's accuracy."""
    decoder, task = Decoder.from_pretrained(model), load_task(task_name)
    for method in make_methods(["zero_shot", "few_shot", "i2cl"], recipe=recipe):
        runs = [evaluate(decoder, task, method, seed=seed, limit=200) for seed in range(int(seeds))]
        accuracies = [100 * run.accuracy for run in runs]
        print(f"{method.name:10} {statistics.fmean(accuracies):5.1f} ± {statistics.stdev(accuracies):.1f}")
    table = printed_for("main", model)
    if table is None or task_name not in table.tasks:
        print("the paper has no such cell")
        return
    row, index = table.rows["I2CL"], table.tasks.index(task_name)
    print(f"{table.paper}: I2CL {row.mean[index]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
