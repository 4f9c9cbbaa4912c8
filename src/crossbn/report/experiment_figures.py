"""The pictures of the experiments that have one."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from crossbn.experiments.tasks import Result
from crossbn.report.ratio_figure import plot_ratios

FIGURES: dict[str, Callable[[Sequence[Result]], Figure]] = {"gradients": plot_ratios}
"""By the name of the experiment: turns its results into a figure, which `reproduce` and `report` save as they need."""
