"""Making sections of records that may be incomplete, or not what they should be."""

from collections.abc import Callable, Iterator

from crossbn.lab.report.page import Section
from crossbn.lab.report.reading import Problem, Source

# What goes wrong where a value is missing or is something else: records of another version, or changed by hand.
_UNFIT = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, StopIteration)

Maker = Callable[[Source], Iterator[Section | Problem]]
"""Turns the records of one kind in a file into sections."""


def attempt(make: Callable[[], Section], source: str) -> Section | Problem:
    """Return the section, or say why there is none."""
    try:
        section = make()
        for table in section.tables:
            if not all(isinstance(cell, str) for row in table.rows for cell in row):
                raise TypeError("a name is no text")
    except _UNFIT as error:
        return _unfit(source, error)
    return section


def attempt_all(make: Maker, source: Source) -> Iterator[Section | Problem]:
    """Yield the sections of a file until something goes wrong, and say what."""
    try:
        yield from make(source)
    except _UNFIT as error:
        yield _unfit(source.name, error)


def _unfit(source: str, error: Exception) -> Problem:
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    return Problem(f"{source} has records that fit together to no table of this version of crossbn ({reason}).")
