"""Deeper networks: how far CBN is from exact statistics, of its own layer and of all layers before."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from crossbn.lab.experiments.accuracies import Cells, grid_rows
from crossbn.lab.experiments.cells import Cell, cbn, exact, plain
from crossbn.lab.experiments.classification import check, describe, make_tasks, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Depth: CBN and exact statistics in deeper networks (ours, not the paper's)"
ALONE = False
SUBJECT, OWN, FULL = "CBN", "exact, own layer", "exact, all layers"
MEASURES: tuple[Measure, ...] = tuple(Measure(name, f"{name}, %", ".1f") for name in ("BN", SUBJECT, OWN, FULL))
SIZES = (4, 2, 1)
NETWORKS: dict[str, dict[str, Any]] = {
    "plain network of 20 layers": {"model": "plain20"},
    "ResNet-20": {"model": "resnet20"},
    # Smaller images would end as single pixels.
    "MobileNet-v2": {"model": "mobilenet_v2", "image_size": 64, "train_images": 2000, "test_images": 2000},
}


def grid() -> Mapping[str, Cells]:
    """Return the cells by network, batch size and statistics."""
    return {f"{name}, batch {size}": _row(name, size) for name in NETWORKS for size in SIZES}


def _row(name: str, size: int) -> Cells:
    def of(cell: Cell) -> Cell:
        return replace(cell, changes={"data": "cifar10", **NETWORKS[name]}, prefix=f"{name}: ")

    exactly = {} if size != 2 else {label: replace(exact(size, how), burn_in=0.0) for label, how in _EXACT.items()}
    cells = {"BN": plain("bn", size), SUBJECT: cbn(size, burn_in=0.0, weights="auto"), **exactly}
    return {label: of(cell) for label, cell in cells.items()}


_EXACT = {OWN: "own", FULL: "full"}


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training of each network with each kind of statistics."""
    return make_tasks([cell for row in grid().values() for cell in row.values()], scale, seeds)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each network and batch size, CBN compared with the others."""
    return grid_rows(results, grid(), SUBJECT)


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    return [
        *describe(scale),
        "The networks learn CIFAR-10 at both scales, MobileNet-v2 half as many images, enlarged to 64 pixels, at the "
        "small one. CBN is the library's default: automatic weights, no burn-in. Exact: the remembered images go "
        "through the whole network again at each step, so that their statistics are those of today's weights and "
        "today's statistics of the norms before; with the gradient into the own layer's weights, or into all. A "
        "compensation for what changes in the layers before could at most reach the first of these.",
        "The paper has no such table.",
    ]
