from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from crossbn.lab.cost.sweep import distinct, sweep
from crossbn.lab.report.cost_figure import plot_growth
from crossbn.lab.report.figure import save_png
from tests.lab.cost.handmade import case, records


def test_a_panel_for_each_size_and_a_line_for_each_norm() -> None:
    base = case(batch_size=2, window=8)
    growth = sweep(base, batch_sizes=[2, 8, 4], image_sizes=[6, 12])
    made = [
        record
        for each in distinct(base, growth)
        for record in records(each, gn=1.1, cbn=1 + each.window / 10 + each.input_shape[-1] / 100)
    ]
    made += [replace(record, compiled=True) for record in made]
    batch, image = plot_growth(growth, made).axes
    lines = {str(line.get_label()): line for line in batch.lines}
    assert list(lines) == ["BN", "GN", "CBN", "GN, compiled", "CBN, compiled"]
    assert numpy.asarray(lines["CBN"].get_xdata()).tolist() == [2, 4, 8]
    assert numpy.asarray(lines["GN"].get_ydata()) == pytest.approx([1.1, 1.1, 1.1])
    assert numpy.asarray(lines["CBN"].get_ydata()) == pytest.approx([1.86, 1.46, 1.26])
    assert batch.get_title(loc="left") == "tiny, the paper's window, 6 px"
    assert image.get_title(loc="left") == "tiny, window 8, batch 2"
    assert [float(tick) for tick in image.get_xticks()] == [6.0, 12.0]


def test_picture_depends_on_the_numbers_alone(tmp_path: Path) -> None:
    base = case()
    growth = sweep(base, windows=[3, 4])
    for name, ratio in (("a", 1.2), ("b", 1.2), ("c", 1.3)):
        made = [record for each in distinct(base, growth) for record in records(each, cbn=ratio)]
        save_png(plot_growth(growth, made), tmp_path / f"{name}.png")
    first, again, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first.startswith(b"\x89PNG")
    assert first == again != other
