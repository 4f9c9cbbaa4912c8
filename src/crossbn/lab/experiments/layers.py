"""Compensation over more than one layer: the paper's ablation.

CBN follows the weights right before a norm. With two layers it follows those before the previous norm as well: if the
gradients towards them are as small as the appendix has it, that changes little and costs much.
"""

from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from crossbn.lab.data import DATASETS
from crossbn.lab.environment import best_device
from crossbn.lab.experiments.demo import CEILING_BATCH_SIZE, LEARNING_RATE
from crossbn.lab.experiments.estimates import training_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale, Values
from crossbn.lab.experiments.gradients import build_classifier
from crossbn.lab.experiments.notes import notes_of
from crossbn.lab.experiments.table import list_rows
from crossbn.lab.progress import Watch
from crossbn.lab.records import Record, Task
from crossbn.schedules import window_for

if TYPE_CHECKING:  # whoever asks for runs that are finished does not wait for it
    from torch import nn

NORMS: dict[str, dict[str, int] | None] = {
    "BN": None,
    "CBN, no compensation": {"order": 0, "layers": 1},
    "CBN, one layer": {"order": 1, "layers": 1},
    "CBN, two layers": {"order": 1, "layers": 2},
}
"""The order of the compensation and the layers that it follows, by the name of the run."""
WIDTHS = (16, 16, 32, 64)
_STEPS_OF_TWO_LAYERS = 40  # that take as long as one with two layers, which has a gradient for each channel


def chain(classes: int) -> "nn.Sequential":
    """Return convolutions one after the other, each with a norm, from images [N, 3, 8, 8] to scores.

    Every norm but the first has one norm before it, so that two layers can be followed. The maps shrink to 1 by 1, as
    those of the demo's network do.
    """
    from torch import nn

    layers: list[nn.Module] = []
    for before, channels in pairwise((3, *WIDTHS)):
        convolution = nn.Conv2d(before, channels, 3, stride=2 if layers else 1, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(WIDTHS[-1], classes))


def build_model(settings: Any, device: str = "cpu") -> "nn.Module":
    """Return the network of a run with its norm; equal seeds give equal weights, whatever the norm."""
    from crossbn.convert import convert_
    from crossbn.lab.experiments.two_layer import extend_

    model = _build_plain(settings).to(device)
    if settings["norm"] is not None:
        # All positions: no sampling beside what is compared.
        convert_(model, window=settings["window"], positions=None, order=settings["norm"]["order"])
        if settings["norm"]["layers"] == 2:
            extend_(model)
    return model


def _build_plain(settings: Any) -> "nn.Module":
    if settings["model"] == "chain":
        return chain(DATASETS[settings["data"]].classes)
    import torch

    return build_classifier(settings, seed=torch.initial_seed())


def _settings(scale: Scale) -> dict[str, Any]:
    small = scale is Scale.SMALL
    size, epochs, data = (2, 4, "digits") if small else (4, 90, "imagenet")
    rate = LEARNING_RATE * size / CEILING_BATCH_SIZE if small else 0.1 * size / 256
    return {
        **{"model": "chain" if small else "resnet18", "data": data, "image_size": 8 if small else 224},
        **{"batch_size": size, "window": window_for(size), "steps": epochs * DATASETS[data].train_images // size},
        **{"learning_rate": rate, "momentum": 0.9, "weight_decay": 0.0 if small else 1e-4},
    }


class Layers:
    """See `experiment.Experiment`."""

    title = "Compensation over more than one layer: none, one and two"
    measures = (
        Measure("accuracy", "accuracy, %", ".1f"),
        Measure("loss", "loss at the end", ".3f"),
        Measure("milliseconds", "ms / step", ",.1f"),
    )
    scales = (Scale.SMALL, Scale.FULL)
    alone = True

    def configs(self, scale: Scale, seeds: int | None = None) -> list[Task]:
        """Return a training with each norm: a chain of convolutions on digits, or ResNet-18 on ImageNet."""
        return [
            Task("layers", name, seed, {**_settings(scale), "norm": norm})
            for name, norm in NORMS.items()
            for seed in range(seeds or 1)
        ]

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise UnavailableError if the images of one of the runs are not there."""
        from crossbn.lab.experiments.pictures import check_pictures

        check_pictures(tasks, test=True)

    def estimate_seconds(self, task: Task) -> float:
        """Return about how long a run takes: three forward passes a step, and the gradients that two layers take."""
        settings: Any = task.settings
        calls = _STEPS_OF_TWO_LAYERS if (settings["norm"] or {}).get("layers") == 2 else 1
        steps, size = settings["steps"], settings["image_size"]
        return training_seconds(settings["model"], size, steps * calls, 3 * steps * settings["batch_size"])

    def work(self, task: Task, watch: Watch, _: Path | None = None, /) -> Values:
        """Train, and test at the end."""
        import torch

        from crossbn.lab.experiments.pictures import batches, batches_to_test
        from crossbn.lab.training import Training, accuracy

        settings: Any = task.settings
        torch.manual_seed(task.seed)
        optimizer = {name: settings[name] for name in ("steps", "learning_rate", "momentum", "weight_decay")}
        training = Training(build_model(settings, best_device()), **optimizer, watch=watch)
        data, size = settings["data"], settings["image_size"]
        for batch in islice(batches(data, size, settings["batch_size"]), settings["steps"]):
            training.step(batch)
        share, tested = accuracy(training.model, batches_to_test(data, size))
        return {
            **{"accuracy": share, "test_images": tested},
            **{"final_loss": training.final_loss, "seconds_per_step": median(training.seconds)},
        }

    def rows(self, records: Sequence[Record]) -> list[Comparison]:
        """Return a row for each norm."""
        return list_rows(records, _numbers)

    def notes(self, scale: Scale) -> list[str]:
        """Say what the numbers are."""
        return notes_of("layers", scale)


def _numbers(record: Record) -> dict[str, float | None]:
    values: Any = record.values
    return {
        "accuracy": 100 * values["accuracy"],
        "loss": values["final_loss"],
        "milliseconds": 1000 * values["seconds_per_step"],
    }
