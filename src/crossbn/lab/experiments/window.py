"""How many steps to pool: the paper's ablation of the window, beside BN with as many examples in one batch."""

from collections.abc import Mapping, Sequence

from crossbn.lab.experiments.accuracies import Cells, grid_rows
from crossbn.lab.experiments.cells import cbn, plain
from crossbn.lab.experiments.classification import BATCH_SIZE, check, describe, make_tasks, scale_of, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Window: CBN, CBN without compensation, and BN with as many examples"
ALONE = False
WINDOWS = (1, 2, 4, 8, 16)
CBN, AUTO, NAIVE, BN = "CBN", "CBN, auto", "naive", "BN, k times the batch"
MEASURES: tuple[Measure, ...] = tuple(Measure(name, f"{name}, %", ".1f") for name in (CBN, AUTO, NAIVE, BN))


def grid(scale: Scale) -> Mapping[str, Cells]:
    """Return the cells by window and norm."""
    size = BATCH_SIZE[scale]
    return {f"k = {k}": _row(size, k) for k in WINDOWS}


def _row(size: int, k: int) -> Cells:
    ours = {CBN: cbn(size, k), AUTO: cbn(size, k, weights="auto"), NAIVE: cbn(size, k, order=0)}
    return {**ours, BN: plain("bn", size * k)}


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training with each norm and each window."""
    return make_tasks([cell for row in grid(scale).values() for cell in row.values()], scale, seeds)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each window, CBN compared with the others."""
    return grid_rows(results, grid(scale_of(results)), CBN)


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    size = BATCH_SIZE[scale]
    return [
        *describe(scale),
        f"CBN and naive have batches of {size}. CBN has the paper's equal weights of all steps, CBN, auto the "
        f"library's automatic ones. With k = 1 all are BN at batch size {size}, one run. BN with k times the batch "
        "takes k times fewer steps at a learning rate k times as large: beside its statistics, its optimization is "
        "another one, and it gets worse where steps become too few.",
        "The paper's own numbers are not beside these: no source at hand showed them to check them with.",
    ]
