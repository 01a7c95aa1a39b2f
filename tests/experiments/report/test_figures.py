"""Figures of small synthetic results show the computed numbers."""

from dataclasses import replace
from itertools import combinations

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from experiments.report.synthetic import changed, message
from i2cl.experiments.confidence import highest, reliability
from i2cl.experiments.grid import Cell, Experiment, GridRow, Scale
from i2cl.experiments.records import Scores
from i2cl.experiments.report import figures
from i2cl.experiments.report.figures import FIGURES, save
from i2cl.experiments.report.results import results_of
from i2cl.injections.temperature import best_temperature, log_softmax

TASKS = ("films", "news", "plots")
ZERO = GridRow(name="Zero-shot", method="zero_shot", seeds=1)
ICL = GridRow(name="Few-shot (ICL)", method="few_shot")
I2CL = GridRow(name="I2CL")
MOVED = GridRow(name="Moved", study="move")
COST = {"zero_shot": (4.0, 0), "few_shot": (20.0, 2_000_000), "i2cl": (5.0, 3000)}


def share(cell):
    """A number of correct queries out of 100 that is different for every cell."""
    task = TASKS.index(cell.task) if cell.task in TASKS else 0
    source = TASKS.index(cell.sources[0]) if cell.sources and cell.sources[0] in TASKS else 0
    method = [*COST].index(cell.method) % 3
    return 20 + 20 * method + 5 * task + (cell.seed**2) + 7 * source + (cell.shots or 0)


def answered(right):
    """A run with this many of 100 queries correct."""
    return (1,) * right + (0,) * (100 - right)


def record(cell, labels=("a", "b"), layers=4, sublayers=2):
    right = share(cell)
    milliseconds, size = COST[cell.method]
    made = np.random.default_rng([cell.seed, len(cell.task)])
    coefficients = made.random((layers, sublayers, 2)).tolist() if cell.method == "i2cl" else None
    outcome = {"accuracy": right / 100, "macro_f1": 0.5, "gold": (1,) * 100, "predictions": answered(right)}
    outcome |= {"labels": labels, "demonstrations": (0,), "coefficients": coefficients}
    outcome |= {"fit_seconds": 1, "predict_seconds": milliseconds / 10, "trainable_parameters": 0}
    outcome |= {"cached_values": 0, "cached_bytes": size, "held_out": 0}
    return message(cell, status="done", outcome=outcome)


def results(*rows, tasks=TASKS, seeds=3, keep=lambda cell: True, **made):
    experiment = Experiment(name="trial", title="Trial", measures="Things.", tasks=tasks, rows=rows)
    cells = experiment.cells(Cell(model="m", task=tasks[0]), tasks, Scale(seeds=seeds))
    return results_of(experiment, [record(cell, **made) for cell in cells if keep(cell)])[0]


def vectors_of(result, classes=2, d=3):
    """Vectors that are far apart for tasks and classes, and close for seeds."""
    made = {}
    for one in result.cells:
        rng = np.random.default_rng([one.cell.seed, 7])
        middle = 10 * result.tasks.index(one.cell.task) + np.arange(classes)[:, None, None, None]
        parts = {"context_vector": (4, 2, d), "coefficients": (4, 2, 2), "class_vectors": (classes, 4, 2, d)}
        made[one.key] = {name: rng.random(shape) for name, shape in parts.items()}
        made[one.key]["context_vector"] += middle[0]
        made[one.key]["class_vectors"] += 3.0 * middle
    return made


def drawn(view, result, vectors=None):
    figure = FIGURES[view](result, vectors or {})
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    return figure


def texts(axes):
    return [text.get_text() for text in axes.texts]


def legend_of(holder):
    legend = holder.get_legend() if hasattr(holder, "get_legend") else holder.legends[0]
    return [text.get_text() for text in legend.get_texts()]


def points_of(axes):
    """Curves of data, without the lines from points to labels."""
    return [line for line in axes.lines if line.get_marker() == "o"]


def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


