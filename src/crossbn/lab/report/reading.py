"""Which records the files of a folder have."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from crossbn.lab.records import MALFORMED, Record
from crossbn.lab.report.page import Section

T = TypeVar("T")


class Problem(NamedTuple):
    """Why something is not on the page."""

    sentence: str


class Source(NamedTuple):
    """A file of records.

    Attributes:
        path: where it is.
        folder: of it, as the page's commands say it.
        name: what the page calls it.
        records: in the order of the file.
    """

    path: Path
    folder: str
    name: str
    records: list[Record]

    @property
    def latest(self) -> list[Record]:
        """The last record of each work."""
        return list({record.key: record for record in self.records}.values())

    def parse(self, of: Callable[[Record], T]) -> tuple[list[T], list[Problem]]:
        """Return what `of` makes of the records, and how many lack something that those of their kind have."""
        found, lost = [], 0
        for record in self.records:
            try:
                found.append(of(record))
            except (*MALFORMED, IndexError):
                lost += 1
        sentence = f"{lost} of {len(self.records)} {self.records[0].kind!r} records of {self.name} cannot be read."
        return found, [Problem(sentence)] if lost else []


Maker = Callable[[Source], Iterator[Callable[[], Section] | Problem]]
"""Returns what makes the sections of a file with records of one kind."""


def find_files(folder: Path) -> list[Path]:
    """Return the files of JSON lines in a folder and those below it, hidden folders left out."""
    found = []
    for place, below, names in os.walk(folder):
        below[:] = [name for name in below if not name.startswith(".")]  # environments are large
        found += [Path(place, name) for name in names if name.endswith(".jsonl")]
    return sorted(found)


def read_folder(folder: Path) -> tuple[list[Source], list[Problem]]:
    """Return the files that have records, and what else there is."""
    sources, problems = [], []
    shown = Path(folder.name) if folder.is_absolute() else folder
    for path in find_files(folder):
        inside = path.relative_to(folder)
        for found in _read(path, (shown / inside).parent.as_posix(), inside.as_posix()):
            if isinstance(found, Problem):
                problems.append(found)
            else:
                sources.append(found)
    return sources, problems


def _read(path: Path, folder: str, name: str) -> Iterator[Source | Problem]:
    records, damaged = [], []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(Record.from_json(line.decode()))
        except MALFORMED:
            damaged.append(number)
    if records:
        yield Source(path, folder, name, records)
        if damaged:
            yield Problem(f"{_count(damaged)} of {name} cannot be read: no whole record of crossbn's.")
    else:
        yield Problem(f"{name} is empty." if not lines else f"{name} is not a file of crossbn's records.")


def _count(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return f"Line{'s' if len(numbers) > 1 else ''} {shown}{' and more' if len(numbers) > 5 else ''}"
