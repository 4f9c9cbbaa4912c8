"""Records of `crossbn train` as a section of a page: all trainings of a folder side by side."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from crossbn.lab.experiments.rows import Spread
from crossbn.lab.report.comparison import write_spread
from crossbn.lab.report.context import in_text, origin, surroundings
from crossbn.lab.report.page import Section
from crossbn.lab.report.settings import Settings, common, names_that_differ, settings_table
from crossbn.lab.report.table import Table
from crossbn.lab.report.training_figure import plot_trainings
from crossbn.lab.report.training_records import Training

_FIRST = ("norm", "batch_size", "window")
COLUMNS = ("", "n", "test accuracy, %", "best, %", "train accuracy, %", "train loss", "seconds")


def training_section(trainings: Sequence[Training], name: str) -> Section:
    """Return the section of trainings that may have nothing in common but the command.

    Args:
        trainings: the later one counts of two that are the same.
        name: of the files that they are from.
    """
    latest = list({(training.key, training.seed): training for training in trainings}.values())
    groups = group_by_settings(latest)
    differing = settings_table({label: group[0].settings for label, group in groups.items()})
    rows = tuple((label, *_cells(group)) for label, group in groups.items())
    return Section(
        title="Trainings" if len(groups) > 1 else f"Training: {next(iter(groups))}",
        tables=[Table("At the end of training, mean ± standard deviation over n seeds", COLUMNS, rows)],
        figures=[plot_trainings(groups)],
        notes=[
            "Test accuracy is that of the last measurement, best the highest of all measurements, which the test "
            "images themselves chose. Training loss and accuracy are those since the measurement before. "
            "Seconds are wall-clock time of a run."
        ],
        settings={
            **common([training.settings for training in latest]),
            **surroundings(latest),
            **origin(name, len(latest), sum(training.seconds for training in latest)),
        },
        setting_tables=[] if differing is None else [differing],
    )


class HasSettings(Protocol):
    """What a training has at least."""

    @property
    def settings(self) -> Settings:
        """Everything that it was told but the seed, by name."""
        ...


TrainingT = TypeVar("TrainingT", bound=HasSettings)


def group_by_settings(trainings: Sequence[TrainingT]) -> dict[str, list[TrainingT]]:
    """Return the trainings by what sets them apart, those that differ in their seed only together."""
    runs = [training.settings for training in trainings]
    telling = ["norm"]
    for name in sorted(names_that_differ(runs), key=lambda name: name not in _FIRST):
        # What follows from the others, as the learning rate does from the batch size, is not in the name.
        if len({_label(run, [*telling, name]) for run in runs}) > len({_label(run, telling) for run in runs}):
            telling.append(name)
    groups: dict[str, list[TrainingT]] = {}
    for training in trainings:
        groups.setdefault(_label(training.settings, telling), []).append(training)
    return groups


def _label(run: Settings, names: Sequence[str]) -> str:
    return ", ".join(_phrase(name, run[name]) for name in names if run.get(name) is not None)


def _phrase(name: str, value: object) -> str:
    return str(value).upper() if name == "norm" else f"{name.replace('_', ' ')} {in_text(value)}"


def _cells(group: Sequence[Training]) -> list[str]:
    last = [training.curve[-1] for training in group]
    best = [max(moment.test_accuracy for moment in training.curve) for training in group]
    shares = [[moment.test_accuracy for moment in last], best, [moment.train_accuracy for moment in last]]
    return [
        str(len(group)),
        *(write_spread(Spread.of([100 * share for share in each]), ".1f") for each in shares),
        write_spread(Spread.of([moment.train_loss for moment in last]), ".3f"),
        write_spread(Spread.of([training.seconds for training in group]), ".0f"),
    ]
