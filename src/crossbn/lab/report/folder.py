"""A folder of records as a page."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from crossbn.lab.records import RecordError
from crossbn.lab.report.cost_section import cost_sections
from crossbn.lab.report.demo_section import demo_sections
from crossbn.lab.report.detection_section import detection_section
from crossbn.lab.report.experiment_section import experiment_sections
from crossbn.lab.report.fidelity_section import fidelity_sections
from crossbn.lab.report.page import Page, Section
from crossbn.lab.report.reading import (
    COST,
    DEMO,
    DETECT,
    DIAGNOSE,
    KINDS,
    REPRODUCE,
    TRAIN,
    Kind,
    Problem,
    Source,
    read_folder,
)
from crossbn.lab.report.sections import Maker, attempt, attempt_all
from crossbn.lab.report.training_section import training_section

_MAKERS: dict[Kind, Maker] = {
    DEMO: demo_sections,
    REPRODUCE: experiment_sections,
    COST: cost_sections,
    DIAGNOSE: fidelity_sections,
}
_JOINED: dict[Kind, Callable[[list[Any], str], Section]] = {DETECT: detection_section, TRAIN: training_section}


def make_page(folder: Path, title: str | None = None) -> Page:
    """Return the page of all records in a folder and in those below it.

    Raises:
        RecordError: if there is none that a table can be made of; the message says what was found instead.
    """
    sources, problems = read_folder(folder)
    sections: list[tuple[str, Section]] = []
    for name, found in _parts(sources):
        if isinstance(found, Problem):
            problems.append(found)
        else:
            sections.append((name, found))
    if not sections:
        raise RecordError(_nothing(folder, problems))
    records = sum(len(found) for source in sources for found in source.records.values())
    return Page(
        title=title or f"Results in {folder.resolve().name}",
        sections=_told_apart(sections),
        lead=[f"{_many(records, 'record')} in {_many(len(sources), 'file')}."],
        problems=[problem.sentence for problem in problems],
        command=["crossbn", "report", str(folder), *([] if title is None else ["--title", title])],
    )


def _parts(sources: Sequence[Source]) -> Iterator[tuple[str, Section | Problem]]:
    """Yield what the page consists of, by command, with the name of the file that it is about."""
    for kind in KINDS:
        files = [source for source in sources if kind in source.records]
        if kind in _JOINED and files:
            # One section for all: each training has a folder of its own, and a comparison needs several.
            name = files[0].name if len(files) == 1 else f"{len(files)} files"
            trainings = [training for source in files for training in source.records[kind]]
            yield name, attempt(partial(_JOINED[kind], trainings, name), name)
        else:
            yield from ((source.name, found) for source in files for found in attempt_all(_MAKERS[kind], source))


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
