"""An experiment that computes nothing, in the shape of a module."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from crossbn.lab.experiments.experiment import Comparison, Measure, Scale, UnavailableError
from crossbn.lab.experiments.rows import Spread
from crossbn.lab.experiments.tasks import News, Result, Task, Values, by_name

TITLE = "Numbers out of thin air"
ALONE = False
MEASURES: tuple[Measure, ...] = (Measure("number", "number"), Measure("square", "square", ".0f"))


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


def work(task: Task, watch: Callable[[News], None], folder: Path | None = None) -> Values:
    watch(News(0.5, "half way"))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint").write_text("half way")
    number = task.settings["number"] + task.seed
    return {"number": number, "square": number**2, "process": os.getpid()}


def rows(results: Sequence[Result]) -> list[Comparison]:
    return [
        Comparison(
            name,
            {key: Spread.of([result.values[key] for result in seeds]) for key in ("number", "square")},
            {"square": 4.0} if name == "two" else {},
        )
        for name, seeds in by_name(results).items()
    ]


def notes(scale: Scale) -> list[str]:
    return [f"Made up, {scale.value}."]
