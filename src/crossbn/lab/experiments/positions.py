"""On how many positions the gradient of the variance is estimated; the paper takes all and has no such table."""

from collections.abc import Sequence

from crossbn.lab.experiments.accuracies import MEASURES, Cells, list_rows
from crossbn.lab.experiments.cells import DEFAULT, cbn
from crossbn.lab.experiments.classification import BATCH_SIZE, POSITIONS, check, describe, make_tasks, scale_of, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Positions that the gradient of the variance is estimated on (ours, not the paper's)"
ALONE = False
CHOICES = (16, 32, 64, 128, 256, None)
ALL = "all positions"


def cells(scale: Scale) -> Cells:
    """Return the cells by what they are called."""
    return {
        ALL if each is None else f"{each} positions": cbn(
            BATCH_SIZE[scale], positions=DEFAULT if each == POSITIONS[scale] else each
        )
        for each in CHOICES
    }


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training with each number of positions."""
    return make_tasks(cells(scale).values(), scale, seeds)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each number of positions, compared with all of them."""
    return list_rows(results, cells(scale_of(results)), ALL)


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    return [
        *describe(scale),
        f"Batches of {BATCH_SIZE[scale]}. Positions are chosen at random at each step, at most as many as said; 128 is "
        "the library's default. Weights of more than 2^15 numbers make do with fewer, see `reproduce sampling`, which "
        "looks at the errors of the statistics themselves.",
        "The paper has no such table.",
    ]