EVERYTHING = {"shots": (ZERO, GridRow(name="I2CL", shots=(1, 5))), "matrix": (ZERO, MOVED)}
EVERYTHING |= dict.fromkeys(("reliability", "risk-coverage"), (ZERO, I2CL))
EVERYTHING |= dict.fromkeys(("efficiency", "bars"), (ZERO, ICL, I2CL))
EVERYTHING |= dict.fromkeys(("vectors", "coefficient-map", "class-vectors", "coefficients"), (I2CL,))


@pytest.mark.parametrize("view", EVERYTHING)
def test_no_figure_without_results(view):
    assert set(FIGURES) == set(EVERYTHING)
    assert FIGURES[view](replace(results(*EVERYTHING[view]), tasks=(), cells=()), {}) is None


@pytest.mark.parametrize("view", ["efficiency", "matrix", "coefficient-map"])
def test_figure_files_are_deterministic(view, tmp_path):
    result = results(*EVERYTHING[view])
    vectors = vectors_of(result)
    before = dict(mpl.rcParams)
    images = [drawn(view, result, vectors)]
    with mpl.rc_context({"font.size": 20, "svg.fonttype": "path", "savefig.bbox": "tight"}):
        images.append(drawn(view, result, vectors))
        paths = [save(figure, tmp_path / str(n) / "some.figure") for n, figure in enumerate(images)]
    assert [path.name for path in paths[0]] == ["some.figure.png", "some.figure.svg"]
    assert [path.read_bytes() for path in paths[0]] == [path.read_bytes() for path in paths[1]]
    svg = paths[0][1].read_text()
    assert "<text" in svg
    assert "<dc:date>" not in svg
    assert images[0].axes == []
    assert dict(mpl.rcParams) == before


def test_bars_show_means_and_standard_deviations():
    (axes,) = drawn("bars", results(ZERO, ICL, I2CL)).axes
    assert ticks(axes.yaxis) == ["Zero-shot", "Few-shot (ICL)", "I2CL"]
    spread = np.std([0, 1, 4], ddof=1)
    means = [25, 40 + 5 + 5 / 3, 60 + 5 + 5 / 3]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(means)
    assert texts(axes) == ["25.0", f"46.7 ± {spread:.1f}", f"66.7 ± {spread:.1f}"]
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == ["#0072b2", "#0072b2", "#d55e00"]
    (whiskers,) = axes.collections
    assert [line[1, 0] - line[0, 0] for line in whiskers.get_segments()] == pytest.approx([2 * spread] * 2)
    assert axes.get_xlabel() == "mean accuracy over 3 tasks (%)"


