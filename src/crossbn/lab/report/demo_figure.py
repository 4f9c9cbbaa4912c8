"""The demo's curves of accuracy during training."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from crossbn.lab.experiments.rows import Row
from crossbn.lab.report.figure import COLOURS, LINES, spread_out

LABEL_DISTANCE = 5.5  # percent of the axis: what a line of text needs


def plot_curves(rows: Sequence[Row]) -> Figure:
    """Return mean accuracy per row, with a band of one standard deviation."""
    # Small, with letters to match: on a phone the picture shrinks to a third.
    figure = Figure(figsize=(5.6, 4.2), dpi=170, layout="constrained")
    axes = figure.add_subplot()
    heights = spread_out([100 * row.accuracy.mean for row in rows], LABEL_DISTANCE)
    for row, (colour, line), height in zip(rows, choose_styles(rows), heights, strict=True):
        _draw_row(axes, row, colour, line)
        _draw_label(axes, row, colour, height)
    _draw_frame(axes, rows)
    return figure


def choose_styles(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return colour and line of each row: a colour for each norm, a line for each row that the norm has."""
    lines: dict[str, int] = {}
    styles = []
    for row in rows:
        lines[row.norm] = lines.get(row.norm, -1) + 1
        colour = list(lines).index(row.norm)
        styles.append((COLOURS[colour % len(COLOURS)], LINES[lines[row.norm] % len(LINES)]))
    return styles


def _draw_row(axes: Axes, row: Row, colour: str, line: str) -> None:
    means = [100 * each.mean for each in row.curve]
    axes.plot(row.epochs, means, color=colour, linestyle=line, linewidth=2)
    margins = [100 * (each.sd or 0.0) for each in row.curve]
    low = [mean - margin for mean, margin in zip(means, margins, strict=True)]
    high = [mean + margin for mean, margin in zip(means, margins, strict=True)]
    axes.fill_between(row.epochs, low, high, color=colour, alpha=0.13, linewidth=0)


def _draw_label(axes: Axes, row: Row, colour: str, height: float) -> None:
    axes.annotate(
        f"{row.name}: {100 * row.accuracy.mean:.1f}",
        xy=(row.epochs[-1], 100 * row.accuracy.mean),
        xytext=(1.06 * row.epochs[-1], height),
        color=colour,
        verticalalignment="center",
        annotation_clip=False,
        arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "relpos": (0, 0.5)},
    )


def _draw_frame(axes: Axes, rows: Sequence[Row]) -> None:
    seeds = rows[0].seeds
    shown = f"mean of {seeds} seeds, band: ± 1 standard deviation" if seeds > 1 else "one seed"
    axes.set_title(f"Test accuracy during training\n{shown}", fontsize=11, loc="left", pad=14)  # above the labels
    axes.set_xlabel("Epochs")
    axes.set_ylabel(f"Accuracy on {rows[0].test_images} test images, %")
    axes.set_xlim(0, max(rows[0].epochs))
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
