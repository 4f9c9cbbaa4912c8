"""Records of classification runs that nobody trained."""

from collections.abc import Callable

from crossbn.lab.experiments.experiment import Experiment, Scale
from crossbn.lab.records import Record, Task
from tests.lab.experiments.handmade import record_of


def result(task: Task, accuracy: float, test_images: int = 200) -> Record:
    """A run that ends at `accuracy`, half of that at the first of two points, in training 0.1 above."""
    curve = [
        {
            "epoch": float(epoch),
            "train_loss": 1.0 / epoch,
            "train_accuracy": accuracy * epoch / 2 + 0.1,
            "test_accuracy": accuracy * epoch / 2,
        }
        for epoch in (1, 2)
    ]
    values = {"accuracy": accuracy, "test_images": test_images, "curve": curve, "seconds_per_step": 0.01}
    return record_of(task, values)


def results_of(
    experiment: Experiment, accuracy: Callable[[Task], float], seeds: int = 2, scale: Scale = Scale.SMALL
) -> list[Record]:
    """All runs of an experiment."""
    return [result(task, accuracy(task)) for task in experiment.configs(scale, seeds)]


def by_norm(task: Task) -> float:
    """CBN 60 %, everything else 50 %, and two points more with each seed."""
    return (0.6 if task.settings["norm"] == "cbn" else 0.5) + 0.02 * task.seed
