"""Other networks: BN at a large and a small batch, GN, BRN and CBN at the small one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from crossbn.lab.experiments.accuracies import Cells, grid_rows
from crossbn.lab.experiments.cells import Cell, cbn, plain
from crossbn.lab.experiments.classification import check, describe, make_tasks, scale_of, work
from crossbn.lab.experiments.classification_estimates import estimate_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Architectures: ResNet-50, VGG-16, Inception-v3, DenseNet-121 and MobileNet-v2"
ALONE = False
LARGE, SMALL = 32, 4
MEASURES: tuple[Measure, ...] = tuple(
    Measure(name, f"{name}, %", ".1f") for name in (f"BN {LARGE}", f"BN {SMALL}", "GN", "BRN", "CBN")
)
NETWORKS = {
    **{"ResNet-50": "resnet50", "VGG-16": "vgg16_bn", "Inception-v3": "inception_v3"},
    **{"DenseNet-121": "densenet121", "MobileNet-v2": "mobilenet_v2"},
}
_SMALL: dict[str, Any] = {"data": "digits", "train_images": 1000, "test_images": None, "epochs": 4, "points": 1}
_SMALL_SIZES = {"Inception-v3": 75}
_SMALL_SIZE = 32
_PAPER = "The paper's own numbers are not beside these: no source at hand showed them to check them with."


def grid(scale: Scale) -> Mapping[str, Cells]:
    """Return the cells by network and norm."""
    cells: Cells = {
        **{f"BN {LARGE}": plain("bn", LARGE), f"BN {SMALL}": plain("bn", SMALL)},
        **{"GN": plain("gn", SMALL), "BRN": plain("brn", SMALL), "CBN": cbn(SMALL)},
    }
    return {name: {column: _with(cell, name, scale) for column, cell in cells.items()} for name in NETWORKS}


def _with(cell: Cell, name: str, scale: Scale) -> Cell:
    changes: dict[str, Any] = {"model": NETWORKS[name]}
    if scale is Scale.SMALL:
        changes |= {**_SMALL, "image_size": _SMALL_SIZES.get(name, _SMALL_SIZE)}
        if name == "VGG-16":
            changes["head"] = "pooled"
    elif name == "Inception-v3":
        changes["image_size"] = 299
    return replace(cell, changes=changes, prefix=f"{name}: ")


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training of each network with each norm; with one seed, as three take more than an hour."""
    return make_tasks([cell for row in grid(scale).values() for cell in row.values()], scale, seeds or 1)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each network, CBN compared with the others."""
    return grid_rows(results, grid(scale_of(results)), "CBN")


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    if scale is Scale.FULL:
        told = describe(scale)
        told[0] = told[0].replace("ResNet-18 on", "The networks, as torchvision has them, on")
        sizes = f"GN, BRN and CBN have batches of {SMALL}. Inception-v3 sees 299 pixels, the others 224."
        return [*told, sizes, _PAPER]
    setting = (
        f"Small scale: {_SMALL['train_images']} of the digits that come with scikit-learn, enlarged to "
        f"{_SMALL_SIZE} pixels (Inception-v3: {_SMALL_SIZES['Inception-v3']}), in {_SMALL['epochs']} epochs; VGG-16 "
        "has a mean over space and one linear layer in place of its three. These networks were made for a thousand "
        f"times as many images. Whether they learn at all with a norm at batch size {SMALL}, and how far CBN is from "
        f"BN at {LARGE}, can be seen; which network suits a norm better cannot. One seed, unless more are asked for: "
        "no difference is known to be more than chance."
    )
    return [
        setting,
        *describe(scale)[1:],
        f"GN, BRN and CBN have batches of {SMALL}, and take {LARGE // SMALL} times the steps of BN at {LARGE}. "
        "DenseNet-121's last maps are single pixels.",
        _PAPER,
    ]
