"""Compare the predictions of exported checkpoints with those of i2cl, on the bundled model's tasks.

The folded checkpoint runs in transformers. The GGUF file runs in llama.cpp, first on the same token ids and
then on the text, which llama.cpp tokenizes. Needs the extra gguf.

python scripts/folded_predictions.py > table.md
python scripts/folded_predictions.py --write docs/log.md         # replaces the table between the markers
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM

from i2cl import CalibrationConfig, Decoder, Injection, calibrate, extract, load_task
from i2cl.export import export_causal_lm, export_gguf
from i2cl.export.llama_cpp import LlamaCpp
from i2cl.models.scoring import LabelScorer
from i2cl.tasks.generated import TASKS

BEGIN, END = "<!-- folded: begin -->", "<!-- folded: end -->"
QUERIES = 200
WAYS = ("transformers", "llama.cpp, ids", "llama.cpp, text")
HEAD = "| task | accuracy | " + " | ".join(f"{way}: equal | log p" for way in WAYS) + " | tokens equal |"


@dataclass(frozen=True)
class Comparison:
    """Results of one task.

    Attributes:
        task: name.
        accuracy: accuracy of i2cl.
        queries: number of queries.
        equal: number of predictions equal to those of i2cl, for each of `WAYS`.
        differences: largest difference of a label log-probability, for each of `WAYS`.
        encoded: number of queries with the same token ids in llama.cpp and transformers.
        ties: smallest difference between the log-probabilities of the two best labels.
    """

    task: str
    accuracy: float
    queries: int
    equal: tuple[int, ...]
    differences: tuple[float, ...]
    encoded: int
    ties: float


def main() -> None:
    """Print the table, or write it between the markers of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="file with the two markers")
    parser.add_argument("--tasks", nargs="+", default=[one.name for one in TASKS])
    parser.add_argument("--queries", type=int, default=QUERIES)
    options = parser.parse_args()
    decoder = Decoder.from_pretrained("reference", device="cpu")
    result = [compared(decoder, name, options.queries) for name in options.tasks]
    table = "\n".join(lines(result))
    if options.write is None:
        print(table)
        return
    before, _, rest = options.write.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    options.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def compared(decoder: Decoder, name: str, count: int) -> Comparison:
    """Fit one task with the fast recipe and seed 0, and run the same queries in every program."""
    task = load_task(name)
    demonstrations = task.sample(None, 0)
    context = extract(decoder, task, demonstrations, seed=0)
    injection = calibrate(decoder, task, demonstrations, context, CalibrationConfig.recipe("fast"), seed=0)
    examples = task.test[:count]
    texts = [example.text for example in examples]
    scorer = LabelScorer(decoder, task)
    labels = scorer.labels
    assert not labels.full, f"{name}: labels are more than one token"
    first = list(labels.first)
    ids = scorer.queries(texts)
    hooked = injection.log_probs(decoder, texts)
    with tempfile.TemporaryDirectory() as scratch:
        export_causal_lm(decoder, injection, Path(scratch) / "hf")
        plain = AutoModelForCausalLM.from_pretrained(Path(scratch) / "hf").eval()
        in_transformers = asked(ids, first, lambda row: plain(torch.tensor([list(row)])).logits[0, -1])
        in_llama_cpp, encoded = asked_llama_cpp(injection, decoder, Path(scratch), texts, ids, first)
    ways = (in_transformers, *in_llama_cpp)
    best, second = hooked.topk(2).values.unbind(-1)
    wanted = torch.tensor([example.label for example in examples])
    return Comparison(
        task=name,
        accuracy=float((hooked.argmax(-1) == wanted).float().mean()),
        queries=len(texts),
        equal=tuple(int((way.argmax(-1) == hooked.argmax(-1)).sum()) for way in ways),
        differences=tuple(float((way - hooked).abs().max()) for way in ways),
        encoded=encoded,
        ties=float((best - second).min()),
    )


def asked_llama_cpp(
    injection: Injection,
    decoder: Decoder,
    scratch: Path,
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    labels: Sequence[int],
) -> tuple[list[Float[Tensor, "queries labels"]], int]:
    """Return llama.cpp's scores for the ids and for the texts, and the number of texts with the same ids."""
    path = scratch / "model.gguf"
    export_gguf(decoder, injection, path)
    length = max(map(len, ids)) + 16  # room for an encoding that is longer
    with LlamaCpp(path, length) as model:
        own = [model.tokens(injection.task.template.query(text)) for text in texts]
        answers = [asked(rows, labels, model.logits) for rows in (ids, own)]
    return answers, sum(list(one) == other for one, other in zip(ids, own, strict=True))


def asked(
    rows: Iterable[Sequence[int]], labels: Sequence[int], logits: Callable[[Sequence[int]], Tensor]
) -> Float[Tensor, "queries labels"]:
    """Return the log-probabilities of the label tokens after each row."""
    with torch.no_grad():
        return torch.stack([logits(row).float().log_softmax(-1)[list(labels)] for row in rows])


def lines(result: Sequence[Comparison]) -> list[str]:
    """Format the table, with totals in its last row, and a sentence on ties."""
    rows = [HEAD, "|---" + "|---:" * (HEAD.count("|") - 2) + "|"]
    rows += [
        _line(one.task, one.accuracy, one.queries, one.equal, one.differences, one.encoded) for one in result
    ]
    ways = range(len(WAYS))
    rows.append(
        _line(
            "**all**",
            sum(one.accuracy for one in result) / len(result),
            sum(one.queries for one in result),
            [sum(one.equal[way] for one in result) for way in ways],
            [max(one.differences[way] for one in result) for way in ways],
            sum(one.encoded for one in result),
        )
    )
    closest = min(result, key=lambda one: one.ties)
    rows += ["", f"The two best labels of a query are at least {closest.ties:.1e} apart ({closest.task})."]
    return rows


def _line(
    task: str, accuracy: float, queries: int, equal: Sequence[int], differences: Sequence[float], encoded: int
) -> str:
    pairs = [
        f"{same} of {queries} | {difference:.1e}" for same, difference in zip(equal, differences, strict=True)
    ]
    return f"| {task} | {100 * accuracy:.1f} | {' | '.join(pairs)} | {encoded} of {queries} |"


if __name__ == "__main__":
    main()
