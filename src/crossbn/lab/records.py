"""Records as lines of JSON in a file that only grows: what is on the disk survives an interruption."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

RecordT = TypeVar("RecordT")

MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
"""What reading a line may raise that is not JSON, lacks a field, or has something else in one."""


class RecordError(ValueError):
    """A file of records holds something else."""


class Writable(Protocol):
    """What a record has at least."""

    def to_json(self) -> str:
        """Return the record as one line."""
        ...


def append_lines(path: Path, records: Iterable[Writable]) -> None:
    """Add a line for each record to the file, which need not exist yet."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{record.to_json()}\n" for record in records))


def read_lines(path: Path, parse: Callable[[str], RecordT], kind: str) -> list[RecordT]:
    """Return the records of a file, none if there is no such file.

    Args:
        path: the file.
        parse: turns a line into a record, or raises one of `MALFORMED`.
        kind: what each line should be, for the error's sentence.

    Raises:
        RecordError: if a line is something else.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            records.append(parse(line.decode()))
        except MALFORMED as error:
            raise RecordError(f"line {number} of {path} is not {kind}") from error
    return records
