import json
from pathlib import Path

import pytest

from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.experiments.records import append_record
from crossbn.lab.records import append_lines
from crossbn.lab.report.reading import COST, DEMO, DIAGNOSE, REPRODUCE, TRAIN, Kind, read_folder
from tests.lab.cost import handmade as costs
from tests.lab.experiments import pretended
from tests.lab.experiments.handmade import record
from tests.lab.report import on_disk

LINES = {
    DEMO: record(0.5).to_json(),
    REPRODUCE: on_disk.result(pretended.configs(Scale.SMALL)[0], 1.0).to_json(),
    TRAIN: json.dumps(on_disk.training("bn", 0, 0.5)),
    COST: costs.records(costs.case())[0].to_json(),
    DIAGNOSE: on_disk.fidelity()[0].to_json(),
}


@pytest.mark.parametrize("kind", LINES, ids=lambda kind: kind.command)
def test_a_line_is_recognized_by_its_fields(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "any.jsonl").write_text(f"{LINES[kind]}\n")
    (source,), problems = read_folder(tmp_path)
    assert (list(source.records), problems) == ([kind], [])
    assert source.records[kind] == [kind.parse(LINES[kind])]


def test_a_file_may_hold_several_kinds(tmp_path: Path) -> None:
    (tmp_path / "any.jsonl").write_text("\n".join([*LINES.values(), *LINES.values()]))
    (source,), problems = read_folder(tmp_path)
    assert {kind: len(found) for kind, found in source.records.items()} == dict.fromkeys(LINES, 2)
    assert problems == []


def test_folders_below_are_read_and_hidden_ones_are_not(tmp_path: Path) -> None:
    for name in ("b/deep/records.jsonl", "a.jsonl", ".venv/lib/records.jsonl", "b/notes.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        append_record(path, record(0.5))
    sources, problems = read_folder(tmp_path)
    assert [source.name for source in sources] == ["a.jsonl", "b/deep/records.jsonl"]
    assert problems == []


@pytest.mark.parametrize(
    "line",
    [
        b'{"experiment": "demo", "na',
        b"[1, 2]",
        b"17",
        b"",
        b"\xff\xfe",
        LINES[COST].replace("rounds", "bounds").encode(),
    ],
)
def test_damaged_lines_are_counted_and_the_others_kept(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_lines(path, on_disk.fidelity()[:2])
    with path.open("ab") as file:
        file.write(line + b"\n")
    append_lines(path, on_disk.fidelity()[2:3])
    (source,), (problem,) = read_folder(tmp_path)
    assert len(source.records[DIAGNOSE]) == 3
    assert problem.sentence == "Line 3 of records.jsonl cannot be read: no whole record of crossbn's."


def test_many_damaged_lines_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join([LINES[DEMO], *["{"] * 7]))
    _, (problem,) = read_folder(tmp_path)
    assert problem.sentence.startswith("Lines 2, 3, 4, 5, 6 and more of x.jsonl cannot be read")


def test_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"loss": 1.0}\n')
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "picture.jsonl").write_bytes(bytes(range(256)))
    sources, problems = read_folder(tmp_path)
    assert sources == []
    assert [problem.sentence for problem in problems] == [
        "log.jsonl is not a file of crossbn's records.",
        "none.jsonl is empty.",
        "picture.jsonl is not a file of crossbn's records.",
    ]


def test_a_training_needs_a_curve(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({**on_disk.training("bn", 0, 0.5), "curve": []}))
    assert read_folder(tmp_path)[0] == []


def test_settings_of_a_training_are_those_that_took_effect() -> None:
    cbn, bn = (TRAIN.parse(json.dumps(on_disk.training(norm, 3, 0.5))) for norm in ("cbn", "bn"))
    assert (cbn.settings["window"], cbn.settings["learning_rate"], cbn.seed) == (8, 0.00625, 3)
    assert "window" not in bn.settings
    assert not any(name.endswith("_used") for name in cbn.settings)
