"""Making a section of records that may be incomplete."""

from collections.abc import Callable

from crossbn.report.page import Section
from crossbn.report.reading import Problem

# What goes wrong where a value is missing or is something else: records of another version, or cut by hand.
_UNFIT = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, StopIteration)


def attempt(make: Callable[[], Section], source: str) -> Section | Problem:
    """Return the section, or say why there is none."""
    try:
        return make()
    except _UNFIT as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        return Problem(f"{source} has records that fit together to no table of this version of crossbn ({reason}).")
