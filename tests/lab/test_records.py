"""The one home of files that hold a record in each line."""

import errno
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from crossbn.lab.records import (
    DamagedError,
    Record,
    RecordError,
    Task,
    append,
    by_name,
    forget,
    locked,
    of_cells,
    on_their_data,
    read,
    replace_in,
    write_whole,
)

RECORD = Record("classify", "BN, batch 2", 0, {"batch_size": 2, "shape": (3, 4)}, {"accuracy": 0.5}, {"commit": "abc"})


def test_a_file_grows_and_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert read(path) == []
    for seeds in ((1, 2), (3,)):
        append(path, [replace(RECORD, seed=seed) for seed in seeds])
    assert path.read_text().count("\n") == 3
    assert [record.seed for record in read(path)] == [1, 2, 3]


@pytest.mark.parametrize("line", [b"two", b"{}", b"\xff\xfe", b""])
def test_says_which_line_is_something_else(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "records.jsonl"
    whole = RECORD.to_json().encode()
    path.write_bytes(whole + b"\n" + line + b"\n" + whole + b"\n")
    with pytest.raises(DamagedError, match=rf"line 2 of {path} is not a record of crossbn's"):
        read(path)


def test_a_record_comes_back_as_json_has_it(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append(path, [RECORD, replace(RECORD, values={"accuracy": float("nan")})])
    first, second = read(path)
    assert first == replace(RECORD, settings={"batch_size": 2, "shape": [3, 4]})
    assert first.key == RECORD.key != replace(RECORD, seed=1).key
    assert second.values == {"accuracy": None}
    assert "NaN" not in path.read_text()


@pytest.mark.parametrize(
    ("before", "name"),
    [
        ("BN, batch 2", "BN, batch 2"),
        ("fast BN, batch 2, seed-free", "BN, batch 2, momentum 0.1, seed-free"),
        ("CIFAR-10: fast BN, batch 16, rate 0.01", "CIFAR-10: BN, batch 16, momentum 0.1, rate 0.01"),
    ],
)
def test_what_had_another_name_is_read_under_todays(before: str, name: str) -> None:
    assert Record.from_json(replace(RECORD, name=before).to_json()).name == name


def test_a_record_shares_its_keys_with_its_task() -> None:
    task = Task("classify", "BN, batch 2", 0, {"shape": [3, 4], "batch_size": 2})
    assert (task.key, task.cell) == (RECORD.key, RECORD.cell)
    assert replace(RECORD, seed=1).key != task.key
    assert replace(RECORD, seed=1).cell == task.cell
    assert replace(RECORD, settings={"batch_size": 4}).cell != task.cell


def test_a_record_is_current_if_the_software_is_the_same() -> None:
    made = Record("classify", "BN", 0, {}, {})
    assert made.is_current
    assert replace(made, environment={**made.environment, "commit": "another"}).is_current
    versions = {**made.environment["versions"], "lightning": "2"}
    assert replace(made, environment={"versions": versions}).is_current
    assert not replace(made, environment={"versions": {**versions, "torch": "0.1"}}).is_current
    assert not replace(made, environment={}).is_current


def test_forgetting_leaves_other_work(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    forget(path, [RECORD])
    assert not path.exists()
    other = replace(RECORD, seed=1)
    append(path, [RECORD, other, RECORD])
    with path.open("a") as file:
        file.write("{damaged")
    with pytest.raises(DamagedError, match=f"line 4 of {path} is not a record of crossbn's"):
        read(path)
    forget(path, [RECORD])
    assert [each.seed for each in read(path)] == [1]


def test_a_line_without_its_end_is_no_part_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(RECORD.to_json())
    append(path, [RECORD])
    assert len(read(path)) == 2


def test_records_of_cells_are_of_all_seeds_and_the_latest() -> None:
    other = replace(RECORD, name="GN")
    again = replace(RECORD, values={"accuracy": 0.7})
    foreign = replace(RECORD, settings={})
    records = [replace(RECORD, seed=2), foreign, RECORD, other, again]
    assert of_cells(records, [other, RECORD]) == [other, again, replace(RECORD, seed=2)]
    assert [*by_name(records)] == ["BN, batch 2", "GN"]
    assert len(by_name(records)["BN, batch 2"]) == 4


def test_a_record_takes_the_place_of_one_of_the_same_work(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    other = replace(RECORD, kind="cost").to_json()
    path.write_text(f"{RECORD.to_json()}\n{other}")
    replace_in(path, replace(RECORD, values={"accuracy": 0.7}))
    assert path.read_text().splitlines()[0] == other
    assert [(each.kind, each.values["accuracy"]) for each in read(path)] == [("cost", 0.5), ("classify", 0.7)]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    append(path, [RECORD])
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RecordError, match="cannot be written: No space left on device"):
        append(path, [RECORD])
    with pytest.raises(RecordError, match=rf"{path} cannot be written: No space left on device"):
        write_whole(path, b"something else")
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["records.jsonl"]


def test_every_committed_record_is_read() -> None:
    files = sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.jsonl"))
    records = [record for path in files for record in read(path)]
    assert len(records) == sum(len(path.read_bytes().splitlines()) for path in files) > 0
    assert {record.kind for record in records} >= {"classification", "cost"}
    assert all(record.environment["versions"]["torch"] and record.values for record in records)


def test_a_second_process_is_refused_and_a_dead_one_lets_go(tmp_path: Path) -> None:
    holding = "import sys; from pathlib import Path; from crossbn.lab.records import locked\n" + (
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holding, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RecordError, match="another process works in"), locked(tmp_path):
            pass
        other.kill()
        other.wait()
    with locked(tmp_path):
        pass


def test_tasks_are_on_the_data_that_records_have() -> None:
    tasks = [Task("detection", name, 0, {"norm": name, "data": "shapes"}) for name in ("bn", "gn")]
    found = Record("detection", "gn", 1, {"norm": "gn", "data": "nuclei"}, {}, {})
    assert [task.settings["data"] for task in on_their_data(tasks, [found])] == ["nuclei", "nuclei"]
    here = Record("detection", "bn", 1, {"norm": "bn", "data": "shapes"}, {}, {})
    others = Record("detection", "cbn", 1, {"norm": "cbn", "data": "nuclei"}, {}, {})
    assert on_their_data(tasks, [found, here]) == on_their_data(tasks, [others]) == tasks
