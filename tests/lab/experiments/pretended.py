"""An experiment that computes nothing, in the shape of a module."""

import os
from collections.abc import Sequence
from pathlib import Path

from crossbn.lab.experiments.experiment import Comparison, Measure, Scale, UnavailableError, Values
from crossbn.lab.experiments.table import list_rows
from crossbn.lab.progress import Progress, Watch
from crossbn.lab.records import Record, Task
from tests.lab.experiments.handmade import record_of

title = "Numbers out of thin air"
alone = False
scales = (Scale.SMALL, Scale.FULL)
measures: tuple[Measure, ...] = (Measure("number", "number"), Measure("square", "square", ".0f"))


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    base = 1 if scale is Scale.SMALL else 100
    return [
        Task("pretended", name, seed, {"number": base * number})
        for name, number in (("one", 1), ("two", 2))
        for seed in range(seeds or 1)
    ]


def estimate_seconds(task: Task) -> float:
    return 60.0 * task.settings["number"]


def check(tasks: Sequence[Task]) -> None:
    if any(task.settings["number"] >= 100 for task in tasks):
        raise UnavailableError("large numbers are not in the folder")


def work(task: Task, watch: Watch, folder: Path | None = None, /) -> Values:
    watch(Progress(0.5, "half way"))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint").write_text("half way")
    number = task.settings["number"] + task.seed
    return {"number": number, "square": number**2, "process": os.getpid()}


def rows(records: Sequence[Record]) -> list[Comparison]:
    def numbers(record: Record) -> dict[str, float | None]:
        return {key: record.values[key] for key in ("number", "square")}

    return list_rows(records, numbers, known={"two": {"square": 4.0}})


def notes(scale: Scale) -> list[str]:
    return [f"Made up, {scale.value}."]


def finished(task: Task, seconds: float = 0.5) -> Record:
    """Return the record of a run, done here."""
    return record_of(task, work(task, lambda _: None), seconds)
