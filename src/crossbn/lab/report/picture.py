"""Figures as SVG inside a page: crisp on paper, searchable, and in the colours of the page they are on."""

import io
import re
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.legend import Legend

from crossbn.lab.report.figure import add_legend

THEME = {
    # By the colour that a figure is drawn in: the page's name for it, and what takes its place by night.
    "#000000": ("ink", "#e6e6e6"),
    "#555555": ("grey", "#a8adb3"),
    "#777777": ("rule", "#8b9096"),
    "#d55e00": ("vermilion", "#ff8a3d"),
    "#0072b2": ("blue", "#5cb3f0"),
    "#009e73": ("green", "#2ecba0"),
    "#cc79a7": ("purple", "#e39dc4"),
}
NARROW_INCHES, PANEL_INCHES = 4.6, 2.9  # letters of 10 points are 10 pixels high on a phone
_LINE_INCHES, _HALF_LINE = 0.2, 26  # of a legend: height, and letters in half of a line
# Nothing of this is for readers, and the date would make every page another one.
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


class Picture(NamedTuple):
    """A figure in the markup of a page."""

    caption: str
    """Its title, taken out of the drawing: text of the page wraps where the page is narrow."""
    alternative: str
    """What is drawn, for those who do not see it."""
    wide: str
    """The drawing, for a screen or paper."""
    narrow: str
    """The drawing with one panel below the other, for a phone."""


def make_picture(figure: Figure, name: str) -> Picture:
    """Turn a figure into markup; the figure is another one afterwards.

    Args:
        figure: drawn as for a file.
        name: no other picture of the page has it.
    """
    caption = figure.get_suptitle().replace("\n", ", ")
    figure.suptitle("")
    alternative = _describe(figure, caption)
    wide = _markup(figure, f"{name}w", alternative)
    _stack(figure)
    return Picture(caption, alternative, wide, _markup(figure, f"{name}n", alternative))


def _describe(figure: Figure, caption: str) -> str:
    """Say what is drawn against what, in which panels, and which lines there are."""
    heights = [axes.get_ylabel() or figure.axes[0].get_ylabel() for axes in figure.axes]
    parts = [
        *_distinct(f"{y} by {axes.get_xlabel()}" for y, axes in zip(heights, figure.axes, strict=True)),
        "Panels: " + "; ".join(_distinct(axes.get_title(loc="left") for axes in figure.axes)),
        "Shown: " + "; ".join(_distinct(label for axes in figure.axes for label in _labels(axes))),
    ]
    return ". ".join([caption or "Figure", *(part for part in parts if not part.endswith(": "))]) + "."


def _labels(axes: Axes) -> list[str]:
    return [*axes.get_legend_handles_labels()[1], *(text.get_text() for text in axes.texts)]


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def _stack(figure: Figure) -> None:
    """Put one panel below the other, in a figure as narrow as a phone."""
    specs = list(dict.fromkeys(axes.get_subplotspec() for axes in figure.axes))
    grid = GridSpec(len(specs), 1, figure=figure)
    for axes in figure.axes:
        axes.set_subplotspec(grid[specs.index(axes.get_subplotspec())])
        if len(specs) > 1:  # panels beside each other share the first one's
            axes.tick_params(labelleft=True, labelbottom=True)
            axes.set_ylabel(axes.get_ylabel() or figure.axes[0].get_ylabel())
    lines = sum(_narrow_legend(figure, legend) for legend in list(figure.legends))
    tallest = max(PANEL_INCHES, figure.get_figheight() if len(specs) == 1 else 0)
    figure.set_size_inches(NARROW_INCHES, tallest * len(specs) + _LINE_INCHES * lines)


def _narrow_legend(figure: Figure, legend: Legend) -> int:
    """Put a legend with fewer columns in place of one; return how many lines it has."""
    labels = [text.get_text() for text in legend.get_texts()]
    columns = 2 if max(map(len, labels), default=0) <= _HALF_LINE else 1
    legend.remove()
    add_legend(figure, columns)
    return -(-len(labels) // columns)


def _markup(figure: Figure, name: str, alternative: str) -> str:
    """Return the drawing as an element of HTML: its names are its own, its colours and letters the page's."""
    text = io.StringIO()
    # Letters stay letters; the salt makes the names of parts the same in every run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "svg.id": None}):
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    head, _, drawing = text.getvalue().partition("<svg ")[2].partition(">")
    box = re.search(r'viewBox="0 0 (\S+) (\S+)"', head)
    assert box is not None, "matplotlib writes it"
    width, height = (round(float(number) * 4 / 3) for number in box.groups())
    drawing = re.sub(r"<style.*?</style>", "", drawing, flags=re.DOTALL)  # it would hold for the whole page
    drawing = re.sub(r'<g id="\w+_\d+">', "<g>", drawing)  # nothing refers to these
    drawing = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}", drawing).replace("xlink:href", "href")
    drawing = re.sub(r"font-family: [^;\"]*;? ?", "", drawing)
    drawing = re.sub(r"\s*\n\s*", " ", drawing)
    for colour, (theme, _) in THEME.items():
        drawing = drawing.replace(colour, f"var(--{theme})")
    size = f'{box.group()} width="{width}" height="{height}" preserveAspectRatio="xMinYMid"'
    return f'<svg {size} role="img" aria-label="{escape(alternative)}">{drawing}'
