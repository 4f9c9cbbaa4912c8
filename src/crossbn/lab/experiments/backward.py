"""Whether gradients follow the compensated statistics into today's weights; the paper has no such table."""

from collections.abc import Sequence

from crossbn.lab.experiments.accuracies import MEASURES, Cells, list_rows
from crossbn.lab.experiments.cells import cbn, plain
from crossbn.lab.experiments.classification import BATCH_SIZE, check, describe, make_tasks, scale_of, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Gradient through the compensation: through and detached (ours, not the paper's)"
ALONE = False
THROUGH = "CBN, through"


def cells(scale: Scale) -> Cells:
    """Return the cells by what they are called."""
    size = BATCH_SIZE[scale]
    return {
        **{"BN": plain("bn", size), "GN": plain("gn", size)},
        **{THROUGH: cbn(size), "CBN, detached": cbn(size, backward="detached")},
    }


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training with each gradient, and those of BN and GN to judge by."""
    return make_tasks(cells(scale).values(), scale, seeds)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each training, compared with the gradient that goes through."""
    return list_rows(results, cells(scale_of(results)), THROUGH)


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    return [
        *describe(scale),
        f"Batches of {BATCH_SIZE[scale]}. Compensated statistics are functions of today's weights. Through lets the "
        "gradient follow them there, as the paper's text allows and BN does with the statistics of its one batch; "
        "detached takes them for constants, as the paper's released code does.",
        "The paper has no such table.",
    ]
