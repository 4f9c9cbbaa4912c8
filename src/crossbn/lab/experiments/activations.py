"""Norms behind an activation: compensated through it, and left as BatchNorm."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from crossbn.lab.experiments.accuracies import Cells, grid_rows
from crossbn.lab.experiments.cells import cbn, plain
from crossbn.lab.experiments.classification import check, describe, make_tasks, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Norms behind an activation, compensated through it (ours, not the paper's)"
ALONE = False
SEEDS = {Scale.SMALL: 5, Scale.FULL: 1}
SIZES = (2, 1)
NETWORKS = {"ResNet-8, norms last": "resnet8_norm_last", "ConvMixer-4": "convmixer4"}
SUBJECT = "through the activation"
MEASURES: tuple[Measure, ...] = tuple(Measure(name, f"{name}, %", ".1f") for name in ("BN", SUBJECT))


_IMAGES = {Scale.SMALL: 2000, Scale.FULL: None}


def grid(scale: Scale) -> Mapping[str, Cells]:
    """Return the cells by network and batch size, and by norm."""
    return {f"{title}, batch {size}": _row(title, size, scale) for title in NETWORKS for size in SIZES}


def _row(title: str, size: int, scale: Scale) -> Cells:
    through = cbn(size, burn_in=0.0, weights="auto")
    through = replace(through, options={**through.options, "compensate_through": "activations"})
    changes = {"model": NETWORKS[title], "data": "cifar10", "train_images": _IMAGES[scale]}
    cells = {"BN": plain("bn", size), SUBJECT: through}
    return {name: replace(cell, changes=changes, prefix=f"{title}, ") for name, cell in cells.items()}


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training of each network with each norm at each batch size."""
    return make_tasks([cell for row in grid(scale).values() for cell in row.values()], scale, seeds or SEEDS[scale])


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each network and batch size."""
    return grid_rows(results, grid(Scale.SMALL), SUBJECT)  # names are those of both scales


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    images = "2,000 images of CIFAR-10" if scale is Scale.SMALL else "CIFAR-10 instead of ImageNet"
    return [
        *describe(scale),
        f"This table is of {images} and two other networks, in which every norm reads the output of a convolution's "
        "activation. Without `compensate_through` such norms are left as they are, so the first column is also what a "
        "conversion gives by itself. ResNet-8, norms last: the small network of the other tables with each norm after "
        "its ReLU. ConvMixer-4: four blocks of 64 channels, patches of 2 by 2, kernels of 5 by 5, GELU. Its last norm "
        "is before the mean over the image: a batch of one image then has a mean of beta in every channel, whatever it "
        "shows, and BN learns nothing. No burn-in, windows of 8, automatic weights. At small scale this table has five "
        "seeds, where others have three.",
        "The paper has no such table.",
    ]
