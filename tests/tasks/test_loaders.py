import json

import pytest

from fitting import raises
from i2cl.tasks import Example, Template, list_tasks, load_task
from i2cl.tasks.loaders import BUNDLED_TASKS

CSV = "text,label\nx,ham\ny,spam\n"
TEMPLATE = "Mail: {text}\nKind: {label}"


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch):
    monkeypatch.delenv("I2CL_DATA_DIR", raising=False)


@pytest.fixture
def mails(tmp_path):
    path = tmp_path / "mails.csv"
    path.write_text(CSV)
    return path


def failure(*args, **kwargs):
    return raises("", load_task, *args, **kwargs)


def test_file_of_rows_becomes_a_task(mails, tmp_path):
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps({"text": "z", "label": 1}))
    task = load_task(mails, template=TEMPLATE, test_path=test)
    assert (task.name, task.group, task.labels) == ("mails", "user", ("ham", "spam"))
    assert task.template == Template(TEMPLATE)
    assert task.train == (Example("x", 0), Example("y", 1))
    assert task.test == (Example("z", 1),)
    assert load_task(str(mails), template=Template(TEMPLATE), labels=["spam", "ham"]).train[0].label == 1
    path = tmp_path / "a.tsv"
    path.write_text("body\tkind\nx\tham\ny\tspam\n")
    task = load_task(path, template=TEMPLATE, text_column="body", label_column="kind")
    assert [e.text for e in task.train] == ["x", "y"]


def test_first_id_is_taken_from_the_training_file(tmp_path, monkeypatch):
    monkeypatch.setenv("I2CL_DATA_DIR", str(tmp_path))
    (tmp_path / "sst2").mkdir()
    for split, ids in (("train", (1, 2)), ("test", (1,))):
        lines = [json.dumps({"text": f"film {at}", "label": at}) + "\n" for at in ids]
        (tmp_path / "sst2" / f"{split}.jsonl").write_text("".join(lines))
    task = load_task("sst2")
    assert [one.label for one in (*task.train, *task.test)] == [0, 1, 0]


def test_invalid_arguments_for_a_file_of_rows_are_refused(mails, tmp_path):
    assert "needs a template" in failure(mails)
    assert "it needs {text}, then some text, then {label}" in failure(mails, template="{text}")
    assert "is the string 'ham,spam'" in failure(mails, template=TEMPLATE, labels="ham,spam")
    assert "none.csv does not exist" in failure(tmp_path / "none.csv", template=TEMPLATE)
    assert "none.jsonl does not exist" in failure(mails, template=TEMPLATE, test_path=tmp_path / "none.jsonl")
    assert "leave test_path (--test) out" in failure("synthetic", test_path=mails)
    assert "leave them out" in failure("synthetic", text_column="body")
    mails.rename(tmp_path / "rows.txt")
    value = failure(tmp_path / "rows.txt")
    assert "cannot read files ending in '.txt': use one of .toml, .csv" in value


def test_task_toml_reads_files_relative_to_it(mails, tmp_path):
    toml = tmp_path / "mine.toml"
    toml.write_text(
        f'name = "kind"\nlabels = ["spam", "ham"]\ntemplate = {json.dumps(TEMPLATE)}\nshots = 1\n'
        '[files]\ntrain = "mails.csv"\ntest = "mails.csv"\n'
    )
    task = load_task(toml)
    assert (task.name, task.group, task.shots) == ("kind", "user", 1)
    assert task.train == task.test == (Example("x", 1), Example("y", 0))
    assert "leave test_path (--test) out" in failure(toml, test_path=mails)
    toml.write_text(toml.read_text().replace('test = "mails.csv"', ""))
    assert load_task(toml).test == ()
    assert load_task(toml, test_path=mails).test == task.test
    assert "leave them out" in failure(toml, label_column="kind")
    mails.unlink()
    assert "mails.csv does not exist" in failure(toml)


def write_sst2(folder, train='{"text": "fine", "label": 1}\n', test='{"text": "poor", "label": 0}\n'):
    (folder / "sst2").mkdir(exist_ok=True)
    (folder / "sst2" / "train.jsonl").write_text(train)
    (folder / "sst2" / "test.jsonl").write_text(test)


def test_paper_task_is_read_from_a_data_folder(tmp_path, monkeypatch):
    write_sst2(tmp_path)
    task = load_task("sst2", data_dir=tmp_path)
    assert (task.train, task.test) == ((Example("fine", 1),), (Example("poor", 0),))
    assert (task.title, task.group) == ("SST-2", "paper")
    monkeypatch.setenv("I2CL_DATA_DIR", str(tmp_path))
    assert load_task("sst2") == task
    task = load_task("sst2", data_dir=tmp_path, template=Template.plain(), labels=["no", "yes"])
    assert (task.template, task.labels) == (Template.plain(), ("no", "yes"))
    assert task.train == (Example("fine", 1),)
    value = failure("sst2", data_dir=tmp_path, labels=["a", "b", "c"])
    assert "has 2 classes (negative, positive), not 3" in value


def test_incomplete_data_folder_is_refused(tmp_path):
    assert "data folder" in failure("sst2", data_dir=tmp_path / "none")
    assert "train.jsonl does not exist" in failure("sst2", data_dir=tmp_path)
    write_sst2(tmp_path)
    (tmp_path / "sst2" / "test.jsonl").unlink()
    assert "test.jsonl does not exist" in failure("sst2", data_dir=tmp_path)
    write_sst2(tmp_path, train='{"text": "fine", "label": 2}')
    expected = "train.jsonl line 1: label 2 is not one of negative, positive"
    assert expected in failure("sst2", data_dir=tmp_path)
    write_sst2(tmp_path, train='{"text": " ", "label": 1}')
    assert "the text is empty" in failure("sst2", data_dir=tmp_path)


def test_list_tasks_has_every_group_without_rows():
    task = load_task("mood-colour-1")
    assert (task.name, task.group, len(task.labels)) == ("mood-colour-1", "reference", 4)
    assert min(len(task.train), len(task.test)) > 0
    assert load_task("mood-colour-1", labels=list("abcd")).labels == ("a", "b", "c", "d")
    tasks = list_tasks()
    count = len(BUNDLED_TASKS)
    groups = ["paper"] * 9 + ["benchmark"] * 2 + ["bundled"] * count + ["synthetic"] + ["reference"] * 16
    assert [task.group for task in tasks] == groups
    assert len({task.name for task in tasks}) == len(tasks)
    assert all(task.train == task.test == () for task in tasks)
    assert all(task.title and task.description for task in tasks[: 11 + count])


@pytest.mark.parametrize(
    ("name", "close"), [("sst", "sst2"), ("AGNews", "agnews"), ("mood-color", "mood-colour")]
)
def test_unknown_names_get_close_matches(name, close):
    message = failure(name)
    for part in (f"unknown task {name!r}: did you mean", close, "i2cl ls tasks"):
        assert part in message
    assert failure("qqqq.qqqq").startswith("unknown task 'qqqq.qqqq' and no such file: 'i2cl ls tasks'")
    assert failure("qqqqqqqq") == "unknown task 'qqqqqqqq': 'i2cl ls tasks' lists them all"
