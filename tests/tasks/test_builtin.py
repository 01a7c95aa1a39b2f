from collections import Counter
from pathlib import Path

import pytest

from i2cl.tasks import PAPER_TASKS, load_task
from i2cl.tasks.loaders import builtin_spec

DATA = Path(__file__).parents[3] / "shared" / "data"

# Paper, appendix "Prompting Templates": title, text prefix, label prefix, label space.
DBPEDIA = "company / school / artist / athlete / politics / transportation / building / nature / village"
DBPEDIA += " / animal / plant / album / film / book"
TREC = "Abbreviation / Entity / Description / Person / Location / Number"
TABLE = {
    "sst2": ("SST-2", "Review", "Sentiment", "negative / positive"),
    "sst5": ("SST-5", "Sentence", "Sentiment", "terrible / negative / neutral / positive / great"),
    "mr": ("MR", "Review", "Sentiment", "negative / positive"),
    "subj": ("Subj", "Sentence", "Label", "objective / subjective"),
    "dbpedia": ("DBPedia", "Input", "Label", DBPEDIA),
    "agnews": ("AGNews", "News", "Type", "World / Sports / Business / Technology"),
    # The paper's table omits Description, which the data contains.
    "trec": ("TREC", "Question", "Answer Type", TREC),
    "hate_speech18": ("HateSpeech18", "Text", "Label", "neutral / hate"),
    "emoc": ("EmoC", "Dialogue", "Emotion", "others / happy / sad / angry"),
}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_builtin_tasks_match_the_table_in_the_paper(name):
    assert sorted(PAPER_TASKS) == sorted(TABLE)
    title, text_prefix, label_prefix, label_space = TABLE[name]
    spec = builtin_spec(name)
    task = spec.to_task()
    assert (task.name, task.title) == (name, title)
    assert task.labels == tuple(label_space.split(" / "))
    assert task.template.exchange("A", "B") == f"{text_prefix}: A\n{label_prefix}: B\n"
    assert task.shots == (1 if name == "dbpedia" else 5)
    assert task.description
    assert (spec.hub is None, spec.files) == (False, None)
    if name in {"trec", "emoc", "hate_speech18"}:  # published as scripts, so read from the Parquet copy
        assert spec.hub.revision == "refs/convert/parquet"


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the data of the nine tasks")
@pytest.mark.parametrize("name", sorted(TABLE))
def test_paper_data_loads_and_samples_balanced(name):
    task = load_task(name, data_dir=DATA)
    assert task.group == "paper"
    classes = len(task.labels)
    assert {e.label for e in task.train} == {e.label for e in task.test} == set(range(classes))
    assert {e.text for e in task.train}.isdisjoint({e.text for e in task.test})

    demonstrations = task.sample(seed=1)
    assert Counter(e.label for e in demonstrations) == dict.fromkeys(range(classes), task.shots)
    limit = min(500, len(task.test))
    spread = Counter(e.label for e in task.queries(limit, seed=1))
    assert spread.total() == limit
    available = Counter(e.label for e in task.test)
    largest = max(spread.values())
    assert all(count >= min(available[label], largest - 1) for label, count in spread.items())
    held_out = task.held_out(32, demonstrations, seed=1)
    assert {e.text for e in held_out}.isdisjoint({e.text for e in demonstrations})
