"""The learning rate of each norm, chosen on training images that are not trained on: what medium tables train with."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from crossbn.lab.experiments.accuracies import Cells, accuracies_of, grid_rows
from crossbn.lab.experiments.cells import Cell, cbn, plain
from crossbn.lab.experiments.classification import check, describe, make_tasks, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Learning rates by norm, on validation images (ours, not the paper's)"
ALONE = False
BATCH_SIZE = 2
PAPER_RATE = 0.1 / 32
"""For each image of a batch."""
FACTORS = {"a third": 1 / 3, "the paper's": 1.0, "three times": 3.0}
MEASURES: tuple[Measure, ...] = tuple(Measure(name, f"{name}, %", ".1f") for name in FACTORS)
CHOSEN: Mapping[str, str] = {
    **{"BN": "a third", "BN, WS": "the paper's", "GN": "the paper's", "GN, WS": "a third", "BRN": "a third"},
    **{"EvoNorm-S0": "a third", "FRN, TLU": "the paper's"},
    **{"CBN, equal": "a third", "CBN": "the paper's", "CBN, WS": "the paper's"},
}
"""What came out, by norm; `batch_size` trains with these at medium scale."""
_BUDGET: dict[str, Any] = {"train_images": 5000, "test_images": 5000, "epochs": 4, "points": 1, "validate": True}


def norms(size: int) -> Cells:
    """Return the cell of each norm at a batch size, with the paper's learning rate and without burn-in."""
    own = cbn(size, burn_in=0.0, weights="auto")
    return {
        **{"BN": plain("bn", size), "BN, WS": _standardized(plain("bn", size)), "GN": plain("gn", size)},
        **{"GN, WS": _standardized(plain("gn", size)), "BRN": plain("brn", size)},
        **{"EvoNorm-S0": plain("evonorm_s0", size), "FRN, TLU": plain("frn_tlu", size)},
        **{"CBN, equal": cbn(size, burn_in=0.0), "CBN": own, "CBN, WS": _standardized(own)},
    }


def _standardized(cell: Cell) -> Cell:
    return replace(cell, changes={"reparametrize": "ws"}, prefix="weight-standardized ")


def at_rate(cell: Cell, factor: float) -> Cell:
    """Return the same training at a multiple of the paper's learning rate."""
    if factor == 1:
        return cell
    return replace(cell, changes={**cell.changes, "learning_rate": factor * PAPER_RATE * cell.batch_size})


def at_chosen_rate(cell: Cell, norm: str) -> Cell:
    """Return the same training at the learning rate that was chosen for the norm."""
    return at_rate(cell, FACTORS[CHOSEN.get(norm, "the paper's")])


def grid() -> Mapping[str, Cells]:
    """Return the cells by norm and learning rate."""
    return {
        norm: {
            name: replace(rated, changes={**rated.changes, **_BUDGET}, prefix=f"validated: {rated.prefix}")
            for name, factor in FACTORS.items()
            for rated in [at_rate(cell, factor)]
        }
        for norm, cell in norms(BATCH_SIZE).items()
    }


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training of each norm at each learning rate; one seed is the budget."""
    return make_tasks([cell for row in grid().values() for cell in row.values()], scale, seeds or 1)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each norm."""
    return [replace(row, remark="") for row in grid_rows(results, grid(), "the paper's")]


def choose(results: Sequence[Result]) -> dict[str, str]:
    """Return the best learning rate of each norm; the first of equal ones."""
    chosen = {}
    for norm, cells in grid().items():
        found = {name: accuracies_of(results, cell).get(0, 0.0) for name, cell in cells.items()}
        chosen[norm] = max(found, key=lambda name: found[name])
    return chosen


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    return [
        describe(scale)[0]
        .replace("10,000 images of CIFAR-10 in 8", "5,000 images of CIFAR-10 in 4")
        .rpartition(" All")[0],
        f"Accuracy on {_BUDGET['test_images']:,} training images that are not trained on, at batches of {BATCH_SIZE} "
        f"and multiples of the paper's learning rate, {PAPER_RATE * BATCH_SIZE:g}. Each norm has the same budget: "
        f"{len(FACTORS)} trainings of one seed, half the images and half the epochs of the table that they are for. "
        "The best multiple of a norm is its multiple at all batch sizes of `reproduce batch_size --scale medium`.",
        "The paper has no such table.",
    ]
