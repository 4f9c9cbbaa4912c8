"""How much an old step is worth: automatic weights beside equal ones, fixed rates and the bound, without burn-in."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from crossbn.lab.experiments.accuracies import Cells, grid_rows
from crossbn.lab.experiments.cells import cbn, exact, plain
from crossbn.lab.experiments.classification import check, describe, make_tasks, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Weights of old steps: automatic, equal, falling at a fixed rate, and the bound (ours, not the paper's)"
ALONE = False
SEEDS = {Scale.SMALL: 5, Scale.FULL: 1}
SIZES = (8, 4, 2, 1)
BOUND_SIZE = 2
RATES = {"decay 0.85": 0.85, "decay 0.7": 0.7, "decay 0.5": 0.5}
SUBJECT = "auto"
MEASURES: tuple[Measure, ...] = tuple(
    Measure(name, f"{name}, %", ".1f") for name in ("BN", "equal", *RATES, SUBJECT, "exact, own layer")
)


def grid() -> Mapping[str, Cells]:
    """Return the cells by batch size and kind of weights, without burn-in and with the paper's."""
    rows = {f"batch {size}": _row(size) for size in SIZES}
    return rows | {f"batch {size}, burn-in": _row_with_burn_in(size) for size in SIZES}


def _row(size: int) -> Cells:
    ours = {"equal": cbn(size, burn_in=0.0)}
    # A training of single images takes as many steps as all others together.
    rates = ("decay 0.85", "decay 0.7") if size > 1 else ("decay 0.85",)
    ours |= {name: cbn(size, burn_in=0.0, decay=RATES[name]) for name in rates}
    ours[SUBJECT] = cbn(size, burn_in=0.0, weights="auto")
    # Remembered images go through the network again: as long as all else together, so at one size only.
    bound = {"exact, own layer": replace(exact(size, "own"), burn_in=0.0)} if size == BOUND_SIZE else {}
    return {"BN": plain("bn", size), **ours, **bound}


def _row_with_burn_in(size: int) -> Cells:
    rates = RATES if size > 1 else {"decay 0.7": RATES["decay 0.7"]}
    return {"BN": plain("bn", size), "equal": cbn(size)} | {name: cbn(size, decay=rate) for name, rate in rates.items()}


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training with each kind of weights at each batch size."""
    return make_tasks([cell for row in grid().values() for cell in row.values()], scale, seeds or SEEDS[scale])


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each batch size, automatic weights compared with the others."""
    return grid_rows(results, grid(), SUBJECT)


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    return [
        *describe(scale),
        "Unlike in other tables, cross-iteration norms have no burn-in here, but for the rows that say so: fixed "
        "rates were compared with it first. Equal: every step of the window counts alike, as in the paper. Decay: a "
        "remembered step counts the rate to the power of its age, today's step 1. Auto: each norm measures while "
        "training what an old step is worth, see docs/derivation.md. Exact, own layer: what all of these approximate, "
        "see `reproduce bound`. Windows are the paper's: 8 at batch sizes 1 and 2, 4 at 4, 2 at 8. At small scale "
        "this table has five seeds, where others have three.",
        "The paper has no such table.",
    ]
