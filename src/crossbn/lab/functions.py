"""Functions of one's own by name, `package.module:function`: networks, batches and losses may be such."""

import pkgutil
from collections.abc import Callable
from typing import Any


class FunctionError(ValueError):
    """There is no such function; the message is for the user."""


def find_function(name: str) -> Callable[..., Any]:
    """Return a function by name.

    Raises:
        FunctionError: if there is none.

    Example:
        >>> find_function("math:hypot")(3, 4)
        5.0
    """
    try:
        found = pkgutil.resolve_name(name)
    except ImportError as error:
        raise FunctionError(f"{name!r} cannot be imported: {error}") from None
    except AttributeError:
        module, _, attribute = name.partition(":")
        raise FunctionError(f"the module {module!r} has no {attribute!r}") from None
    except ValueError:
        raise FunctionError(f"{name!r} is not package.module:function") from None
    if not callable(found):
        raise FunctionError(f"{name!r} is of {type(found)}, which cannot be called: a function would return it")
    return found
