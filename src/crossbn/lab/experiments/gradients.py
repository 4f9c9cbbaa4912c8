"""Gradients of statistics with respect to earlier layers' weights, relative to those of the layer's own: the appendix.

CBN corrects old statistics for the change of the weights right before a norm, and of these only. That is good as far as
statistics depend less on the weights before.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from crossbn.lab.experiments.experiment import Comparison, Measure, Scale
from crossbn.lab.experiments.gradient_training import estimate_training_seconds as estimate_seconds
from crossbn.lab.experiments.gradient_training import train_and_look as work
from crossbn.lab.experiments.pictures import IMAGENET_IMAGES, check_pictures
from crossbn.lab.experiments.rows import Spread
from crossbn.lab.experiments.tasks import Result, Task, by_name

__all__ = ["ALONE", "MEASURES", "TITLE", "check", "configs", "estimate_seconds", "notes", "rows", "work"]

TITLE = "Gradients of the statistics with respect to the weights of earlier layers"
ALONE = False
MEASURES: tuple[Measure, ...] = (
    Measure("mean_1", "mean, l-1"),
    Measure("second_moment_1", "nu, l-1"),
    Measure("mean_2", "mean, l-2"),
    Measure("second_moment_2", "nu, l-2"),
    Measure("loss", "loss at the end"),
)
PAPER = {
    "ResNet-18": {"mean_1": 0.12, "second_moment_1": 0.39},
    "VGG-16": {"mean_1": 0.20, "second_moment_1": 0.41},
    "Inception-v3": {"mean_1": 0.15, "second_moment_1": 0.37},
}
_NETWORKS = {"ResNet-18": "resnet18", "VGG-16": "vgg16_bn", "Inception-v3": "inception_v3"}
_SMALL_SIZES = {"ResNet-18": 64, "VGG-16": 32, "Inception-v3": 75}
_FULL_SIZES = {"ResNet-18": 224, "VGG-16": 224, "Inception-v3": 299}
_EPOCHS = 90
_RECIPE = {"momentum": 0.9, "weight_decay": 1e-4}


def configs(scale: Scale, seeds: int | None = None) -> list[Task]:
    """Return a training of each network: on digits for a few hundred steps, or on ImageNet for 90 epochs."""
    make = _small if scale is Scale.SMALL else _full
    return [Task("gradients", name, seed, make(name)) for name in _NETWORKS for seed in range(seeds or 1)]


def _small(name: str) -> dict[str, Any]:
    return {
        **{"model": _NETWORKS[name], "head": "pooled" if name == "VGG-16" else "own", "data": "digits"},
        **{"image_size": _SMALL_SIZES[name], "batch_size": 16, "steps": 200, "looks": 4, "probes": 4},
        **{"learning_rate": 0.01, **_RECIPE},
    }


def _full(name: str) -> dict[str, Any]:
    batch_size = 32
    return {
        **{"model": _NETWORKS[name], "head": "own", "data": "imagenet", "image_size": _FULL_SIZES[name]},
        **{"batch_size": batch_size, "steps": _EPOCHS * IMAGENET_IMAGES // batch_size, "looks": 90, "probes": 16},
        # As in torchvision's reference recipes, VGG learns at a tenth of the others' rate.
        **{"learning_rate": (0.01 if name == "VGG-16" else 0.1) * batch_size / 256, **_RECIPE},
    }


def check(tasks: Sequence[Task]) -> None:
    """Raise UnavailableError if the images of one of the runs are not there."""
    for data in dict.fromkeys(task.settings["data"] for task in tasks):
        check_pictures(data)


def rows(results: Sequence[Result]) -> list[Comparison]:
    """Return a row for each network: ratios averaged over the looks, but the one before training."""
    table = []
    for name, seeds in by_name(results).items():
        numbers = [_numbers(result) for result in seeds]
        ours = {key: Spread.of([each[key] for each in numbers]) for key in numbers[0]}
        table.append(Comparison(name, ours, PAPER.get(name, {})))
    return table


def _numbers(result: Result) -> dict[str, float]:
    looks = result.values["looks"][1:]
    ratios = {
        f"{moment}_{distance}": fmean(look[moment][distance - 1] for look in looks)
        for moment in ("mean", "second_moment")
        for distance in (1, 2)
    }
    return {**ratios, "loss": result.values["final_loss"]}


def notes(scale: Scale) -> list[str]:
    """Say what the numbers are."""
    told = [
        "Frobenius norm of d mean_l / dW_r or d nu_l / dW_r for r = l-1 and l-2, relative to that for r = l: the mean "
        "over the layers that have such an r, then over the looks during training. mean_l and nu_l are the moments of "
        "the input of norm l over the current batch, W_r the weight of the operator that feeds norm r, l-1 the norm "
        "before l on the longest way through the network. Squared norms are unbiased estimates by random projections.",
        "The paper's pair of numbers for each network is taken as mean and second moment at r = l-1; its text was not "
        "at hand to check how it averages.",
    ]
    if scale is Scale.SMALL:
        told.append(
            "Small scale: 200 steps on enlarged digits, small images and batches of 16; the paper's are on ImageNet: "
            "expect its order of magnitude at most. A loss near ln 10 = 2.30 means that the network has not learned."
        )
    return told
