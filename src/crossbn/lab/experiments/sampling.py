"""What sampling costs: how near compensated variances are to the true ones, by the positions their gradient is from.

The plan takes fewer positions than asked for where the weight is large, see `functional.choose_plan`; so one family of
runs asks for more and more positions, the other moves the plan's own limit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from crossbn.lab.environment import best_device
from crossbn.lab.experiments import paper
from crossbn.lab.experiments.estimates import training_seconds
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale, Values
from crossbn.lab.experiments.gradients import build_classifier
from crossbn.lab.experiments.notes import notes_of
from crossbn.lab.experiments.table import list_rows
from crossbn.lab.fidelity import SAME_LAYER, WHOLE_NETWORK, FidelityRecord
from crossbn.lab.fidelity.records import by_age
from crossbn.lab.progress import Watch
from crossbn.lab.records import Record, Task

BATCH_SIZE, WINDOW = 4, 4
POSITIONS = (16, 32, 64, 128, 256, None)
WINDOW_SAMPLES = (8, 16, 64, 128, 384)
_DEFAULT_POSITIONS = 128
_SMALL: dict[str, Any] = {
    **{"model": "resnet18", "data": "digits", "image_size": 96},
    **{"steps": 80, "every": 5, "learning_rate": 0.005},
}
_FULL: dict[str, Any] = {
    **{"model": "resnet50", "data": "imagenet", "image_size": 224},
    **{"steps": 20_000, "every": 200, "learning_rate": 0.1 * BATCH_SIZE / 256},
}


@contextmanager
def limited(window_samples: int | None) -> Iterator[None]:
    """Let the plan take this many samples over the window where weights are large; None for its own limit.

    Example:
        >>> from crossbn.functional import Geometry, choose_plan
        >>> with limited(64):
        ...     choose_plan(Geometry(512, 512, kernel=(3, 3)), 128, slots=4).positions
        16
    """
    from crossbn.functional import storage as plan

    before = plan._WINDOW_SAMPLES, plan._FEWEST_SAMPLES
    try:
        if window_samples is not None:
            plan._WINDOW_SAMPLES, plan._FEWEST_SAMPLES = window_samples, 1
        yield
    finally:
        plan._WINDOW_SAMPLES, plan._FEWEST_SAMPLES = before


class Sampling:
    """See `experiment.Experiment`."""

    title = "What sampling costs: errors of remembered variances, by the positions that are looked at"
    measures = (
        Measure("samples", "large weights, a step", ".0f"),
        Measure("explained_1", "explained, age 1", ".0%"),
        Measure("explained_2", "age 2", ".0%"),
        Measure("explained_3", "age 3", ".0%"),
        Measure("layer_naive", "layer, naive", ".2%"),
        Measure("layer_compensated", "layer, moved", ".2%"),
        Measure("network_naive", "network, naive", ".2%"),
        Measure("network_compensated", "network, moved", ".2%"),
        Measure("loss", "loss at the end"),
    )
    scales = (Scale.SMALL, Scale.FULL)
    alone = False

    def configs(self, scale: Scale, seeds: int | None = None) -> list[Task]:
        """Return a training for each number of positions, then for each limit of the plan."""
        default = _DEFAULT_POSITIONS
        asked: dict[str, tuple[int | None, int | None]] = {
            **{f"{each or 'all'} positions": (each, None) for each in POSITIONS},
            **{f"{default} positions, {each} a window": (default, each) for each in WINDOW_SAMPLES},
        }
        shared = _SMALL if scale is Scale.SMALL else _FULL
        return [
            Task("sampling", name, seed, {"positions": positions, "window_samples": samples, **shared})
            for name, (positions, samples) in asked.items()
            for seed in range(seeds or 1)
        ]

    def estimate_seconds(self, task: Task) -> float:
        """Return about how long a run takes: three forward passes a step, and the batches that are repeated."""
        settings: Any = task.settings
        steps = settings["steps"]
        images = BATCH_SIZE * (3 * steps + 2 * (WINDOW - 1) * steps / settings["every"])
        return training_seconds(settings["model"], settings["image_size"], steps, images)

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise UnavailableError if the images of one of the runs are not there."""
        from crossbn.lab.experiments.pictures import check_pictures

        check_pictures(tasks)

    def work(self, task: Task, watch: Watch, _: Path | None = None, /) -> Values:
        """Train and measure on the way; what is found in the later half counts.

        Weights at the start and batches are those of the seed; what the norms make of them differs from run to run.
        """
        import torch

        from crossbn.convert import convert_
        from crossbn.functional import Geometry, choose_plan
        from crossbn.lab.experiments.pictures import batches
        from crossbn.lab.fidelity.probe import fidelity
        from crossbn.lab.training import Training

        settings: Any = task.settings
        torch.manual_seed(task.seed)
        model, steps = build_classifier(settings, task.seed).to(best_device()), settings["steps"]
        rate, every = settings["learning_rate"], settings["every"]
        training = Training(model, steps, rate, weight_decay=1e-4, falls=False, watch=watch)
        supply = batches(settings["data"], settings["image_size"], BATCH_SIZE)
        with limited(settings["window_samples"]):
            convert_(model, window=WINDOW, positions=settings["positions"])
            records = fidelity(model, supply, training.step, steps=steps, every=every)
            samples = choose_plan(Geometry(512, 512, kernel=(3, 3)), settings["positions"], WINDOW - 1).positions
        later = [record for record in records if record.step >= steps / 2]
        return {"samples": samples, "ages": _errors(later), "final_loss": training.final_loss}

    def rows(self, records: Sequence[Record]) -> list[Comparison]:
        """Return a row for each choice."""
        return list_rows(records, _numbers)

    def notes(self, scale: Scale) -> list[str]:
        """Say what the numbers are."""
        return [*notes_of("sampling", scale), paper.about("sampling")]


def _errors(records: Sequence[FidelityRecord]) -> list[dict[str, dict[str, float]]]:
    """Return the errors of the variance for each age, by truth."""
    return [
        {
            truth: {"naive": found.naive_var_error, "compensated": found.compensated_var_error}
            for truth, found in averages.items()
        }
        for averages in by_age(records).values()
    ]


def _numbers(record: Record) -> dict[str, float | None]:
    values: Any = record.values
    ages = values["ages"]
    numbers: dict[str, float | None] = {} if values["samples"] is None else {"samples": float(values["samples"])}
    for age, errors in enumerate(ages, start=1):
        own = errors[SAME_LAYER]
        numbers[f"explained_{age}"] = 1 - own["compensated"] / own["naive"]
    for short, truth in (("layer", SAME_LAYER), ("network", WHOLE_NETWORK)):
        for kind in ("naive", "compensated"):
            numbers[f"{short}_{kind}"] = fmean(errors[truth][kind] for errors in ages)
    return {**numbers, "loss": values["final_loss"]}
