"""What a norm says when it does something else than was asked for, and how a name is refused that there is not."""

import difflib
import warnings
from collections.abc import Iterable


class ConversionWarning(UserWarning):
    """A norm stays, or is for a step, plain BatchNorm where cross-iteration statistics were asked for."""


def say(message: str) -> None:
    """Warn."""
    warnings.warn(message, ConversionWarning, stacklevel=2)


def no_such(what: str, name: object, known: Iterable[str], most: int = 20) -> str:
    """Return the sentence for a name that does not exist: with those that were meant, if they can be guessed.

    Args:
        what: kind of thing that is named.
        name: that was given.
        known: names that there are.
        most: of these that are listed where none is similar.

    Example:
        >>> no_such("norm", "cnb", ["bn", "cbn", "gn"])
        "there is no norm 'cnb': did you mean cbn?"
        >>> no_such("norm", "xyz", ["bn", "cbn", "gn"])
        "there is no norm 'xyz': there are bn, cbn, gn"
    """
    names = list(known)
    meant = difflib.get_close_matches(str(name), names)
    if meant:
        return f"there is no {what} {name!r}: did you mean {' or '.join(meant)}?"
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return f"there is no {what} {name!r}: there are {', '.join(names[:most])}{rest}"
