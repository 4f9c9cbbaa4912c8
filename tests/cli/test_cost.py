import json
import re
from pathlib import Path

import pytest

from crossbn.cli import extras
from crossbn.lab.cost import Case, CaseError, CostRecord, measuring
from crossbn.lab.cost.records import read
from crossbn.lab.records import append, locked
from tests.cli.answers import call
from tests.lab.cost.handmade import case, records

TINY = ("cost", "--model", "tests.lab.cost.handmade:tiny_network", "--threads", "1", "--device", "cpu", "--rounds", "6")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Nothing is measured: CBN takes 1.25 times as long as BN. Returns what was asked for."""
    cases: list[Case] = []

    def pretend(told: Case, watch: object) -> list[CostRecord]:
        assert callable(watch)
        watch("pretending")
        cases.append(told)
        return records(told, gn=1.1, cbn=1.25)

    monkeypatch.setattr(measuring, "measure", pretend)
    return cases


def test_really_measured(tmp_path: Path) -> None:
    """In no time: no further round is begun after the sixth."""
    answer = call(*TINY, "--image-size", "6", "--batch-size", "2", "--max-seconds", "0", "--output", tmp_path)
    assert answer.status == 0, answer.errors
    found = read(tmp_path / "records.jsonl")
    assert [record.norm for record in found] == ["bn", "gn", "cbn"]
    assert found[0].case.window == 8
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    for text in (answer.output, table):
        ratio = f"{found[2].timings['train'].ratio:.2f}"
        assert re.search(rf"relative to BN +[|│] +1 [|│].*[|│] +{ratio} ± ", text)
        assert "commit" in text
    assert not (tmp_path / "growth.png").exists()
    line = json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])
    assert line["settings"]["model"] == "tests.lab.cost.handmade:tiny_network"


def test_lists_make_a_sweep_and_a_picture(tmp_path: Path, asked: list[Case]) -> None:
    answer = call(
        *TINY, "--image-size", "6,12", "--batch-size", "4,2", "--window", "4,8,2", "--norms", "cbn", "--out", tmp_path
    )
    assert answer.status == 0, answer.errors
    assert [(each.input_shape[-1], each.batch_size, each.window) for each in asked] == [
        (6, 4, 4),
        (6, 4, 8),
        (6, 4, 2),
        (6, 2, 4),
        (12, 4, 4),
    ]
    assert {each.norms for each in asked} == {("bn", "cbn")}
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert answer.output.count("1.25 ± 0.01") == 5


def test_options_reach_the_case(tmp_path: Path, asked: list[Case]) -> None:
    options = ("--input-shape", "1,50", "--positions", "0", "--compile", "--max-seconds", "7", "--norms", "bn, gn")
    call(*TINY, *options, "--out", tmp_path)
    assert asked[0].input_shape == (1, 50)
    assert (asked[0].positions, asked[0].compile, asked[0].threads, asked[0].device) == (None, True, 1, "cpu")
    assert (asked[0].precision.rounds, asked[0].precision.max_seconds) == (6, 7.0)
    assert asked[0].norms == ("bn", "gn")
    assert (asked[0].batch_size, asked[0].window) == (4, 4)


def test_finished_cases_are_not_measured_again(tmp_path: Path, asked: list[Case]) -> None:
    first = call(*TINY, "--window", "2,4", "--out", tmp_path)
    assert len(asked) == 2
    again = call(*TINY, "--window", "2,4", "--out", tmp_path)
    assert len(asked) == 2
    assert (again.status, again.output) == (0, first.output)
    assert f"2 of 2 cases are in {tmp_path / 'records.jsonl'} already." in again.errors
    call(*TINY, "--window", "2,4,8", "--out", tmp_path)
    assert len(asked) == 3
    call(*TINY, "--window", "2,4", "--out", tmp_path, "--fresh")
    assert len(asked) == 5
    assert len(read(tmp_path / "records.jsonl")) == 6


def test_interruption_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(told: Case, **_: object) -> list[CostRecord]:
        if told.window == 4:
            raise KeyboardInterrupt
        return records(told)

    monkeypatch.setattr(measuring, "measure", interrupted)
    answer = call(*TINY, "--window", "2,4", "--out", tmp_path)
    assert answer.status == 130
    assert answer.errors.endswith("crossbn: interrupted; the same command again measures the cases that are missing\n")
    assert {record.case.window for record in read(tmp_path / "records.jsonl")} == {2}


def test_suite_shows_ratios_with_targets(tmp_path: Path, asked: list[Case]) -> None:
    answer = call("cost", "--suite", "targets", "--threads", "1", "--out", tmp_path)
    assert answer.status == 0, answer.errors
    assert [each.model for each in asked][:2] == ["resnet18", "resnet50"]
    assert len(asked) == 6
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    row = "| mobilenet_v2, input 3x224x224, batch 4, window 4 | 1.25 ± 0.01 (1.10) |"
    assert row in table
    assert " | 1.02 ± 0.01 (1.01) | " in table
    assert "ms" not in answer.output.split("Times are")[0]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--model", "resnet"], "there is no model 'resnet': did you mean resnet8 or resnet50 or "),
        (["--model", "nowhere:net"], "'nowhere:net' cannot be imported: No module named 'nowhere'"),
        (["--window", "0"], "whole numbers from 1 on, separated by commas, got '0'"),
        (["--batch-size", "two"], "got 'two'"),
        (["--image-size", "6,,7"], "got '6,,7'"),
        (["--input-shape", "3,-1"], "got '3,-1'"),
        (["--input-shape", "3,6,6", "--image-size", "6"], "not both"),
        (["--norms", "gnn"], "there is no norm 'gnn': did you mean gn"),
        (["--norms", "gn,gn,gn,bn,"], "there is no norm ''"),
        (["--rounds", "5"], "--rounds"),
        (["--threads", "0"], "--threads"),
        (["--device", "abacus"], "there is no device 'abacus'"),
        (["--suite", "all"], "there is no suite 'all': there are targets, detection"),
        (["--suite", "detct"], "there is no suite 'detct': did you mean detection?"),
        (["--model", "vit_b_16"], "vit_b_16 has no BatchNorm that a norm could take the place of: take resnet18"),
        (["--suite", "targets", "--window", "4"], "the suite sets the cases: leave out --window"),
        (["--output", __file__], "--output"),
    ],
)
def test_usage_errors(words: list[str], complaint: str, asked: list[Case]) -> None:
    answer = call("cost", *words)
    assert (answer.status, answer.output, asked) == (2, "", [])
    assert complaint in answer.errors.splitlines()[-1]


def test_other_mistakes_end_with_a_sentence(tmp_path: Path, asked: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    answer = call(*TINY, "--out", tmp_path / "file" / "results")
    assert (answer.status, answer.errors) == (1, f"crossbn: Not a directory: {tmp_path / 'file' / 'results'}\n")
    path = tmp_path / "records.jsonl"
    append(path, [records(case())[0].record()])
    with path.open("a") as file:
        file.write("{")
    answer = call(*TINY, "--out", tmp_path)
    sentence = f"crossbn: line 2 of {path} is not a record of crossbn's; --fresh starts anew\n"
    assert (answer.status, answer.errors) == (1, sentence)
    assert asked == []

    def refuse(told: Case, **_: object) -> list[CostRecord]:
        raise CaseError(f"{told}: the model has no BatchNorm")

    monkeypatch.setattr(measuring, "measure", refuse)
    answer = call(*TINY, "--image-size", "6", "--out", tmp_path / "new")
    assert answer.status == 1
    assert answer.errors.splitlines()[-1].endswith("batch 4, window 4: the model has no BatchNorm")


def test_a_second_process_is_refused_and_fresh_is_no_remedy(tmp_path: Path, asked: list[Case]) -> None:
    with locked(tmp_path):
        answer = call(*TINY, "--out", tmp_path)
    sentence = f"crossbn: another process works in {tmp_path}: wait for it, or take another --output\n"
    assert (answer.status, answer.errors, asked) == (1, sentence, [])


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "torchvision" else name)
    answer = call("cost", "--out", tmp_path / "results")
    assert answer.status == 1
    assert "needs torchvision: pip install '.[train]'" in answer.output


BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "README.md"


@pytest.mark.parametrize("command", re.findall(r"`crossbn (cost .*?)`", BENCHMARKS.read_text()))
def test_benchmarks_can_be_asked_for(command: str, tmp_path: Path, asked: list[Case]) -> None:
    words = [word.replace("benchmarks", str(tmp_path)) for word in command.split()]
    answer = call(*words)
    assert answer.status == 0, answer.errors
    expected = {"targets": 6, "detection": 1, "resnet50": 1, "growth": 9, "resnet50-window": 3, "compiled": 1}
    assert len(asked) == expected[Path(words[-1]).name]
