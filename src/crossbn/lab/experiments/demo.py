"""The norms side by side at a tiny batch, on digits.

BN at batch size 32 is the ceiling. All runs see the same images equally often, and the learning rate is proportional
to the batch size, as in the paper, so a run differs from the ceiling in its batch and its norm alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from crossbn.lab.data import DATASETS
from crossbn.lab.experiments.experiment import Comparison, Measure, Scale, Values
from crossbn.lab.experiments.notes import notes_of
from crossbn.lab.progress import Progress, Watch
from crossbn.lab.records import Record, Task, by_name
from crossbn.lab.statistics import CONFIDENCE, Spread, paired_difference
from crossbn.schedules import window_for

if TYPE_CHECKING:  # whoever asks for runs that are finished does not wait for it
    from torch import nn

CEILING_BATCH_SIZE = 32
# At the ceiling's batch size. Chosen by test accuracy, few seeds each: of 0.025, 0.05, 0.1 and 0.4 the best for the
# ceiling, for GN and for CBN alike; CBN was also tried at 0.0125, and was worse.
LEARNING_RATE = 0.025
TRAIN_IMAGES = DATASETS["digits"].train_images
_POINTS_PER_EPOCH = 4
_NORMS = ("bn", "gn", "cbn")


def build_model(norm: str, window: int) -> "nn.Sequential":
    """Return `digits_resnet` with a norm; equal seeds give equal weights, whatever the norm."""
    from crossbn.convert import convert_
    from crossbn.lab.networks import digits_resnet
    from crossbn.swap import swap_norm_

    model = digits_resnet()
    if norm == "gn":
        swap_norm_(model, "gn", groups=8)
    elif norm == "cbn":
        convert_(model, window=window)
    return model


@dataclass(frozen=True)
class Demo:
    """BN at batch size 32, then BN, GN and CBN at a small one; see `experiment.Experiment`.

    At batch size 1 there is no BN: in the last block it would have a single value per channel to normalize with.

    Attributes:
        batch_size: images per step.
        epochs: passes over the training images.
        train_images: how many to train on.
        window: of CBN; None for `window_for(batch_size)`.

    Raises:
        ValueError: if there are fewer images than a batch has, or CBN would be BN at batch size 1.
    """

    batch_size: int = 2
    epochs: int = 4
    train_images: int = 500
    window: int | None = None

    title = "BN, GN and CBN side by side at a tiny batch"
    measures = (
        Measure("window", "window", ".0f"),
        Measure("seeds", "seeds", ".0f"),
        Measure("accuracy", "mean ± sd, %", ".1f"),
        Measure("seconds", "seconds", ".1f"),
    )
    scales = (Scale.SMALL,)
    alone = False

    def __post_init__(self) -> None:
        window, largest = self.window or window_for(self.batch_size), max(self.batch_size, CEILING_BATCH_SIZE)
        object.__setattr__(self, "window", window)
        if self.train_images < largest:
            raise ValueError(f"{self.train_images} training images do not fill a batch of {largest}")
        if window == self.batch_size == 1:
            raise ValueError("with a window of 1 CBN is BN, which batch size 1 leaves a single value per channel")

    def configs(self, _: Scale = Scale.SMALL, seeds: int | None = None) -> list[Task]:
        """Return the runs, each with every seed."""
        kinds = [("bn", CEILING_BATCH_SIZE), *((norm, self.batch_size) for norm in _NORMS)]
        return [
            Task("demo", f"{norm.upper()} at batch {size}", seed, self._settings(norm, size))
            for norm, size in dict.fromkeys(kinds)  # once each: the first two may be the same
            if (norm, size) != ("bn", 1)
            for seed in range(seeds or 3)
        ]

    def _settings(self, norm: str, batch_size: int) -> dict[str, Any]:
        return {
            **{"norm": norm, "batch_size": batch_size, "window": self.window if norm == "cbn" else 1},
            **{"epochs": self.epochs, "train_images": self.train_images, "momentum": 0.9},
            "learning_rate": LEARNING_RATE * batch_size / CEILING_BATCH_SIZE,
        }

    def estimate_seconds(self, task: Task) -> float:
        """Return what is more for runs that take longer: they start first, so that no core is idle at the end."""
        settings = task.settings
        return settings["epochs"] * settings["train_images"] / settings["batch_size"] * settings["window"]

    def check(self, tasks: Sequence[Task]) -> None:
        """Nothing can be missing: digits come with scikit-learn."""

    def work(self, task: Task, watch: Watch, _: Path | None = None, /) -> Values:
        """Train, and test several times an epoch."""
        import torch

        from crossbn.lab.experiments.pictures import load_digits
        from crossbn.lab.training import Training, accuracy, draw

        settings: Any = task.settings
        torch.manual_seed(task.seed)
        images, digits = (each[: settings["train_images"]] for each in load_digits(train=True))
        test = [load_digits(train=False)]
        epochs, batch_size = settings["epochs"], settings["batch_size"]
        steps = epochs * (len(digits) // batch_size)
        model = build_model(settings["norm"], settings["window"])
        training = Training(model, steps, settings["learning_rate"], settings["momentum"])
        points = epochs * _POINTS_PER_EPOCH
        due = {-(-steps * i // points) for i in range(1, points + 1)}  # rounded up: the last one is the last step
        curve: list[dict[str, float]] = []
        for step, batch in zip(range(1, steps + 1), draw(len(digits), batch_size), strict=False):
            training.step((images[batch], digits[batch]))
            if step in due:
                share, tested = accuracy(model, test)
                curve.append({"epoch": step * epochs / steps, "test_accuracy": share})
                watch(Progress(step / steps, f"{share:.1%}"))
        return {"accuracy": share, "curve": curve, "test_images": tested}

    def rows(self, records: Sequence[Record]) -> list[Comparison]:
        """Return the rows in the order of `configs`, whatever the order in which runs have finished."""
        return [Comparison(name, _numbers(group)) for name, group in by_name(in_order(records)).items()]

    def notes(self, scale: Scale = Scale.SMALL) -> list[str]:
        """Describe what is trained and compared."""
        return notes_of("demo", scale, size=self.batch_size, window=self.window)


def in_order(records: Sequence[Record]) -> list[Record]:
    """Return the records of a demo in the order of its table: the ceiling, BN, GN, CBN, seed by seed."""

    def place(record: Record) -> tuple[int, int, int]:
        return _NORMS.index(record.settings["norm"]), -record.settings["batch_size"], record.seed

    return sorted(records, key=place)


def _numbers(group: Sequence[Record]) -> dict[str, Spread]:
    settings = group[0].settings
    window = {"window": Spread(settings["window"], None)} if settings["norm"] == "cbn" else {}
    return {
        **window,
        "seeds": Spread(len(group), None),
        "accuracy": Spread.of([100 * record.values["accuracy"] for record in group]),
        "seconds": Spread(fmean(record.values["seconds"] for record in group), None),
    }


def caption(records: Sequence[Record]) -> str:
    """Say what the columns are."""
    return (
        f"Accuracy on {records[0].values['test_images']} test images at the end of training: mean and standard "
        "deviation (sd) over the seeds. Seconds are wall-clock time of one run on one core, others beside it."
    )


def findings(records: Sequence[Record]) -> list[str]:
    """Say in sentences how CBN, the last of the table, compares with the others, and what the seeds can tell of it."""
    groups = by_name(in_order(records))
    found = {name: {each.seed: 100 * each.values["accuracy"] for each in group} for name, group in groups.items()}
    name, own = found.popitem()
    last = groups[name][-1]
    paired = {other: paired_difference(own, each) for other, each in found.items()}
    differences = {other: each for other, each in paired.items() if each}
    result = (
        f"{name}, with a window of {last.settings['window']}, classified {fmean(own.values()):.1f}% of "
        f"{last.values['test_images']} test images correctly: "
        f"{_enumerate([f'{_points(each.mean)} {other}' for other, each in differences.items()])}."
    )
    if all(each.margin is None for each in differences.values()):
        return [result, "One seed cannot tell a difference from chance."]
    clear = [other for other, each in differences.items() if each.is_beyond_chance]
    unclear = [other for other in differences if other not in clear]
    parts = [f"CBN's distance to {_enumerate(clear)} is more than chance"] if clear else []
    parts += [f"CBN's distance to {_enumerate(unclear)} may be chance"] if unclear else []
    test = f"{CONFIDENCE:.0%} confidence, Student's t of the differences seed by seed"
    return [result, f"Over {len(own)} seeds, {'; '.join(parts)} ({test})."]


def _points(difference: float) -> str:
    size = f"{abs(difference):.1f}"
    return "level with" if size == "0.0" else f"{size} points {'above' if difference > 0 else 'below'}"


def _enumerate(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
