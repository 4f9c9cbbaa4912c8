import json
from dataclasses import replace
from pathlib import Path

import pytest

from crossbn.lab.experiments.records import append_record, read_records
from crossbn.lab.records import RecordError
from tests.lab.experiments.handmade import record, run


def test_file_gives_back_what_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert read_records(path) == []
    records = [record(0.5, 0.9), record(0.5, 0.8, seed=1)]
    for each in records:
        append_record(path, each)
    assert read_records(path) == records


def test_line_carries_the_context() -> None:
    line = json.loads(record(0.5, 0.9, seed=4).to_json())
    assert (line["name"], line["norm"], line["batch_size"], line["window"]) == ("CBN at batch 2", "cbn", 2, 8)
    assert (line["seed"], line["accuracy"], line["curve"]) == (4, 0.9, [[1.0, 0.5], [2.0, 0.9]])
    assert (line["test_images"], line["seconds"], line["settings"]["epochs"]) == (200, 3.0, 2)
    assert line["versions"].keys() == {"crossbn", "torch", "python"}
    assert line["machine"]["cores"] >= 1


def test_record_answers_the_same_run_by_the_same_software_only() -> None:
    done = record(0.9)
    assert done.answers(run())
    assert not done.answers(run(seed=1))
    assert not done.answers(run(window=4))
    assert not replace(done, versions={**done.versions, "torch": "1.0"}).answers(run())


@pytest.mark.parametrize("line", ["not JSON", '{"name": "lacks the rest"}', "[]", record(0.9).to_json()[:50]])
def test_says_which_line_is_not_a_record(tmp_path: Path, line: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f"{record(0.9).to_json()}\n{line}\n")
    with pytest.raises(RecordError, match=r"line 2 of .*records\.jsonl is not a record"):
        read_records(path)
