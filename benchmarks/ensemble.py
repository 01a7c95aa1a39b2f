"""Evaluate an ensemble on the scores of a store: its weights see some of the queries, and answer the others.

    python benchmarks/ensemble.py docs/experiments/real/store --limit 200 --scores scores -o real.json
    python benchmarks/ensemble.py fresh smollm2 --scores fresh -o fresh.json

The label scores of anchored calibration and LoRA come from the store; both text experts are fitted to the
same demonstrations and kept in ``--scores``. The paper's nine tasks need I2CL_DATA_DIR or the hub.

``fresh`` instead fits anchored calibration in bfloat16 to demonstrations of new seeds, and scores test rows
that are in no table of docs/ (`Task.queries` excludes them).
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from i2cl import Decoder, Example, Task, load_task
from i2cl.core.experts import EmbeddingsExpert, TfidfExpert
from i2cl.encoders import MINILM, EmbeddingsConfig
from i2cl.experiments.confidence import confidence
from i2cl.experiments.evidence.verdicts import holm
from i2cl.experiments.statistics import difference
from i2cl.experiments.store import Store
from i2cl.injections.ensemble import (
    EXPERT_PRIORS,
    WeightPrior,
    cross_fitted,
    likely_weights,
    with_states_expert,
)
from i2cl.injections.temperature import TEMPERATURE_SPREAD, TYPICAL_TEMPERATURE, log_softmax
from i2cl.methods import make_injector

PRIORS = [
    WeightPrior(1 / TYPICAL_TEMPERATURE, TEMPERATURE_SPREAD / TYPICAL_TEMPERATURE),
    *(EXPERT_PRIORS[name] for name in ("embeddings", "tfidf")),
]
MEMBERS = ("anchored", "embeddings", "tfidf")
OTHER_TASKS = "prior of the other tasks"
METHODS = ("ensemble", "typical weights", OTHER_TASKS, "product", "anchored", "embeddings", "tfidf")
RIVALS = ("lora", "setfit", "few_shot+label_prior")
STATES_TOO, STATES_INSTEAD = "ensemble and hidden states", "hidden states instead of embeddings"
NO_ENCODER = "ensemble without embeddings"
STATES = (STATES_TOO, STATES_INSTEAD, NO_ENCODER, "states")
STATES_COMPARED = (
    (STATES_TOO, "ensemble"),
    (STATES_TOO, "anchored"),
    (STATES_INSTEAD, NO_ENCODER),
    (STATES_INSTEAD, "ensemble"),
    ("states", "embeddings"),
)
LORA_INSTEAD, LORA_TOO = "ensemble with LoRA instead of anchored", "ensemble with both"
NO_PRIOR = WeightPrior(0.5, 100.0)
FEW_ROWS = (12, 20, 40)  # rows for the weights where evidence is weak
DRAWS = 20
FRESH_TASKS = "tickets,intents,subj,trec,agnews,emoc,hate_speech18,sst2,mr,sst5,dbpedia"
FIRST_FRESH_SEED = 4  # the tables have the seeds below
BEHIND = 0.03  # accuracy behind the best member that counts as far behind

Scores = dict[str, Any]


def collect(store: Store, limit: int, folder: Path, encoder: str) -> dict[tuple[str, int], Scores]:
    """Return the scores of all members, and predictions of rivals, by task and seed."""
    runs: dict[tuple[str, int], dict[str, Any]] = defaultdict(dict)
    for record in store.records.values():
        run, cell = record.outcome, record.cell
        plain = cell.shots is None and cell.demonstrations == "random" and not (cell.chat or cell.own)
        if run is not None and run.n == limit and run.seed < 4 and plain and cell.skew == 1:
            options = cell.options
            if run.method == "anchored" and not options and run.scores is not None:
                runs[run.task, run.seed]["anchored"] = run
            elif run.method in RIVALS and "scoring" not in options and options.get("epochs", 20) == 20:
                runs[run.task, run.seed][run.method] = run
    folder.mkdir(parents=True, exist_ok=True)
    collected = {}
    for (task, seed), of_method in sorted(runs.items()):
        if "anchored" not in of_method:
            continue
        path = folder / f"{task}-{seed}.npz"
        if not path.is_file():
            known = load_task(task)
            queries = known.queries(limit)
            np.savez_compressed(path, text=text_scores(known, known.sample(None, seed), queries, encoder))
        anchored = of_method["anchored"]
        scores = np.concatenate([log_softmax(anchored.scores.array)[None], np.load(path)["text"]])
        gold = np.array(anchored.gold)
        rivals = {
            name: np.array(of_method[name].predictions) == np.array(of_method[name].gold)
            for name in RIVALS
            if name in of_method
        }
        collected[task, seed] = {"scores": scores, "gold": gold, "rivals": rivals}
        lora = of_method.get("lora")
        if lora is not None and lora.scores is not None:
            collected[task, seed]["lora"] = log_softmax(lora.scores.array)
    return collected


def priors_of_other_tasks(collected: dict[tuple[str, int], Scores], task: str) -> list[WeightPrior]:
    """Return mean and standard deviation of the best weights on all tasks but one."""
    weights = np.array(
        [
            likely_weights(one["scores"], one["gold"], [NO_PRIOR] * len(MEMBERS))
            for (name, _), one in collected.items()
            if name != task
        ]
    )
    return [WeightPrior(*pair) for pair in zip(weights.mean(0), weights.std(0), strict=True)]


def text_scores(
    task: Task, demonstrations: Sequence[Example], queries: Sequence[Example], encoder: str
) -> np.ndarray:
    """Return the log-probabilities of both text experts on some queries of a task."""
    texts = [row.text for row in queries]
    embeddings = EmbeddingsExpert.fit(EmbeddingsConfig(encoder=encoder), task, demonstrations, "cpu")
    experts = (embeddings, TfidfExpert.fit(task, demonstrations))
    return np.stack([expert.scores(texts, "cpu").double().log_softmax(-1).numpy() for expert in experts])


def collect_fresh(
    model: str, tasks: Sequence[str], seeds: int, limit: int, folder: Path, encoder: str
) -> dict[tuple[str, int], Scores]:
    """Return the scores of all members by task and new seed, on up to ``limit`` rows outside the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    collected, decoder = {}, None
    for seed, name in product(range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + seeds), tasks):
        path = folder / f"{name}-{seed}.npz"
        if not path.is_file():
            decoder = decoder or Decoder.from_pretrained(model, dtype="bfloat16")
            task = load_task(name)
            used = {row.text for row in task.queries(limit)}
            rest = replace(task, test=tuple(row for row in task.test if row.text not in used))
            queries, demonstrations = rest.queries(limit), task.sample(None, seed)
            llm, states = llm_scores(decoder, task, demonstrations, queries, seed)
            text = text_scores(task, demonstrations, queries, encoder)
            gold = [row.label for row in queries]
            np.savez_compressed(path, scores=np.stack([llm, *text]), states=states, gold=gold)
            accuracies = [f"{(one.argmax(1) == gold).mean():.3f}" for one in (llm, states)]
            print(f"{name}, seed {seed}: LLM {accuracies[0]}, hidden states {accuracies[1]}", flush=True)
        collected[name, seed] = {**np.load(path), "rivals": {}}
    return collected


