from collections.abc import Sequence
from typing import Any

import numpy
import pytest

from crossbn.lab.experiments.experiment import Comparison, Measure
from crossbn.lab.experiments.registry import EXPERIMENTS
from crossbn.lab.records import Record
from crossbn.lab.report import experiment_figures
from crossbn.lab.report.experiment_figures import FIGURES
from crossbn.lab.report.figure import GREY
from crossbn.lab.statistics import Spread
from tests.lab.experiments.classified import by_norm, results_of


def runs_of(name: str, seeds: int = 2) -> list[Record]:
    """CBN ends at 60 %, everything else at 50 %, two points more with each seed; half of it at the first epoch."""
    return results_of(EXPERIMENTS[name], by_norm, seeds)


def bars(axes: Any) -> dict[str, tuple[Any, Any]]:
    """Points of the lines with error bars, by label; where they stand is rounded to the size that they are of."""
    found = {}
    for container in axes.containers:
        line = container.lines[0]
        sizes = [2 ** round(float(numpy.log2(x))) for x in line.get_xdata()]
        found[container.get_label()] = (sizes, list(line.get_ydata()))
    return found


def test_accuracy_by_batch_size() -> None:
    figure = FIGURES["batch_size"](runs_of("batch_size"))
    axes: Any = figure.axes[0]
    lines = bars(axes)
    assert lines["BN"] == ([32, 16, 8, 4, 2, 1], pytest.approx([51] * 6))
    assert lines["CBN"] == ([32, 16, 8, 4, 2, 1], pytest.approx([51, 51, 61, 61, 61, 61]))
    assert lines["CBN, k = 16"] == ([1], pytest.approx([61]))
    assert lines.keys() == {"BN", "GN", "BRN", "CBN", "CBN, k = 16"}
    assert figure.get_suptitle() == "Accuracy by batch size\nmean of 2 seeds, ± 1 standard deviation"
    assert axes.get_ylabel() == "Accuracy on 200 test images, %"
    assert axes.get_xlim()[0] > axes.get_xlim()[1]  # from large batches to small ones
    assert sorted(axes.get_xticks()) == [1, 2, 4, 8, 16, 32]
    places = [container.lines[0].get_xdata()[0] for container in axes.containers]
    assert len({round(float(place), 6) for place in places}) == len(places), "no error bar hides another"


def test_error_bars_are_standard_deviations() -> None:
    axes: Any = FIGURES["batch_size"](runs_of("batch_size")).axes[0]
    segments = axes.containers[0].lines[2][0].get_segments()
    assert segments[0][:, 1].tolist() == pytest.approx([51 - 2**0.5, 51 + 2**0.5])


def test_all_seeds_are_drawn_and_counted() -> None:
    records = [each for each in runs_of("batch_size", 5) if each.seed < 3 or each.name == "BN, batch 4"]
    figure = FIGURES["batch_size"](records)
    assert bars(figure.axes[0])["BN"][1] == pytest.approx([52, 52, 52, 54, 52, 52])  # of three, and of five at batch 4
    assert figure.get_suptitle().endswith("mean of 3 to 5 seeds, ± 1 standard deviation")


def test_accuracy_by_window() -> None:
    figure = FIGURES["window"](runs_of("window", seeds=1))
    lines = bars(figure.axes[0])
    assert lines["CBN"] == ([1, 2, 4, 8, 16], pytest.approx([50, 60, 60, 60, 60]))
    assert lines["naive"] == lines["BN, k times the batch"] == ([1, 2, 4, 8, 16], pytest.approx([50] * 5))
    assert figure.get_suptitle() == "Accuracy by window, batches of 2\none seed"


def test_the_paper_s_numbers_are_grey_and_dashed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = EXPERIMENTS["batch_size"]

    class Known:
        measures = table.measures

        @staticmethod
        def rows(_: Sequence[Record]) -> list[Comparison]:
            ours = {"BN": Spread(50.0, 1.0), "CBN": Spread(60.0, 1.0)}
            papers = {32: {"BN": 70.2, "CBN": 70.2}, 2: {"BN": 55.9, "CBN": 69.6}, 1: {"CBN": 69.3}}
            return [Comparison(f"batch {size}", ours, paper) for size, paper in papers.items()]

    monkeypatch.setattr(experiment_figures, "EXPERIMENTS", {"batch_size": Known})
    axes: Any = FIGURES["batch_size"](runs_of("batch_size")).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    paper = lines["CBN, the paper's"]
    assert (list(paper.get_xdata()), list(paper.get_ydata())) == ([32, 2, 1], [70.2, 69.6, 69.3])
    assert list(lines["BN, the paper's"].get_ydata()) == [70.2, 55.9]
    assert (paper.get_color(), paper.get_linestyle()) == (GREY, "--")


def test_curves_of_training_and_test() -> None:
    records = runs_of("compensation")
    panels: Any = FIGURES["compensation"](records).axes
    for axes, height in zip(panels, (10, 0), strict=True):
        lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        assert list(lines) == ["CBN, batch 2, window 8", "naive CBN, batch 2, window 8", "BN, batch 2", "BN, batch 16"]
        assert lines["CBN, batch 2, window 8"] == pytest.approx([30.5 + height, 61 + height])
        assert lines["naive CBN, batch 2, window 8"] == pytest.approx([25.5 + height, 51 + height])
        assert list(axes.lines[0].get_xdata()) == list(axes.get_xticks()) == [1, 2]


@pytest.mark.parametrize("name", ["batch_size", "window"])
def test_what_was_not_run_is_not_drawn(name: str) -> None:
    figure = FIGURES[name]([each for each in runs_of(name) if each.settings["norm"] == "cbn"])
    labels = bars(figure.axes[0]).keys()
    assert {label for label in labels if label.startswith("CBN")} == labels


@pytest.mark.parametrize("paper", [{}, {"AP": 37.7}], ids=["ours", "with the paper's"])
def test_rows_are_lines_with_the_paper_s_beside_them(monkeypatch: pytest.MonkeyPatch, paper: dict[str, float]) -> None:
    class Known:
        measures = (Measure("AP", "AP, %"), Measure("AP50", "AP50, %"))

        @staticmethod
        def rows(_: Sequence[Record]) -> list[Comparison]:
            return [
                Comparison("no norm", {"AP": Spread(30.0, 1.0)}),
                Comparison("not run", {}, paper),
                Comparison("CBN", {"AP": Spread(33.0, None)}, paper),
            ]

    monkeypatch.setattr(experiment_figures, "EXPERIMENTS", {"coco_norms": Known})
    panels: Any = FIGURES["coco_norms"](runs_of("batch_size")).axes
    assert [axes.get_xlabel() for axes in panels] == ["AP, %, ours", "AP, %, the paper's"][: 1 + len(paper)]
    ours = panels[0].containers[0].lines[0]
    assert (list(ours.get_xdata()), list(ours.get_ydata())) == ([30.0, 33.0], [0, 1])
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["no norm", "CBN"]
    assert panels[0].get_ylim()[0] > panels[0].get_ylim()[1]  # as in the table, from above
    if paper:
        assert (list(panels[1].lines[0].get_xdata()), list(panels[1].lines[0].get_ydata())) == ([37.7], [1])
