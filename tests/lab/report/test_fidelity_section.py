"""Records of `crossbn diagnose` on a page, of today's shape and of the one before."""

import json
from dataclasses import replace
from pathlib import Path

from crossbn.lab.records import append, read
from crossbn.lab.report.folder import make_page
from tests.lab.report import on_disk
from tests.lab.report.sections import only_section

SETTINGS = {
    "Measurements": "2, each of all layers and ages",
    "Model": "tiny",
    "Window": "3",
    "Software": "torch 2.6",
    "Machine": "processor abacus",
}


def test_diagnosis_has_its_settings_and_a_recommendation(tmp_path: Path) -> None:
    on_disk.write_diagnosis(tmp_path / "here" / "records.jsonl")
    section = only_section(tmp_path)
    assert section.title == "How close remembered statistics of tiny are to the true ones"
    assert section.findings[0].startswith(
        "Too little was measured to rely on: 2 measurements where it takes 4. So far: window 3 serves: even at age 2 "
    )
    titles = [table.title for table in section.tables]
    assert titles == ["By age of the statistics", "By progress of the training", "By layer"]
    assert section.tables[0].rows[0][1:3] == ("20.0 → 10.0", "50.0")
    assert section.settings == {**SETTINGS, "Burn in": "0", "Commit": "abc1234", "Records": "16 in here/records.jsonl"}
    age, layer, step = section.figures[0].axes
    assert [axes.get_xticks().tolist() for axes in (age, layer, step)] == [[1, 2], [1, 2], [10, 20]]


def test_earlier_versions_wrote_settings_beside_the_records(tmp_path: Path) -> None:
    lines = [json.dumps({**each.settings, **each.values}) for each in on_disk.fidelity()]
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    bare = only_section(tmp_path)
    assert bare.title == "How close remembered statistics are to the true ones"
    context = {"model": "tiny", "window": "3", "burn-in": "0", "torch": "2.6", "commit": "", "processor": "abacus"}
    (tmp_path / "context.json").write_text(json.dumps(context))
    section = only_section(tmp_path)
    assert section.title == "How close remembered statistics of tiny are to the true ones"
    assert section.findings == bare.findings
    assert section.settings["Model"] == "tiny"
    assert "Commit" not in section.settings


def test_runs_of_a_file_have_a_section_each(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    on_disk.write_diagnosis(path)
    first = read(path)
    append(path, [replace(record, settings={**record.settings, "window": 4}) for record in first])
    sections = make_page(tmp_path).sections
    titles = [section.title for section in sections]
    title = "How close remembered statistics of tiny are to the true ones"
    assert titles == [f"{title}: window 3", f"{title}: window 4"]
    assert [section.settings["Records"] for section in sections] == ["16 in records.jsonl"] * 2