def llm_scores(
    decoder: Decoder, task: Task, demonstrations: Sequence[Example], queries: Sequence[Example], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities of anchored calibration and of the expert on its hidden states."""
    method = make_injector("anchored")
    injection = method.fit_injection(decoder, task, demonstrations, seed)
    expert = with_states_expert(injection, decoder, PRIORS[0], demonstrations).head.states
    if expert is None:
        raise ValueError(f"{task.name}: a label has no demonstration")
    scores, states = injection.scores_and_states(decoder, [row.text for row in queries], expert.layer)
    llm, on_states = (one.double().log_softmax(-1).numpy() for one in (scores, expert.scores(states)))
    return llm, on_states


def evaluate(one: Scores, other_tasks: list[WeightPrior]) -> dict[str, Any]:
    """Return accuracies and calibration of members, products and the ensemble on one task and seed.

    ``other_tasks`` are the priors of `priors_of_other_tasks`.
    """
    scores, gold = one["scores"], one["gold"]
    pooled = {
        "ensemble": cross_fitted(scores, gold, PRIORS, folds=5),
        "typical weights": cross_fitted(scores, gold, PRIORS, folds=0),
        OTHER_TASKS: cross_fitted(scores, gold, other_tasks, folds=5),
        "product": log_softmax(scores[0] / TYPICAL_TEMPERATURE + scores[1]),
        "anchored": cross_fitted(scores[:1], gold, PRIORS[:1], folds=5),
        "embeddings": scores[1],
        "tfidf": scores[2],
    }
    if "states" in one:
        llm, embeddings, tfidf = zip(scores, PRIORS, strict=True)
        states = (one["states"], EXPERT_PRIORS["states"])
        pools = {
            STATES_TOO: (llm, states, embeddings, tfidf),
            STATES_INSTEAD: (llm, states, tfidf),
            NO_ENCODER: (llm, tfidf),
        }
        for name, members in pools.items():
            log_probs, priors = zip(*members, strict=True)
            pooled[name] = cross_fitted(np.stack(log_probs), gold, priors, folds=5)
        pooled["states"] = one["states"]
    if "lora" in one:
        pooled[LORA_INSTEAD] = cross_fitted(np.stack([one["lora"], *scores[1:]]), gold, PRIORS, folds=5)
        both = np.stack([*scores, one["lora"]])
        pooled[LORA_TOO] = cross_fitted(both, gold, [*PRIORS, PRIORS[0]], folds=5)
    record = {
        name: {"right": (log_probs.argmax(1) == gold).tolist()}
        | {key: vars(confidence(log_probs, gold, log_probs.argmax(1)))[key] for key in ("log_loss", "ece")}
        for name, log_probs in pooled.items()
    }
    record |= {name: {"right": right.tolist()} for name, right in one["rivals"].items()}
    record["weights"] = dict(zip(MEMBERS, likely_weights(scores, gold, PRIORS), strict=True))
    return record


def weak_evidence(one: Scores, rows: int) -> list[dict[str, float]]:
    """Return accuracies of the ensemble and its best member, with weights from random ``rows``."""
    scores, gold, draws = one["scores"], one["gold"], []
    for draw in range(DRAWS):
        order = np.random.default_rng(draw).permutation(len(gold))
        some, rest = order[:rows], order[rows:]
        weights = likely_weights(scores[:, some], gold[some], PRIORS)
        right = np.tensordot(weights, scores[:, rest], 1).argmax(1) == gold[rest]
        members = (scores[:, rest].argmax(2) == gold[rest]).mean(1)
        draws.append({"ensemble": float(right.mean()), "best": float(members.max())})
    return draws


def show(collected: dict[tuple[str, int], Scores], records: dict[str, dict[str, Any]]) -> None:
    """Print the mean of each method, and the difference of the ensemble from it."""
    tasks = sorted({task for task, _ in collected})
    seeds = sorted(set.intersection(*({seed for name, seed in collected if name == task} for task in tasks)))
    right = {
        method: [
            np.stack([records[f"{task} {seed}"][method]["right"] for seed in seeds])
            for task in tasks
            if all(method in records.get(f"{task} {seed}", {}) for seed in seeds)
        ]
        for method in (*METHODS, *RIVALS, *STATES, LORA_INSTEAD, LORA_TOO)
    }
    complete = {method: each for method, each in right.items() if len(each) == len(tasks)}
    differences = {
        method: difference(complete["ensemble"], each)
        for method, each in complete.items()
        if method != "ensemble"
    }
    if STATES_TOO in complete:
        compared = [difference(complete[method], complete[other]) for method, other in STATES_COMPARED]
        states_qs = holm([one.p for one in compared])
        for (method, other), one, q in zip(STATES_COMPARED, compared, states_qs, strict=True):
            interval = f"{100 * one.low:.1f} to {100 * one.high:.1f}"
            print(f"{method} minus {other}: {100 * one.mean:+.1f} ({interval}), q {q:.4f}")
    # the prior of other tasks is a check, not a method; hidden states are compared apart
    rivals = [method for method in differences if method not in {OTHER_TASKS, *STATES}]
    qs = dict(zip(rivals, holm([differences[method].p for method in rivals]), strict=True))
    for method, each in complete.items():
        means = {
            key: np.mean([records[key_of][method].get(key, np.nan) for key_of in records])
            for key in ("log_loss", "ece")
        }
        by_task = " ".join(f"{task} {100 * one.mean():.1f}" for task, one in zip(tasks, each, strict=True))
        mean = 100 * np.mean([one.mean() for one in each])
        print(f"{method}: {mean:.1f}, log-loss {means['log_loss']:.3f}, ECE {means['ece']:.3f} ({by_task})")
        if method in differences:
            one = differences[method]
            interval = f"{100 * one.low:.1f} to {100 * one.high:.1f}"
            tested = f", q {qs[method]:.4f}" if method in qs else ""
            print(f"  ensemble {100 * one.mean:+.1f} ({interval}){tested}")


def main() -> None:
    """Print means over tasks and seeds, and write all figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", help="a store, or fresh")
    parser.add_argument("model", nargs="?", help="of fresh")
    parser.add_argument("--tasks", default=FRESH_TASKS, help="of fresh")
    parser.add_argument("--seeds", type=int, default=4, help="of fresh")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--encoder", default=MINILM, help="minilm, or a folder of sentence-transformers")
    parser.add_argument("--scores", type=Path, required=True, help="one folder per store and encoder")
    parser.add_argument("--weak", default="mr,subj,tickets,trec", help="tasks of the draws with few rows")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    rest = (given.limit, given.scores, given.encoder)
    if given.store == "fresh":
        collected = collect_fresh(given.model, given.tasks.split(","), given.seeds, *rest)
    else:
        collected = collect(Store.open(Path(given.store)), *rest)
    tasks = {task for task, _ in collected}
    priors = {task: priors_of_other_tasks(collected, task) for task in sorted(tasks)}
    records = {f"{task} {seed}": evaluate(one, priors[task]) for (task, seed), one in collected.items()}
    first = min(seed for _, seed in collected)
    weak = {
        f"{task} {rows}": weak_evidence(collected[task, first], rows)
        for task in given.weak.split(",")
        for rows in FEW_ROWS
        if rows < len(collected[task, first]["gold"])
    }
    weights = {key: record["weights"] for key, record in records.items()}
    given.output.write_text(json.dumps({"weights": weights, "weak": weak}) + "\n", encoding="utf-8")
    show(collected, records)
    for key, draws in weak.items():
        behind = np.mean([one["best"] - one["ensemble"] > BEHIND for one in draws])
        print(f"{key} rows: {behind:.0%} of draws more than {100 * BEHIND:.0f} points behind the best member")


if __name__ == "__main__":
    main()
