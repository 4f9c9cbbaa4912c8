"""What compensation does during training: curves of CBN with and without it, and of BN at a small and a large batch."""

from collections.abc import Sequence

from crossbn.lab.experiments.accuracies import MEASURES, Cells, list_rows
from crossbn.lab.experiments.cells import cbn, plain
from crossbn.lab.experiments.classification import BATCH_SIZE, check, describe, make_tasks, scale_of, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Compensation: curves of CBN with and without it, and of BN"
ALONE = False
LARGE = 16


def cells(scale: Scale) -> Cells:
    """Return the cells by what they are called."""
    size = BATCH_SIZE[scale]
    return {
        **{"CBN": cbn(size), "naive CBN": cbn(size, order=0)},
        **{f"BN at batch {size}": plain("bn", size), f"BN at batch {LARGE}": plain("bn", LARGE)},
    }


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return the trainings."""
    return make_tasks(cells(scale).values(), scale, seeds)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each training, compared with CBN."""
    return list_rows(results, cells(scale_of(results)), "CBN")


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    size = BATCH_SIZE[scale]
    return [
        *describe(scale),
        f"CBN and naive CBN have batches of {size} and pool {LARGE} examples, as many as BN at batch size {LARGE} has "
        "at once. Naive CBN pools what it remembers as it was.",
        "The paper shows curves, without numbers to set beside these.",
    ]
