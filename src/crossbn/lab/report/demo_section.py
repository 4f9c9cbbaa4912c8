"""The demo's records as a section of a page."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from crossbn.lab.experiments.demo import CEILING_BATCH_SIZE, Demo, caption, findings, in_order
from crossbn.lab.records import Record, by_name
from crossbn.lab.report.comparison import comparison_table
from crossbn.lab.report.context import describe_origin, shown_path
from crossbn.lab.report.curves_figure import plot_trainings
from crossbn.lab.report.page import Section
from crossbn.lab.report.reading import Source


def demo_sections(source: Source) -> Iterator[Callable[[], Section]]:
    """Yield a section for each demo in a file: calls with other settings add their records to the same one."""
    for records in _demos(source.latest):
        yield partial(demo_section, records, Path(source.folder), source.name)


def _demos(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Yield the records of each call: those of a CBN, and what it is compared with."""
    own = ("norm", "batch_size", "window", "learning_rate")
    alike: dict[str, list[Record]] = {}
    for record in records:
        shared = {name: value for name, value in record.settings.items() if name not in own}
        alike.setdefault(json.dumps(shared, sort_keys=True), []).append(record)
    for group in alike.values():
        kinds = {(r.settings["batch_size"], r.settings["window"]) for r in group if r.settings["norm"] == "cbn"}
        for batch_size, window in sorted(kinds):
            yield [record for record in group if _belongs(record, batch_size, window)]
        if not kinds:
            yield group


def _belongs(record: Record, batch_size: int, window: int) -> bool:
    norm, own = record.settings["norm"], record.settings["batch_size"]
    if norm == "cbn":
        return (own, record.settings["window"]) == (batch_size, window)
    return own == batch_size or (norm, own) == ("bn", CEILING_BATCH_SIZE)


def demo_section(records: Sequence[Record], out: Path, name: str) -> Section:
    """Return the section of a demo.

    Args:
        records: of one call, CBN among them or not.
        out: directory of the results, as the command is told it.
        name: of the file that the records are from.
    """
    records = in_order(records)
    last, settings = records[-1], records[-1].settings
    seeds = len(by_name(records)[last.name])
    batch_size, window = settings["batch_size"], settings["window"]
    experiment = Demo(batch_size, settings["epochs"], settings["train_images"], window)
    rates = [f"{record.settings['learning_rate']:g} at batch {record.settings['batch_size']}" for record in records]
    options = {
        "--batch-size": batch_size,
        "--window": window,
        "--seeds": seeds,
        "--epochs": settings["epochs"],
        "--train-images": settings["train_images"],
        "--output": shown_path(out),
    }
    return Section(
        title=f"BN, GN and CBN side by side at batch size {batch_size}",
        findings=findings(records) if settings["norm"] == "cbn" and len(by_name(records)) > 1 else [],
        tables=[comparison_table("", experiment.measures, experiment.rows(records))],
        figures=[plot_curves(records)],
        notes=[caption(records), *experiment.notes()],
        settings={
            "Training images": settings["train_images"],
            "Test images": last.values["test_images"],
            "Epochs": settings["epochs"],
            "Optimizer": f"SGD, momentum {settings['momentum']}",
            "Learning rate": f"{', '.join(dict.fromkeys(rates))}; it falls linearly to 0",
            **describe_origin(records, name),
        },
        command=["crossbn", "demo", *(str(word) for option in options.items() for word in option)],
    )


def plot_curves(records: Sequence[Record]) -> Figure:
    """Return test accuracy during training of each norm and batch size, and what it comes to at the end."""
    groups = by_name(in_order(records)).items()
    ends = {name: fmean(100 * record.values["accuracy"] for record in group) for name, group in groups}
    return plot_trainings({f"{name}: {ends[name]:.1f}": group for name, group in groups}, ["test_accuracy"])