def test_bars_of_incomplete_rows():
    gone = results(ICL, I2CL, MOVED, keep=lambda cell: cell.method == "i2cl" or cell.task != "news")
    (axes,) = drawn("bars", gone).axes
    assert ticks(axes.yaxis) == ["Few-shot (ICL) (2 of 3 tasks)", "I2CL"]
    assert axes.patches[0].get_width() == pytest.approx(40 + 5 + 5 / 3)  # tasks at 0 and 10, seeds at 0, 1, 4
    short = results(I2CL, keep=lambda cell: (cell.task, cell.seed) != ("news", 2))
    (axes,) = drawn("bars", short).axes  # only seeds that all tasks have
    assert axes.patches[0].get_width() == pytest.approx(60 + 5 + 0.5)
    assert FIGURES["bars"](results(I2CL, keep=lambda cell: cell.seed == TASKS.index(cell.task)), {}) is None
    result = results(ZERO.model_copy(update={"seeds": None}))  # seeds of another experiment in the same store
    limited = replace(result, experiment=result.experiment.model_copy(update={"rows": (ZERO,)}))
    (axes,) = drawn("bars", limited).axes
    assert texts(axes) == ["25.0"]
    (axes,) = drawn("bars", results(GridRow(name="I2CL", shots=(1, 5)), tasks=("films",))).axes
    assert ticks(axes.yaxis) == ["I2CL, 1 per class", "I2CL, 5 per class"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([61 + 5 / 3, 65 + 5 / 3])
    assert axes.get_xlabel() == "accuracy on films (%)"


def test_shots_are_curves_with_bands():
    rows = ZERO, ICL.model_copy(update={"shots": (1, 5, 10)}), I2CL.model_copy(update={"shots": (1, 5, 20)})
    figure = drawn("shots", results(*rows))
    (axes,) = figure.axes
    flat, icl, ours = axes.lines
    assert list(icl.get_xdata()) == [1, 5, 10]
    assert icl.get_ydata() == pytest.approx([one + 45 + 5 / 3 for one in (1, 5, 10)])
    assert ours.get_ydata() == pytest.approx([one + 65 + 5 / 3 for one in (1, 5, 20)])
    assert (set(flat.get_ydata()), flat.get_linestyle()) == ({25.0}, "--")
    spread = np.std([0, 1, 4], ddof=1)
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(55 + 5 / 3 + spread)
    assert band[:, 1].min() == pytest.approx(46 + 5 / 3 - spread)
    assert legend_of(figure) == ["Zero-shot", "Few-shot (ICL)", "I2CL"]
    assert ticks(axes.xaxis) == ["1", "5", "10", "20"]
    assert (axes.get_xscale(), axes.get_xlabel()) == ("log", "demonstrations per class")
    assert axes.get_ylabel() == "mean accuracy over 3 tasks (%)"


def test_points_of_a_curve_are_means_over_the_same_tasks():
    row = I2CL.model_copy(update={"shots": (1, 5, 30)})
    lacking = results(row, keep=lambda cell: cell.shots == 1 or (cell.shots, cell.task) == (5, "plots"))
    figure = drawn("shots", lacking)
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [1, 5]
    assert line.get_ydata() == pytest.approx([71 + 5 / 3, 75 + 5 / 3])
    assert legend_of(figure) == ["I2CL (1 of 3 tasks)"]
    assert FIGURES["shots"](results(ZERO, I2CL, GridRow(name="five", shots=(5,))), {}) is None
    row = I2CL.model_copy(update={"shots": (1, 5)})
    apart = results(row, keep=lambda cell: (cell.task, cell.shots) in {("films", 1), ("news", 5)})
    assert FIGURES["shots"](apart, {}) is None


def test_efficiency_labels_every_row_in_both_panels():
    time, memory = drawn("efficiency", results(ZERO, ICL, I2CL)).axes
    heights = [25, 45 + 5 / 3, 65 + 5 / 3]
    for axes, wanted in ((time, [4, 20, 5]), (memory, [0, 2_000_000, 3000])):
        assert [line.get_xdata()[0] for line in points_of(axes)] == pytest.approx(wanted)
        assert [line.get_ydata()[0] for line in points_of(axes)] == pytest.approx(heights)
        assert texts(axes) == ["Zero-shot", "Few-shot (ICL)", "I2CL"]
    assert (time.get_xscale(), memory.get_xscale()) == ("log", "symlog")
    assert (time.get_xlabel(), memory.get_xlabel()) == ("time per query (ms)", "memory stored for prediction")
    assert {"5", "10", "20"} <= set(ticks(time.xaxis))
    assert ticks(memory.xaxis) == ["0", "1 kB", "10 kB", "100 kB", "1 MB", "10 MB"]
    assert max(time.get_yticks()) <= 100


def test_point_labels_do_not_overlap():
    """Twelve methods close together."""
    rows = tuple(GridRow(name=f"A method of number {n}", options={"n": n}) for n in range(12))
    result = results(*rows, seeds=1, tasks=("films",))
    moved = (changed(one, predictions=answered(60 + 3 * at)) for at, one in enumerate(result.cells))
    for axes in drawn("efficiency", replace(result, cells=tuple(moved))).axes:
        extents = [text.get_window_extent() for text in axes.texts]
        assert len(extents) == 12
        assert not any(one.overlaps(other) for one, other in combinations(extents, 2))
        assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in extents)
        assert all(axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1 for box in extents)
        for line in (one for one in axes.lines if one.get_marker() != "o"):
            near, far = axes.transData.transform(line.get_xydata())
            way = near + np.linspace(0, 1, 20)[:, None] * (far - near)
            assert sum(any(box.contains(*at) for at in way[1:-1]) for box in extents) == 0


