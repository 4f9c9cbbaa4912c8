"""What the commands that train have in common: options, a bar, and the sentence that a mistake ends with."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from crossbn.cli.printing import fail
from crossbn.lab.data import DataError
from crossbn.lab.recipes.classification import OtherRunError, RecipeError
from crossbn.lab.recipes.classification import Progress as News

OutcomeT = TypeVar("OutcomeT")
Watch = Callable[[Any], None]
Describe = Callable[[Any], str]
"""Returns the line for a point of the curve."""


def parse_options(given: Sequence[str] | None, hint: str) -> dict[str, Any]:
    """Return options by name; a value is JSON, or else a text."""
    options: dict[str, Any] = {}
    for word in given or ():
        name, equals, value = word.partition("=")
        if not equals:
            raise typer.BadParameter(f"{word!r} is not NAME=VALUE", param_hint=hint)
        try:
            options[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            options[name.replace("-", "_")] = value
    return options


def carry_out(
    train: Callable[[Watch], OutcomeT], title: str, epochs: int, describe: Describe, output: Path, fresh: bool
) -> OutcomeT:
    """Train, or go on, and show how it goes if this is the first process.

    Args:
        train: does it, and calls what it is given with the news.
        title: of the bar.
        epochs: of the whole training.
        describe: returns the line for a point of the curve.
        output: the directory of the run.
        fresh: whether the training begins anew.
    """
    from crossbn.lab.recipes.classification.trainer import Files  # it imports the engine, which takes seconds

    if not is_first():
        return train(lambda _: None)
    files = Files(output)
    finished = files.record.exists() and not fresh
    if files.checkpoint.exists() and not finished and not fresh:
        typer.echo(f"{files.checkpoint} is there: the run goes on from it.", err=True)
    output.mkdir(parents=True, exist_ok=True)
    with _shown(_Shown(title, epochs, describe)) as watch:
        outcome = train(watch)
    if finished:
        typer.echo(f"{files.record} is there: the run had been finished, --fresh trains anew.", err=True)
    return outcome


def is_first() -> bool:
    """Tell whether this is the first of the processes that train, the one that speaks."""
    from crossbn.integrations.engine import rank_zero_only

    return bool(rank_zero_only.rank == 0)


class _Shown(logging.Handler):
    """Shows a bar, a line for each point of the curve, and above the bar what the norms' callback logs."""

    def __init__(self, title: str, epochs: int, describe: Describe) -> None:
        super().__init__(logging.INFO)
        columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn())
        times = (TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
        self.title, self.epochs, self.describe = title, epochs, describe
        self.progress = Progress(*columns, *times, console=Console(stderr=True))
        self.bar = self.progress.add_task(title, total=1.0)

    def emit(self, record: logging.LogRecord) -> None:
        self.progress.console.print(record.getMessage(), highlight=False)

    def watch(self, news: Any) -> None:
        self.progress.start()  # only now: what keeps a run from starting is told without a bar
        if isinstance(news, News):
            self.progress.update(self.bar, completed=news.share, description=f"{self.title}: {news.phrase}")
        else:
            self.progress.console.print(self.describe(news), highlight=False)
            self.progress.update(self.bar, completed=news.epoch / self.epochs)


@contextmanager
def _shown(shown: _Shown) -> Iterator[Watch]:
    """Show how a run goes."""
    from crossbn.integrations.lightning import LOGGER

    level = LOGGER.level
    LOGGER.addHandler(shown)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    try:
        yield shown.watch
    finally:
        shown.progress.stop()
        LOGGER.removeHandler(shown)
        LOGGER.setLevel(level)
        LOGGER.propagate = True


@contextmanager
def mistakes_told(output: Path) -> Iterator[None]:
    """End the command with a sentence for what is not the program's fault."""
    try:
        yield
    except KeyboardInterrupt:
        fail(f"interrupted; the same command goes on from {output}")
    except OtherRunError as error:
        fail(f"{error}; --output names another directory, --fresh begins anew")
    except (RecipeError, DataError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.strerror}: {error.filename}")
