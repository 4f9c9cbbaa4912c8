"""The tables and figures of classification, a specification each: those of the paper, and ours."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from crossbn.lab.experiments.cells import BURN_IN, DEFAULT, TITLES, Cell, cbn, exact, plain, varied
from crossbn.lab.experiments.classification import POSITIONS, check
from crossbn.lab.experiments.classification_table import Cells, Grid, Table
from crossbn.lab.experiments.experiment import Scale, UnavailableError
from crossbn.lab.experiments.rates import FINETUNE, LEARNING_RATE, at_chosen_rate, medium_norms
from crossbn.lab.experiments.table import batch_size_of
from crossbn.lab.records import Task
from crossbn.schedules import window_for

WINDOWS = (1, 2, 4, 8, 16)
LARGE = 16
"""As many images as CBN pools."""
MEDIUM_SIZES, BOUND, BOUND_SIZE = (32, 8, 4, 2, 1), "exact, own layer", 2
"""The bound takes as long as all else together, so it is at one size only."""
NETWORKS = {
    **{"ResNet-50": "resnet50", "VGG-16": "vgg16_bn", "Inception-v3": "inception_v3"},
    **{"DenseNet-121": "densenet121", "MobileNet-v2": "mobilenet_v2"},
}
_DIGITS: dict[str, Any] = {"data": "digits", "train_images": 1000, "test_images": None, "epochs": 4, "points": 1}
_DECAYS = {"decay 0.85": 0.85, "decay 0.7": 0.7, "decay 0.5": 0.5}
_DEEP: dict[str, dict[str, Any]] = {
    "plain network of 20 layers": {"model": "plain20"},
    "ResNet-20": {"model": "resnet20"},
    # Smaller images would end as single pixels.
    "MobileNet-v2": {"model": "mobilenet_v2", "image_size": 64, "train_images": 2000, "test_images": 2000},
}
_NORM_LAST = {"ResNet-8, norms last": "resnet8_norm_last", "ConvMixer-4": "convmixer4"}
_SEEDS_OF_VARIANTS = {"bn": 4, "cbn": 3}  # as many as were trained before they left
_LAST_COMMIT = "61dfb96"


def _norms(scale: Scale) -> Cells:
    size = batch_size_of(scale)
    others = {TITLES[norm]: plain(norm, size) for norm in ("in", "ln", "gn", "bn")}
    return {**others, "CBN": cbn(size), "BN at batch 32": plain("bn", 32)}


def _batch_size(scale: Scale) -> Grid:
    if scale is Scale.MEDIUM:
        return {f"batch {size}": _medium_row(size) for size in MEDIUM_SIZES}
    return {f"batch {size}": _batch_size_row(size) for size in (32, 16, 8, 4, 2, 1)}


def _medium_row(size: int) -> Cells:
    row = {norm: at_chosen_rate(cell, norm) for norm, cell in medium_norms(size).items()}
    if size == max(MEDIUM_SIZES):
        return {"BN": row["BN"]}
    if size == BOUND_SIZE:
        row[BOUND] = at_chosen_rate(_exact(size, "own"), "CBN")
    return row


def _batch_size_row(size: int) -> Cells:
    row = {"BN": plain("bn", size), "GN": plain("gn", size), "BRN": plain("brn", size), "CBN": cbn(size)}
    if size <= 2:  # where CBN matters most, CBN without compensation, and without its gradient
        row |= {"naive": cbn(size, order=0), "detached": cbn(size, backward="detached")}
    # At batch size 1 the paper's window of 8 holds half the examples that it holds elsewhere.
    return {**row, "CBN, k = 16": cbn(size, 16)} if size == 1 else row


def _architectures(scale: Scale) -> Grid:
    cells: Cells = {
        **{"BN 32": plain("bn", 32), "BN 4": plain("bn", 4)},
        **{"GN": plain("gn", 4), "BRN": plain("brn", 4), "CBN": cbn(4)},
    }
    return {name: {column: _with(cell, name, scale) for column, cell in cells.items()} for name in NETWORKS}


def _with(cell: Cell, name: str, scale: Scale) -> Cell:
    changes: dict[str, Any] = {"model": NETWORKS[name]}
    if scale is Scale.SMALL:
        changes |= {**_DIGITS, "image_size": 75 if name == "Inception-v3" else 32}
        changes |= {"head": "pooled"} if name == "VGG-16" else {}
    elif name == "Inception-v3":
        changes["image_size"] = 299
    return replace(cell, changes=changes, prefix=f"{name}: ")


def _window(scale: Scale) -> Grid:
    size = batch_size_of(scale)
    return {
        f"k = {k}": {
            **{"CBN": cbn(size, k), "CBN, auto": cbn(size, k, weights="auto"), "naive": cbn(size, k, order=0)},
            "BN, k times the batch": plain("bn", size * k),
        }
        for k in WINDOWS
    }


def _compensation(scale: Scale) -> Cells:
    size = batch_size_of(scale)
    return {
        **{"CBN": cbn(size), "naive CBN": cbn(size, order=0)},
        **{f"BN at batch {each}": plain("bn", each) for each in (size, LARGE)},
    }


def _burn_in(scale: Scale) -> Grid:
    size = batch_size_of(scale)
    return {
        f"{share:.0%}": {each: cbn(size, backward=each, burn_in=share) for each in ("through", "detached")}
        for share in (0.0, 0.1, BURN_IN, 0.5, 0.75)
    }


def _order(scale: Scale) -> Cells:
    size = batch_size_of(scale)
    return {
        **{"BN": plain("bn", size), "naive CBN": cbn(size, order=0)},
        **{"CBN, first order": cbn(size), "CBN, second order": cbn(size, order=2)},
    }


def _exact(size: int, gradient: str) -> Cell:
    return replace(exact(size, gradient), burn_in=0.0)


def _backward(scale: Scale) -> Cells:
    size = batch_size_of(scale)
    return {
        **{"BN": plain("bn", size), "GN": plain("gn", size)},
        **{"CBN, through": cbn(size), "CBN, detached": cbn(size, backward="detached")},
    }


def _positions(scale: Scale) -> Cells:
    return {
        f"{each or 'all'} positions": cbn(batch_size_of(scale), positions=DEFAULT if each == POSITIONS[scale] else each)
        for each in (16, 32, 64, 128, 256, None)
    }


def _bound(scale: Scale) -> Cells:
    size = batch_size_of(scale)
    large = size * window_for(size)
    return {
        **{f"BN at batch {size}": plain("bn", size), "CBN, detached": cbn(size, backward="detached"), "CBN": cbn(size)},
        **{"exact, no gradient": exact(size, "none"), "exact, own layer": exact(size, "own")},
        **{"exact, full gradient": exact(size, "full"), f"BN at batch {large}": plain("bn", large)},
    }


def _depth(_: Scale) -> Grid:
    return {f"{name}, batch {size}": _depth_row(name, size) for name in _DEEP for size in (4, 2, 1)}


def _depth_row(name: str, size: int) -> Cells:
    cells = {"BN": plain("bn", size), "CBN": cbn(size, burn_in=0.0, weights="auto")}
    second = cbn(size, burn_in=0.0, weights="auto", order=2)
    cells["consistent"] = replace(second, options={**second.options, "consistent": True})
    if size == 2:
        cells |= {"exact, own layer": _exact(size, "own"), "exact, all layers": _exact(size, "full")}
    changes = {"data": "cifar10", **_DEEP[name]}
    return {label: replace(cell, changes=changes, prefix=f"{name}: ") for label, cell in cells.items()}


def _weights(_: Scale) -> Grid:
    rows = {f"batch {size}": _weights_row(size) for size in (8, 4, 2, 1)}
    return rows | {f"batch {size}, burn-in": _weights_row_with_burn_in(size) for size in (8, 4, 2, 1)}


def _weights_row(size: int) -> Cells:
    row = {"BN": plain("bn", size), "equal": cbn(size, burn_in=0.0)}
    # A training of single images takes as many steps as all others together.
    rates = ("decay 0.85", "decay 0.7") if size > 1 else ("decay 0.85",)
    row |= {name: cbn(size, burn_in=0.0, decay=_DECAYS[name]) for name in rates}
    row["auto"] = cbn(size, burn_in=0.0, weights="auto")
    # Remembered images go through the network again: as long as all else together, so at one size only.
    return {**row, "exact, own layer": _exact(size, "own")} if size == 2 else row


def _weights_row_with_burn_in(size: int) -> Cells:
    rates = _DECAYS if size > 1 else {"decay 0.7": _DECAYS["decay 0.7"]}
    return {"BN": plain("bn", size), "equal": cbn(size)} | {name: cbn(size, decay=rate) for name, rate in rates.items()}


def _activations(scale: Scale) -> Grid:
    return {f"{title}, batch {size}": _activations_row(title, size, scale) for title in _NORM_LAST for size in (2, 1)}


def _activations_row(title: str, size: int, scale: Scale) -> Cells:
    through = cbn(size, burn_in=0.0, weights="auto")
    through = replace(through, options={**through.options, "compensate_through": "activations"})
    images = 2000 if scale is Scale.SMALL else None
    changes = {"model": _NORM_LAST[title], "data": "cifar10", "train_images": images}
    cells = {"BN": plain("bn", size), "through the activation": through}
    return {name: replace(cell, changes=changes, prefix=f"{title}, ") for name, cell in cells.items()}


def _improvements(scale: Scale) -> Cells:
    size = batch_size_of(scale)
    own, bn = cbn(size), plain("bn", size)
    decayed, bound = {"CBN, decay 0.7": cbn(size, decay=0.7)}, {"exact, own layer": exact(size, "own")}
    if scale is Scale.FULL:
        return {"BN": bn, "CBN": own, **decayed, **bound}
    return {
        **{"BN": bn, "BN, recalibrated": varied(bn, "recalibrated"), "CBN": own, **decayed},
        f"CBN, window from 2 to {window_for(size)}": varied(own, "growing from 2"),
        **{f"CBN, {name}": varied(own, name) for name in ("extrapolated", "recalibrated")},
        **bound,
    }


class _Improvements(Table):
    """Of what was tried only `decay` has helped. The code of the others is gone; their results are still shown."""

    def configs(self, scale: Scale, seeds: int | None = None) -> list[Task]:
        """Return a training with each variant, and those that it is to be judged by."""
        tasks = super().configs(scale, seeds)
        return [task for task in tasks if task.seed < self._most_seeds(task)]

    def _most_seeds(self, task: Task) -> float:
        return _SEEDS_OF_VARIANTS[task.settings["norm"]] if "variant" in task.settings else float("inf")

    @staticmethod
    def check(tasks: Sequence[Task]) -> None:
        """Raise UnavailableError if a run is of a variant that is gone, or something that runs need is missing."""
        if gone := [task.name for task in tasks if "variant" in task.settings]:
            raise UnavailableError(
                f"{gone[0]!r} can be shown and no longer be trained: variants that did not help are gone since the "
                f"commit after {_LAST_COMMIT}; their results are in benchmarks/reproduce, to be given as --output"
            )
        check(tasks)


_SPECIFICATIONS = (
    Table(
        "batch_size",
        "Accuracy by batch size: BN, GN, BRN and CBN",
        _batch_size,
        "CBN",
        scales=(Scale.SMALL, Scale.MEDIUM, Scale.FULL),
    ),
    Table("norms", "Norms: IN, LN, GN, BN and CBN at a small batch, BN at 32", _norms, "CBN"),
    FINETUNE,
    Table(
        "weights",
        "Weights of old steps: automatic, equal, falling at a fixed rate, and the bound (ours, not the paper's)",
        _weights,
        "auto",
        seeds=5,
    ),
    LEARNING_RATE,
    Table("depth", "Depth: CBN and exact statistics in deeper networks (ours, not the paper's)", _depth, "CBN"),
    Table(
        "activations",
        "Norms behind an activation, compensated through it (ours, not the paper's)",
        _activations,
        "through the activation",
        seeds=5,
    ),
    Table("window", "Window: CBN, CBN without compensation, and BN with as many examples", _window, "CBN"),
    Table("compensation", "Compensation: curves of CBN with and without it, and of BN", _compensation, "CBN"),
    Table("order", "Order of the compensation: BN, none, first, second", _order, "CBN, first order"),
    Table("burn_in", "Burn-in: how long a training begins with BN", _burn_in, "through"),
    Table(
        "bound",
        "Bound: exact statistics over the window, by the gradient they pass on (ours, not the paper's)",
        _bound,
        "CBN",
    ),
    Table(
        "architectures",
        "Architectures: ResNet-50, VGG-16, Inception-v3, DenseNet-121 and MobileNet-v2",
        _architectures,
        "CBN",
        seeds=1,  # three take more than an hour
    ),
    Table(
        "backward",
        "Gradient through the compensation: through and detached (ours, not the paper's)",
        _backward,
        "CBN, through",
    ),
    Table(
        "positions",
        "Positions that the gradient of the variance is estimated on (ours, not the paper's)",
        _positions,
        "all positions",
    ),
    _Improvements(
        "improvements",
        "Improvements: what might bring CBN nearer to exact statistics (ours, not the paper's)",
        _improvements,
        "CBN",
        seeds=5,
    ),
)
TABLES: dict[str, Table] = {table.name: table for table in _SPECIFICATIONS}
"""By the name that `crossbn reproduce` takes, what a reader asks first before what answers questions of detail."""
