import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from crossbn.cli import extras, make_app
from crossbn.lab.data import FOLDER_VARIABLE
from crossbn.lab.experiments import runner
from crossbn.lab.experiments.experiment import Scale
from crossbn.lab.experiments.registry import EXPERIMENTS
from crossbn.lab.progress import Progress
from crossbn.lab.records import Record, Task, append, locked, read
from crossbn.lab.report.experiment_figures import FIGURES
from tests.lab.experiments import pretended
from tests.lab.recipes.detection.runs import write_folder


class Answer(NamedTuple):
    status: int
    output: str
    errors: str


def call(*words: str | Path) -> Answer:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(make_app(), ["reproduce", *(str(word) for word in words)])
    return Answer(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An experiment named "pretended", done in this process. Returns the runs that were done."""
    names: list[str] = []

    def here(do: Any, tasks: list[Any], _: int) -> Iterator[Any]:
        for task in tasks:
            names.append(f"{task.name} {task.seed}")
            yield task, Progress(0.1, "begun")
            yield task, do(task, lambda _: None)

    monkeypatch.setitem(EXPERIMENTS, "pretended", pretended)
    monkeypatch.setattr(runner, "run_all", here)
    return names


def test_table_with_the_paper_s_numbers_on_the_terminal_and_in_markdown(tmp_path: Path) -> None:
    answer = call("pretended", "--output", tmp_path / "new" / "folder", "--seeds", "2")
    assert answer.status == 0, answer.errors
    table = (tmp_path / "new" / "folder" / "pretended-small.md").read_text(encoding="utf-8")
    for text in (answer.output, table):
        assert re.search(r"two +[|│] +2.50 ± 0.71 [|│] +6 ± 4 [|│] +4 [|│]", text)
        assert "Made up, small." in text
        assert "2 seeds, mean ± standard deviation; crossbn" in text
    assert "### Numbers out of thin air (small scale)" in table
    assert len(read(tmp_path / "new" / "folder" / "pretended-small.jsonl")) == 4


def test_finished_runs_are_not_repeated(tmp_path: Path, asked: list[str]) -> None:
    first = call("pretended", "--out", tmp_path)
    assert asked == ["two 0", "one 0"]
    assert "two, seed 0: done in 1 s" in first.errors
    again = call("pretended", "--out", tmp_path)
    assert len(asked) == 2
    assert again.output == first.output
    assert f"2 of 2 runs are in {tmp_path / 'pretended-small.jsonl'} already." in again.errors
    call("pretended", "--out", tmp_path, "--seeds", "2")
    assert sorted(asked[2:]) == ["one 1", "two 1"]
    call("pretended", "--out", tmp_path, "--fresh")
    assert len(asked) == 6


def test_some_runs_are_done_and_all_are_shown(tmp_path: Path, asked: list[str]) -> None:
    call("pretended", "--out", tmp_path, "--only", "one")
    answer = call("pretended", "--out", tmp_path, "--only", "TWO", "--fresh")
    assert asked == ["one 0", "two 0"]
    assert re.search(r"two +│ +2.00 │", answer.output)
    assert re.search(r"one +│ +1.00 │", answer.output)


def test_all_seeds_of_the_file_are_in_the_table(tmp_path: Path, asked: list[str]) -> None:
    call("pretended", "--out", tmp_path, "--seeds", "3")
    answer = call("pretended", "--out", tmp_path)
    assert len(asked) == 6
    assert re.search(r"two +│ +3.00 ± 1.00 │", answer.output)
    assert "3 seeds, mean ± standard deviation" in answer.output


def test_show_makes_the_table_of_what_there_is(tmp_path: Path, asked: list[str]) -> None:
    answer = call("pretended", "--out", tmp_path, "--show")
    assert (answer.status, asked) == (1, [])
    path = tmp_path / "pretended-small.jsonl"
    assert answer.errors == f"crossbn: {path} has no record of pretended: without --show its runs are done\n"
    append(path, [pretended.finished(pretended.configs(Scale.SMALL)[1])])
    answer = call("pretended", "--out", tmp_path, "--show")
    assert (answer.status, asked) == (0, [])
    assert re.search(r"two +│ +2.00 │", answer.output)
    page = (tmp_path / "pretended-small.md").read_text(encoding="utf-8")
    assert "Not finished: one still to be run." in page
    assert not (tmp_path / ".lock").exists()


def test_a_second_process_is_refused(tmp_path: Path, asked: list[str]) -> None:
    with locked(tmp_path):
        answer = call("pretended", "--out", tmp_path)
        assert (answer.status, asked) == (1, [])
        assert answer.errors == (
            f"crossbn: another process works in {tmp_path}: wait for it, or take another --output\n"
        )
    assert call("pretended", "--out", tmp_path).status == 0


def test_numbers_that_are_not_finite_are_no_number_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretended, "work", lambda *_: {"number": float("nan"), "square": float("inf")})
    answer = call("pretended", "--out", tmp_path)
    assert answer.status == 0, answer.errors
    first, _ = read(tmp_path / "pretended-small.jsonl")
    assert (first.values["number"], first.values["square"]) == (None, None)
    assert "NaN" not in (tmp_path / "pretended-small.jsonl").read_text()
    again = call("pretended", "--out", tmp_path)
    assert re.search(r"two +│ +nan │", again.output)


def test_dry_run_shows_cells_and_times_and_does_none(tmp_path: Path, asked: list[str]) -> None:
    answer = call("pretended", "--dry-run", "--scale", "full", "--seeds", "2", "--out", tmp_path / "none")
    assert (answer.status, asked) == (0, [])
    assert re.search(r"one +│ 2 of 2 +│ 3 h +│ number 100 +│", answer.output)
    assert "4 of 4 runs to do" in answer.output
    assert not (tmp_path / "none").exists()
    call("pretended", "--out", tmp_path)
    answer = call("pretended", "--dry-run", "--seeds", "2", "--fresh", "--out", tmp_path)
    assert re.search(r"two +│ 1 of 2 +│ 1 s +│ number 2 +│", answer.output)  # as the first took
    call("pretended", "--out", tmp_path, "--seeds", "2", "--only", "one")
    answer = call("pretended", "--dry-run", "--seeds", "2", "--out", tmp_path)
    assert re.search(r"│ two +│ 1 of 2 .*│ one +│ 0 of 2 ", answer.output, re.DOTALL)  # what is to do comes first
    assert "1 of 4 runs to do" in answer.output
    call("pretended", "--out", tmp_path, "--seeds", "2")
    answer = call("pretended", "--dry-run", "--seeds", "2", "--out", tmp_path)
    assert re.search(r"two +│ 0 of 2 +│ done +│", answer.output)


def test_dry_run_tells_settings_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"norm": None, "augment": True, "points": None, "image_size": (3, 8), "looks": 4, "probes": 2}
    options: list[dict[str, Any]] = [{}, {"positions": 128, "order": 2}, {"positions": None}]
    tasks = [
        Task("pretended", f"{i}", 0, {**shared, "number": 1, "learning_rate": 0.1 / 10**i, "norm_options": each})
        for i, each in enumerate(options)
    ]
    monkeypatch.setattr(pretended, "configs", lambda *_: tasks)
    output = call("pretended", "--dry-run", "--out", tmp_path).output
    for i, told in enumerate(
        ["learning rate 0.1", "learning rate 0.01, positions 128, order 2", "learning rate 0.001, positions all"]
    ):
        assert re.search(rf"│ {i} +│ 1 of 1 │ 60 s +│ {told} +│", output)
    everything = "augment yes, image size 3, 8, measurements 4, random projections 2, number 1"
    assert f"All runs: {everything}.\n" in output


@pytest.mark.parametrize(("name", "runs"), [("batch_size", 81), ("weights", 170)])
def test_a_plan_of_many_runs_fits_a_screen(name: str, runs: int, tmp_path: Path) -> None:
    words = ["reproduce", name, "--dry-run", "--out", str(tmp_path)]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(make_app(), words)
    table = result.stdout.partition("All runs:")[0].splitlines()
    assert f"{runs} of {runs} runs to do" in result.stdout
    assert len(table) <= 38
    assert max(map(len, table)) <= 80


def test_list(asked: list[str]) -> None:
    answer = call("--list")
    assert (answer.status, asked) == (0, [])
    for name, title in (("cost", "Cost table"), ("gradients", "Gradients of the statistics")):
        assert re.search(rf"{name} +│ +{title}", answer.output)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("cost", "small"), ("cost", "full"), ("gradients", "small"), ("gradients", "full"), ("positions", "small")],
)
def test_real_runs_can_be_listed_with_their_times(name: str, scale: str, tmp_path: Path) -> None:
    answer = call(name, "--dry-run", "--scale", scale, "--out", tmp_path)
    assert answer.status == 0, answer.errors
    assert re.search(r"(\d+) of \1 runs to do(, \d+ at once)?: about \d", answer.output)
    assert re.findall(r"None|True|False|[{}\[\]]|not set|looks|probes", answer.output) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "a name is missing; `crossbn reproduce --list` shows all"),
        (("batchsize",), "there is no 'batchsize'; did you mean batch_size? `crossbn reproduce --list` shows all"),
        (("xyz",), "there is no 'xyz'; `crossbn reproduce --list` shows all"),
        (("learning_rate",), "learning_rate has no small scale, but medium"),
        (("pretended", "--scale", "huge"), "--scale"),
        (("pretended", "--seeds", "0"), "--seeds"),
        (("pretended", "--only", "three"), "no run of pretended has 'three' in its name; --dry-run shows all"),
        (("pretended", "--output", __file__), "--output"),
    ],
)
def test_usage_errors(words: tuple[str, ...], complaint: str, asked: list[str]) -> None:
    answer = call(*words)
    assert (answer.status, answer.output, asked) == (2, "", [])
    assert complaint in answer.errors.splitlines()[-1]


def test_a_picture_is_drawn_again_for_other_records_or_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def draw(records: Sequence[Record]) -> Figure:
        drawn.append(len(records))
        return Figure()

    monkeypatch.setitem(FIGURES, "pretended", draw)
    words = ("pretended", "--out", tmp_path)
    for more, times in (((), 1), ((), 1), (("--show",), 2), (("--seeds", "3"), 3), ((), 3)):
        assert call(*words, *more).status == 0
        assert len(drawn) == times
    assert drawn[0] == drawn[1] < drawn[2]
    (tmp_path / "pretended-small.png").unlink()
    call(*words)
    assert (tmp_path / "pretended-small.png").read_bytes().startswith(b"\x89PNG")


def test_missing_data_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "")  # so that it is put back afterwards
    answer = call("gradients", "--scale", "full", "--out", tmp_path / "none", "--data-folder", tmp_path)
    assert answer.status == 1
    assert answer.errors.startswith(f"crossbn: ImageNet is not in {tmp_path}/imagenet/train: ")
    assert answer.errors.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_interruption_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(do: Any, tasks: list[Any], _: int) -> Iterator[Any]:
        yield tasks[0], do(tasks[0], lambda _: None)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_all", interrupted)
    answer = call("pretended", "--out", tmp_path)
    assert answer.status == 130
    assert answer.errors.endswith("crossbn: interrupted; the same command again does the runs that are missing\n")
    assert [each.name for each in read(tmp_path / "pretended-small.jsonl")] == ["two"]


def test_other_mistakes_end_with_a_sentence(tmp_path: Path, asked: list[str]) -> None:
    path = tmp_path / "pretended-small.jsonl"
    path.write_text("{")
    answer = call("pretended", "--out", tmp_path)
    sentence = f"crossbn: line 1 of {path} is not a record of crossbn's; --fresh starts anew\n"
    assert (answer.status, answer.errors, asked) == (1, sentence, [])  # before anything is computed
    (tmp_path / "file").write_text("")
    answer = call("pretended", "--out", tmp_path / "file" / "results")
    assert answer.status == 1
    assert answer.errors.splitlines()[-1] == f"crossbn: Not a directory: {tmp_path / 'file' / 'results'}"


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "torchvision" else name)
    answer = call("cost")
    assert answer.status == 1
    assert "needs torchvision: pip install '.[train]'" in answer.output


def test_tables_of_detection_are_made_of_a_folder_of_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "elsewhere")
    folder = write_folder(tmp_path / "mine")
    planned = call("coco_norms", "--data", folder, "--dry-run", "--output", tmp_path)
    assert planned.status == 0, planned.errors
    assert "data mine" in " ".join(planned.output.split())
    assert os.environ[FOLDER_VARIABLE] == str(tmp_path.resolve())  # of the runs, which are processes of their own
    refused = call("coco_norms", "--data", folder, "--scale", "full")
    assert (refused.status, "has data of its own: it is for coco_norms" in refused.errors) == (2, True)
    assert "norms at small scale has data of its own" in call("norms", "--data", folder).errors
    assert "there is no folder no_such" in call("coco_norms", "--data", "no_such", "--dry-run").errors
