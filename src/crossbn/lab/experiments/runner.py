"""Doing the runs of an experiment that have not been done yet."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from crossbn.lab.environment import usable_cores, versions
from crossbn.lab.experiments.experiment import Experiment, Values
from crossbn.lab.experiments.workers import run_all
from crossbn.lab.progress import Progress as News
from crossbn.lab.progress import Watch
from crossbn.lab.records import Record, Task, append, forget, of_cells, read

Work = Callable[[Task, Watch, Path], Values]


@dataclass(frozen=True)
class Progress:
    """Runs, and the records that there are.

    Attributes:
        tasks: all runs.
        path: the file of their records.
        known: what the file has, of other runs as well.
    """

    tasks: Sequence[Task]
    path: Path
    known: list[Record]

    @classmethod
    def read(cls, tasks: Sequence[Task], path: Path) -> "Progress":
        """Look which of the runs a file has records of.

        Raises:
            RecordError: if the file holds something else.
        """
        return cls(tasks, path, read(path))

    @classmethod
    def anew(cls, tasks: Sequence[Task], path: Path) -> "Progress":
        """Forget the records of the runs, and what unfinished ones have left; other runs' in the file stay."""
        forget(path, tasks)
        progress = cls.read(tasks, path)
        for task in tasks:
            progress.tidy(task)
        return progress

    @property
    def todo(self) -> list[Task]:
        """The runs without a record that the software in use now has made."""
        done = {record.key for record in self.known if record.is_current}
        return [task for task in self.tasks if task.key not in done]

    @property
    def shown(self) -> list[Record]:
        """The records that a table of the runs shows: of all seeds that there are, whoever asked for them."""
        return of_cells(self.known, self.tasks)

    def seconds(self, estimate: Callable[[Task], float]) -> dict[str, float]:
        """Return about how long a run of each cell takes: as those in the file have taken, else as `estimate` says."""
        taken: dict[str, list[float]] = {}
        for record in self.known:
            if "seconds" in record.values:
                taken.setdefault(record.cell, []).append(record.values["seconds"])
        cells = {task.cell: task for task in self.tasks}
        return {cell: median(taken[cell]) if cell in taken else estimate(task) for cell, task in cells.items()}

    @property
    def folder(self) -> Path:
        """Where unfinished runs have a folder each."""
        return self.path.parent / "runs"

    def tidy(self, task: Task) -> None:
        """Remove what an unfinished run left, and the folder of all with the last of them."""
        shutil.rmtree(self.folder / folder_name(task), ignore_errors=True)
        with suppress(OSError):  # it is not there, or not empty
            self.folder.rmdir()


def folder_name(task: Task) -> str:
    """Return a short name for the folder of what an unfinished run leaves; other software has another."""
    return hashlib.sha256(json.dumps([task.key, versions()]).encode()).hexdigest()[:12]


def processes_of(experiment: Experiment) -> int:
    """Return how many runs are done at once."""
    return 1 if experiment.alone else usable_cores()


def carry_on(experiment: Experiment, progress: Progress) -> Generator[tuple[Task, News | Record]]:
    """Do the runs that are missing and yield what comes in; each record is in the file before it is yielded.

    A caller that stops listening, by Ctrl-C or otherwise, ends the runs under way and loses no finished one.

    Raises:
        UnavailableError: if something that the runs need is missing.
        RecordError: if a record cannot be written.
        WorkerError: if a run fails; what happened to it is on the error output.
    """
    todo = progress.todo
    experiment.check(todo)
    # The longest first, so that no core is idle at the end.
    seconds = progress.seconds(experiment.estimate_seconds)
    todo.sort(key=lambda task: seconds[task.cell], reverse=True)
    with closing(run_all(partial(do, experiment.work, progress.folder), todo, processes_of(experiment))) as events:
        for task, news in events:
            if isinstance(news, Record):
                append(progress.path, [news])
                progress.known.append(news)
                progress.tidy(task)
            yield task, news


def do(work: Work, folder: Path, task: Task, watch: Watch) -> Record:
    """Do one run, with a folder of its own in `folder`, and take its time."""
    started = time.perf_counter()
    values = work(task, watch, folder / folder_name(task))
    told = {**values, "seconds": time.perf_counter() - started}
    return Record(task.kind, task.name, task.seed, task.settings, told)
