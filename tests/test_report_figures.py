"""What pictures show, read back from matplotlib's objects, on records made up for the purpose."""

import json
import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from made_up_evidence import digest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from specifications import FILES

from dpbench.claims import Artefact, Evidence, load_all, load_artefact
from dpbench.claims.computed_file import Axis, Computed, Curve, Panel, Style, path_of, write_computed
from dpbench.claims.draw import Draw, default_draw, parse_draw
from dpbench.errors import UserError
from dpbench.report import palette
from dpbench.report.figures import draw, files_of, fingerprint
from dpbench.report.grid import build_grid
from dpbench.report.layout import picture_of
from dpbench.report.picture import Map, Picture, Plot, Ranking

AXES = {"method": ("A", "B"), "data": ("X", "Y"), "eps": ("1", "8")}


def picture(artefact: Artefact, evidence: Evidence) -> Picture:
    found = picture_of(build_grid(artefact, evidence))
    assert found is not None
    return found


def of_file(name: str, results: Path) -> Picture:
    return picture(load_artefact(FILES / f"{name}.yaml"), Evidence(results, digest))


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def lines(axes: Axes, *, hollow: bool) -> dict[str, tuple[list[float], list[float]]]:
    """Points of the lines with hollow marks, or of all others, by colour."""
    found = {}
    for line in axes.lines:
        assert isinstance(line, Line2D)
        if (line.get_markerfacecolor() == "none") == hollow and line.get_marker() not in ("_", "|"):
            found[str(line.get_color())] = (list(map(float, line.get_xdata())), list(map(float, line.get_ydata())))
    return found


