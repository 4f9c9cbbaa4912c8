"""Functions of one's own, named package.module:function on the command line."""

import inspect
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import typer


def look_here() -> None:
    """Let modules be looked for where one stands, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def find_function(name: str, option: str, arguments: int) -> Callable[..., Any]:
    """Return the function `package.module:function`, which takes so many arguments.

    Raises:
        typer.BadParameter: if there is none.
    """
    look_here()
    try:
        found = pkgutil.resolve_name(name)
    except ImportError as error:
        raise typer.BadParameter(f"{name!r} cannot be imported: {error}", param_hint=option) from None
    except AttributeError:
        module, _, attribute = name.partition(":")
        raise typer.BadParameter(f"the module {module!r} has no {attribute!r}", param_hint=option) from None
    except ValueError:
        raise typer.BadParameter(f"{name!r} is not package.module:function", param_hint=option) from None
    if not callable(found):
        problem = f"{name!r} is of {type(found)}, which cannot be called: a function would return it"
        raise typer.BadParameter(problem, param_hint=option)
    if not _takes(found, arguments):
        count = {0: "no arguments", 1: "one argument"}.get(arguments, f"{arguments} arguments")
        problem = f"{name!r} cannot be called with {count}: its signature is {inspect.signature(found)}"
        raise typer.BadParameter(problem, param_hint=option)
    return found


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True  # of a builtin that does not tell
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True
