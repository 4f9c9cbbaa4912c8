"""The pictures of the experiments that have one: ours, and the paper's numbers beside them where a row has some."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from crossbn.lab.experiments.experiment import Comparison
from crossbn.lab.experiments.registry import EXPERIMENTS
from crossbn.lab.records import Record, by_name
from crossbn.lab.report.curves_figure import plot_trainings
from crossbn.lab.report.figure import (
    COLOURS,
    GREY,
    PAPER,
    add_legend,
    begin,
    choose_styles,
    say_seeds,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DODGE = 1.02  # from one line to the next: no error bar hides another
_MOMENTS = {"mean": "mean", "second_moment": "second moment"}


def plot_columns(
    records: Sequence[Record],
    *,
    experiment: str,
    title: str,
    label: str,
    without: Sequence[str] = (),
    falls: bool = False,
) -> Figure:
    """Return a table whose rows are sizes as a figure: accuracy by size, a line for each column.

    Args:
        records: of the experiment.
        experiment: its name.
        title: over the figure; {batch} in it stands for the smallest batch.
        label: what the size is.
        without: columns that are in the table only.
        falls: whether sizes fall from left to right.
    """
    table = EXPERIMENTS[experiment]
    rows = {int(re.findall(r"\d+", row.name)[-1]): row for row in table.rows(records)}
    columns = [measure.name for measure in table.measures if measure.name not in without]
    drawn = [column for column in columns if any(column in row.ours for row in rows.values())]
    counts = [len(group) for group in by_name(records).values()]
    batch = min(record.settings["batch_size"] for record in records)
    figure, (axes,) = begin(f"{title.format(batch=batch)}\n{say_seeds(counts)}", width=5.6, height=4.8)
    for i, (column, style) in enumerate(zip(drawn, choose_styles([*map(_norm, drawn)]), strict=True)):
        found = {size: row.ours[column] for size, row in rows.items() if column in row.ours}
        places = [size * _DODGE ** (i - len(drawn) // 2) for size in found]
        means, bars = [each.mean for each in found.values()], [each.sd or 0.0 for each in found.values()]
        axes.errorbar(places, means, bars, **style, markersize=5, linewidth=2, capsize=3, label=column)
        _draw_paper(axes, column, rows, style["marker"])
    tested = {record.values["test_images"] for record in records}
    axes.set_ylabel(f"Accuracy on {min(tested):,} test images, %" if tested else "Accuracy, %")
    tidy(axes, label, rows, log=True)
    if falls:
        axes.invert_xaxis()
    add_legend(figure, 3)
    return figure


def _norm(column: str) -> str:
    first = column.partition(",")[0].lower()
    return "naive_cbn" if first.startswith("naive") else first


def _draw_paper(axes: Axes, column: str, rows: dict[int, Comparison], marker: str) -> None:
    found = {size: row.paper[column] for size, row in rows.items() if column in row.paper}
    if found:
        style = {"color": GREY, "linestyle": "--", "linewidth": 1, "marker": marker, "markersize": 4}
        axes.plot(list(found), list(found.values()), **style, label=f"{column}, {PAPER}")  # type: ignore[arg-type]


def plot_ratios(records: Sequence[Record], experiment: str = "gradients") -> Figure:
    """Return the ratios for l-1 and l-2 over the steps of training, a panel for each network."""
    groups = by_name(records)
    paper = {row.name: row.paper for row in EXPERIMENTS[experiment].rows(records)}
    title = "Gradients of statistics with respect to earlier layers' weights\n"
    figure, panels = begin(
        title + say_seeds(map(len, groups.values()), ""), len(groups), width=1.2 + 2.6 * len(groups), height=4.0
    )
    for axes, (name, group) in zip(panels, groups.items(), strict=True):
        looks = list(zip(*(record.values["looks"] for record in group), strict=True))
        steps = [look[0]["step"] for look in looks]
        for (moment, label), colour, dashes in zip(_MOMENTS.items(), COLOURS, ("--", "-."), strict=False):
            for distance, line in enumerate(("-", ":")):
                ratios = [fmean(each[moment][distance] for each in look) for look in looks]
                style = {"color": colour, "marker": "o", "markersize": 3, "label": f"{label}, l-{distance + 1}"}
                axes.plot(steps, ratios, line, **style)  # type: ignore[arg-type]
            if (height := paper[name].get(f"{moment}_1")) is not None:
                axes.axhline(height, color=GREY, linestyle=dashes, linewidth=1, label=f"{label}, l-1, {PAPER}")
        axes.set_title(name, fontsize=10, loc="left")
        tidy(axes, "Steps", steps)
    panels[0].set_ylim(bottom=0)  # at the end: it stops the common axis from growing
    panels[0].set_ylabel("Norm relative to that for r = l")
    add_legend(figure, 2)
    return figure


def plot_rows(records: Sequence[Record], *, experiment: str, title: str) -> Figure:
    """Return the first measure of a table's rows as a figure, a line for each; the paper's beside ours.

    Args:
        records: of the experiment.
        experiment: its name.
        title: over the figure.
    """
    table, counts = EXPERIMENTS[experiment], [len(group) for group in by_name(records).values()]
    measure = table.measures[0]
    rows = [row for row in table.rows(records) if measure.name in row.ours]
    theirs = {i: row.paper[measure.name] for i, row in enumerate(rows) if measure.name in row.paper}
    height = 1.6 + 0.32 * len(rows)
    figure, panels = begin(f"{title}\n{say_seeds(counts)}", 2 if theirs else 1, width=5.6, height=height)
    means = [row.ours[measure.name].mean for row in rows]
    panels[0].errorbar(
        means, range(len(rows)), xerr=[row.ours[measure.name].sd or 0.0 for row in rows], fmt="o", capsize=3
    )
    if theirs:
        panels[1].plot(list(theirs.values()), list(theirs), "o", color=GREY)
    for axes, whose in zip(panels, ("ours", PAPER), strict=False):
        axes.set_xlabel(f"{measure.label}, {whose}")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), [row.name for row in rows])
    panels[0].invert_yaxis()
    return figure


FIGURES: dict[str, Callable[[Sequence[Record]], Figure]] = {
    "batch_size": partial(
        plot_columns,
        experiment="batch_size",
        title="Accuracy by batch size",
        label="Images in a batch",
        without=("naive", "detached", "exact, own layer"),
        falls=True,  # from easy to hard
    ),
    "window": partial(
        plot_columns, experiment="window", title="Accuracy by window, batches of {batch}", label="Window k, steps"
    ),
    "compensation": lambda records: plot_trainings(by_name(records), ("train_accuracy", "test_accuracy")),
    "gradients": plot_ratios,
    "coco_norms": partial(
        plot_rows, experiment="coco_norms", title="Detection: the norm of the backbone, then that of the heads"
    ),
    "coco_window": partial(plot_rows, experiment="coco_window", title="Detection: AP by window k"),
    "coco_switch": partial(plot_rows, experiment="coco_switch", title="Detection: BN that is switched to SyncBN"),
}
"""By the name of the experiment: turns its records into a figure, which `reproduce` and `report` save as they need."""
