import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from crossbn.lab import environment
from crossbn.lab.cost import Case, CostRecord, find_baseline
from crossbn.lab.cost.records import read
from crossbn.lab.records import Record, RecordError, append
from crossbn.nn import NORMS, Settings
from tests.lab.cost.handmade import case, records


def test_lines_come_back_as_they_were(tmp_path: Path) -> None:
    made = records(case(), gn=1.1, cbn=1.2) + records(case(positions=None, compile=True), cbn=1.3)
    path = tmp_path / "records.jsonl"
    append(path, [record.record() for record in made[:3]])
    append(path, [record.record() for record in made[3:]])
    assert read(path) == made
    assert read(tmp_path / "none.jsonl") == []


def test_a_record_says_what_it_was_measured_with() -> None:
    record = records(case(), cbn=1.2)[2].record()
    assert (record.kind, record.name, record.seed) == ("cost", "tiny, input 3x6x6, batch 2, window 3, CBN", 0)
    told = record.settings
    assert (told["model"], told["batch_size"], told["norm"], told["threads"]) == ("tiny", 2, "cbn", 1)
    assert told["precision"] == {"rounds": 6, "tolerance": 1e9, "max_seconds": 120.0}
    assert record.values["timings"]["train"]["ratio"] == 1.2
    assert record.environment["versions"].keys() == {"crossbn", "torch", "python"}
    assert record.environment["machine"]["processor"]


def test_committed_lines_are_read_and_written_anew() -> None:
    """They have the shape in which settings and values stood side by side."""
    path = Path(__file__).parents[3] / "benchmarks" / "resnet50" / "records.jsonl"
    found = read(path)
    assert [record.name for record in found] == ["BN", "GN", "CBN"]
    assert str(found[2].case) == "resnet50, input 3x224x224, batch 4, window 4"
    assert found[2].history_bytes > 0
    assert [CostRecord.of(Record.from_json(each.record().to_json())) for each in found] == found


WHOLE = records(case())[0].record().to_json()


@pytest.mark.parametrize("line", ["{", "[]", "{}", '"words"', WHOLE.replace('"peak', '"pike')])
def test_other_lines_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "records.jsonl"
    append(path, [records(case())[0].record()])
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(RecordError, match=r"line 2 of .*records\.jsonl is not a record of c"):
        read(path)


def test_answers_the_same_question_in_the_same_environment() -> None:
    record = records(case())[0]
    assert record.answers(case())
    assert not record.answers(case(batch_size=3))
    assert not record.answers(case(threads=2))
    for part in ({"versions": {"torch": "1.0"}}, {"machine": {"processor": "abacus"}}, {"commit": "other"}):
        assert not replace(record, environment={**record.environment, **part}).answers(case())


def test_defaults_are_the_library_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Case` does not import it, so that a finished measurement is found without torch."""
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    told = Case("resnet18", (3, 64, 64), 4, 2)
    assert told.threads == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert Case("resnet18", (3, 64, 64), 4, 2).threads == environment.usable_cores()
    assert told.positions == Settings.positions
    assert {*told.norms} <= {*NORMS}


def test_names_and_baseline() -> None:
    made = records(case(norms=("bn", "naive_cbn"))) + records(case())
    assert [record.name for record in made[:2]] == ["BN", "NAIVE CBN"]
    assert replace(made[0], compiled=True).name == "BN, compiled"
    assert find_baseline(made[1], made) is made[0]
    assert find_baseline(made[-1], made) is made[2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"norms": ("gn", "cbn")},
        {"norms": ("bn", "bn")},
        {"input_shape": ()},
        {"input_shape": (3, 0)},
        {"batch_size": 0},
        {"window": 0},
        {"threads": 0},
    ],
)
def test_cases_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        case(**wrong)


def test_case_in_words() -> None:
    assert str(Case("resnet18", (3, 64, 64), 4, 2)) == "resnet18, input 3x64x64, batch 4, window 2"


def test_commit_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "src" / "crossbn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")

    def git(*words: str) -> None:
        author = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", str(tmp_path), *author, *words], check=True, capture_output=True)

    def commit() -> str:
        environment.commit.cache_clear()
        return environment.commit()

    monkeypatch.setattr("crossbn.__file__", str(package / "__init__.py"))
    try:
        assert commit() == ""
        git("init")
        git("add", ".")
        git("commit", "-m", "first")
        first = commit()
        assert len(first) >= 7
        (tmp_path / "README").write_text("beside the package")
        assert commit() == first
        (package / "__init__.py").write_text("changed = 1")
        changed = commit()
        assert changed.startswith(f"{first}+")
        (package / "__init__.py").write_text("changed = 2")
        assert commit() != changed
        monkeypatch.setattr("crossbn.__file__", str(package / "deeper" / "__init__.py"))
        (package / "deeper").mkdir()
        assert commit() == ""
    finally:
        environment.commit.cache_clear()
