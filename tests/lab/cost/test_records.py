import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from crossbn.lab.cost import Case, CostRecord, append_records, find_baseline, read_records, surroundings
from crossbn.lab.records import RecordError
from tests.lab.cost.handmade import case, records


def test_lines_come_back_as_they_were(tmp_path: Path) -> None:
    made = records(case(), gn=1.1, cbn=1.2) + records(case(positions=None, compile=True), cbn=1.3)
    path = tmp_path / "records.jsonl"
    append_records(path, made[:3])
    append_records(path, made[3:])
    assert read_records(path) == made
    assert read_records(tmp_path / "none.jsonl") == []


def test_a_line_is_flat_and_says_what_it_was_measured_with() -> None:
    line = json.loads(records(case(), cbn=1.2)[2].to_json())
    assert (line["model"], line["batch_size"], line["norm"], line["threads"]) == ("tiny", 2, "cbn", 1)
    assert line["timings"]["train"]["ratio"] == 1.2
    assert line["versions"].keys() == {"crossbn", "torch", "python"}
    assert line["machine"]["processor"]
    assert line["precision"] == {"rounds": 6, "tolerance": 1e9, "max_seconds": 120.0}


@pytest.mark.parametrize("line", ["{", "[]", "{}", '"words"', records(case())[0].to_json().replace('"peak', '"pike')])
def test_other_lines_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "records.jsonl"
    append_records(path, records(case())[:1])
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(RecordError, match=r"line 2 of .*records\.jsonl is not a record of costs"):
        read_records(path)


def test_answers_the_same_question_in_the_same_surroundings() -> None:
    record = records(case())[0]
    assert record.answers(case())
    assert not record.answers(case(batch_size=3))
    assert not record.answers(case(threads=2))
    other: list[CostRecord] = [
        replace(record, versions={**record.versions, "torch": "1.0"}),
        replace(record, machine={"processor": "abacus"}),
        replace(record, commit="other"),
    ]
    assert not any(each.answers(case()) for each in other)


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
        {"norms": ("bn", "xn")},
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
        surroundings.commit.cache_clear()
        return surroundings.commit()

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
        surroundings.commit.cache_clear()
