"""Trainings of classifiers and of detectors on a page."""

from pathlib import Path

import numpy
import pytest

from crossbn.lab.report.folder import make_page
from crossbn.lab.report.page import Page
from crossbn.lab.report.training_section import settled
from tests.lab.report import on_disk
from tests.lab.report.sections import only_section


def test_trainings_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    on_disk.write_trainings(tmp_path)
    on_disk.write(tmp_path / "again.jsonl", [on_disk.training("cbn", 0, 0.2, 0.3, learning_rate_used=0.1)])
    section = only_section(tmp_path)
    assert section.tables[0].rows == (
        ("CBN, learning rate 0.1", "1", "30.0", "30.0", "40.0", "1.500", "60"),
        ("BN, learning rate 0.00625", "2", "42.0 ± 2.8", "42.0 ± 2.8", "52.0 ± 2.8", "1.500 ± 0.000", "60 ± 0"),
        ("CBN, learning rate 0.00625", "2", "49.0 ± 1.4", "49.0 ± 1.4", "59.0 ± 1.4", "1.500 ± 0.000", "60 ± 0"),
    )
    assert section.settings["Batch size"] == "2"
    assert section.settings["Computing time"] == "5 min"
    assert "Norm options" not in section.settings, "what is not set is not shown"
    assert section.setting_tables[0].columns == ("run", "norm", "window", "learning rate")
    assert section.setting_tables[0].rows[1] == ("BN, learning rate 0.00625", "bn", "", "0.00625")
    test, _, loss = section.figures[0].axes
    assert numpy.asarray(test.lines[2].get_ydata()) == pytest.approx([10.0, 49.0])
    assert numpy.asarray(loss.lines[0].get_ydata()) == pytest.approx([2.0, 1.5])
    assert test.get_xticks().tolist() == [1.0, 2.0]
    assert section.figures[0].get_suptitle().startswith("During training, mean of 1 to 2 seeds")


def test_the_section_begins_with_what_it_shows(tmp_path: Path) -> None:
    on_disk.write_trainings(tmp_path)
    (sentence,) = only_section(tmp_path).findings
    # 48 - 40 and 50 - 44: two seeds cannot tell 7 ± 1.4 from chance at 95 %; twice the standard error could.
    assert sentence.startswith("The highest test accuracy at the end, 49.0 ± 1.4 %, is that of CBN: +7.0 ± 12.7 to BN")
    on_disk.write(tmp_path / "one" / "record.jsonl", [on_disk.training("gn", 0, 0.3)])
    (alone,) = only_section(tmp_path / "one").findings
    assert alone == "GN ends with test accuracy of 30.0 %."


def test_a_training_that_diverged_is_shown(tmp_path: Path) -> None:
    lost = on_disk.training("bn", 1, 0.1, 0.1)
    lost.values["curve"][-1]["train_loss"] = float("nan")  # null in the file
    on_disk.write(tmp_path / "record.jsonl", [on_disk.training("bn", 0, 0.2, 0.4), lost])
    section = only_section(tmp_path)
    assert section.title == "Training: BN"
    assert section.tables[0].rows[0][1:3] == ("2", "25.0 ± 21.2")
    assert section.tables[0].rows[0][5] == "nan ± nan"
    assert "Training: BN" in Page("Diverged", [section]).html()


def test_settings_are_those_that_took_effect() -> None:
    cbn, bn = (settled(on_disk.training(norm, 3, 0.5)) for norm in ("cbn", "bn"))
    assert (cbn.settings["window"], cbn.settings["learning_rate"], cbn.seed) == (8, 0.00625, 3)
    assert "window" not in bn.settings
    assert not any(name.endswith("_used") for name in cbn.settings)


def test_seeds_of_detectors_are_joined_and_norms_stand_side_by_side(tmp_path: Path) -> None:
    for norm, seed, score in (("bn", 0, 0.3), ("bn", 1, 0.4), ("cbn", 0, 0.5)):
        on_disk.write(tmp_path / f"{norm}-{seed}" / "record.jsonl", [on_disk.detector(norm, seed, score)])
    section = only_section(tmp_path)
    assert section.title == "Detectors"
    (table,) = section.tables
    assert table.columns == ("", "n", "AP, %", "APl, %", "train loss", "waiting for images, %", "seconds")
    assert [row[:4] for row in table.rows] == [("BN", "2", "35.0 ± 7.1", ""), ("CBN", "1", "50.0", "")]
    assert section.findings == ["The highest AP at the end, 50.0 %, is that of CBN: +20.0 to BN."]


def test_a_training_without_a_measurement_is_counted(tmp_path: Path) -> None:
    empty = on_disk.detector("bn", 1, 0.3)
    empty.values["curve"].clear()
    on_disk.write(tmp_path / "record.jsonl", [on_disk.detector("bn", 0, 0.3), empty])
    page = make_page(tmp_path)
    assert [section.tables[0].rows[0][1] for section in page.sections] == ["1"]
    assert page.problems == ["1 of 2 'detect' records of record.jsonl cannot be read."]
