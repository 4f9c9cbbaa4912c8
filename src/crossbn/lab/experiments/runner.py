"""Doing the runs of an experiment that have not been done yet."""

import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from crossbn.lab.experiments.cores import usable_cores
from crossbn.lab.experiments.experiment import Experiment
from crossbn.lab.experiments.tasks import News, Result, Task, Values, append_result, forget_results, read_results
from crossbn.lab.experiments.workers import run_all

Work = Callable[[Task, Callable[[News], None], Path], Values]


@dataclass(frozen=True)
class Progress:
    """Runs, and the results that there are.

    Attributes:
        tasks: all runs.
        path: the file of their results.
        found: the results so far, by the key of the task.
    """

    tasks: Sequence[Task]
    path: Path
    found: dict[str, Result]

    @classmethod
    def read(cls, tasks: Sequence[Task], path: Path) -> "Progress":
        """Look which of the runs a file has results of.

        Raises:
            RecordError: if the file holds something else.
        """
        known = read_results(path)
        return cls(tasks, path, {task.key: result for task in tasks for result in known if result.answers(task)})

    @classmethod
    def anew(cls, tasks: Sequence[Task], path: Path) -> "Progress":
        """Forget the results of the runs, and what unfinished ones have left; other runs' in the file stay."""
        forget_results(path, tasks)
        progress = cls(tasks, path, {})
        for task in tasks:
            progress.tidy(task)
        return progress

    @property
    def folder(self) -> Path:
        """Where unfinished runs have a folder each."""
        return self.path.parent / "runs"

    def tidy(self, task: Task) -> None:
        """Remove what an unfinished run left, and the folder of all with the last of them."""
        shutil.rmtree(self.folder / task.folder_name, ignore_errors=True)
        with suppress(OSError):  # it is not there, or not empty
            self.folder.rmdir()

    @property
    def todo(self) -> list[Task]:
        """The runs without a result."""
        return [task for task in self.tasks if task.key not in self.found]

    @property
    def results(self) -> list[Result]:
        """The results in the order of the runs, those that there are."""
        return [self.found[task.key] for task in self.tasks if task.key in self.found]


def processes_of(experiment: Experiment) -> int:
    """Return how many runs are done at once."""
    return 1 if experiment.ALONE else usable_cores()


def carry_on(experiment: Experiment, progress: Progress) -> Generator[tuple[Task, News | Result]]:
    """Do the runs that are missing and yield what comes in; each result is in the file before it is yielded.

    A caller that stops listening, by Ctrl-C or otherwise, ends the runs under way and loses no finished one.

    Raises:
        UnavailableError: if something that the runs need is missing.
        WorkerError: if a run fails; what happened to it is on the error output.
    """
    todo = progress.todo
    experiment.check(todo)
    # The longest first, so that no core is idle at the end.
    todo.sort(key=experiment.estimate_seconds, reverse=True)
    with closing(run_all(partial(do, experiment.work, progress.folder), todo, processes_of(experiment))) as events:
        for task, news in events:
            if isinstance(news, Result):
                append_result(progress.path, news)
                progress.found[task.key] = news
                progress.tidy(task)
            yield task, news


def do(work: Work, folder: Path, task: Task, watch: Callable[[News], None]) -> Result:
    """Do one run, with a folder of its own in `folder`, and take its time."""
    started = time.perf_counter()
    values = work(task, watch, folder / task.folder_name)
    return Result(task, values, time.perf_counter() - started)
