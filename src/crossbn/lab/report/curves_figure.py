"""Accuracy and loss during trainings: one figure for all commands that train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from crossbn.lab.records import Record
from crossbn.lab.report.figure import add_legend, begin, choose_styles, say_seeds, tidy
from crossbn.lab.statistics import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {
    "test_accuracy": ("Test accuracy, %", 100.0),
    "train_accuracy": ("Training accuracy, %", 100.0),
    "train_loss": ("Training loss", 1.0),
}
Groups = Mapping[str, Sequence[Record]]
"""Trainings by what sets them apart; those of a group differ in their seed only."""


def plot_trainings(groups: Groups, measures: Sequence[str] = tuple(MEASURES)) -> Figure:
    """Return a panel for each measure and in it a line for each group: the mean over its seeds, with a band."""
    shown = say_seeds(map(len, groups.values()), "band: ± 1 standard deviation")
    size = {"width": 2.4 + 2.8 * len(measures), "height": 3.4 + 0.2 * -(-len(groups) // len(measures))}
    figure, panels = begin(f"During training, {shown}", len(measures), **size, sharey=False)
    styles = choose_styles([group[0].settings["norm"] for group in groups.values()])
    for axes, measure in zip(panels, measures, strict=True):
        label, factor = MEASURES[measure]
        epochs: set[float] = set()
        for (name, group), style in zip(groups.items(), styles, strict=True):
            curve = curve_of(group, measure, factor)
            axes.plot(list(curve), [each.mean for each in curve.values()], **style, markersize=4, label=name)
            low, high = ([each.mean + sign * (each.sd or 0.0) for each in curve.values()] for sign in (-1, 1))
            axes.fill_between(list(curve), low, high, color=style["color"], alpha=0.13, linewidth=0)
            epochs |= curve.keys()
        axes.set_ylabel(label)
        whole = [epoch for epoch in epochs if epoch == int(epoch)]
        tidy(axes, "Epochs", whole if len(whole) > 1 else epochs)
    add_legend(figure, max(2, len(measures)))
    return figure


def curve_of(group: Sequence[Record], measure: str, factor: float = 100.0) -> dict[float, Spread]:
    """Return a measure over the seeds, by epoch; of a training that was cut short, what there is of all."""
    moments = zip(*(record.values["curve"] for record in group), strict=False)
    return {moment[0]["epoch"]: Spread.of([number(each[measure], factor) for each in moment]) for moment in moments}


def number(value: float | None, factor: float = 100.0) -> float:
    """Return a value of a record, in percent or so: files have null for what is not finite."""
    return float("nan") if value is None else factor * value
