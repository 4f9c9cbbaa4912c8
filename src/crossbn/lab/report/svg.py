"""Figures as SVG inside a page: crisp on paper, searchable, and in the colours of the page they are on."""

import io
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.legend import Legend

from crossbn.lab.report.style import THEME

NARROW_INCHES, PANEL_INCHES = 4.6, 2.9  # letters of 10 points are 10 pixels high on a phone
_LINE_INCHES, _HALF_LINE = 0.2, 26  # of a legend: height, and letters in half of a line
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_PLACES: tuple[Literal["left", "center", "right"], ...] = ("left", "center", "right")
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
    caption = _take_title(figure)
    alternative = _describe(figure, caption)
    wide = _markup(figure, f"{name}w", alternative)
    _stack(figure)
    return Picture(caption, alternative, wide, _markup(figure, f"{name}n", alternative))


def _take_title(figure: Figure) -> str:
    """Return the figure's title without it: the one over all panels, or that of the only panel."""
    title = figure.get_suptitle()
    figure.suptitle("")
    if not title and len(figure.axes) == 1:
        title = " ".join(filter(None, (figure.axes[0].get_title(loc=place) for place in _PLACES)))
        for place in _PLACES:
            figure.axes[0].set_title("", loc=place)
    return title.replace("\n", ", ")


def _describe(figure: Figure, caption: str) -> str:
    """Say what is drawn against what, in which panels, and which lines there are."""
    heights = [axes.get_ylabel() or figure.axes[0].get_ylabel() for axes in figure.axes]
    parts = [
        *_distinct(f"{y} by {axes.get_xlabel()}" for y, axes in zip(heights, figure.axes, strict=True)),
        "Panels: " + "; ".join(_distinct(axes.get_title(loc="left") or axes.get_title() for axes in figure.axes)),
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
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 9}
    figure.legend([handle for handle in legend.legend_handles if handle is not None], labels, **place)
    return -(-len(labels) // columns)


def _markup(figure: Figure, name: str, alternative: str) -> str:
    """Return the drawing as an element of HTML."""
    text = io.StringIO()
    # Letters stay letters; the salt makes the names of parts the same in every run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    drawing = ElementTree.fromstring(text.getvalue())
    for parent in list(drawing.iter()):
        for child in list(parent):
            if child.tag == f"{_SVG}style":
                parent.remove(child)  # it would hold for the whole page
    used = set(re.findall(r"#(\w+)", " ".join(_references(drawing))))
    for element in drawing.iter():
        _adapt(element, name, used)
    width, height = (float(number) for number in drawing.attrib["viewBox"].split()[2:])
    drawing.attrib = {
        "viewBox": drawing.attrib["viewBox"],
        "width": f"{width * 4 / 3:.0f}",
        "height": f"{height * 4 / 3:.0f}",
        "preserveAspectRatio": "xMinYMid",
        "role": "img",
        "aria-label": alternative,
    }
    return ElementTree.tostring(drawing, encoding="unicode")


def _references(drawing: ElementTree.Element) -> Iterable[str]:
    for element in drawing.iter():
        yield from (element.get(key, "") for key in (_LINK, "clip-path"))


def _adapt(element: ElementTree.Element, name: str, used: set[str]) -> None:
    """Make an element fit for a page with others: no name that they have, no colour that the page has another for."""
    element.tag = element.tag.removeprefix(_SVG)
    element.text, element.tail = (None if text is None or not text.strip() else text for text in (element.text, None))
    if _LINK in element.attrib:
        element.attrib["href"] = element.attrib.pop(_LINK).replace("#", f"#{name}")
    for key, value in list(element.attrib.items()):
        if key == "id":
            element.attrib[key] = f"{name}{value}"
            if value not in used:
                del element.attrib[key]
        elif key == "clip-path":
            element.attrib[key] = value.replace("#", f"#{name}")
        elif key == "d":
            element.attrib[key] = " ".join(value.split())
        elif key == "style":
            element.attrib[key] = _themed(value)


def _themed(style: str) -> str:
    style = re.sub(r"font-family: [^;]*;? ?", "", style)
    for colour, name in THEME.items():
        style = style.replace(colour, f"var({name})")
    return style
