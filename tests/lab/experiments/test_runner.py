import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from crossbn.lab.experiments import paper, runner
from crossbn.lab.experiments.experiment import Comparison, Experiment, Measure, Scale, UnavailableError
from crossbn.lab.experiments.registry import EXPERIMENTS
from crossbn.lab.experiments.runner import Progress, carry_on, do, folder_name
from crossbn.lab.progress import Progress as News
from crossbn.lab.records import Record, Task, append, of_cells, on_their_data, read
from crossbn.lab.report.comparison import comparison_table, surroundings
from crossbn.lab.statistics import Spread
from tests.lab.experiments import pretended
from tests.lab.experiments.pretended import finished

EXPERIMENT: Experiment = pretended
BENCHMARKS = Path(__file__).parents[3] / "benchmarks/reproduce"


def test_missing_runs_are_done_in_other_processes(tmp_path: Path) -> None:
    tasks = pretended.configs(Scale.SMALL, 2)
    path = tmp_path / "results.jsonl"
    append(path, [finished(tasks[0])])
    progress = Progress.read(tasks, path)
    assert progress.todo == tasks[1:]
    events = list(carry_on(EXPERIMENT, progress))
    assert [news for _, news in events if isinstance(news, News)] == [News(0.5, "half way")] * 3
    assert [each.values["number"] for each in progress.shown] == [1, 2, 2, 3]
    assert os.getpid() not in {each.values["process"] for each in progress.shown[1:]}
    assert progress.todo == []
    assert Progress.read(tasks, path).shown == progress.shown
    assert [each.name for each in tmp_path.iterdir()] == ["results.jsonl"]  # what runs leave on their way is gone


def test_a_run_has_a_folder_of_its_own_until_its_result_is_written(tmp_path: Path) -> None:
    one, two = pretended.configs(Scale.SMALL)
    record = do(pretended.work, tmp_path / "runs", one, lambda _: None)
    assert (record.key, record.values["number"]) == (one.key, 1)
    assert 0 < record.values["seconds"] < 60
    progress = Progress([one, two], tmp_path / "results.jsonl", [])
    assert (progress.folder / folder_name(one) / "checkpoint").read_text() == "half way"
    do(pretended.work, progress.folder, two, lambda _: None)
    assert folder_name(one) != folder_name(two)
    progress.tidy(one)
    assert [each.name for each in progress.folder.iterdir()] == [folder_name(two)]
    progress.tidy(two)
    assert not progress.folder.exists()


