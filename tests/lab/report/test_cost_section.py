from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from crossbn.lab.cost.cases import distinct, sweep
from crossbn.lab.records import Record
from crossbn.lab.report.cost_section import plot_growth
from crossbn.lab.report.figure import save_png
from crossbn.lab.report.folder import make_page
from tests.lab.cost.handmade import case, records
from tests.lab.report import on_disk
from tests.lab.report.sections import only_section


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


def test_costs_of_several_cases_have_an_overview_and_a_picture(tmp_path: Path) -> None:
    on_disk.write_costs(tmp_path / "records.jsonl")
    section = only_section(tmp_path)
    overview, first, second = section.tables
    assert overview.columns[0] == "CBN / BN"
    assert [row[:2] for row in overview.rows] == [
        ("tiny, input 3x6x6, batch 2, window 3", "1.25 ± 0.01"),
        ("tiny, input 3x6x6, batch 2, window 6", "1.50 ± 0.01"),
    ]
    assert (first.title, second.rows[1][3]) == ("tiny, input 3x6x6, batch 2, window 3", "1.50 ± 0.01")
    assert section.findings == [
        "In 2 cases a training step with CBN takes 1.25 (tiny, input 3x6x6, batch 2, window 3) to 1.50 (tiny, input "
        "3x6x6, batch 2, window 6) times BN's time and 1.10 times its memory."
    ]
    (figure,) = section.figures
    assert [axes.get_xlabel() for axes in figure.axes] == ["Window, steps"]
    assert section.settings["Repetitions"] == "20 rounds"
    assert section.settings["Norms"] == "bn, gn, cbn"


def test_one_case_is_named_in_the_title_and_a_lost_baseline_in_the_problems(tmp_path: Path) -> None:
    whole, lost = records(case()), records(case(batch_size=5))[1:]
    on_disk.write(tmp_path / "records.jsonl", [on_disk.cost(each) for each in (*whole, *lost)])
    page = make_page(tmp_path)
    (section,) = page.sections
    assert section.title == "Costs: time, memory and FLOPs of tiny, input 3x6x6, batch 2, window 3"
    assert section.findings == ["A training step with CBN takes 1.00 ± 0.01 times BN's time and 1.10 times its memory."]
    assert (len(section.tables), section.figures) == (1, [])
    assert page.problems == ["records.jsonl lacks BN's record to compare with: tiny, input 3x6x6, batch 5, window 3."]


def test_targets_are_in_brackets(tmp_path: Path) -> None:
    def made(**changes: object) -> list[Record]:
        sizes = {"model": "resnet18", "input_shape": (3, 224, 224), "batch_size": 4, "window": 4}
        return [on_disk.cost(each) for each in records(case(norms=("bn", "cbn"), **sizes, **changes), cbn=1.05)]

    on_disk.write(tmp_path / "records.jsonl", [*made(), *made(positions=None)])
    overview = only_section(tmp_path).tables[0]
    assert overview.columns[0] == "CBN / BN (target)"
    assert [row[1] for row in overview.rows] == ["1.05 ± 0.01 (1.06)", "1.05 ± 0.01"]


def test_a_norm_without_cbn_is_told_too(tmp_path: Path) -> None:
    made = records(case(norms=("bn", "gn")), gn=1.1)
    on_disk.write(tmp_path / "records.jsonl", [on_disk.cost(each) for each in made])
    assert only_section(tmp_path).findings == [
        "A training step with GN takes 1.10 ± 0.01 times BN's time and 1.00 times its memory."
    ]
