"""Which records a file has: every line is recognized by the fields it brings."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crossbn.lab.cost import CostRecord
from crossbn.lab.experiments.records import Record
from crossbn.lab.experiments.tasks import Result
from crossbn.lab.fidelity.fidelity_records import FidelityRecord
from crossbn.lab.records import MALFORMED
from crossbn.lab.report.detection_section import DetectorTraining
from crossbn.lab.report.training_records import Training


class Kind(NamedTuple):
    """Records that one command writes."""

    command: str
    marks: frozenset[str]
    """Fields that no other kind has together; the first kind that fits is taken."""
    parse: Callable[[str], Any]


DEMO = Kind("demo", frozenset({"experiment", "norm", "window", "curve", "test_images"}), Record.from_json)
REPRODUCE = Kind("reproduce", frozenset({"experiment", "name", "seed", "settings", "values"}), Result.from_json)
DETECT = Kind("train detect", frozenset({"curve", "scores", "waiting_share"}), DetectorTraining.from_json)
TRAIN = Kind("train", frozenset({"curve", "seconds", "versions"}), Training.from_json)
COST = Kind("cost", frozenset({"model", "norm", "timings", "peak_bytes"}), CostRecord.from_json)
DIAGNOSE = Kind("diagnose", frozenset({"step", "layer", "age", "truth"}), FidelityRecord.from_json)
KINDS = (DEMO, REPRODUCE, DETECT, TRAIN, COST, DIAGNOSE)


class Problem(NamedTuple):
    """Why something is not on the page."""

    sentence: str


class Source(NamedTuple):
    """A file of records.

    Attributes:
        path: where it is.
        name: what the page calls it.
        records: by their kind, in the order of the file.
    """

    path: Path
    name: str
    records: dict[Kind, list[Any]]


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
    for path in find_files(folder):
        for found in _read(path, path.relative_to(folder).as_posix()):
            if isinstance(found, Problem):
                problems.append(found)
            else:
                sources.append(found)
    return sources, problems


def _read(path: Path, name: str) -> Iterator[Source | Problem]:
    records: dict[Kind, list[Any]] = {}
    damaged = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            kind, record = _parse(line.decode())
        except MALFORMED:
            damaged.append(number)
        else:
            records.setdefault(kind, []).append(record)
    if records:
        yield Source(path, name, records)
        if damaged:
            yield Problem(f"{_count(damaged)} of {name} cannot be read: no whole record of crossbn's.")
    else:
        yield Problem(f"{name} is empty." if not lines else f"{name} is not a file of crossbn's records.")


def _parse(line: str) -> tuple[Kind, Any]:
    fields = json.loads(line)
    kind = next((kind for kind in KINDS if kind.marks <= fields.keys()), None)
    if kind is None:
        raise ValueError("no kind of record has these fields")
    return kind, kind.parse(line)


def _count(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return f"Line{'s' if len(numbers) > 1 else ''} {shown}{' and more' if len(numbers) > 5 else ''}"
