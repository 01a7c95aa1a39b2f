import pytest

from fitting import raises
from i2cl.tasks.schema import parse_spec, read_spec

HEAD = 'name = "mood"\nlabels = ["bad", "good"]\ntemplate = "{text}: {label}"\n'
FILES = '[files]\ntrain = "a.csv"\n'
HUB = '[hub]\ndataset = "some/where"\ntest = "test"\n'


def test_user_task_is_parsed():
    spec = parse_spec((HEAD + 'separator = " | "\nshots = 3\n' + FILES).encode(), "mine.toml")
    task = spec.to_task()
    assert (task.name, task.title, task.group, task.shots) == ("mood", "mood", "user", 3)
    assert task.labels == ("bad", "good")
    assert task.template.exchange("x", "good") == "x: good | "
    assert spec.files is not None
    assert (spec.files.text, spec.files.label, spec.files.test) == ("text", "label", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEAD + "shot = 3\n" + FILES, "unknown field 'shot': did you mean 'shots'?"),
        (HEAD + "colour = 3\n" + FILES, "unknown field 'colour': remove it or use one of name, labels"),
        (HEAD + FILES + 'tset = "b.csv"\n', "unknown field 'files.tset': did you mean 'text' or 'test'?"),
        (HEAD.replace('name = "mood"\n', "") + FILES, "name: Field required"),
        (HEAD + "[files]\n", "files.train: Field required"),
        (HEAD + 'shots = "5"\n' + FILES, "shots='5': Input should be a valid integer"),
        (HEAD + "shots = 0\n" + FILES, "0 shots per class"),
        (HEAD.replace('"good"', "1") + FILES, "labels.1=1: Input should be a valid string"),
        (HEAD.replace('"good"', '"bad"') + FILES, "'bad' is given twice"),
        (HEAD.replace(": {label}", "") + FILES, "it needs {text}, then some text"),
        (HEAD, "give exactly one of the tables [hub] and [files]"),
        (HEAD + FILES + HUB, "give exactly one of the tables [hub] and [files]"),
        (HEAD + '[hub]\ndataset = "some/where"\n', "hub: give either test"),
        ("hub = 3\n" + HEAD, "hub=3: Input should be"),
        (HEAD + HUB + "test_fraction = 0.2\n", "give either test"),
        (
            HEAD + '[hub]\ndataset = "x"\ntest_fraction = 1.5\n',
            "test_fraction=1.5: Input should be less",
        ),
        (HEAD + HUB + "keep_labels = [0, 1, 2]\n", "keep_labels must contain 2 different ids"),
        (HEAD + HUB + "keep_labels = [1, 1]\n", "keep_labels must contain 2 different ids"),
        ("name = \n", "is not valid TOML"),
        pytest.param("name = " + "[" * 5000 + "]" * 5000, "is not valid TOML", id="lists in lists"),
        pytest.param("name = " + "{a=" * 5000 + "1" + "}" * 5000, "is not valid TOML", id="tables in tables"),
        pytest.param("name = " + "9" * 5000, "is not valid TOML", id="a number of 5000 digits"),
    ],
)
def test_invalid_toml_names_file_and_field(content, message):
    assert message in raises("^mine.toml", parse_spec, content.encode(), "mine.toml")


def test_unreadable_toml_is_refused(tmp_path):
    raises("does not exist", read_spec, tmp_path / "none.toml")
    latin = tmp_path / "latin.toml"
    latin.write_bytes('name = "café"'.encode("latin-1"))
    raises("is not UTF-8", read_spec, latin)
