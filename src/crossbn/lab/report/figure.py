"""What the figures have in common: a norm has its colour in all of them, and ticks stand where there are points."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossbn.lab.records import write_whole
from crossbn.lab.report.context import span

if TYPE_CHECKING:  # which figures there are is known without it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's, which colour-blind readers tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
LINES = ("-", "--", ":", "-.")
GREY = "#777777"
"""Of what is there to compare with: the paper's numbers, BN at 1."""
PAPER = "the paper's"
"""What the labels of the paper's numbers end with."""
_MARKERS = ("s", "o", "^", "D", "v", "P", "X")
_NORMS = ("bn", "cbn", "gn", "brn", "naive_cbn")
_MOST_TICKS = 7


def choose_styles(norms: Sequence[str]) -> list[dict[str, Any]]:
    """Return how each of the lines is drawn: in the colour of its norm, and differently where a norm has several.

    Example:
        >>> [(style["color"], style["linestyle"]) for style in choose_styles(["cbn", "bn", "cbn"])]
        [('#0072B2', '-'), ('#D55E00', '-'), ('#0072B2', '--')]
    """
    places = {norm: i for i, norm in enumerate(dict.fromkeys((*_NORMS, *norms)))}
    earlier = [norms[:i].count(norm) for i, norm in enumerate(norms)]
    return [
        {
            "color": COLOURS[places[norm] % len(COLOURS)],
            "linestyle": LINES[count % len(LINES)],
            "marker": _MARKERS[places[norm] % len(_MARKERS)],
        }
        for norm, count in zip(norms, earlier, strict=True)
    ]


def begin(
    title: str, panels: int = 1, *, width: float, height: float, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels beside each other; sizes are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=11)
    return figure, list(figure.subplots(1, panels, sharey=sharey, squeeze=False)[0])


def tidy(axes: Axes, label: str, points: Iterable[float], *, log: bool = False) -> None:
    """Label the horizontal axis, with ticks where there are points: of many, at most seven evenly chosen ones."""
    places = sorted(set(points))
    shown = places[::-1][:: -(-len(places) // _MOST_TICKS)][::-1]
    if log:
        axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{each:.4g}" for each in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(figure: Figure, columns: int) -> None:
    """Put the labels of all panels below the figure, each once, the paper's after ours."""
    shown = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels()[::-1], strict=True)]
    found = dict(sorted(shown, key=lambda pair: pair[0].endswith(PAPER)))
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 9}
    figure.legend(list(found.values()), list(found), handlelength=3, **place)


def say_seeds(counts: Iterable[int], spread: str = "± 1 standard deviation") -> str:
    """Say what a point is the mean of.

    Example:
        >>> say_seeds([3, 5, 3]), say_seeds([1, 1])
        ('mean of 3 to 5 seeds, ± 1 standard deviation', 'one seed')
    """
    found = [*counts]
    return "one seed" if max(found, default=1) == 1 else f"mean of {span(found)} seeds, {spread}"


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG file that depends on the figure alone: the version of matplotlib is not in it."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    write_whole(path, drawn.getvalue())