def test_starting_anew_forgets_these_runs_only(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    one, two = pretended.configs(Scale.SMALL)
    assert Progress.anew([one], path).todo == [one]
    assert not path.exists()
    append(path, [finished(task) for task in (one, two, one)])
    with path.open("a") as file:
        file.write("{damaged\n")
    do(pretended.work, tmp_path / "runs", one, lambda _: None)
    assert Progress.anew([one], path).todo == [one]
    assert [each.name for each in read(path)] == ["two"]
    assert [each.name for each in tmp_path.iterdir()] == ["results.jsonl"]


def test_records_of_other_software_are_shown_and_done_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    (task, _) = pretended.configs(Scale.SMALL)
    made = finished(task)
    versions = {**made.environment["versions"], "torch": "0.1"}
    append(path, [replace(made, environment={**made.environment, "versions": versions})])
    progress = Progress.read([task], path)
    assert (progress.todo, len(progress.shown)) == ([task], 1)
    append(path, [made])
    progress = Progress.read([task], path)
    assert (progress.todo, progress.shown) == ([], [made])


def test_runs_take_as_long_as_those_of_their_cell_have_taken(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    one, two = pretended.configs(Scale.SMALL)
    found = [replace(finished(one), seed=seed, values={"seconds": taken}) for seed, taken in ((7, 5.0), (8, 9.0))]
    append(path, [*found, replace(found[0], settings={"number": 3}, values={"seconds": 1.0})])
    seconds = Progress.read([one, two], path).seconds(pretended.estimate_seconds)
    assert seconds == {one.cell: 7.0, two.cell: 120.0}


def test_all_seeds_that_there_are_are_shown_whoever_asked_for_them(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    many = pretended.configs(Scale.SMALL, 3)
    append(path, [finished(task) for task in reversed(many)])
    progress = Progress.read(pretended.configs(Scale.SMALL), path)
    assert [(each.name, each.seed) for each in progress.shown] == [(task.name, task.seed) for task in many]
    assert progress.todo == []


def test_a_caller_that_stops_listening_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def endless(work: Callable[..., Record], tasks: list[Task], _: int) -> Iterator[tuple[Task, Record]]:
        try:
            for task in tasks:
                yield task, work(task, lambda _: None)
        finally:
            closed.append(True)

    monkeypatch.setattr(runner, "run_all", endless)
    path = tmp_path / "results.jsonl"
    events = carry_on(EXPERIMENT, Progress.read(pretended.configs(Scale.SMALL, 20), path))
    next(events)
    assert not closed
    events.close()
    assert closed
    assert len(read(path)) == 1


def test_nothing_is_started_if_something_is_missing(tmp_path: Path) -> None:
    progress = Progress.read(pretended.configs(Scale.FULL), tmp_path / "results.jsonl")
    with pytest.raises(UnavailableError, match="large numbers"):
        list(carry_on(EXPERIMENT, progress))


def test_the_paper_s_numbers_stand_beside_ours() -> None:
    table = comparison_table(
        "Title", pretended.measures, pretended.rows([*map(finished, pretended.configs(Scale.SMALL))])
    )
    assert table.columns == ("", "number", "square", "paper")
    assert table.rows == (("one", "1.00", "1", ""), ("two", "2.00", "4", "4"))
    assert "| two | 2.00 | 4 | 4 |" in table.markdown()


def test_seeds_have_a_standard_deviation() -> None:
    row = Comparison("CBN", {"size": Spread.of([1.0, 2.0, 3.0])})
    assert comparison_table("", [Measure("size", "size")], [row]).rows == (("CBN", "2.00 ± 1.00"),)


def test_remarks_are_the_last_column_where_there_are_any() -> None:
    rows = [Comparison("BN", {"size": Spread(1.0, None)}), Comparison("CBN", {}, {"size": 3.0}, "+2.0 to BN")]
    table = comparison_table("", [Measure("size", "size")], rows)
    assert table.columns == ("", "size", "paper", "difference")
    assert table.rows == (("BN", "1.00", "", ""), ("CBN", "", "3.00", "+2.0 to BN"))


def test_surroundings_name_seeds_and_software() -> None:
    environment: dict[str, Any] = {"versions": {"torch": "9"}, "commit": "abc", "machine": {"cores": "2"}}
    made = [replace(finished(task, 1.5), environment=environment) for task in pretended.configs(Scale.SMALL, 2)]
    told = surroundings(made)
    assert told == "2 seeds, mean ± standard deviation; torch 9; commit abc; cores 2; 6 s of computing in all."
    assert surroundings(made[1:]).startswith("1 to 2 seeds, mean")


@pytest.mark.parametrize(
    ("name", "scale"), [(name, scale) for name, each in EXPERIMENTS.items() for scale in each.scales]
)
def test_every_experiment_has_runs_that_differ(name: str, scale: Scale) -> None:
    tasks = EXPERIMENTS[name].configs(scale, 2)
    assert {task.kind for task in tasks} in ({name}, {"classification"}, {"detection"})
    assert len({(task.name, task.seed) for task in tasks}) == len({task.key for task in tasks}) == len(tasks)
    assert {task.seed for task in tasks} == {0, 1}
    assert {task.seed for task in EXPERIMENTS[name].configs(scale)} in ({0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3, 4})
    assert EXPERIMENTS[name].notes(scale)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_another_process_can_be_told_what_to_do(name: str, tmp_path: Path) -> None:
    told = partial(do, EXPERIMENTS[name].work, tmp_path)
    assert pickle.loads(pickle.dumps(told)).func is do


@pytest.mark.parametrize("page", sorted(BENCHMARKS.glob("*-*.md")), ids=lambda page: page.stem)
def test_a_committed_page_says_what_its_records_say(page: Path) -> None:
    name, _, scale = page.stem.rpartition("-")
    experiment = EXPERIMENTS[name]
    tasks = experiment.configs(Scale(scale))
    known = read(BENCHMARKS / f"{tasks[0].kind}-{scale}.jsonl")
    asked = on_their_data(tasks, known)  # this machine may not have it
    records = of_cells(known, asked) or known  # a machine with other cores would measure another cost
    title = f"{experiment.title} ({scale} scale)"
    told = [comparison_table(title, experiment.measures, experiment.rows(records)).markdown(), surroundings(records)]
    shown = page.read_text(encoding="utf-8")
    assert all(part in shown for part in [*told, *experiment.notes(Scale(scale))])


def test_the_paper_s_numbers_are_of_rows_and_columns_that_there_are() -> None:
    for name, experiment in EXPERIMENTS.items():
        known = paper.numbers(name)
        measures = {measure.name for measure in experiment.measures}
        assert {column for row in known.values() for column in row} <= measures
    assert paper.about("weights") == "The paper has no such table."
    assert paper.numbers("order")["CBN, second order"] == {"accuracy": 70.0}
    assert paper.numbers("architectures")["MobileNet-v2"]["BN 4"] == 67.3
