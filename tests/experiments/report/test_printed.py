import math

import pydantic
import pytest

from experiments.report.synthetic import LLAMA, cells, grid, llama, noted, section, table, texts, trial
from fitting import raises
from i2cl.experiments.library import load_experiment
from i2cl.experiments.report.printed import PrintedRow, PrintedTable, printed_for, printed_tables
from i2cl.tasks.generated import SYNTHETIC
from i2cl.tasks.loaders import PAPER_TASKS

LLAMA3 = "meta-llama/Meta-Llama-3-8B"
GPTJ = "EleutherAI/gpt-j-6b"
GPT2 = "openai-community/gpt2-xl"
TABLES = printed_tables()


def test_tables_are_those_of_the_paper_in_its_order():
    result = [(int(t.paper.split(":")[0].removeprefix("Table ")), t.name) for t in TABLES]
    ablations = [f"ablation-{name}" for name in ("module", "layer", "position", "noise", "formula")]
    names = ["main", "peft", "transfer", *ablations, "main", "main", "main", "synthetic", "over-icl"]
    assert result == list(zip([*range(1, 9), *range(11, 16)], names, strict=True))
    others = {11: "GPT-J-6B", 12: "GPT2-XL", 13: "Llama3-8B"}
    assert [t.model for t in TABLES] == [others.get(number, "Llama2-7b") for number, _ in result]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.name}-{table.model}")
def test_every_table_is_whole(table):
    assert "I2CL" in table.rows
    assert set(table.tasks) <= {*PAPER_TASKS, SYNTHETIC}
    assert len(set(table.tasks)) == len(table.tasks)
    for name, printed in table.rows.items():
        assert len(printed.mean) == len(table.tasks)
        assert all(math.isfinite(number) and 0 < number < 100 for number in printed.mean)
        # only methods without demonstrations have no standard deviation
        assert (printed.sd is None) == (name == "Zero-shot" or not table.tasks)
        assert printed.sd is None or len(printed.sd) == len(table.tasks)
        assert all(0 < number < 17 for number in printed.sd or ())
        assert (printed.trainable_thousands is None) == (table.name != "peft")
        assert (printed.cached is None) == ((table.name, table.model) != ("main", "Llama2-7b"))


def test_printed_costs_and_tasks():
    peft = printed_for("peft", LLAMA).rows.values()
    assert [result.trainable_thousands for result in peft] == [4.10, 4194.30, 262.14, 0.13]
    main = printed_for("main", LLAMA).rows.values()
    compressed = "2(M/K)DL"
    expected = ["0", "2MDL", "2DL", compressed, "D", "DL", "2DL", compressed, compressed, compressed]
    assert [result.cached for result in main] == expected
    assert set(printed_for("main", LLAMA).tasks) == set(PAPER_TASKS)
    assert set(PAPER_TASKS) - set(printed_for("main", GPT2).tasks) == {"agnews", "dbpedia"}
    assert set(PAPER_TASKS) - set(printed_for("over-icl", LLAMA).tasks) == {"agnews"}


@pytest.mark.parametrize("name", ["peft", "over-icl", "transfer"])
@pytest.mark.parametrize("called", ["I2CL", "Few-shot (ICL)"])
def test_rows_in_two_printed_tables_agree(name, called):
    main, table = printed_for("main", LLAMA), printed_for(name, LLAMA)
    for place, task in enumerate(table.tasks if called in table.rows else ()):
        first, again = main.tasks.index(task), table.rows[called]
        assert again.mean[place] == main.rows[called].mean[first]
        if (name, task) == ("transfer", "mr"):
            # the paper prints the deviation of SST-2, which has the same mean
            assert (again.sd[place], main.rows[called].sd[first]) == (2.47, 2.26)
        else:
            assert again.sd[place] == main.rows[called].sd[first]


def test_four_printed_averages_are_not_the_mean_of_their_row():
    """The four are listed in docs/reference/fidelity.md; all others are exact to the last digit."""
    rows = [(t, name, row) for t in TABLES for name, row in t.rows.items() if row.mean and row.average]
    means = [(t.name, t.model, name, row.average, sum(row.mean) / len(row.mean)) for t, name, row in rows]
    wrong = [(*what, shown, round(mean, 2)) for *what, shown, mean in means if abs(shown - mean) > 0.0051]
    assert wrong == [
        ("main", "Llama2-7b", "AutoComp.", 63.94, 65.05),
        ("peft", "Llama2-7b", "Prompt-tuning", 54.94, 53.83),
        ("main", "Llama3-8B", "Few-shot (ICL)", 81.26, 72.23),
        ("main", "Llama3-8B", "I2CL", 81.18, 72.17),
    ]


LLAMAS = [LLAMA, "NousResearch/Llama-2-7b-hf", "/data/models/Llama-2-7b-hf", "../Llama-2-7b-hf/"]
LLAMAS += ["C:\\models\\llama-2-7b-hf\\"]
FOUND = {"Llama2-7b": LLAMAS, "GPT-J-6B": [GPTJ, "EleutherAI/gpt-j-6B"], "GPT2-XL": [GPT2, "gpt2-xl"]}
FOUND["Llama3-8B"] = [LLAMA3]
OTHER = """reference gpt2 xl my-gpt2-xl gpt2-xl/checkpoint-1 meta-llama/Llama-2-7b-chat-hf
meta-llama/Llama-2-13b-hf meta-llama/Meta-Llama-3-8B-Instruct meta-llama/Llama-3.1-8B /"""


FOUND[None] = ["", *OTHER.split()]


