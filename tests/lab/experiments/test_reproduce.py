import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crossbn.lab.experiments import runner
from crossbn.lab.experiments.classification import EXPERIMENT as EXPERIMENT_OF_CLASSIFIERS
from crossbn.lab.experiments.experiment import Comparison, Experiment, Measure, Scale, UnavailableError
from crossbn.lab.experiments.registry import EXPERIMENTS, scales_of
from crossbn.lab.experiments.rows import Spread
from crossbn.lab.experiments.runner import Progress, carry_on, do
from crossbn.lab.experiments.tasks import News, Result, Task, append_result, forget_results, read_results
from crossbn.lab.records import RecordError
from crossbn.lab.report.comparison import comparison_table, surroundings
from tests.lab.experiments import pretended

EXPERIMENT: Experiment = pretended


def result(task: Task) -> Result:
    return Result(task, pretended.work(task, lambda _: None), 0.5)


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    made = [result(task) for task in pretended.configs(Scale.SMALL, 2)]
    for each in made:
        append_result(tmp_path / "results.jsonl", each)
    assert read_results(tmp_path / "results.jsonl") == made
    assert made[0].answers(pretended.configs(Scale.SMALL)[0])
    assert read_results(tmp_path / "none.jsonl") == []


def test_a_result_answers_its_own_task_by_the_same_software_only() -> None:
    task = Task("pretended", "one", 0, {"number": 1})
    made = result(task)
    assert made.answers(Task("pretended", "one", 0, {"number": 1}))
    assert not made.answers(replace(task, seed=1))
    assert not made.answers(replace(task, settings={"number": 2}))
    assert not replace(made, versions={"torch": "0.1"}).answers(task)
    assert replace(made, commit="another").answers(task)


def test_something_else_in_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"name": "one"}\n')
    with pytest.raises(RecordError, match=r"line 1 of .* is not the result of a run"):
        read_results(path)


def test_missing_runs_are_done_in_other_processes(tmp_path: Path) -> None:
    tasks = pretended.configs(Scale.SMALL, 2)
    path = tmp_path / "results.jsonl"
    append_result(path, result(tasks[0]))
    progress = Progress.read(tasks, path)
    assert progress.todo == tasks[1:]
    events = list(carry_on(EXPERIMENT, progress))
    assert [news for _, news in events if isinstance(news, News)] == [News(0.5, "half way")] * 3
    assert [each.values["number"] for each in progress.results] == [1, 2, 2, 3]
    assert os.getpid() not in {each.values["process"] for each in progress.results[1:]}
    assert progress.todo == []
    assert Progress.read(tasks, path).results == progress.results
    assert [each.name for each in tmp_path.iterdir()] == ["results.jsonl"]  # what runs leave on their way is gone


def test_a_run_has_a_folder_of_its_own_until_its_result_is_written(tmp_path: Path) -> None:
    one, two = pretended.configs(Scale.SMALL)
    assert do(pretended.work, tmp_path / "runs", one, lambda _: None).values["number"] == 1
    progress = Progress([one, two], tmp_path / "results.jsonl", {})
    assert (progress.folder / one.folder_name / "checkpoint").read_text() == "half way"
    do(pretended.work, progress.folder, two, lambda _: None)
    assert one.folder_name != two.folder_name
    progress.tidy(one)
    assert [each.name for each in progress.folder.iterdir()] == [two.folder_name]
    progress.tidy(two)
    assert not progress.folder.exists()


def test_starting_anew_forgets_these_runs_only(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    one, two = pretended.configs(Scale.SMALL)
    forget_results(path, [one])
    assert not path.exists()
    for task in (one, two, one):
        append_result(path, result(task))
    with path.open("a") as file:
        file.write("{damaged\n")
    do(pretended.work, tmp_path / "runs", one, lambda _: None)
    progress = Progress.anew([one], path)
    assert progress.todo == [one]
    assert [each.task for each in read_results(path)] == [two]
    assert [each.name for each in tmp_path.iterdir()] == ["results.jsonl"]


def test_a_caller_that_stops_listening_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def endless(work: Callable[..., Result], tasks: list[Task], _: int) -> Iterator[tuple[Task, Result]]:
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
    assert len(read_results(path)) == 1


def test_nothing_is_started_if_something_is_missing(tmp_path: Path) -> None:
    progress = Progress.read(pretended.configs(Scale.FULL), tmp_path / "results.jsonl")
    with pytest.raises(UnavailableError, match="large numbers"):
        list(carry_on(EXPERIMENT, progress))


def test_the_paper_s_numbers_stand_beside_ours() -> None:
    table = comparison_table(
        "Title", pretended.MEASURES, pretended.rows([*map(result, pretended.configs(Scale.SMALL))])
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
    made = [replace(result(task), seconds=1.5) for task in pretended.configs(Scale.SMALL, 2)]
    told = surroundings([replace(each, commit="abc", versions={"torch": "9"}) for each in made])
    assert told.startswith("2 seeds, mean ± standard deviation; torch 9; commit abc; processor ")
    assert told.endswith("; 6 s of computing in all.")


@pytest.mark.parametrize(("name", "scale"), [(name, scale) for name in EXPERIMENTS for scale in scales_of(name)])
def test_every_experiment_has_runs_that_differ(name: str, scale: Scale) -> None:
    tasks = EXPERIMENTS[name].configs(scale, 2)
    assert {task.experiment for task in tasks} in ({name}, {EXPERIMENT_OF_CLASSIFIERS}, {"detection"})
    assert len({(task.name, task.seed) for task in tasks}) == len({task.key for task in tasks}) == len(tasks)
    assert {task.seed for task in tasks} == {0, 1}
    assert {task.seed for task in EXPERIMENTS[name].configs(scale)} in ({0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3, 4})
    assert EXPERIMENTS[name].notes(scale)
