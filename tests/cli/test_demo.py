import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from crossbn.cli import extras, main, make_app
from crossbn.lab.experiments import runner
from crossbn.lab.records import append, read
from tests.lab.experiments.handmade import finished, record, run

TINY = ("--epochs", "1", "--train-images", "32", "--batch-size", "4")


class Answer(NamedTuple):
    status: int
    output: str
    errors: str


def call(*words: str | Path) -> Answer:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(make_app(), [str(word) for word in words])
    return Answer(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """A small demo, really trained."""
    out = tmp_path_factory.mktemp("demo") / "made" / "on the way"
    return out, call("demo", *TINY, "--seeds", "1", "--out", out)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any, runs: list[Any], __: int) -> Iterator[Any]:
        assert runs == []
        yield from ()

    monkeypatch.setattr(runner, "run_all", refuse)


def test_every_run_leaves_a_record_and_its_number_on_the_table_and_the_page(first: tuple[Path, Answer]) -> None:
    out, answer = first
    assert answer.status == 0, answer.errors
    records = read(out / "records.jsonl")
    names = {"BN at batch 32", "BN at batch 4", "GN at batch 4", "CBN at batch 4"}
    assert {each.name for each in records} == names
    assert len(records) == 4
    page = (out / "index.html").read_text(encoding="utf-8")
    for each in records:
        number = f"{100 * each.values['accuracy']:.1f}"
        assert re.search(rf"{each.name} .*[ │]{number} ", answer.output)
        assert re.search(rf'<th scope="row">{each.name}</th>.*<td>{number}</td>', page)
        assert f"{each.name}, seed 0: {number}%, done in" in answer.errors
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "Accuracy on 797 test images" in answer.output
    assert str(out / "index.html") in answer.output


@pytest.mark.usefixtures("no_training")
def test_a_second_call_trains_nothing(first: tuple[Path, Answer]) -> None:
    out, answer = first
    before = (out / "records.jsonl").read_text()
    again = call("demo", *TINY, "--seeds", "1", "--out", out)
    assert (again.status, again.output) == (0, answer.output)
    assert "4 of 4 runs are in" in again.errors
    assert (out / "records.jsonl").read_text() == before


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Runs are not trained: each seed is 10 points better than the one before. Returns what was asked for."""
    asked: list[tuple[str, int]] = []

    def pretend(_: Any, runs: list[Any], __: int) -> Iterator[Any]:
        for each in runs:
            asked.append((each.name, each.seed))
            yield each, finished(each, 0.2, 0.5 + each.seed / 10, test_images=797)

    monkeypatch.setattr(runner, "run_all", pretend)
    return asked


def test_more_seeds_train_only_the_new_ones(tmp_path: Path, made_up: list[tuple[str, int]]) -> None:
    call("demo", *TINY, "--seeds", "2", "--out", tmp_path)
    assert len(made_up) == 8
    made_up.clear()
    answer = call("demo", *TINY, "--seeds", "3", "--out", tmp_path)
    assert {seed for _, seed in made_up} == {2}
    assert len(made_up) == 4
    assert f"{100 * fmean((0.5, 0.6, 0.7)):.1f} ± 10.0" in answer.output
    assert len(read(tmp_path / "records.jsonl")) == 12


@pytest.mark.parametrize("changed", [("--epochs", "2"), ("--window", "3"), ("--fresh",)])
def test_other_settings_and_fresh_train_again(
    tmp_path: Path, made_up: list[tuple[str, int]], changed: tuple[str, ...]
) -> None:
    call("demo", *TINY, "--seeds", "1", "--out", tmp_path)
    made_up.clear()
    assert call("demo", *TINY, "--seeds", "1", "--out", tmp_path, *changed).status == 0
    assert len(made_up) == (1 if "--window" in changed else 4)
    assert len(read(tmp_path / "records.jsonl")) == 4 + len(made_up) * ("--fresh" not in changed)


@pytest.mark.usefixtures("made_up")
def test_the_page_is_of_the_settings_that_were_asked_for_last(tmp_path: Path) -> None:
    pages = []
    for window in ("3", "2", "3"):
        call("demo", *TINY, "--seeds", "1", "--out", tmp_path, "--window", window)
        pages.append((tmp_path / "index.html").read_text(encoding="utf-8"))
    assert pages[0] == pages[2] != pages[1]
    assert "window of 2" in pages[1]


def test_interruption_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any, runs: list[Any], __: int) -> Iterator[Any]:
        yield runs[0], finished(runs[0], 0.5, test_images=797)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_all", interrupted)
    answer = call("demo", *TINY, "--seeds", "1", "--out", tmp_path)
    assert answer.status == 130
    assert answer.errors.endswith("crossbn: interrupted; the same command again does the runs that are missing\n")
    assert len(read(tmp_path / "records.jsonl")) == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["demo", "--batch-size", "0"], "--batch-size"),
        (["demo", "--seeds", "none"], "--seeds"),
        (["demo", "--train-images", "1001"], "--train-images"),
        (["demo", "--train-images", "31"], "31 training images do not fill a batch of 32"),
        (["demo", "--batch-size", "1", "--window", "1"], "a single value per channel"),
        (["demo", "--out", __file__], "--out"),
        (["demo", "--colour"], "--colour"),
        (["dance"], "dance"),
    ],
)
def test_usage_errors(words: list[str], complaint: str) -> None:
    answer = call(*words)
    assert (answer.status, answer.output) == (2, "")
    assert complaint in answer.errors.splitlines()[-1]


def test_other_mistakes_end_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = call("demo", "--out", tmp_path / "file" / "results")
    assert (answer.status, answer.errors) == (1, f"crossbn: Not a directory: {tmp_path / 'file' / 'results'}\n")
    records = tmp_path / "records.jsonl"
    append(records, [record(0.5)])
    with records.open("a") as file:
        file.write("{")
    answer = call("demo", "--out", tmp_path)
    sentence = f"crossbn: line 2 of {records} is not a record of crossbn's; --fresh starts anew\n"
    assert (answer.status, answer.errors) == (1, sentence)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in ("typer", "sklearn") else name)
    with pytest.raises(SystemExit, match=re.escape("needs typer: pip install '.[demo]'")):
        main()
    answer = call("demo", "--out", tmp_path / "results")
    assert answer.status == 1
    assert "needs sklearn: pip install '.[demo]'" in answer.output
    assert not (tmp_path / "results").exists()


def test_page_tells_the_command_that_makes_it(tmp_path: Path, made_up: list[tuple[str, int]]) -> None:
    assert call("demo", *TINY, "--out", tmp_path / "a b").status == 0
    page = (tmp_path / "a b" / "index.html").read_text(encoding="utf-8")
    command = re.search(r"<pre>(.*)</pre>", page)
    assert command is not None
    options = "--batch-size 4 --window 4 --seeds 3 --epochs 1 --train-images 32 --output"
    assert re.sub(r"</?span>", "", command[1]) == f"crossbn demo {options} &#39;a b&#39;"
    assert {name for name, _ in made_up} == {"BN at batch 32", "BN at batch 4", "GN at batch 4", "CBN at batch 4"}


def test_records_of_other_experiments_in_the_directory_do_no_harm(
    tmp_path: Path, made_up: list[tuple[str, int]]
) -> None:
    append(tmp_path / "records.jsonl", [record(0.5)])
    answer = call("demo", *TINY, "--seeds", "1", "--out", tmp_path)
    assert answer.status == 0
    assert len(made_up) == 4
    assert run().name not in answer.output
