"""Ratios of gradients during training, a panel for each network."""

from collections.abc import Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from crossbn.lab.experiments.gradients import PAPER
from crossbn.lab.experiments.tasks import Result, by_name
from crossbn.lab.report.figure import COLOURS

_MOMENTS = {"mean": "mean", "second_moment": "second moment"}
_LINES = ("-", ":")


def plot_ratios(results: Sequence[Result]) -> Figure:
    """Return the ratios for l-1 and l-2 over the steps of training, with the paper's beside."""
    groups = by_name(results)
    figure = Figure(figsize=(1.2 + 2.6 * len(groups), 3.8), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (name, seeds) in zip(panels, groups.items(), strict=True):
        _draw_panel(axes, name, seeds)
    panels[0].set_ylim(bottom=0)  # at the end: it stops the common axis from growing
    panels[0].set_ylabel("Norm relative to that for r = l")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    title = "Gradients of statistics with respect to earlier layers' weights"
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=11)
    return figure


def _draw_panel(axes: Axes, name: str, seeds: Sequence[Result]) -> None:
    looks = list(zip(*(result.values["looks"] for result in seeds), strict=True))
    steps = [look[0]["step"] for look in looks]
    for (moment, label), colour in zip(_MOMENTS.items(), COLOURS, strict=False):
        for distance, line in enumerate(_LINES):
            ratios = [fmean(each[moment][distance] for each in look) for look in looks]
            axes.plot(steps, ratios, line, color=colour, marker="o", markersize=3, label=f"{label}, l-{distance + 1}")
        if name in PAPER:
            height = PAPER[name][f"{moment}_1"]
            axes.axhline(height, color=colour, linestyle="--", linewidth=0.9, label=f"{label}, l-1, paper")
    axes.set_title(name, fontsize=10, loc="left")
    axes.set_xlabel("Steps")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
