"""Runs of an experiment, shown as they go."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path

import typer
from rich.progress import TaskID

from crossbn.cli import printing
from crossbn.lab.experiments import runner
from crossbn.lab.experiments.estimates import in_words
from crossbn.lab.experiments.experiment import Experiment, UnavailableError
from crossbn.lab.experiments.workers import WorkerError
from crossbn.lab.records import Record, Task, locked


def complete(experiment: Experiment, tasks: Sequence[Task], path: Path, fresh: bool) -> list[Record]:
    """Return the records of runs, of all seeds that there are, after doing those that the file has no record of.

    Args:
        experiment: whose runs they are.
        tasks: the runs.
        path: the file of the records.
        fresh: whether to forget what it has of these runs.

    Raises:
        UnavailableError: if something that the runs need is missing; nothing has been shown or written then.
        RecordError: if the file holds something else, which is noticed first, or if another process works there.
        WorkerError: if a run fails.
    """
    todo = tasks if fresh else runner.Progress.read(tasks, path).todo
    if not todo:
        typer.echo(f"{len(tasks)} of {len(tasks)} runs are in {path} already.", err=True)
        return runner.Progress.read(tasks, path).shown
    experiment.check(todo)
    with locked(path.parent):  # what has been read may be old by now
        progress = (runner.Progress.anew if fresh else runner.Progress.read)(tasks, path)
        if done := len(tasks) - len(progress.todo):
            typer.echo(f"{done} of {len(tasks)} runs are in {path} already.", err=True)
        _carry_on(experiment, progress)
    return progress.shown


def _carry_on(experiment: Experiment, progress: runner.Progress) -> None:
    with printing.make_bars() as shown:
        whole = shown.add_task("all runs", total=float(len(progress.todo)))
        bars: dict[str, TaskID] = {}  # of the runs under way
        with closing(runner.carry_on(experiment, progress)) as events:
            for task, news in events:
                label = f"{task.name}, seed {task.seed}"
                if isinstance(news, Record):
                    shown.console.print(f"{label}: {_outcome(news)}", highlight=False)
                    shown.advance(whole)
                    if task.key in bars:
                        shown.remove_task(bars.pop(task.key))
                    continue
                if task.key not in bars:
                    bars[task.key] = shown.add_task(label, total=1.0)
                shown.update(bars[task.key], completed=news.share, description=f"{label}: {news.phrase}")


def _outcome(record: Record) -> str:
    accuracy = record.values.get("accuracy")
    told = "" if accuracy is None else f"{accuracy:.1%}, "
    return f"{told}done in {in_words(record.values['seconds'])}"


def mistakes_told() -> AbstractContextManager[None]:
    """End the command with a sentence for what is not the program's fault."""
    again = "the same command again does the runs that are missing"
    return printing.mistakes_told(UnavailableError, WorkerError, interrupted=again, fresh=True)