def test_matrix_shows_accuracy_minus_zero_shot():
    axes, bar = drawn("matrix", results(ZERO, MOVED)).axes
    (image,) = axes.images
    wanted = [[60 + 7 * s + 5 * t + 5 / 3 - (20 + 5 * t) for t in range(3)] for s in range(3)]
    assert np.array(image.get_array()) == pytest.approx(np.array(wanted))
    assert ticks(axes.xaxis) == ticks(axes.yaxis) == list(TASKS)
    assert texts(axes) == [f"{round(value):+d}" for row in wanted for value in row]
    assert image.norm.vmin == -image.norm.vmax == pytest.approx(-np.max(wanted))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("target task (tested on)", "source task (fitted on)")
    assert "minus zero-shot" in bar.get_ylabel()
    red, _, blue, _ = image.cmap(image.norm(40))
    assert red > blue


def test_matrix_annotations_and_missing_cells():
    result = results(ZERO, MOVED, seeds=1, keep=lambda one: one.sources != ("news",) or one.task != "films")
    worse = {("zero_shot", "films"): 0.6, ("zero_shot", "news"): 0.99}
    keys = [(one.cell.method, one.cell.task) for one in result.cells]
    pairs = zip(keys, result.cells, strict=True)
    records = [changed(one, accuracy=worse[key]) if key in worse else one for key, one in pairs]
    axes = drawn("matrix", replace(result, cells=tuple(records))).axes[0]
    values = np.ma.getmaskarray(axes.images[0].get_array())
    assert values.tolist() == [[False] * 3, [True, False, False], [False] * 3]
    assert texts(axes) == ["0", "−34", "+40", "−27", "+47", "+14", "−20", "+54"]
    assert FIGURES["matrix"](results(MOVED), {}) is None
    assert FIGURES["matrix"](results(ZERO, I2CL), {}) is None
    many = tuple(f"task-{number}" for number in range(17))
    axes = drawn("matrix", results(ZERO, MOVED, tasks=many, seeds=1)).axes[0]
    assert axes.images[0].get_array().shape == (17, 17)
    assert texts(axes) == []


@pytest.mark.parametrize("view", ["vectors", "coefficient-map"])
def test_maps_have_a_point_per_task_and_seed(view):
    result = results(ZERO, I2CL)
    figure = drawn(view, result, vectors_of(result))
    (axes,) = figure.axes
    assert [len(line.get_xdata()) for line in axes.lines] == [3, 3, 3]
    assert legend_of(figure) == list(TASKS)
    assert np.isfinite([line.get_xydata() for line in axes.lines]).all()
    many = tuple(f"task-{number}" for number in range(20))
    figure = drawn("vectors", (result := results(I2CL, tasks=many, seeds=1)), vectors_of(result))
    assert len({(line.get_color(), line.get_marker()) for line in figure.axes[0].lines}) == 20


def test_no_map_without_enough_distinct_points(monkeypatch):
    one, few = results(I2CL, tasks=("films",), seeds=6), results(I2CL, tasks=("films", "news"), seeds=2)
    many, other = results(I2CL), results(ICL)
    equal = {key: {"context_vector": np.ones((4, 2, 3))} for key in vectors_of(many)}
    for result, vectors in ((one, vectors_of(one)), (few, vectors_of(few)), (many, {}), (many, equal)):
        assert FIGURES["vectors"](result, vectors) is None
    assert FIGURES["class-vectors"](many, equal) is None
    assert FIGURES["vectors"](other, vectors_of(other)) is None


def test_class_vectors_have_a_panel_per_task(monkeypatch):
    result = results(I2CL, labels=("good", "$bad"))
    vectors = vectors_of(result)
    whole = dict(vectors)
    del vectors[result.cells[0].key]  # four points are too few for a map
    figure = drawn("class-vectors", result, vectors)
    assert [axes.get_title() for axes in figure.axes] == ["news", "plots"]
    for axes in figure.axes:
        assert [len(line.get_xdata()) for line in axes.lines] == [3, 3]
        assert legend_of(axes) == ["good", "$bad"]
    monkeypatch.setattr(figures, "MAX_LEGEND_CLASSES", 1)
    axes = drawn("class-vectors", result, whole).axes[0]
    assert (axes.get_legend(), axes.get_xlabel()) == (None, "2 classes")


