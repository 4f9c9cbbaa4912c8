"""What the figures have in common."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

# Okabe and Ito's, which colour-blind readers tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
LINES = ("-", "--", ":", "-.")


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG file that depends on the figure alone: the version of matplotlib is not in it."""
    figure.savefig(path, format="png", metadata={"Software": None})


def spread_out(heights: Sequence[float], distance: float) -> list[float]:
    """Move heights apart, as little as it takes, until neighbours are `distance` apart; their order stays.

    Example:
        >>> spread_out([50.0, 10.0, 51.0], 5.0)
        [48.0, 10.0, 53.0]
    """
    moved = list(heights)
    order = sorted(range(len(heights)), key=heights.__getitem__)
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and moved[groups[-1][0]] - moved[groups[-2][-1]] < distance:
            joined = groups.pop(-2) + groups.pop()
            groups.append(joined)
            middle = sum(heights[i] for i in joined) / len(joined)
            for place, i in enumerate(joined):
                moved[i] = middle + (place - (len(joined) - 1) / 2) * distance
    return moved