def record(results: Path, overrides: str, accuracies: list[list[float]], epochs: list[float]) -> None:
    """Runs with learning curves, in per cent."""
    for seed, curve in enumerate(accuracies):
        folder = results / "runs" / digest(overrides.split()) / str(seed)
        folder.mkdir(parents=True)
        entries = [
            {"step": 10 * k, "epoch": epoch, "test_accuracy": value / 100}
            for k, (epoch, value) in enumerate(zip(epochs, curve, strict=True))
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        (folder / "summary.json").write_text(json.dumps({"test_accuracy": {"final": curve[-1] / 100}}))
        (folder / "status.json").write_text('{"status": "finished"}')


# Numbers over an axis.


def test_printed_numbers_are_hollow_and_ours_filled_with_their_spread(world):
    world.runs("dataset=digits algo=disk eps=1", 60.0, 60.6, 61.2)
    world.runs("dataset=digits algo=disk eps=8", 71.0, 72.0, 73.0)
    shown = picture(world.artefact(), world.evidence)
    assert shown.title == "ADP, Made up: Made up"
    assert shown.subtitle == "ours: mean ± standard deviation of 3 runs; 2 of 4 cells not run yet"
    (axes,) = panels(draw(shown))
    colour = palette.colours_of(shown.names, methods=True)
    assert shown.names == ("new", "old")  # the difference of both is no point among them
    printed = {tuple(line.get_ydata()) for line in axes.lines if line.get_markerfacecolor() == "none"}
    assert printed == {(60.0, 70.0), (55.0, 69.5)}
    ours = [line for line in axes.lines if line.get_marker() == "o" and line.get_markerfacecolor() != "none"]
    (line,) = [line for line in ours if len(line.get_xdata()) == 2]
    assert line.get_color() == colour["new"]
    assert list(line.get_xdata()) == [1.0, 8.0]
    assert list(line.get_ydata()) == pytest.approx([60.6, 72.0])
    (bars,) = axes.collections
    assert [list(segment[:, 1]) for segment in bars.get_segments()] == [
        pytest.approx([60.0, 61.2]),
        pytest.approx([71.0, 73.0]),
    ]
    assert (axes.get_xlabel(), [text.get_text() for text in axes.get_xticklabels()]) == ("eps", ["1", "8"])


def test_the_legend_tells_lines_and_kinds_of_marks(world):
    world.runs("dataset=digits algo=disk eps=1", 60.0)
    figure = draw(picture(world.artefact(), world.evidence))
    names = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert names == ["new", "old", "printed", "ours"]


def test_what_is_not_run_shows_the_printed_numbers_and_says_so(tmp_path):
    shown = of_file("disk/figure_1", tmp_path)
    assert shown.subtitle == "not run yet: printed values only"
    figure = draw(shown)
    assert [axes.get_title(loc="left") for axes in panels(figure)] == ["MNIST", "CIFAR-10", "CIFAR-100"]
    mnist, *_, hundred = panels(figure)
    assert not mnist.lines
    assert [text.get_text() for text in mnist.texts] == ["no number yet"]
    ((x, y),) = lines(hundred, hollow=True).values()
    assert (x, y) == ([0.5, 1, 2, 4, 8], [14.7, 22.7, 30.0, 37.1, 42.0])
    assert hundred.get_xscale() == "log"  # 0.5 and 1 would run into each other


@pytest.mark.parametrize("name", ["doppler/figure_3", "dc_sgd/figure_1", "adp/figure_5", "doppler/figure_6"])
def test_without_any_number_there_is_no_picture(tmp_path, name):
    artefact = load_artefact(FILES / f"{name}.yaml")
    assert picture_of(build_grid(artefact, Evidence(tmp_path, digest))) is None


def test_names_on_the_x_axis_stand_apart_with_all_methods_beside_each_other(tmp_path):
    shown = of_file("disk/table_1", tmp_path)
    (axes,) = panels(draw(shown))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["MNLI", "QNLI", "SST-2", "QQP"]
    places = sorted({round(float(x), 6) for line in axes.lines for x in line.get_xdata()})
    assert len(places) == 4 * 7
    assert max(places[:7]) < 0.5 < min(places[7:14])


# Learning curves.


def test_learning_curves_are_means_over_seeds_with_a_band(tmp_path):
    artefact = load_artefact(FILES / "dp_pmlf" / "figure_2.yaml")
    (cell,) = [cell for cell in artefact.cells if cell.at == {"method": "DP-PMLF", "model": "CNN-5"}]
    curves = [[10.0, 30.0, 44.0], [14.0, 34.0, 48.0]]
    record(tmp_path, " ".join(cell.candidates[0]), curves, [0.0, 50.0, 100.0])
    first = panels(draw(picture(artefact, Evidence(tmp_path, digest))))[0]
    assert list(lines(first, hollow=False).values()) == [([0.0, 50.0, 100.0], pytest.approx([12.0, 32.0, 46.0]))]
    assert list(lines(first, hollow=True).values()) == [([100.0], [47.0])]  # as printed, at the end
    (band,) = [one for one in first.collections if isinstance(one, PolyCollection)]
    heights = band.get_paths()[0].vertices[:, 1]
    spread = math.sqrt(8.0)  # sample standard deviation of two numbers that differ by four
    assert (heights.min(), heights.max()) == (pytest.approx(12 - spread), pytest.approx(46 + spread))
    assert first.get_xlabel() == "epoch"


def test_a_panel_without_learning_curves_has_no_ticks(tmp_path):
    artefact = load_artefact(FILES / "adp" / "figure_4.yaml")
    record(tmp_path, " ".join(artefact.cells[0].candidates[0]), [[80.0, 90.0]], [0.0, 50.0])
    shown, none, *_ = panels(draw(picture(artefact, Evidence(tmp_path, digest))))
    assert [text.get_text() for text in none.texts] == ["no number yet"]
    assert not [*none.get_xticks(), *none.get_xticks(minor=True), *none.get_yticks()]
    assert shown.lines
    assert len(shown.get_xticks()) > 2


def test_learning_curves_have_the_evaluations_that_all_seeds_have(tmp_path):
    artefact = load_artefact(FILES / "adp" / "figure_1.yaml")
    overrides = " ".join(artefact.cells[0].candidates[0])
    record(tmp_path, overrides, [[10.0, 20.0, 30.0], [20.0, 30.0, 40.0]], [0.0, 1.0, 2.0])
    metrics = tmp_path / "runs" / digest(overrides.split()) / "1" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    (axes,) = panels(draw(picture(artefact, Evidence(tmp_path, digest))))
    assert list(lines(axes, hollow=False).values()) == [([0.0, 10.0], pytest.approx([15.0, 25.0]))]
    assert axes.get_xlabel() == "step"


# Maps and spectra.


def test_a_map_has_colours_for_the_cells_that_are_there(tmp_path):
    artefact = load_artefact(FILES / "disk" / "figure_8b.yaml")
    for cell, accuracy in ((artefact.cells[0], 40.0), (artefact.cells[-1], 50.0)):
        record(tmp_path, " ".join(cell.candidates[0]), [[accuracy]], [1.0])
    shown = picture(artefact, Evidence(tmp_path, digest))
    (panel,) = shown.panels
    assert isinstance(panel, Map)
    assert (panel.x, panel.y, panel.columns, panel.rows) == (
        "eps", "kappa", ("0.5", "1", "2", "4", "8"), ("0.5", "0.6", "0.7", "0.8", "0.9", "0.99"),
    )  # fmt: skip
    (image,) = draw(shown).axes[0].images
    data = np.ma.filled(image.get_array(), np.nan)
    assert data.shape == (6, 5)
    assert (data[0, 0], data[-1, -1]) == (40.0, 50.0)
    assert np.isnan(data).sum() == 28


def test_long_labels_of_a_map_stand_upright_within_the_picture(tmp_path):
    artefact = load_artefact(FILES / "disk" / "figure_8a.yaml")
    record(tmp_path, " ".join(artefact.cells[0].candidates[0]), [[40.0]], [1.0])
    figure = draw(picture(artefact, Evidence(tmp_path, digest)))
    labels = figure.axes[0].get_xticklabels()
    assert {label.get_rotation() for label in labels} == {90.0}
    figure.canvas.draw()
    assert figure.axes[0].get_tightbbox().y0 >= 0


# Rankings.


def test_a_ranking_has_a_row_for_each_method_that_was_run(tmp_path):
    """The best on the whole above, who lacks a panel below, whom no panel can hold beside it in a number."""
    artefact = load_artefact(FILES / "beyond" / "panel_digits.yaml")
    found = {"DP-SGD": 80.0, "DiSK": 82.0, "DP-Adam": 79.0, "DOPPLER": 81.0, "DP-FTRL": 20.0, "Du": 99.0}
    for cell in artefact.cells:
        method, eps = cell.at["method"], cell.at["eps"]
        if eps in ("1", "2") and method in found and (method, eps) != ("Du", "2"):
            for line in cell.candidates:  # all alike, whichever is chosen
                record(tmp_path, " ".join(line), [[found[method] + seed] for seed in (-1, 0, 1)], [1.0])
    shown = picture(artefact, Evidence(tmp_path, digest))
    first, second, *_ = shown.panels
    assert all(isinstance(panel, Ranking) for panel in shown.panels)
    assert first.rows == second.rows == ("DiSK", "DOPPLER", "DP-SGD", "DP-Adam", "DP-FTRL", "Du")
    assert first.values == (82.0, 81.0, 80.0, 79.0, 20.0, 99.0)
    assert second.values == (82.0, 81.0, 80.0, 79.0, 20.0, None)
    assert [panel.reference for panel in shown.panels] == [80.0, 80.0, None, None]
    assert first.spreads == (1.0,) * 6
    axes = draw(shown).axes[1]
    drawn = {line.get_ydata()[0]: line.get_xdata() for line in axes.lines if line.get_marker() == "o"}
    assert {row: list(x) for row, x in drawn.items()} == {0: [82.0], 1: [81.0], 2: [80.0], 3: [79.0]}
    assert [text.get_text() for text in axes.texts] == ["◂ 20"]
    assert axes.get_xlim()[0] > 70


@pytest.mark.parametrize("values", [(90.5, 91.8), (89.2, 93.4), (92.0, 94.2), (0.5, 1.0), (10.0, 10.03), (99.9, 99.96)])
def test_labels_below_a_ranking_stand_apart(values):
    panel = Ranking("eps = 1", "test accuracy (%)", ("A", "B"), values, (None, None), values[0])
    figure = draw(Picture("t", "s", (panel,) * 4, names=("A", "B"), methods=True))
    FigureCanvasAgg(figure).draw()
    for axes in panels(figure):
        low, high = axes.get_xlim()
        boxes = [
            label.get_window_extent()
            for place, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
            if low <= place <= high
        ]
        assert 1 <= len(boxes) <= 4
        assert all(right.x0 - left.x1 > 0.04 * figure.dpi for left, right in pairwise(boxes))


def test_spectra_of_recorded_gradients(tmp_path):
    """The gradient is one cosine, the noise none: power where the cosine is; behind the filter, times its gain."""
    artefact = load_artefact(FILES / "doppler" / "figure_2.yaml")
    steps = np.arange(400)
    signal = np.cos(2 * np.pi * 0.1 * steps)[:, None] * np.ones((1, 3))
    for cell, b, a in ((artefact.cells[0], [1.0], []), (artefact.cells[-1], [0.5], [-0.5])):
        folder = tmp_path / "runs" / digest(cell.candidates[0]) / "0"
        folder.mkdir(parents=True)
        np.savez_compressed(folder / "gradients.npz", signal=signal, observed=2 * signal)
        (folder / "config.yaml").write_text(yaml.safe_dump({"filter": {"b": b, "a": a}}))
        (folder / "summary.json").write_text('{"test_accuracy": {"final": 0.5}}')
        (folder / "status.json").write_text('{"status": "finished"}')
    first, second = picture(artefact, Evidence(tmp_path, digest)).panels
    assert isinstance(first, Plot)
    assert isinstance(second, Plot)
    assert [series.curve.name for series in first.series] == ["gradient", "noise"]
    assert [series.curve.name for series in second.series] == ["SGD", "LP-SGD"]
    gradient, noise, plain, filtered = (np.array(one.curve.y) for one in (*first.series, *second.series))
    frequencies = np.array(first.series[0].curve.x)
    assert frequencies[gradient.argmax()] == pytest.approx(0.1)
    assert gradient.max() == pytest.approx(3 * 400 / 4)  # K coordinates of amplitude 1, half the power on each side
    assert noise.max() == pytest.approx(gradient.max())
    assert plain.max() == pytest.approx(4 * gradient.max())
    gain = abs(0.5 / (1 - 0.5 * np.exp(-2j * np.pi * 0.1))) ** 2
    assert filtered.max() / plain.max() == pytest.approx(gain)


def with_norms(results: Path, artefact: Artefact, setting: str, **arrays: object) -> None:
    """A finished run behind a cell, with an archive of gradients."""
    (cell,) = artefact.select({"setting": (setting,)})
    folder = results / "runs" / digest(cell.candidates[0]) / "0"
    folder.mkdir(parents=True)
    np.savez_compressed(folder / "gradients.npz", signal=np.ones((3, 1)), observed=np.ones((3, 1)), **arrays)
    (folder / "summary.json").write_text('{"test_accuracy": {"final": 0.5}}')
    (folder / "status.json").write_text('{"status": "finished"}')


@pytest.mark.parametrize(("weight", "end"), [(0.5, 6.6), (4.0, 3.3)])
def test_expected_errors_of_recorded_norms(tmp_path, capsys, weight, end):
    """Of norms n K C² + max(n - C, 0)² is least at n/(1 + K), where it is n² K/(1 + K). One that is inf has none."""
    artefact = load_artefact(FILES / "dc_sgd" / "figure_4.yaml")
    with_norms(tmp_path, artefact, "CNN MNIST", norms=np.array([6.0] * 5 + [np.inf]), error_weight=np.array(weight))
    with_norms(tmp_path, artefact, "ResNet18 CIFAR10")  # of a version that kept none
    panels_of = {plot.title: plot for plot in picture(artefact, Evidence(tmp_path, digest)).panels}
    assert [title for title, plot in panels_of.items() if plot.series] == ["CNN MNIST"]
    (series,) = panels_of["CNN MNIST"].series
    assert series.curve.name == "eps = 8"
    thresholds, errors = np.array(series.curve.x), np.array(series.curve.y)
    assert thresholds[-1] == pytest.approx(end)  # 1.1 times the smaller of n and n/sqrt(K)
    assert errors[[0, -1]] == pytest.approx([weight * c**2 + max(6 - c, 0) ** 2 for c in (end / 200, end)])
    assert thresholds[errors.argmin()] == pytest.approx(6 / (1 + weight), abs=end / 200)
    assert errors.min() == pytest.approx(36 * weight / (1 + weight), abs=0.002)
    assert "gradients.npz: can't be read (" in " ".join(capsys.readouterr().err.split())


def test_large_expected_errors_are_told_in_thousands(tmp_path):
    artefact = load_artefact(FILES / "dc_sgd" / "figure_4.yaml")
    for setting, norm in (("CNN MNIST", 600.0), ("ResNet18 CIFAR10", 6.0)):
        with_norms(tmp_path, artefact, setting, norms=np.array([norm] * 5), error_weight=np.array(4.0))
    large, small, _ = sorted(picture(artefact, Evidence(tmp_path, digest)).panels, key=lambda panel: panel.title)
    assert [large.y.label, small.y.label] == ["expected squared error / 1000", "expected squared error"]
    assert large.series[0].curve.y == pytest.approx([10 * error for error in small.series[0].curve.y])


# Computed panels.


def test_computed_panels_are_drawn_in_their_styles(tmp_path):
    curves = (
        Curve("smooth", (0.0, 1.0, 2.0), (1.0, 2.0, 4.0)),
        Curve("steps", (0.0, 1.0), (1.0, 3.0), Style.STEPS),
        Curve("paper", (1.0,), (2.0,), Style.MARKS, printed=True),
    )
    bars = Panel("b", Axis("bin"), Axis("count"), (Curve("bars", (0.0, 1.0), (5.0, 6.0), Style.BARS),))
    content = Computed(panels=(Panel("a", Axis("t"), Axis("gain", log=True), curves), bars))
    write_computed(path_of(tmp_path, "disk", "figure_3"), content, {})
    figure = draw(of_file("disk/figure_3", tmp_path))
    first, second = panels(figure)
    assert (first.get_yscale(), first.get_xlabel(), first.get_ylabel()) == ("log", "t", "gain")
    assert [line.get_drawstyle() for line in first.lines] == ["default", "steps-post", "default"]
    assert [line.get_markerfacecolor() == "none" for line in first.lines] == [False, False, True]
    assert [bar.get_height() for bar in second.patches] == [5.0, 6.0]


def test_computed_panels_stand_behind_those_of_runs(tmp_path):
    """The noise of a figure is computed, its accuracy trained."""
    curve = Curve("ADP", (0.0, 10.0), (0.2, 0.1))
    content = Computed(panels=(Panel("noise", Axis("step"), Axis("noise"), (curve,)),))
    write_computed(path_of(tmp_path, "adp", "figure_1"), content, {})
    alone = of_file("adp/figure_1", tmp_path)
    assert [panel.title for panel in alone.panels] == ["noise"]
    assert alone.subtitle == "not run yet; other curves computed"
    artefact = load_artefact(FILES / "adp" / "figure_1.yaml")
    record(tmp_path, " ".join(artefact.cells[0].candidates[0]), [[10.0, 20.0]], [0.0, 1.0])
    both = of_file("adp/figure_1", tmp_path)
    assert [panel.title for panel in both.panels] == ["", "noise"]
    first, second = panels(draw(both))
    assert first.lines[0].get_color() == second.lines[0].get_color()  # one method, one colour


# Layout and colours.


def boxes_of(figure: Figure) -> list:
    """What panels with their labels, legends and texts take up, in pixels."""
    boxes = [axes.get_tightbbox() for axes in figure.axes] + [legend.get_window_extent() for legend in figure.legends]
    return boxes + [text.get_window_extent() for text in figure.texts]


def test_long_titles_of_panels_have_room(tmp_path):
    curve = Curve("one", (0.0, 39200.0), (0.2, 0.1))
    long = [Panel(f"noise in the parameters, C = {c}, 200 epochs", Axis("t"), Axis("noise"), (curve,)) for c in "1234"]
    write_computed(path_of(tmp_path, "disk", "figure_3"), Computed(panels=tuple(long)), {})
    figure = draw(of_file("disk/figure_3", tmp_path))
    apart(boxes_of(figure), figure)


@pytest.mark.parametrize("name", ["disk/table_4", "dc_sgd/table_2", "dp_pmlf/table_4", "disk/text_1"])
def test_nothing_runs_into_anything_else(tmp_path, name):
    """Titles, labels and legends of all panels, in pixels."""
    figure = draw(of_file(name, tmp_path))
    apart(boxes_of(figure), figure)


def apart(boxes: list, figure: Figure) -> None:
    width, height = figure.bbox.width, figure.bbox.height
    for box in boxes:
        assert box.x0 >= -1
        assert box.x1 <= width + 1
        assert box.y0 >= -1
        assert box.y1 <= height + 1
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            over = min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
            assert min(over) < 2, (one, other)


def test_a_method_has_one_colour_in_all_figures():
    def colour(name: str) -> str:
        return palette.colours_of((name, "other"), methods=True)[name]

    assert colour("KF") == colour("DiSK") == colour("KF-DP 6.7") == colour("NoisyKF")
    assert colour("LP-DPSGD") == colour("LP-SGD") == colour("DOPPLER") == colour("LP-DPAdamBC")
    assert colour("DP") == colour("DPSGD") == colour("DP-SGD") == colour("DPAdam")
    assert len({colour(name) for name in ("DP", "KF", "LP-DPSGD", "ADP", "DP-PMLF", "DC-SGD-P", "DC-SGD-E")}) == 7


def test_methods_of_ones_own_have_colours_that_no_other_has():
    names = ("DP-SGD", "DiSK", "SoftLion", "Dual averaging", "Mine")
    colours = palette.colours_of(names, methods=True)
    assert len(set(colours.values())) == len(names)
    assert colours["DP-SGD"] == palette.BASELINE
    assert colours["Dual averaging"] != palette.colours_of(("Du",), methods=True)["Du"]


def test_every_line_of_a_picture_can_be_told_from_the_others(tmp_path):
    for artefact in load_all(FILES):
        shown = picture_of(build_grid(artefact, Evidence(tmp_path, digest)))
        if shown is None:
            continue
        colours = palette.colours_of(shown.names, methods=shown.methods)
        marks = palette.marks_of(shown.names)
        assert len({(colours[name], marks[name]) for name in shown.names}) == len(shown.names), artefact.where


# Files.


def test_the_same_picture_gives_the_same_bytes(tmp_path):
    shown = of_file("disk/figure_5", tmp_path)
    svg, png = files_of(shown)
    assert (svg, png) == files_of(shown)
    assert png.startswith(b"\x89PNG")
    assert ET.fromstring(svg).tag.endswith("svg")
    assert fingerprint(shown).encode() in svg[:4096]
    assert b"dc:date" not in svg


def test_the_fingerprint_is_of_all_that_is_drawn(world):
    before = picture(world.artefact(), world.evidence)
    world.runs("dataset=digits algo=disk eps=1", 60.0)
    after = picture(world.artefact(), world.evidence)
    assert fingerprint(before) == fingerprint(
        picture(world.artefact(change=lambda text: text), Evidence(Path(), digest))
    )
    assert fingerprint(before) != fingerprint(after)


# The key `draw`.


def test_the_default_layout_is_the_papers_own():
    assert default_draw(AXES) == Draw("eps", ("method",), ("data",))
    assert default_draw({"task": ("a", "b"), "method": ("A", "B")}) == Draw("task", ("method",), ())
    assert default_draw({"kappa": ("0.1", "0.2"), "eps": ("1", "2")}) == Draw("eps", ("kappa",), ())
    assert default_draw({"eps": ("8",), "filter": ("a", "b")}) == Draw("filter", (), ("eps",))
    assert default_draw({"eps": ("8",)}) is None


def test_axes_that_a_file_does_not_place_are_panels():
    assert parse_draw({"x": "epoch", "lines": "method"}, AXES) == Draw("epoch", ("method",), ("data", "eps"))
    assert parse_draw("none", AXES) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"x": "epsilon"},
            "draw.x=epsilon: expected one of the axes method, data, eps, or epoch, step, frequency, threshold, value",
        ),
        ({"x": "eps", "lines": "algo"}, "draw.lines=algo: expected one of the axes"),
        ({"x": "eps", "lines": "eps"}, "draw=eps: expected each axis in one place"),
        ({"x": "eps", "y": "data", "lines": "method"}, "draw.lines=method: expected no lines in a picture that has y"),
        (
            {"x": "epoch", "y": "data"},
            "draw.y=data: expected one of the axes method, data, eps, where x is one too or value",
        ),
        ({"x": "value"}, "draw.y=null: expected one of the axes method, data, eps, where x is one too or value"),
        ({"x": "eps", "colour": "red"}, "draw.colour=red: expected one of the keys x, y, lines, panels"),
        ("eps", "draw=eps: expected a mapping with x, lines, panels or y, or none"),
    ],
)
def test_a_wrong_layout_is_refused_in_one_sentence(content, message):
    with pytest.raises(UserError, match="expected") as error:
        parse_draw(content, AXES)
    assert str(error.value).startswith(message)


def test_only_what_is_trained_is_laid_out(world):
    with pytest.raises(UserError, match="no such key unless trained"):
        world.artefact(change=lambda text: text.replace("kind: trained", "kind: computed\nreason: so\ndraw: none"))
