"""The demo's records as a section of a page."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from crossbn.lab.experiments.demo import CEILING_BATCH_SIZE, about, findings, rows
from crossbn.lab.experiments.records import Record
from crossbn.lab.experiments.rows import Row
from crossbn.lab.report.context import origin, surroundings
from crossbn.lab.report.demo_figure import plot_curves
from crossbn.lab.report.demo_table import caption, demo_table
from crossbn.lab.report.page import Section
from crossbn.lab.report.reading import DEMO, Problem, Source
from crossbn.lab.report.sections import attempt


def demo_sections(source: Source) -> Iterator[Section | Problem]:
    """Yield a section for each demo in a file: calls with other settings add their records to the same one."""
    latest = {json.dumps(asdict(record.run), sort_keys=True): record for record in source.records[DEMO]}
    for records in _demos(list(latest.values())):
        yield attempt(partial(demo_section, records, source.path.parent, source.name), source.name)


def _demos(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Yield the records of each call: those of a CBN, and what it is compared with."""
    alike: dict[str, list[Record]] = {}
    for record in records:
        shared = {name: value for name, value in record.run.settings.items() if name != "learning_rate"}
        alike.setdefault(json.dumps(shared, sort_keys=True), []).append(record)
    for group in alike.values():
        kinds = dict.fromkeys((r.run.batch_size, r.run.window) for r in group if r.run.norm == "cbn")
        for kind in sorted(kinds):
            yield [record for record in group if _belongs(record, *kind)]
        if not kinds:
            yield group


def _belongs(record: Record, batch_size: int, window: int) -> bool:
    run = record.run
    if run.norm == "cbn":
        return (run.batch_size, run.window) == (batch_size, window)
    return run.batch_size == batch_size or (run.norm, run.batch_size) == ("bn", CEILING_BATCH_SIZE)


def demo_section(records: Sequence[Record], out: Path, name: str) -> Section:
    """Return the section of a demo.

    Args:
        records: of one call, CBN among them or not.
        out: directory of the results, as the command is told it.
        name: of the file that the records are from.
    """
    table = rows(records)
    last = table[-1]
    compared = last.norm == "cbn" and len(table) > 1
    return Section(
        title=f"BN, GN and CBN side by side at batch size {last.batch_size}",
        findings=findings(table) if compared else [],
        tables=[demo_table(table)],
        figures=[plot_curves(table)],
        notes=[caption(table), about(last.batch_size, last.window)],
        settings={**_settings(records), **surroundings(records), **origin(name, len(records))},
        command=_command(last, records, out),
    )


def _settings(records: Sequence[Record]) -> dict[str, str]:
    settings = records[-1].run.settings
    rates = dict.fromkeys(f"{r.run.settings['learning_rate']:g} at batch {r.run.batch_size}" for r in records)
    return {
        "Training images": f"{settings['train_images']}",
        "Test images": f"{records[-1].test_images}",
        "Epochs": f"{settings['epochs']}",
        "Optimizer": f"SGD, momentum {settings['momentum']}",
        "Learning rate": f"{', '.join(rates)}; it falls linearly to 0",
    }


def _command(last: Row, records: Sequence[Record], out: Path) -> list[str]:
    settings = records[-1].run.settings
    options = {
        "--batch-size": last.batch_size,
        "--window": last.window,
        "--seeds": last.seeds,
        "--epochs": settings["epochs"],
        "--train-images": settings["train_images"],
        "--out": out,
    }
    return ["crossbn", "demo", *(str(word) for option in options.items() for word in option)]
