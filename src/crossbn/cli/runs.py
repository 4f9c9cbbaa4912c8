"""What the commands that train have in common: options, a bar, and the sentence that a mistake ends with."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TextColumn, TimeRemainingColumn

from crossbn.cli.named import look_here
from crossbn.cli.printing import fail, make_bars, mistakes_told
from crossbn.lab.data import DataError
from crossbn.lab.models import ModelError
from crossbn.lab.progress import Progress as News
from crossbn.lab.recipes.machine import Machine
from crossbn.lab.recipes.recipe import (
    PRECISIONS,
    DivergedError,
    OtherRunError,
    OutcomeT,
    RecipeError,
    TrainingRecipe,
)
from crossbn.lab.recipes.training import RECORD, finished, train
from crossbn.lab.records import RecordError

Describe = Callable[[Any], str]
"""Returns the line for a point of the curve."""

of_norm, of_training, of_images, of_machine = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Norm", "Training", "Images", "Machine")
)
"""Options in their panel of the help."""
NormOptions = Annotated[list[str] | None, of_norm(metavar="NAME=VALUE", help="Of the norm; may be repeated.")]
Window = Annotated[int | None, of_norm(min=1, help="Forwards to pool.", show_default="16 / batch size, at most 8")]
BatchSize = Annotated[int, of_training(min=1, help="Images per forward and process.")]
Epochs = Annotated[int, of_training(min=1, help="Passes over the training images.")]
BurnIn = Annotated[float, of_norm(min=0, help="Of window 1 first.")]
Momentum = Annotated[float, of_training(min=0, help="Of SGD.")]
WeightDecay = Annotated[float, of_training(min=0, help="On all parameters that are trained.")]
Accumulate = Annotated[int, of_training(min=1, help="Forwards of a step.")]
Precision = Annotated[str, of_training(help=f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}.")]
TrainImages = Annotated[int | None, of_images(min=1, help="To train on.", show_default="all")]
TestImages = Annotated[int | None, of_images(min=1, help="To test on.", show_default="all")]
Seed = Annotated[int, of_training(help="Of weights, order and what is random in preparing images.")]
Points = Annotated[int | None, of_images(min=1, help="How often to test.", show_default="after each epoch")]
SwitchNorm = Annotated[str | None, of_norm(help="Another norm from --switch-epoch on.")]
SwitchEpoch = Annotated[float, of_norm(min=0, help="When to switch.")]
Accelerator = Annotated[str, of_machine(help="auto, cpu or gpu.")]
Devices = Annotated[int | None, of_machine(min=1, help="Processes on each machine.", show_default="1, or torchrun's")]
Nodes = Annotated[int | None, of_machine(min=1, help="Machines.", show_default="1, or torchrun's")]
Strategy = Annotated[str, of_machine(help="As Lightning names it; auto or a kind of ddp.")]
Workers = Annotated[
    int | None, of_machine(min=0, help="Processes that prepare images.", show_default="as the data needs")
]
CheckpointMinutes = Annotated[float, of_machine(min=0, help="Between checkpoints in an epoch.")]
Output = Annotated[Path, typer.Option("--output", "--out", file_okay=False, help="Directory of the run.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever the directory has.")]
KeepGoing = Annotated[bool, of_training("--keep-going", help="Train on when the loss is not finite any more.")]


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


@contextmanager
def told_as_usage() -> Iterator[None]:
    """End the command with a usage error for what a recipe refuses."""
    try:
        yield
    except (RecipeError, ModelError) as error:
        raise typer.BadParameter(str(error)) from None


def carry_out(
    recipe: TrainingRecipe[OutcomeT],
    machine: Machine,
    output: Path,
    fresh: bool,
    describe: Describe,
) -> OutcomeT:
    """Train, or go on, and show how it goes if this is the first process.

    Args:
        recipe: of the run.
        machine: to compute with.
        output: the directory of the run.
        fresh: whether the training begins anew.
        describe: returns the line for a point of the curve.
    """
    again = f"the same command goes on from {output}"
    with mistakes_told(RecipeError, ModelError, DataError, interrupted=again), _remedies_told():
        # This comes first: whoever asks for a run that is finished waits for nothing else.
        if not fresh and (known := _finished(recipe, output, machine)) is not None:
            typer.echo(f"{output / RECORD} is there: the run had been finished, --fresh trains anew.", err=True)
            return known
        look_here()  # for a model of the user's own
        with told_as_usage():
            recipe.check_data()
            recipe.check_model()
        if not is_first():
            return train(recipe, output, machine=machine, fresh=fresh)
        from crossbn.lab.recipes.trainer import Files  # it imports the engine, which takes seconds

        if not fresh and any(path.exists() for path in Files(output).checkpoints):
            typer.echo(f"{Files(output).checkpoint} is there: the run goes on from it.", err=True)
        with _shown(_Shown(f"{recipe.model}, {recipe.norm}", recipe.epochs, describe)) as watch:
            return train(recipe, output, watch, machine, fresh)


def _finished(recipe: TrainingRecipe[OutcomeT], output: Path, machine: Machine) -> OutcomeT | None:
    try:
        return finished(recipe, output, machine.processes)
    except RecordError as error:
        fail(f"{error}: take the line out, or begin anew with --fresh")


def is_first() -> bool:
    """Tell whether this is the first of the processes that train, the one that speaks."""
    # The engine's own answer is the same, but takes seconds to import.
    ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return next((int(rank) for rank in ranks if rank), 0) == 0


class _Shown(logging.Handler):
    """Shows a bar, a line for each point of the curve, and above the bar what the norms' callback logs."""

    def __init__(self, title: str, epochs: int, describe: Describe) -> None:
        super().__init__(logging.INFO)
        self.title, self.epochs, self.describe = title, epochs, describe
        self.progress = make_bars(TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
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
def _shown(shown: _Shown) -> Iterator[Callable[[Any], None]]:
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
def _remedies_told() -> Iterator[None]:
    """Say what helps if a run cannot begin or go on."""
    try:
        yield
    except OtherRunError as error:
        fail(f"{error}; --output names another directory, --fresh begins anew")
    except DivergedError as error:
        fail(f"{error}; --keep-going trains on")
