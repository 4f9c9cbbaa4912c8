from typing import Any

import pytest

from crossbn.lab.experiments import batch_size, compensation, window
from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.experiments.tasks import Result
from crossbn.lab.report.classification_figures import plot_batch_sizes, plot_compensation, plot_windows
from crossbn.lab.report.experiment_figures import FIGURES
from tests.lab.experiments.classified import by_norm, results_of


def bars(axes: Any) -> dict[str, tuple[Any, Any]]:
    """Points of the lines with error bars, by label."""
    found = {}
    for container in axes.containers:
        line = container.lines[0]
        found[container.get_label()] = (list(line.get_xdata()), list(line.get_ydata()))
    return found


def test_accuracy_by_batch_size() -> None:
    (axes,) = plot_batch_sizes(results_of(batch_size, by_norm)).axes
    lines = bars(axes)
    shifted = pytest.approx([1.03 * size for size in (32, 16, 8, 4, 2, 1)])  # so that no error bar hides another
    assert lines["BN"] == (shifted, pytest.approx([51] * 6))
    assert lines["CBN"] == ([32, 16, 8, 4, 2, 1], pytest.approx([51, 51, 61, 61, 61, 61]))
    assert lines["CBN, k = 16"] == ([0.9], pytest.approx([61]))  # beside that of CBN
    assert lines.keys() == {"BN", "GN", "BRN", "CBN", "CBN, k = 16"}
    assert "2 seeds" in axes.get_title("left")
    assert axes.get_ylabel() == "Accuracy on 200 test images, %"
    assert axes.get_xlim()[0] > axes.get_xlim()[1]  # from large batches to small ones


def test_error_bars_are_standard_deviations() -> None:
    axes: Any = plot_batch_sizes(results_of(batch_size, by_norm)).axes[0]
    segments = axes.containers[0].lines[2][0].get_segments()
    assert segments[0][:, 1].tolist() == pytest.approx([51 - 2**0.5, 51 + 2**0.5])


def test_accuracy_by_window() -> None:
    (axes,) = plot_windows(results_of(window, by_norm, seeds=1)).axes
    lines = bars(axes)
    assert lines["CBN"] == ([1, 2, 4, 8, 16], pytest.approx([50, 60, 60, 60, 60]))
    assert lines["naive"] == lines[window.BN] == ([1, 2, 4, 8, 16], pytest.approx([50] * 5))
    assert axes.get_title("left") == "Accuracy by window, batches of 2\none seed"


def test_curves_of_training_and_test() -> None:
    panels: Any = plot_compensation(results_of(compensation, by_norm)).axes
    train, test = panels
    names = list(compensation.cells(Scale.SMALL))
    for axes, height in ((train, 10), (test, 0)):
        lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        assert list(lines) == names
        assert lines["CBN"] == pytest.approx([30.5 + height, 61 + height])
        assert lines["naive CBN"] == pytest.approx([25.5 + height, 51 + height])
        assert list(axes.lines[0].get_xdata()) == [1, 2]


@pytest.mark.parametrize(("name", "experiment"), [("batch_size", batch_size), ("window", window)])
def test_what_was_not_run_is_not_drawn(name: str, experiment: Any) -> None:
    some: list[Result] = [each for each in results_of(experiment, by_norm) if each.task.settings["norm"] == "cbn"]
    (axes,) = FIGURES[name](some).axes
    assert {label for label in bars(axes) if label.startswith("CBN")} == set(bars(axes))
