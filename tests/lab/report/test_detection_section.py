"""Trainings of detectors on a page."""

import json
from pathlib import Path

from crossbn.lab.recipes.detection import Outcome, Point, Recipe
from crossbn.lab.recipes.detection.record import Record
from crossbn.lab.records import append_lines
from crossbn.lab.report.folder import make_page
from crossbn.lab.report.reading import DETECT, read_folder


def record(norm: str, seed: int, score: float) -> Record:
    point = Point(12.0, 0.5, {"AP": score, "APl": None})
    return Record(Outcome(Recipe(norm=norm, seed=seed), (point,), 10, 100.0, 0.5, 0.02), 1, "cpu")


def test_seeds_are_joined_and_norms_stand_side_by_side(tmp_path: Path) -> None:
    for norm, seed, score in (("bn", 0, 0.3), ("bn", 1, 0.4), ("cbn", 0, 0.5)):
        folder = tmp_path / f"{norm}-{seed}"
        folder.mkdir()
        append_lines(folder / "record.jsonl", [record(norm, seed, score)])
    (section,) = make_page(tmp_path).sections
    assert section.title == "Detectors"
    (table,) = section.tables
    assert table.columns == ("", "n", "AP, %", "APl, %", "train loss", "waiting for images, %", "seconds")
    assert [row[:4] for row in table.rows] == [("BN", "2", "35.0 ± 7.1", ""), ("CBN", "1", "50.0", "")]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    whole = json.loads(record("bn", 0, 0.3).to_json())
    lines = [json.dumps(each) for each in (whole, {**whole, "curve": []})]
    (tmp_path / "record.jsonl").write_text("\n".join(lines))
    (source,), (problem,) = read_folder(tmp_path)
    assert len(source.records[DETECT]) == 1
    assert "line 2" in problem.sentence.lower()
