"""Gradients of statistics with respect to earlier layers' weights, relative to those of the layer's own: the appendix.

CBN corrects old statistics for the change of the weights right before a norm, and of these only. That is good as far as
statistics depend less on the weights before.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from crossbn.lab.data import DATASETS
from crossbn.lab.environment import best_device
from crossbn.lab.experiments import paper
from crossbn.lab.experiments.classification import pool_head
from crossbn.lab.experiments.estimates import training_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale, Values
from crossbn.lab.experiments.notes import notes_of
from crossbn.lab.experiments.table import list_rows
from crossbn.lab.models import build_network
from crossbn.lab.progress import Watch
from crossbn.lab.records import Record, Task

if TYPE_CHECKING:  # whoever asks for runs that are finished does not wait for it
    from torch import nn

_NETWORKS = {"ResNet-18": "resnet18", "VGG-16": "vgg16_bn", "Inception-v3": "inception_v3"}
_SMALL_SIZES = {"ResNet-18": 64, "VGG-16": 32, "Inception-v3": 75}
_EPOCHS = 90
# A projection goes back through three layers, weights and inputs: in forward passes, for both moments.
_FORWARDS_A_PROBE = 2 * 3 * 2


def build_classifier(settings: Any, seed: int = 0) -> "nn.Module":
    """Return the network of a run with BatchNorm; equal seeds give equal weights."""
    network = build_network(settings["model"], 3, DATASETS[settings["data"]].classes, seed=seed)
    return pool_head(network) if settings.get("head") == "pooled" else network


def _small(name: str) -> dict[str, Any]:
    return {
        # VGG's three large linear layers, which no norm is among, would be nearly all of the work for small images.
        **{"model": _NETWORKS[name], "head": "pooled" if name == "VGG-16" else "own", "data": "digits"},
        **{"image_size": _SMALL_SIZES[name], "batch_size": 16, "steps": 200, "looks": 4, "probes": 4},
        "learning_rate": 0.01,
    }


def _full(name: str) -> dict[str, Any]:
    size, images = 32, DATASETS["imagenet"].train_images
    return {
        **{"model": _NETWORKS[name], "head": "own", "data": "imagenet"},
        **{"image_size": 299 if name == "Inception-v3" else 224, "batch_size": size},
        **{"steps": _EPOCHS * images // size, "looks": 90, "probes": 16},
        # As in torchvision's reference recipes, VGG learns at a tenth of the others' rate.
        "learning_rate": (0.01 if name == "VGG-16" else 0.1) * size / 256,
    }


class Gradients:
    """See `experiment.Experiment`."""

    title = "Gradients of the statistics with respect to the weights of earlier layers"
    measures = (
        Measure("mean_1", "mean, l-1"),
        Measure("second_moment_1", "nu, l-1"),
        Measure("mean_2", "mean, l-2"),
        Measure("second_moment_2", "nu, l-2"),
        Measure("loss", "loss at the end"),
    )
    scales = (Scale.SMALL, Scale.FULL)
    alone = False

    def configs(self, scale: Scale, seeds: int | None = None) -> list[Task]:
        """Return a training of each network: on digits for a few hundred steps, or on ImageNet for 90 epochs."""
        make = _small if scale is Scale.SMALL else _full
        return [
            Task("gradients", name, seed, {**make(name), "momentum": 0.9, "weight_decay": 1e-4})
            for name in _NETWORKS
            for seed in range(seeds or 1)
        ]

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise UnavailableError if the images of one of the runs are not there."""
        from crossbn.lab.experiments.pictures import check_pictures

        check_pictures(tasks)

    def estimate_seconds(self, task: Task) -> float:
        """Return about how long a run takes: three forward passes a step, and the projections."""
        settings: Any = task.settings
        looks = (settings["looks"] + 1) * settings["probes"] * _FORWARDS_A_PROBE
        images = settings["batch_size"] * (3 * settings["steps"] + looks)
        return training_seconds(settings["model"], settings["image_size"], settings["steps"], images)

    def work(self, task: Task, watch: Watch, _: Path | None = None, /) -> Values:
        """Train, and look before, on the way and at the end: at the batch that comes next, with today's weights."""
        import torch

        from crossbn.lab.experiments.pictures import batches
        from crossbn.lab.fidelity.gradients import average_ratios, gradient_norms
        from crossbn.lab.training import Training

        settings: Any = task.settings
        torch.manual_seed(task.seed)
        model = build_classifier(settings, task.seed).to(best_device())
        optimizer = {name: settings[name] for name in ("steps", "learning_rate", "momentum", "weight_decay")}
        training = Training(model, **optimizer, watch=watch)
        steps = settings["steps"]
        due = {round(steps * look / settings["looks"]) for look in range(settings["looks"] + 1)}
        looks: list[dict[str, Any]] = []
        for step, batch in enumerate(batches(settings["data"], settings["image_size"], settings["batch_size"])):
            if step in due:
                generator = torch.Generator().manual_seed(task.seed)
                images = batch[0].to(training.device)
                found = gradient_norms(model, images, probes=settings["probes"], generator=generator)
                looks.append({"step": step, "layers": len(found), **average_ratios(found)._asdict()})
            if step == steps:
                break
            training.step(batch)
        return {"looks": looks, "final_loss": training.final_loss}

    def rows(self, records: Sequence[Record]) -> list[Comparison]:
        """Return a row for each network: ratios averaged over the looks, but the one before training."""
        return list_rows(records, _numbers, known=paper.numbers("gradients"))

    def notes(self, scale: Scale) -> list[str]:
        """Say what the numbers are."""
        return [*notes_of("gradients", scale), paper.about("gradients")]


def _numbers(record: Record) -> dict[str, float | None]:
    looks = record.values["looks"][1:]
    ratios = {
        f"{moment}_{distance}": fmean(look[moment][distance - 1] for look in looks)
        for moment in ("mean", "second_moment")
        for distance in (1, 2)
    }
    return {**ratios, "loss": record.values["final_loss"]}
