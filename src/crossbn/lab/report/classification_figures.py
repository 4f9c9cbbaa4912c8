"""Accuracies of classifiers by batch size and by window, and during training."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from crossbn.lab.experiments import batch_size, compensation, window
from crossbn.lab.experiments.accuracies import Cells, accuracies_of
from crossbn.lab.experiments.cells import Cell
from crossbn.lab.experiments.classification import BATCH_SIZE, scale_of
from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.experiments.rows import Spread
from crossbn.lab.experiments.tasks import Result, by_name
from crossbn.lab.report.figure import COLOURS

_BN, _CBN, _GN, _BRN, _NAIVE, *_OTHERS = COLOURS
_STYLES = {
    **{"BN": (_BN, "-", "s"), "GN": (_GN, "-", "^"), "BRN": (_BRN, "-", "D"), "CBN": (_CBN, "-", "o")},
    **{batch_size.WIDER: (_CBN, ":", "*"), window.BN: (_BN, "--", "s"), "naive": (_NAIVE, ":", "v")},
    **{"GN, WS": (_GN, "--", "v"), "BN, WS": (_BN, "--", "v"), "CBN, WS": (_CBN, ":", "v")},
    **{"CBN, equal": (_CBN, "--", "o"), window.AUTO: (_CBN, "--", "D")},
    **{"EvoNorm-S0": (_NAIVE, "-", "P"), "FRN, TLU": (_OTHERS[0], "-", "X")},
    **{"naive CBN": (_NAIVE, ":", "v"), f"BN at batch {compensation.LARGE}": (_BN, "--", "s")},
}
"""Colour, line and marker of what is drawn: a norm has its colour in all figures."""
_SHIFTS = {batch_size.WIDER: 0.9, "BN": 1.03, "GN": 0.97, "BRN": 1.06}
"""Beside the points that they would hide."""


def plot_batch_sizes(results: Sequence[Result]) -> Figure:
    """Return accuracy against batch size, a line for each norm."""
    scale = scale_of(results)
    is_medium, grid = scale is Scale.MEDIUM, batch_size.grid(scale)
    sizes = batch_size.MEDIUM_SIZES if is_medium else batch_size.SIZES
    norms = batch_size.MEDIUM_NORMS if is_medium else (*batch_size.NORMS, batch_size.WIDER)
    figure, axes = _begin("Accuracy by batch size", results)
    _draw_columns(axes, results, grid, dict(zip(grid, sizes, strict=True)), norms)
    _finish(axes, "Images in a batch", sizes)
    axes.invert_xaxis()  # from easy to hard
    return figure


def plot_windows(results: Sequence[Result]) -> Figure:
    """Return accuracy against window, with and without compensation, and BN with as many examples."""
    scale = scale_of(results)
    grid = window.grid(scale)
    places = dict(zip(grid, window.WINDOWS, strict=True))
    figure, axes = _begin(f"Accuracy by window, batches of {BATCH_SIZE[scale]}", results)
    _draw_columns(axes, results, grid, places, [window.BN, window.NAIVE, window.CBN, window.AUTO])
    _finish(axes, "Window k, steps", window.WINDOWS)
    return figure


def plot_compensation(results: Sequence[Result]) -> Figure:
    """Return accuracy during training, on the training images and on the test images."""
    figure = Figure(figsize=(8.4, 4.4), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    figure.suptitle(f"Accuracy during training\n{_shown(results)}", x=0.01, horizontalalignment="left", fontsize=11)
    cells = compensation.cells(scale_of(results))
    for axes, kind, label in zip(panels, ("train_accuracy", "test_accuracy"), ("Training", "Test"), strict=True):
        for name, cell in cells.items():
            _draw_curve(axes, results, cell, kind, name)
        axes.set_title(f"{label} images", fontsize=10, loc="left")
        axes.set_xlabel("Epochs")
        axes.set_xlim(left=0)
        _tidy(axes)
    panels[0].set_ylabel("Accuracy, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(cells), handlelength=3.5, frameon=False, fontsize=9
    )
    return figure


def _begin(title: str, results: Sequence[Result]) -> tuple[Figure, Axes]:
    # Small, with letters to match: on a phone the picture shrinks to a third.
    figure = Figure(figsize=(5.6, 4.4), dpi=170, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"{title}\n{_shown(results)}", fontsize=11, loc="left")
    tested = {result.values["test_images"] for result in results}
    axes.set_ylabel(f"Accuracy on {min(tested):,} test images, %" if tested else "Accuracy, %")
    return figure, axes


def _shown(results: Sequence[Result]) -> str:
    seeds = min((len(found) for found in by_name(results).values()), default=1)
    return f"mean of {seeds} seeds, ± 1 standard deviation" if seeds > 1 else "one seed"


def _draw_columns(
    axes: Axes, results: Sequence[Result], grid: Mapping[str, Cells], places: Mapping[str, int], columns: Sequence[str]
) -> None:
    for column in columns:
        found = {
            places[row] * _SHIFTS.get(column, 1): Spread.of([*values.values()])
            for row, cells in grid.items()
            if column in cells and (values := accuracies_of(results, cells[column]))
        }
        if found:
            _draw_line(axes, found, column)


def _style(name: str) -> dict[str, Any]:
    colour, line, marker = _STYLES.get(name, _STYLES["BN"])
    return {"color": colour, "linestyle": line, "marker": marker}


def _draw_line(axes: Axes, found: Mapping[float, Spread], name: str) -> None:
    axes.errorbar(
        list(found),
        [each.mean for each in found.values()],
        [each.sd or 0.0 for each in found.values()],
        **_style(name),
        markersize=5,
        linewidth=2,
        capsize=3,
        label=name,
    )


def _draw_curve(axes: Axes, results: Sequence[Result], cell: Cell, kind: str, name: str) -> None:
    runs = by_name(results).get(cell.name)
    if runs is None:
        return
    points = list(zip(*(result.values["curve"] for result in runs), strict=True))
    epochs = [point[0]["epoch"] for point in points]
    spreads = [Spread.of([100 * each[kind] for each in point]) for point in points]
    means = [spread.mean for spread in spreads]
    axes.plot(epochs, means, **_style(name), markersize=4, linewidth=2, label=name)
    low, high = ([each.mean + sign * (each.sd or 0.0) for each in spreads] for sign in (-1, 1))
    axes.fill_between(epochs, low, high, color=_style(name)["color"], alpha=0.13, linewidth=0)


def _finish(axes: Axes, label: str, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(each) for each in ticks])
    axes.set_xlabel(label)
    axes.legend(handlelength=3.5, frameon=False, fontsize=9)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
