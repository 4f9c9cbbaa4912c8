"""How much an old step should count: votes that fall with its age, by batch size; the paper has equal ones."""

from collections.abc import Mapping, Sequence

from crossbn.experiments.accuracies import Cells, grid_rows
from crossbn.experiments.cells import cbn, plain
from crossbn.experiments.classification import check, describe, make_tasks, work
from crossbn.experiments.classification_estimates import estimate_seconds
from crossbn.experiments.experiment import Comparison, Measure, Scale
from crossbn.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Decay: votes that fall with a step's age (ours, not the paper's)"
ALONE = False
SEEDS = {Scale.SMALL: 5, Scale.FULL: 1}
SIZES = (8, 4, 2, 1)
RATES = {"CBN": 1.0, "decay 0.85": 0.85, "decay 0.7": 0.7, "decay 0.5": 0.5}
SUBJECT = "decay 0.7"
MEASURES: tuple[Measure, ...] = tuple(Measure(name, f"{name}, %", ".1f") for name in ("BN", *RATES))


def grid() -> Mapping[str, Cells]:
    """Return the cells by batch size and rate."""
    return {f"batch {size}": _row(size) for size in SIZES}


def _row(size: int) -> Cells:
    # A training of single images takes as many steps as all others together: there the rate in question has to do.
    rates = RATES if size > 1 else {name: RATES[name] for name in ("CBN", SUBJECT)}
    return {"BN": plain("bn", size), **{name: cbn(size, decay=rate) for name, rate in rates.items()}}


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training with each rate at each batch size."""
    return make_tasks([cell for row in grid().values() for cell in row.values()], scale, seeds or SEEDS[scale])


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each batch size, a decay of 0.7 compared with the others."""
    return grid_rows(results, grid(), SUBJECT)


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    return [
        *describe(scale),
        "In a window of CBN all steps count alike. With a decay, `decay=` of the norms, a remembered step counts the "
        "rate to the power of its age, today's step 1. Windows are the paper's, 8 at batch sizes 1 and 2, 4 at 4, 2 "
        "at 8. At small scale this table has five seeds, where others have three.",
        "The paper has no such table.",
    ]
