from dataclasses import replace
from pathlib import Path

import pytest

from crossbn.lab.cost import CostRecord
from crossbn.lab.records import append
from crossbn.lab.report.reading import read_folder
from tests.lab.cost import handmade as costs
from tests.lab.report import on_disk

DEMO = on_disk.demo("bn", 2, 0, 0.5)
EACH = [
    DEMO,
    on_disk.result("one", 0, {"number": 1}, 1.0),
    on_disk.training("bn", 0, 0.5),
    on_disk.cost(costs.records(costs.case())[0]),
    on_disk.fidelity()[0],
]


def test_a_file_may_hold_several_kinds(tmp_path: Path) -> None:
    append(tmp_path / "any.jsonl", [*EACH, *EACH])
    (source,), problems = read_folder(tmp_path)
    assert [record.kind for record in source.latest] == ["demo", "pretended", "classify", "cost", "diagnose"]
    assert [record.key for record in source.records] == 2 * [record.key for record in EACH]
    assert problems == []


def test_folders_below_are_read_and_hidden_ones_are_not(tmp_path: Path) -> None:
    for name in ("b/deep/records.jsonl", "a.jsonl", ".venv/lib/records.jsonl", "b/notes.json"):
        on_disk.write(tmp_path / name, [DEMO])
    sources, problems = read_folder(tmp_path)
    assert [source.name for source in sources] == ["a.jsonl", "b/deep/records.jsonl"]
    assert [source.folder for source in sources] == [tmp_path.name, f"{tmp_path.name}/b/deep"]
    assert problems == []


def test_a_relative_folder_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk.write(tmp_path / "runs" / "records.jsonl", [DEMO])
    monkeypatch.chdir(tmp_path)
    assert [read_folder(Path(name))[0][0].folder for name in (".", "runs")] == ["runs", "runs"]


@pytest.mark.parametrize(
    "line", [b'{"experiment": "demo", "na', b"[1, 2]", b"17", b"", b"\xff\xfe", b'{"kind": "demo", "environment": {}}']
)
def test_damaged_lines_are_counted_and_the_others_kept(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append(path, on_disk.fidelity()[:2])
    with path.open("ab") as file:
        file.write(line + b"\n")
    append(path, on_disk.fidelity()[2:3])
    (source,), (problem,) = read_folder(tmp_path)
    assert len(source.records) == 3
    assert problem.sentence == "Line 3 of records.jsonl cannot be read: no whole record of crossbn's."


def test_many_damaged_lines_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join([DEMO.to_json(), *["{"] * 7]))
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


def test_records_that_lack_a_value_are_counted(tmp_path: Path) -> None:
    whole, other = (on_disk.cost(each) for each in costs.records(costs.case())[:2])
    broken = {name: value for name, value in other.values.items() if name != "timings"}
    append(tmp_path / "records.jsonl", [whole, replace(other, values=broken)])
    (source,), _ = read_folder(tmp_path)
    (found,), (problem,) = source.parse(CostRecord.of)
    assert found.norm == "bn"
    assert problem.sentence == "1 of 2 'cost' records of records.jsonl cannot be read."