@pytest.mark.parametrize(("model", "expected"), [(one, name) for name in FOUND for one in FOUND[name]])
def test_printed_table_is_found_by_last_part_of_model_name(model, expected):
    assert getattr(printed_for("main", model), "model", None) == expected


COMPRESSORS = [
    ("princeton-nlp/AutoCompressor-Llama-2-7b-6k", "AutoComp.", "92.44 ± 3.29", "63.94"),
    ("models/Llama-2-7b-chat-icae", "ICAE", "91.64 ± 1.69", "64.83"),
    ("hyen/CEPE-LLaMA-2-7B", "CEPE", "74.28 ± 3.90", "64.08"),
]


@pytest.mark.parametrize(("model", "row", "sst2", "average"), COMPRESSORS)
def test_compressor_models_get_only_their_printed_row(model, row, sst2, average):
    whole, alone = printed_for("main", LLAMA), printed_for("main", model)
    assert dict(alone.rows) == {row: whole.rows[row]}
    assert (alone.paper, alone.tasks) == (whole.paper, whole.tasks)
    assert printed_for("peft", model) is None
    asked = load_experiment("main")
    method = next(one.method for one in asked.rows if one.name == row)
    tasks = whole.tasks
    made = [one for name in (method, "i2cl") for one in llama(name, model, [0.72] * len(tasks), tasks)]
    result = table("tasks", asked, made)
    assert [one[0].text for one in result.rows] == [row, f"{row} (paper)", "I2CL"]
    printed = cells(result)[f"{row} (paper)"]
    assert (printed["sst2"].text, printed["Average"].text) == (sst2, average)
    assert "Table 1" in noted(result, "(paper)")


def test_printed_tables_are_validated_and_frozen():
    models = [table.model for table in printed_tables("main")]
    assert models == ["Llama2-7b", "GPT-J-6B", "GPT2-XL", "Llama3-8B"]
    assert (printed_for("peft", LLAMA) is None, printed_for("peft", GPT2)) == (False, None)
    for ask in (lambda: printed_tables("mian"), lambda: printed_for("mian", LLAMA)):
        raises("no table 'mian': use one of main, peft, transfer", ask)
    common = {"name": "mine", "paper": "Table 0: mine", "model": "mine", "tasks": ("sst2", "mr")}
    for wrong in ({"mean": [1.0]}, {"mean": [1.0, 2.0], "sd": [0.5]}, {"average": 3.0}):
        with pytest.raises(pydantic.ValidationError, match="row 'I2CL': give one number for each"):
            PrintedTable.model_validate({**common, "rows": {"I2CL": wrong}})
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        printed_for("main", LLAMA).rows["I2CL"].average = 99.0


def test_printed_rows_are_below_measured_rows():
    result = table("tasks", grid(["I2CL"], printed="main"), llama(tasks=("trec", "sst2")))
    assert [row[0].text for row in result.rows] == ["I2CL", "I2CL (paper)"]
    printed = cells(result)["I2CL (paper)"]
    shown = {name: cell.text for name, cell in printed.items()}
    assert shown == {"Average": "75.12", "sst2": "87.68 ± 2.47", "trec": "78.56 ± 5.32"}
    assert all(cell.printed for cell in printed.values())
    assert printed["sst2"].mark == "‡"
    assert "outside our 95 % interval" in noted(result, "‡")
    assert "as printed in Table 1" in noted(result, "(paper)")
    assert "2 tasks here and 9 in the paper" in noted(result, "so they are not compared")
    assert printed["Average"].mark == ""  # other tasks: nothing to compare
    assert noted(result, "without results here").endswith("Task-vector, ICV and 3 more.")
    result = table("tasks", grid(["I2CL"], printed="main"), llama(tasks=("sst2", "mine")))
    assert cells(result)["I2CL (paper)"]["mine"].text == ""


@pytest.mark.parametrize("view", ["tasks", "average", "cost"])
@pytest.mark.parametrize(("model", "name"), [("reference", "main"), (LLAMA, None), (LLAMA3, "peft")])
def test_no_printed_rows_for_other_models_and_experiments(view, model, name):
    result = table(view, grid(["I2CL"], printed=name), llama(model=model))
    assert "(paper)" not in str((result.columns, result.rows, result.notes))


def test_printed_averages_are_compared_over_all_nine_tasks_only():
    asked = grid(["I2CL"], printed="ablation-module", views=("average",))
    tasks = printed_for("main", LLAMA).tasks
    for made, mark in ((llama(shares=[0.5] * 9, tasks=tasks), "‡"), (llama(), "")):
        last = table("average", asked, made).rows[0][-1]
        assert (last.text, last.mark) == ("75.12", mark)


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [("peft", "Trained, thousands (paper)", "0.13"), ("main", "Stored values (paper)", "2DL")],
)
def test_printed_costs(name, column, message):
    assert cells(table("cost", grid(["I2CL"], printed=name), llama()))["I2CL"][column].text == message


def test_printed_table_without_averages(monkeypatch):
    rows = {"I2CL": PrintedRow(mean=(12.5,))}
    mine = PrintedTable(name="x", paper="Table 9: mine", model="m", tasks=("sst2",), rows=rows)
    assert "no table 'x'" in section(grid(printed="x"), trial()).missing[0]
    monkeypatch.setattr("i2cl.experiments.report.document.printed_for", lambda *_: mine)
    result = table("tasks", grid(["I2CL"], printed="x"), trial())
    assert texts(result)["I2CL (paper)"] == ["", "12.50", ""]
    assert not any("are not compared" in note for note in result.notes)  # no average is printed
