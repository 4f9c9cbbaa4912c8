"""A folder of records as a page."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from crossbn.lab.records import Record, RecordError
from crossbn.lab.report.check_section import check_sections
from crossbn.lab.report.context import shown_path
from crossbn.lab.report.cost_section import cost_sections
from crossbn.lab.report.demo_section import demo_sections
from crossbn.lab.report.experiment_section import experiment_sections
from crossbn.lab.report.fidelity_section import fidelity_sections
from crossbn.lab.report.page import Page, Section
from crossbn.lab.report.reading import Maker, Problem, Source, read_folder
from crossbn.lab.report.training_section import classification_sections, detection_sections

T = TypeVar("T")

TABLE = "table"
"""Stands for the kinds of the runs of all tables, of which there are many."""
SECTIONS: dict[str, Maker] = {
    "demo": demo_sections,
    TABLE: experiment_sections,
    "detect": detection_sections,
    "classify": classification_sections,
    "cost": cost_sections,
    "diagnose": fidelity_sections,
    "check": check_sections,
}
"""By the kind of record, in the order of the page: what makes its sections."""
_JOINED = ("detect", "classify")  # each training has a folder of its own, and a comparison needs several

# What goes wrong where a value is missing or is something else: records of another version, or changed by hand.
_UNFIT = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, StopIteration)


def make_page(folder: Path, title: str | None = None) -> Page:
    """Return the page of all records in a folder and in those below it.

    Raises:
        RecordError: if there is none that a table can be made of; the message says what was found instead.
    """
    sources, problems = read_folder(folder)
    sections: list[tuple[str, Section]] = []
    for kind, make in SECTIONS.items():
        parts = list(_parts(sources, kind, make))
        problems += [part for _, part in parts if isinstance(part, Problem)]
        found = [(name, part) for name, part in parts if isinstance(part, Section)]
        sections += sorted(found, key=lambda each: each[1].rank)
    if not sections:
        raise RecordError(_nothing(folder, problems))
    records = sum(len(source.records) for source in sources)
    return Page(
        title=title or f"Results in {folder.resolve().name}",
        sections=_told_apart(sections),
        lead=[f"{_many(records, 'record')} in {_many(len(sources), 'file')}."],
        problems=[problem.sentence for problem in problems],
        command=["crossbn", "report", shown_path(folder), *([] if title is None else ["--title", title])],
    )


def kind_of(record: Record) -> str:
    """Return whose section a record belongs to."""
    # The table of costs has the name of the command; its runs have all norms in one record.
    return record.kind if record.kind in SECTIONS and "norms" not in record.values else TABLE


def _parts(sources: Sequence[Source], kind: str, make: Maker) -> Iterator[tuple[str, Section | Problem]]:
    """Yield what the page has of a kind, with the name of the file that it is about."""
    of_kind = [source._replace(records=[r for r in source.records if kind_of(r) == kind]) for source in sources]
    files = [source for source in of_kind if source.records]
    if kind in _JOINED and len(files) > 1:
        records = [record for source in files for record in source.records]
        files = [files[0]._replace(name=f"{len(files)} files", records=records)]
    for source in files:
        parts: list[Callable[[], Section] | Problem] | Problem = _attempt(partial(list, make(source)), source.name)
        for part in [parts] if isinstance(parts, Problem) else parts:
            yield source.name, part if isinstance(part, Problem) else _attempt(part, source.name)


def _attempt(work: Callable[[], T], source: str) -> T | Problem:
    """Return what comes of it, or say why nothing does."""
    try:
        found = work()
        if isinstance(found, Section) and not all(isinstance(c, str) for t in found.tables for r in t.rows for c in r):
            raise TypeError("a name is no text")
    except _UNFIT as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        return Problem(f"{source} has records that fit together to no table of this version of crossbn ({reason}).")
    return found


def _told_apart(sections: Sequence[tuple[str, Section]]) -> list[Section]:
    """Return the sections, those with the same title followed by the file that they are about."""
    titles = Counter(section.title for _, section in sections)
    return [replace(s, title=f"{s.title}: {name}") if titles[s.title] > 1 else s for name, s in sections]


def _nothing(folder: Path, problems: Sequence[Problem]) -> str:
    reason = problems[0].sentence if problems else "It has no file that ends in .jsonl."
    more = f" And {len(problems) - 1} more." if len(problems) > 1 else ""
    return f"{folder} has no records to report. {reason}{more}"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
