"""Records of `crossbn diagnose` as a section of a page."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from crossbn.lab.fidelity.fidelity_records import FidelityRecord
from crossbn.lab.report.context import headline, origin
from crossbn.lab.report.fidelity_figure import plot_fidelity
from crossbn.lab.report.fidelity_table import advice, explanation, fidelity_tables
from crossbn.lab.report.page import Section
from crossbn.lab.report.reading import DIAGNOSE, Problem, Source
from crossbn.lab.report.sections import attempt

_SOFTWARE = ("crossbn", "torch", "python")


def fidelity_sections(source: Source) -> Iterator[Section | Problem]:
    """Yield the section of a file."""
    records = source.records[DIAGNOSE]
    yield attempt(lambda: _section(records, _context(source.path.parent / "context.json"), source.name), source.name)


def _context(path: Path) -> dict[str, str]:
    """Return what the command was told and ran on; it writes that beside the records."""
    if not path.is_file():
        return {}
    return {str(name): str(value) for name, value in json.loads(path.read_bytes()).items() if value}


def _section(records: Sequence[FidelityRecord], context: Mapping[str, str], source: str) -> Section:
    model = f" of {context['model']}" if "model" in context else ""
    measured = {"Measurements": f"{len({record.step for record in records})}, each of all layers and ages"}
    return Section(
        title=f"How close remembered statistics{model} are to the true ones",
        findings=_recommendation(records, context),
        tables=fidelity_tables(records),
        figures=[plot_fidelity(records)],
        notes=[explanation()],
        settings={**measured, **_settings(context), **origin(source, len(records))},
    )


def _settings(context: Mapping[str, str]) -> dict[str, str]:
    told = {headline(name): value for name, value in context.items() if name not in _SOFTWARE}
    software = ", ".join(f"{name} {value}" for name, value in context.items() if name in _SOFTWARE)
    return {**told, "Software": software} if software else told


def _recommendation(records: Sequence[FidelityRecord], context: Mapping[str, str]) -> list[str]:
    window = int(context.get("window", 1 + max(record.age for record in records)))
    return [advice(records, window, int(context.get("burn-in", 0)))]
