"""Runs of tables as sections of a page."""

from pathlib import Path
from typing import Any

import pytest

from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.experiments.registry import EXPERIMENTS
from crossbn.lab.report.experiment_figures import FIGURES
from crossbn.lab.report.experiment_section import unfinished
from crossbn.lab.report.folder import make_page
from tests.lab.experiments import pretended
from tests.lab.report import on_disk
from tests.lab.report.sections import only_section
from tests.lab.report.test_picture import panels


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, "pretended", pretended)
    monkeypatch.setitem(FIGURES, "pretended", lambda records: panels(len(records)))


def test_results_are_in_the_order_of_the_table_with_the_paper_s_numbers(tmp_path: Path) -> None:
    on_disk.write_results(tmp_path / "pretended-small.jsonl")
    section = only_section(tmp_path)
    (table,) = section.tables
    assert table.title == "Mean ± standard deviation over seeds, n = 2"
    assert table.rows == (("one", "1.50 ± 0.71", "2 ± 2", ""), ("two", "2.50 ± 0.71", "6 ± 4", "4"))
    assert (section.notes, section.findings) == (["Made up, small."], [])
    assert [len(figure.axes) for figure in section.figures] == [4]
    assert section.setting_tables[0].rows == (("one", "1"), ("two", "2"))
    assert section.settings == {
        "Software": "torch 2.6",
        "Commit": "abc1234",
        "Machine": "processor abacus",
        "Records": "4 in pretended-small.jsonl",
        "Computing time": "6 min",
    }
    words = ["crossbn", "reproduce", "pretended", "--scale", "small", "--output", tmp_path.name]
    assert section.command == words


def test_all_seeds_are_shown_and_counted(tmp_path: Path) -> None:
    on_disk.write_results(tmp_path / "pretended-small.jsonl")
    more = [on_disk.result("one", seed, {"number": 1}, 1.0 + seed) for seed in (7, 3)]
    on_disk.write(tmp_path / "pretended-small.jsonl", more)
    (table,) = only_section(tmp_path).tables
    assert table.title == "Mean ± standard deviation over seeds, n = 2 to 4"
    assert table.rows[0][1] == "3.75 ± 3.10"  # of 1, 2, 4 and 8


def test_the_later_of_two_results_counts_and_missing_runs_are_named(tmp_path: Path) -> None:
    task = pretended.configs(Scale.FULL)[0]
    made = [on_disk.result(task.name, task.seed, dict(task.settings), number) for number in (7.0, 9.0)]
    on_disk.write(tmp_path / "any name.jsonl", made)
    section = only_section(tmp_path)
    assert section.title == "Numbers out of thin air (full scale)"
    assert section.tables[0].title == "One run each (n = 1)"
    assert section.tables[0].rows == (("one", "9.00", "81"),)
    assert section.findings == ["Not finished: two still to be run."]
    assert section.settings["Number"] == "100"


@pytest.mark.parametrize(
    ("name", "title", "notes"),
    [("pretended-full", "Numbers out of thin air (full scale)", 2), ("other", "Numbers out of thin air", 1)],
)
def test_runs_with_other_settings_are_shown_and_said_to_be_so(
    tmp_path: Path, name: str, title: str, notes: int
) -> None:
    on_disk.write(tmp_path / f"{name}.jsonl", [on_disk.result("one", 0, {"number": 5}, 5.0)])
    section = only_section(tmp_path)
    assert section.title == title
    assert len(section.notes) == notes
    assert "other settings than this version" in section.notes[-1]


def test_tables_that_share_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete table explains its runs; of another one that has some of them nothing is shown until it has more."""

    class Larger:
        title, measures, scales = "Larger", pretended.measures, pretended.scales
        rows, notes = staticmethod(pretended.rows), staticmethod(pretended.notes)

        @staticmethod
        def configs(scale: Scale, seeds: int | None = None) -> list[Any]:
            tasks = pretended.configs(scale, seeds)
            return [*tasks, type(tasks[0])("pretended", "three", 0, {"number": 3})]

    monkeypatch.setitem(EXPERIMENTS, "larger", Larger)
    path = tmp_path / "pretended-small.jsonl"
    on_disk.write_results(path, seeds=1)
    assert [section.title for section in make_page(tmp_path).sections] == ["Numbers out of thin air (small scale)"]
    on_disk.write(path, [on_disk.result("three", 0, {"number": 3}, 3.0)])
    page = make_page(tmp_path)
    assert [section.title for section in page.sections][-1] == "Larger (small scale)"
    assert [row[0] for row in page.sections[-1].tables[0].rows] == ["one", "two", "three"]


def test_of_many_missing_runs_three_are_named() -> None:
    assert list(unfinished([])) == []
    (sentence,) = unfinished(["a", "b", "c", "d", "e"])
    assert sentence == "Not finished: a; b; c and 2 others still to be run."
