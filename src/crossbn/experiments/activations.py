"""Norms behind an activation: compensated through it, and left as BatchNorm."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from crossbn.experiments.accuracies import Cells, grid_rows
from crossbn.experiments.cells import Cell, cbn, plain
from crossbn.experiments.classification import check, describe, make_tasks, work
from crossbn.experiments.classification_estimates import estimate_seconds
from crossbn.experiments.experiment import Comparison, Measure, Scale
from crossbn.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Norms behind an activation, compensated through it (ours, not the paper's)"
ALONE = False
SEEDS = {Scale.SMALL: 5, Scale.FULL: 1}
SIZES = (2, 1)
NETWORKS = {"ResNet-8, norms last": "resnet8_norm_last", "ConvMixer-4": "convmixer4"}
SUBJECT = "through the activation"
MEASURES: tuple[Measure, ...] = tuple(Measure(name, f"{name}, %", ".1f") for name in ("BN", SUBJECT))


def grid() -> Mapping[str, Cells]:
    """Return the cells by network and batch size, and by norm."""
    return {f"{title}, batch {size}": _row(title, size) for title in NETWORKS for size in SIZES}


def _row(title: str, size: int) -> Cells:
    through = cbn(size, burn_in=0.0, weights="auto")
    through = replace(through, options={**through.options, "compensate_through": "activations"})
    return {"BN": _within(title, plain("bn", size)), SUBJECT: _within(title, through)}


def _within(title: str, cell: Cell) -> Cell:
    return replace(cell, changes={"model": NETWORKS[title]}, prefix=f"{title}, ")


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training of each network with each norm at each batch size."""
    return make_tasks([cell for row in grid().values() for cell in row.values()], scale, seeds or SEEDS[scale])


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each network and batch size."""
    return grid_rows(results, grid(), SUBJECT)


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    return [
        *describe(scale),
        "Here every norm reads the output of a convolution's activation. Without `compensate_through` such norms are "
        "left as they are, so the first column is also what a conversion gives by itself. ResNet-8, norms last: the "
        "network of the other tables with each norm after its ReLU. ConvMixer-4: four blocks of 64 channels, patches "
        "of 2 by 2, kernels of 5 by 5, GELU. Its last norm is before the mean over the image: a batch of one image has "
        "then a mean of beta in every channel, whatever it shows, and BN learns nothing. No burn-in, windows of 8, "
        "automatic weights. At small scale this table has five seeds, where others have three.",
        "The paper has no such table.",
    ]
