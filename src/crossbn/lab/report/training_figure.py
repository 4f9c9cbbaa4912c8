"""Accuracy and loss during trainings of the recipes."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from crossbn.lab.experiments.rows import Spread
from crossbn.lab.report.figure import COLOURS, LINES
from crossbn.lab.report.training_records import Training

_PANELS = {
    "test_accuracy": ("Test accuracy, %", 100.0),
    "train_accuracy": ("Training accuracy, %", 100.0),
    "train_loss": ("Training loss", 1.0),
}


def plot_trainings(groups: Mapping[str, Sequence[Training]]) -> Figure:
    """Return a panel for each measure and in it a line for each group: the mean over its seeds."""
    figure = Figure(figsize=(1.2 + 3.2 * len(_PANELS), 3.4 + 0.2 * -(-len(groups) // 3)), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(_PANELS), squeeze=False)[0]
    for axes, (measure, (label, factor)) in zip(panels, _PANELS.items(), strict=True):
        for i, (name, group) in enumerate(groups.items()):
            style = COLOURS[i % len(COLOURS)], LINES[i // len(COLOURS) % len(LINES)]
            _draw_group(axes, name, group, measure, factor, style)
        axes.set_ylabel(label)
        axes.set_xlabel("Epochs")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    title = "During training, mean over seeds, band: ± 1 standard deviation"
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=11)
    return figure


def _draw_group(
    axes: Axes, name: str, group: Sequence[Training], measure: str, factor: float, style: tuple[str, str]
) -> None:
    colour, line = style
    # Seeds measure at the same moments; of one that was cut short, what there is of all.
    moments = list(zip(*(training.curve for training in group), strict=False))
    epochs = [moment[0].epoch for moment in moments]
    spreads = [Spread.of([factor * getattr(each, measure) for each in moment]) for moment in moments]
    marker = "o" if len(epochs) == 1 else None
    axes.plot(epochs, [each.mean for each in spreads], color=colour, linestyle=line, marker=marker, label=name)
    if len(group) > 1:
        low, high = ([each.mean + sign * (each.sd or 0.0) for each in spreads] for sign in (-1, 1))
        axes.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