def test_coefficients_are_means_over_seeds():
    result = results(I2CL)
    figure = drawn("coefficients", result)
    assert [axes.get_title() for axes in figure.axes] == list(TASKS)
    values = np.array([one.outcome.coefficients for one in result.reference_records("news")])
    lines = figure.axes[1].lines
    wanted = values.mean(0).reshape(4, 4).T  # attention's lambda and beta, the MLP's lambda and beta
    assert np.array([line.get_ydata() for line in lines]) == pytest.approx(wanted)
    assert list(lines[0].get_xdata()) == [0, 1, 2, 3]
    band = figure.axes[1].collections[3].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx((wanted[3] + values.std(0, ddof=1)[:, 1, 1]).max())
    symbols = [r"$\lambda^a$", r"$\beta^a$", r"$\lambda^m$", r"$\beta^m$"]
    assert [name.split(" ")[0] for name in legend_of(figure)] == symbols
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("layer", "coefficient")
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


def test_coefficients_of_one_module_and_task_names_with_dollars(tmp_path):
    (axes,) = drawn("coefficients", results(I2CL, tasks=("films",), seeds=1, sublayers=1)).axes
    assert len(axes.lines) == 2
    assert not axes.collections
    result = results(I2CL, tasks=("cost_in_$", "price_in_$"))
    svg = save(drawn("coefficients", result), tmp_path / "figure")[1].read_text()
    assert "λ" in svg
    assert ">cost_in_$<" in svg


def scored(result, row=None):
    """Add scores that are confident in the predicted label, and less so for later queries."""
    each = np.linspace(9, 3, 100)

    def kept(one):
        if row is not None and not row.holds(one.cell):
            return one
        side = np.where(np.array(one.outcome.predictions) == 1, 1, -1) * each
        return changed(one, scores=Scores.of(np.stack([-side, side], 1)))

    return replace(result, cells=tuple(map(kept, result.cells)))


def test_reliability_at_both_temperatures():
    result = scored(results(ZERO, I2CL))
    figure = drawn("reliability", result)
    assert [axes.get_title() for axes in figure.axes] == [
        "as predicted",
        "at the best temperature of each task",
    ]
    tasks = [[one.outcome for one in result.reference_records(task)] for task in TASKS]
    arrays = [np.concatenate([run.scores.array for run in runs]) for runs in tasks]
    gold = [np.concatenate([run.gold for run in runs]) for runs in tasks]
    hits = np.concatenate([np.equal(run.gold, run.predictions) for runs in tasks for run in runs])
    warm = [best_temperature(*one) for one in zip(arrays, gold, strict=True)]
    assert min(warm) > 2
    for axes, temperatures in zip(figure.axes, ([1.0, 1.0, 1.0], warm), strict=True):
        diagonal, _, line = axes.lines
        assert (diagonal.get_linestyle(), *diagonal.get_xdata()) == ("--", 0, 100)
        pairs = zip(arrays, temperatures, strict=True)
        sure = np.concatenate([highest(log_softmax(scores, one)) for scores, one in pairs])
        np.testing.assert_allclose(np.stack(line.get_data()), 100 * np.stack(reliability(sure, hits)))
    assert legend_of(figure) == ["Zero-shot", "I2CL"]


def test_risk_coverage_ends_at_the_error_rate():
    result = scored(results(ZERO, I2CL), I2CL)
    (axes,) = drawn("risk-coverage", result).axes
    (line,) = axes.lines
    assert to_hex(line.get_color()) == "#d55e00"
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == pytest.approx((5, 100))
    assert line.get_ydata()[-1] == pytest.approx(100 - (60 + 5 + 5 / 3))
    runs = [one.outcome for one in result.cells if one.outcome.scores is not None]
    half = [100 * (1 - np.equal(run.gold, run.predictions)[:50].mean()) for run in runs]
    assert line.get_ydata()[list(line.get_xdata()).index(50)] == pytest.approx(np.mean(half))
    for view in ("reliability", "risk-coverage"):
        assert FIGURES[view](results(ZERO, I2CL), {}) is None
