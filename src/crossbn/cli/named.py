"""What options name: functions of one's own, networks, devices; and the mistakes that users make with them."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from crossbn.lab import environment, functions


class MistakeError(Exception):
    """A function of the user's does not do what it is for; the message is the sentence that the command ends with.

    It is raised, not printed on the spot: a bar of progress has to be gone before.
    """


def look_here() -> None:
    """Let modules be looked for where one stands, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


@contextmanager
def refused(option: str) -> Iterator[None]:
    """Let a ValueError be what is wrong with an option."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def find_function(name: str, option: str, arguments: int) -> Callable[..., Any]:
    """Return the function `package.module:function`, which takes so many arguments.

    Raises:
        typer.BadParameter: if there is none.
    """
    look_here()
    with refused(option):
        found = functions.find_function(name)
    if not _takes(found, arguments):
        count = {0: "no arguments", 1: "one argument"}.get(arguments, f"{arguments} arguments")
        problem = f"{name!r} cannot be called with {count}: its signature is {inspect.signature(found)}"
        raise typer.BadParameter(problem, param_hint=option)
    return found


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except ValueError:
        return True  # a builtin that does not tell
    except TypeError:
        return False
    return True


def check_device(name: str | None) -> str:
    """Return the device of that name, of None the best there is; torch is imported only where it may have several.

    Raises:
        typer.BadParameter: if there is no such device.
    """
    if name is None:
        return environment.best_device()
    if name == "cpu":
        return name
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without it
        reason = str(error).partition("\n")[0]
        raise typer.BadParameter(f"there is no device {name!r}: {reason}", param_hint="--device") from None
    return name
