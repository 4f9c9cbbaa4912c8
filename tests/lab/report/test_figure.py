import pytest
from matplotlib.figure import Figure

from crossbn.lab.report.figure import COLOURS, choose_styles, tidy


def test_a_norm_keeps_its_colour_in_all_figures() -> None:
    assert [style["color"] for style in choose_styles(["gn", "cbn", "frn"])] == [COLOURS[2], COLOURS[1], COLOURS[5]]
    assert [style["color"] for style in choose_styles(["cbn"])] == [COLOURS[1]]
    styles = choose_styles(["bn", "bn", "cbn", "bn"])
    assert [style["linestyle"] for style in styles] == ["-", "--", "-", ":"]


@pytest.mark.parametrize(
    ("points", "ticks"),
    [([4, 1, 2], [1, 2, 4]), ([0.5], [0.5]), (range(1, 21), [2, 5, 8, 11, 14, 17, 20]), ([1, 1, 2], [1, 2])],
)
def test_ticks_stand_where_there_are_points(points: list[float], ticks: list[float]) -> None:
    axes = Figure().add_subplot()
    tidy(axes, "Steps", points, log=True)
    assert axes.get_xticks().tolist() == ticks
    assert axes.get_xticks(minor=True).tolist() == []
    assert [text.get_text() for text in axes.get_xticklabels()] == [f"{tick:g}" for tick in ticks]
