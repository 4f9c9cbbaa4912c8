"""Records as lines of JSON in a file that only grows: what is on the disk survives an interruption."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from crossbn.lab import environment
from crossbn.lab.earlier_records import translate

MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
"""What reading a line may raise that is not JSON, lacks a field, or has something else in one."""


_RENAMED = (r"fast (BN, batch \d+)", r"\1, momentum 0.1")  # what it was called says nothing


class RecordError(ValueError):
    """A file of records holds something else, or cannot be written."""


class DamagedError(RecordError):
    """A file of records holds something else."""


@dataclass(frozen=True)
class Task:
    """What one run is told: equal keys are the same work.

    Attributes:
        kind: what is run: the commands `classify`, `detect`, `cost`, `diagnose`, `check` and `demo`, or the experiment
            whose run it is.
        name: what tables call it; runs of a kind that share it differ in their seed only.
        seed: of everything random in it; where nothing is, the number of the repetition.
        settings: everything else that it is told, by name. There are no paths in them: the same work on another
            machine has the same settings.
    """

    kind: str
    name: str
    seed: int
    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A text that the same work shares."""
        return json.dumps([self.kind, self.name, self.seed, plain(self.settings)], sort_keys=True)

    @property
    def cell(self) -> str:
        """A text that the same work shares whatever its seed is."""
        return json.dumps([self.kind, self.name, plain(self.settings)], sort_keys=True)


@dataclass(frozen=True)
class Record(Task):
    """What one run was told, what came of it, and where.

    Attributes:
        values: what came out, by name, `seconds` among them; a number that is not finite is None.
        environment: `environment.stamp()` of the process that made it.

    Example:
        >>> record = Record("classify", "BN, batch 2", 0, {"batch_size": 2}, {"accuracy": 0.5})
        >>> Record.from_json(record.to_json()) == record
        True
    """

    values: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=environment.stamp)

    @property
    def is_current(self) -> bool:
        """Whether the software in use now made it: then it answers its task, which need not be done again.

        A commit alone makes nobody repeat a week of training; it is in the record, to judge by.
        """
        return environment.versions().items() <= self.environment.get("versions", {}).items()

    def to_json(self) -> str:
        """Return the record as one line."""
        return json.dumps(plain(asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Record":
        """Return the record of a line, of today's shape or of one that commands have written before.

        Raises:
            ValueError: if the line is not JSON, or no record.
            KeyError: if it lacks a field.
            TypeError: if a field is something else.
        """
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("a record is an object")
        record = cls(**(found if "environment" in found else translate(found)))
        return replace(record, name=re.sub(*_RENAMED, record.name)) if "fast BN" in str(record.name) else record


def plain(value: Any) -> Any:
    """Return a value as JSON has it: tuples are lists, keys are texts, numbers that are not finite are None."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def append(path: Path, records: Iterable[Record]) -> None:
    """Add a line for each record to the file, which need not exist yet: all of them, or none.

    Raises:
        RecordError: if it cannot be written; the file is what it was.
    """
    lines = "".join(f"{record.to_json()}\n" for record in records).encode()
    before = path.stat().st_size if path.exists() else 0
    if before and not path.read_bytes().endswith(b"\n"):
        lines = b"\n" + lines  # a whole record that lost the end of its line
    try:
        with path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if path.exists():
            os.truncate(path, before)
        raise RecordError(f"{path} cannot be written: {error.strerror or error}") from error


def read(path: Path) -> list[Record]:
    """Return the records of a file, none if there is no such file.

    Raises:
        DamagedError: if a line is something else.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            records.append(Record.from_json(line.decode()))
        except MALFORMED as error:
            raise DamagedError(f"line {number} of {path} is not a record of crossbn's") from error
    return records


def replace_in(path: Path, record: Record) -> None:
    """Let the file, which need not exist yet, have a record in place of those of the same work; others stay.

    Raises:
        RecordError: if it cannot be written; the file is what it was.
    """
    write_whole(path, _without(path, [record]) + f"{record.to_json()}\n".encode())


def forget(path: Path, tasks: Iterable[Task]) -> None:
    """Take the records of `tasks`, and what is no record, out of a file; those of other work stay."""
    if path.exists():
        write_whole(path, _without(path, tasks))


def write_whole(path: Path, content: bytes) -> None:
    """Let a file have this content; an interruption or a full disk leaves what it had.

    Raises:
        RecordError: if it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _without(path: Path, tasks: Iterable[Task]) -> bytes:
    keys, lines = {task.key for task in tasks}, path.read_bytes().splitlines() if path.exists() else []
    return b"".join(line + b"\n" for line in lines if _is_other(line, keys))


def _is_other(line: bytes, keys: set[str]) -> bool:
    try:
        return Record.from_json(line.decode()).key not in keys
    except MALFORMED:
        return False


def by_name(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the records of each name, in the order in which the names first come up."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.name, []).append(record)
    return groups


def of_cells(records: Iterable[Record], tasks: Iterable[Task]) -> list[Record]:
    """Return the records of the tasks' cells with whatever seed: tables show all that there are.

    They are in the order of the tasks, then of the seeds. Of two that are the same work the later one counts.
    """
    places: dict[str, int] = {}
    for task in tasks:
        places.setdefault(task.cell, len(places))
    latest = {record.key: record for record in records}
    found = [record for record in latest.values() if record.cell in places]
    return sorted(found, key=lambda record: (places[record.cell], record.seed))


def on_their_data(tasks: Sequence[Task], records: Iterable[Record]) -> Sequence[Task]:
    """Return the tasks as records have them, where this machine would only take another data set."""
    cells = {record.cell for record in records if record.kind == tasks[0].kind}
    names = dict.fromkeys(json.loads(cell)[-1].get("data") for cell in sorted(cells))
    choices = [tasks, *([replace(task, settings={**task.settings, "data": name}) for task in tasks] for name in names)]
    return next((choice for choice in choices if any(task.cell in cells for task in choice)), tasks)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from working in a folder, which is made if need be; a process that dies lets go of it.

    Raises:
        RecordError: if another process works there.
    """
    from filelock import FileLock, Timeout  # torch brings it

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise RecordError(f"another process works in {folder}: wait for it, or take another --output") from error
    try:
        yield
    finally:
        lock.release()
