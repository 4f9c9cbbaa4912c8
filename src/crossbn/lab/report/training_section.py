"""Records of `crossbn train` as a section of a page: all trainings of a folder side by side."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from crossbn.lab.cost.cases import WINDOWED
from crossbn.lab.records import Record
from crossbn.lab.report.comparison import write_spread
from crossbn.lab.report.context import Settings, common, describe_origin, in_text, names_that_differ, settings_tables
from crossbn.lab.report.curves_figure import Groups, number, plot_trainings
from crossbn.lab.report.page import Section
from crossbn.lab.report.reading import Problem, Source
from crossbn.lab.report.table import Table
from crossbn.lab.statistics import CHANCE, Spread, describe_differences

_FIRST = ("norm", "batch_size", "window")


class Column(NamedTuple):
    """Of the table: a number of each training; the first one is what the section begins with."""

    label: str
    value: Callable[[Record], float | None]
    form: str = ".1f"


def _at_end(name: str, factor: float = 100.0) -> Callable[[Record], float]:
    return lambda record: number(record.values["curve"][-1][name], factor)


_SECONDS = Column("seconds", lambda record: record.values["seconds"], ".0f")
_LOSS = Column("train loss", _at_end("train_loss", 1.0), ".3f")


def classification_sections(source: Source) -> Iterator[Callable[[], Section] | Problem]:
    """Yield the section of trained classifiers."""
    columns = [
        Column("test accuracy, %", _at_end("test_accuracy")),
        Column("best, %", lambda record: max(number(point["test_accuracy"]) for point in record.values["curve"])),
        Column("train accuracy, %", _at_end("train_accuracy")),
    ]
    note = (
        "Test accuracy is that of the last measurement, best the highest of all measurements, which the test images "
        "themselves chose. Training loss and accuracy are those since the measurement before. Seconds are wall-clock "
        "time of a run."
    )
    yield from _sections(source, "Training", [*columns, _LOSS, _SECONDS], note, plot_trainings)


def detection_sections(source: Source) -> Iterator[Callable[[], Section] | Problem]:
    """Yield the section of trained detectors."""

    def score(name: str) -> Callable[[Record], float | None]:
        def value(record: Record) -> float | None:
            found = record.values["scores"].get(name)
            return None if found is None else number(found)

        return value

    names = dict.fromkeys(name for record in source.records for name in record.values["scores"])
    scores = [Column(f"{name}, %", score(name)) for name in names]
    waiting = Column("waiting for images, %", lambda record: 100 * record.values["waiting_share"])
    note = (
        "AP is COCO's average precision on the test images, over overlaps of 0.5 to 0.95, at 0.5, at 0.75, and of "
        "small, medium and large objects. Seconds are wall-clock time of a run."
    )
    yield from _sections(source, "Detector", [*scores, _LOSS, waiting, _SECONDS], note)


def _sections(
    source: Source, title: str, columns: Sequence[Column], note: str, plot: Callable[[Groups], Figure] | None = None
) -> Iterator[Callable[[], Section] | Problem]:
    found, problems = source.parse(settled)
    yield from problems
    records = source._replace(records=found).latest
    groups = group_by_settings(records)
    header = ("", "n", *(column.label for column in columns))
    ends = "At the end of training, mean ± standard deviation over n seeds"
    if groups:
        yield lambda: Section(
            title=f"{title}s" if len(groups) > 1 else f"{title}: {next(iter(groups))}",
            findings=_findings(groups, columns[0]),
            tables=[Table(ends, header, tuple(_row(label, group, columns) for label, group in groups.items()))],
            figures=[] if plot is None else [plot(groups)],
            notes=[note, CHANCE] if len(groups) > 1 else [note],
            settings={**common([record.settings for record in records]), **describe_origin(records, source.name)},
            setting_tables=settings_tables({label: group[0].settings for label, group in groups.items()}),
        )


def settled(record: Record) -> Record:
    """Return a training with the settings as they took effect: what a default came to, and a window only if it has one.

    Raises:
        KeyError: if it lacks a field.
        IndexError: if nothing was measured.
    """
    record.values["curve"][-1]["train_loss"]
    told = {**record.settings, **record.values}
    used = {name.removesuffix("_used"): value for name, value in told.items() if name.endswith("_used")}
    settings = {**record.settings, **{name: value for name, value in used.items() if name in record.settings}}
    if settings["norm"] not in WINDOWED:
        settings.pop("window", None)
    return Record(record.kind, record.name, record.seed, settings, record.values, record.environment)


def _row(label: str, group: Sequence[Record], columns: Sequence[Column]) -> tuple[str, ...]:
    found = [[value for record in group if (value := column.value(record)) is not None] for column in columns]
    spreads = [Spread.of(values) if values else None for values in found]
    numbers = [write_spread(spread, column.form) for spread, column in zip(spreads, columns, strict=True)]
    return (label, str(len(group)), *numbers)


def _findings(groups: Groups, column: Column) -> list[str]:
    """Name the best of the groups, with its distance to the others where they are few."""
    found = {label: {r.seed: v for r in group if (v := column.value(r)) is not None} for label, group in groups.items()}
    found = {label: values for label, values in found.items() if values}
    if not found:
        return []
    best = max(found, key=lambda label: Spread.of([*found[label].values()]).mean)
    measure, number = column.label.removesuffix(", %"), write_spread(Spread.of([*found[best].values()]), column.form)
    if len(found) == 1:
        return [f"{best} ends with {measure} of {number} %."]
    told = describe_differences(found[best], dict(islice(((k, v) for k, v in found.items() if k != best), 4)))
    return [f"The highest {measure} at the end, {number} %, is that of {best}{': ' if told else ''}{told}."]


def group_by_settings(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the trainings by what sets them apart, those that differ in their seed only together."""
    runs = [record.settings for record in records]
    telling = ["norm"]
    for name in sorted(names_that_differ(runs), key=lambda name: name not in _FIRST):
        # What follows from the others, as the learning rate does from the batch size, is not in the name.
        if len({_label(run, [*telling, name]) for run in runs}) > len({_label(run, telling) for run in runs}):
            telling.append(name)
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_label(record.settings, telling), []).append(record)
    return groups


def _label(run: Settings, names: Sequence[str]) -> str:
    return ", ".join(_phrase(name, run[name]) for name in names if run.get(name) is not None)


def _phrase(name: str, value: Any) -> str:
    return str(value).upper() if name == "norm" else f"{name.replace('_', ' ')} {in_text(value)}"
