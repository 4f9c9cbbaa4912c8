"""The pictures of the experiments that have one."""

from collections.abc import Callable, Sequence
from pathlib import Path

from crossbn.experiments.tasks import Result
from crossbn.report.ratio_figure import draw_ratios

FIGURES: dict[str, Callable[[Sequence[Result], Path], None]] = {"gradients": draw_ratios}
"""By the name of the experiment: draws its results into a PNG file."""
