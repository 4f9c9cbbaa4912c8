"""How many terms of the Taylor polynomial: the paper's comparison of no, first and second order."""

from collections.abc import Sequence

from crossbn.lab.experiments.accuracies import MEASURES, Cells, list_rows
from crossbn.lab.experiments.cells import cbn, plain
from crossbn.lab.experiments.classification import BATCH_SIZE, check, describe, make_tasks, scale_of, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Order of the compensation: BN, none, first, second"
ALONE = False
FIRST = "CBN, first order"


def cells(scale: Scale) -> Cells:
    """Return the cells by what they are called."""
    size = BATCH_SIZE[scale]
    return {
        **{"BN": plain("bn", size), "naive CBN": cbn(size, order=0)},
        **{FIRST: cbn(size), "CBN, second order": cbn(size, order=2)},
    }


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training with each order."""
    return make_tasks(cells(scale).values(), scale, seeds)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each order, compared with the first."""
    return list_rows(results, cells(scale_of(results)), FIRST)


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    return [
        *describe(scale),
        f"Batches of {BATCH_SIZE[scale]}. The second order is exact as far as the layer's own weights go, but for the "
        "positions it looks at. Time is of one core with another run beside it.",
        "The paper's own numbers are not beside these: no source at hand showed them to check them with.",
    ]
