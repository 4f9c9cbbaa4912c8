from pathlib import Path

import pytest

from crossbn.lab.experiments.demo import rows
from crossbn.lab.report.demo_figure import choose_styles, plot_curves
from crossbn.lab.report.figure import save_png, spread_out
from tests.lab.experiments.handmade import record, three_norms


@pytest.mark.parametrize(
    ("heights", "moved"),
    [
        ([10.0, 50.0], [10.0, 50.0]),
        ([50.0, 50.0], [48.0, 52.0]),
        ([94.0, 39.0, 95.0, 93.0], [94.0, 39.0, 98.0, 90.0]),
        ([0.0, 3.0, 6.0, 20.0], [-1.0, 3.0, 7.0, 20.0]),
        ([0.0, 3.9, 4.0], [-1.3666, 2.6333, 6.6333]),  # pushed apart, the first two reach the third
    ],
)
def test_labels_are_spread_out(heights: list[float], moved: list[float]) -> None:
    assert spread_out(heights, 4.0) == pytest.approx(moved, abs=1e-3)


def test_a_norm_keeps_its_colour() -> None:
    ceiling, bn, cbn = choose_styles(rows(three_norms()))
    assert ceiling[0] == bn[0] != cbn[0]
    assert (ceiling[1], bn[1], cbn[1]) == ("-", "--", "-")


def test_picture_depends_on_the_numbers_alone(tmp_path: Path) -> None:
    table = rows(three_norms())
    for name, drawn in (("a", table), ("b", table), ("c", table[:-1])):
        save_png(plot_curves(drawn), tmp_path / f"{name}.png")
    first, again, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first.startswith(b"\x89PNG")
    assert first == again != other


def test_one_seed_can_be_drawn(tmp_path: Path) -> None:
    save_png(plot_curves(rows([record(0.1, 0.5)])), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000
