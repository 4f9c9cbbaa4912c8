"""The pictures of the experiments that have one."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from crossbn.lab.experiments.tasks import Result
from crossbn.lab.report.classification_figures import plot_batch_sizes, plot_compensation, plot_windows
from crossbn.lab.report.ratio_figure import plot_ratios

FIGURES: dict[str, Callable[[Sequence[Result]], Figure]] = {
    "batch_size": plot_batch_sizes,
    "window": plot_windows,
    "compensation": plot_compensation,
    "gradients": plot_ratios,
}
"""By the name of the experiment: turns its results into a figure, which `reproduce` and `report` save as they need."""
