"""`crossbn train`: the recipes, any norm, any registered model and data set."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from crossbn.cli.extras import require
from crossbn.cli.printing import fail
from crossbn.lab.data import DATASETS, FOLDER_VARIABLE, DataError
from crossbn.lab.recipes.classification import Machine, OtherRunError, Outcome, Point, Recipe, RecipeError
from crossbn.lab.recipes.classification import Progress as News
from crossbn.lab.recipes.classification import train as train_classifier
from crossbn.lab.recipes.classification.networks import check_model
from crossbn.nn import NORMS

train = typer.Typer(no_args_is_help=True, help="Train a network.", rich_markup_mode=None)
train.callback()(lambda: None)  # with a callback, a single verb stays a verb

_Options = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of the norm; may be repeated.")]


@train.command()
def classify(
    model: Annotated[
        str, typer.Option(help="A torchvision classifier, or resnet8, resnet14, ..., convmixer4 for small images.")
    ] = "resnet20",
    norm: Annotated[str, typer.Option(help=f"One of {', '.join(NORMS)}.")] = "cbn",
    data: Annotated[
        str, typer.Option(help=f"One of {', '.join(DATASETS)}, or a folder with train and val in it.")
    ] = "cifar10",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward and process.")] = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 100,
    width: Annotated[int, typer.Option(min=1, help="Of a small network, channels of its first stage.")] = 16,
    norm_option: _Options = None,
    reparametrize: Annotated[str | None, typer.Option(help="Of weights: wn or ws.")] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Forwards to pool.", show_default="16 / batch size, at most 8")
    ] = None,
    burn_in_epochs: Annotated[float, typer.Option(min=0, help="Of window 1 first.")] = 0.0,
    lr: Annotated[
        float | None, typer.Option(min=0, help="At the beginning.", show_default="0.1 * batch size / 32")
    ] = None,
    momentum: Annotated[float, typer.Option(min=0, help="Of SGD.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(min=0, help="On all parameters.")] = 1e-4,
    accumulate: Annotated[int, typer.Option(min=1, help="Forwards of a step.")] = 1,
    precision: Annotated[str, typer.Option(help="32, bf16-mixed, 16-mixed or 64.")] = "32",
    train_images: Annotated[int | None, typer.Option(min=1, help="To train on.", show_default="all")] = None,
    test_images: Annotated[int | None, typer.Option(min=1, help="To test on.", show_default="all")] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help="Height and width.", show_default="the data's")] = None,
    augment: Annotated[bool, typer.Option(help="Crop and mirror training images at random.")] = True,
    seed: Annotated[int, typer.Option(help="Of weights, order and augmentation.")] = 0,
    points: Annotated[
        int | None, typer.Option(min=1, help="How often to test.", show_default="after each epoch")
    ] = None,
    switch_norm: Annotated[str | None, typer.Option(help="Another norm from --switch-epoch on.")] = None,
    switch_epoch: Annotated[float, typer.Option(min=0, help="When to switch.")] = 0.0,
    switch_option: _Options = None,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
    devices: Annotated[
        int | None, typer.Option(min=1, help="Processes on each machine.", show_default="1, or torchrun's")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines.", show_default="1, or torchrun's")] = None,
    strategy: Annotated[str, typer.Option(help="As Lightning names it; auto or a kind of ddp.")] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that prepare images.", show_default="as the data needs")
    ] = None,
    checkpoint_minutes: Annotated[float, typer.Option(min=0, help="Between checkpoints in an epoch.")] = 5.0,
    data_folder: Annotated[
        Path | None, typer.Option(help="Directory of the data sets.", envvar=FOLDER_VARIABLE, show_default="data")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "--out", file_okay=False, help="Directory of the run.")] = Path(
        "train-results"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever the directory has.")] = False,
) -> None:
    """Train a classifier as the paper does.

    SGD with weight decay on all parameters, a learning rate proportional to the batch that falls to 0 along a cosine,
    crops and mirror images. Writes last.ckpt, from which the same command goes on after an interruption, log for
    TensorBoard, and at the end record.jsonl. Under torchrun it trains in all its processes.
    """
    require("lightning", "tensorboard", "torchmetrics", "torchvision", extra="train")
    try:
        recipe = Recipe(
            data=data,
            model=model,
            width=width,
            norm=norm,
            norm_options=_parse(norm_option, "--norm-option"),
            reparametrize=reparametrize,
            window=window,
            batch_size=batch_size,
            epochs=epochs,
            burn_in_epochs=burn_in_epochs,
            learning_rate=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            accumulate=accumulate,
            precision=precision,
            train_images=train_images,
            test_images=test_images,
            image_size=image_size,
            augment=augment,
            seed=seed,
            points=points,
            switch_norm=switch_norm,
            switch_epoch=switch_epoch,
            switch_options=_parse(switch_option, "--switch-option"),
        )
        check_model(model)
    except RecipeError as error:
        raise typer.BadParameter(str(error)) from None
    machine = Machine(accelerator, devices, nodes, strategy, workers, data_folder, 60 * checkpoint_minutes)
    with _mistakes_told(output):
        outcome = _carry_out(recipe, machine, output, fresh)
    if _is_first():
        _print(outcome, output)


def _parse(given: Sequence[str] | None, hint: str) -> dict[str, Any]:
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


def _carry_out(recipe: Recipe, machine: Machine, output: Path, fresh: bool) -> Outcome:
    from crossbn.lab.recipes.classification.trainer import Files  # it imports the engine, which takes seconds

    if not _is_first():
        return train_classifier(recipe, output, machine=machine, fresh=fresh)
    files = Files(output)
    finished = files.record.exists() and not fresh
    if files.checkpoint.exists() and not finished and not fresh:
        typer.echo(f"{files.checkpoint} is there: the run goes on from it.", err=True)
    output.mkdir(parents=True, exist_ok=True)
    with _shown(recipe) as watch:
        outcome = train_classifier(recipe, output, watch, machine, fresh)
    if finished:
        typer.echo(f"{files.record} is there: the run had been finished, --fresh trains anew.", err=True)
    return outcome


def _is_first() -> bool:
    """Tell whether this is the first of the processes that train, the one that speaks."""
    from crossbn.integrations.engine import rank_zero_only

    return bool(rank_zero_only.rank == 0)


class _Shown(logging.Handler):
    """Shows a bar, a line for each point of the curve, and above the bar what the norms' callback logs."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(logging.INFO)
        columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn())
        times = (TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
        self.epochs = recipe.epochs
        self.name = f"{recipe.model}, {recipe.norm}"
        self.progress = Progress(*columns, *times, console=Console(stderr=True))
        self.bar = self.progress.add_task(self.name, total=1.0)

    def emit(self, record: logging.LogRecord) -> None:
        self.progress.console.print(record.getMessage(), highlight=False)

    def watch(self, news: Point | News) -> None:
        self.progress.start()  # only now: what keeps a run from starting is told without a bar
        if isinstance(news, Point):
            self.progress.console.print(_describe(news), highlight=False)
            self.progress.update(self.bar, completed=news.epoch / self.epochs)
        else:
            self.progress.update(self.bar, completed=news.share, description=f"{self.name}: {news.phrase}")


@contextmanager
def _shown(recipe: Recipe) -> Iterator[Callable[[Point | News], None]]:
    """Show how a run goes."""
    from crossbn.integrations.lightning import LOGGER

    shown, level = _Shown(recipe), LOGGER.level
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


def _describe(point: Point) -> str:
    return (
        f"epoch {point.epoch:g}: loss {point.train_loss:.3f}, accuracy {point.train_accuracy:.1%} in training, "
        f"{point.test_accuracy:.1%} on test images"
    )


def _print(outcome: Outcome, output: Path) -> None:
    recipe = outcome.recipe
    typer.echo(
        f"{recipe.model} with {recipe.norm} at batch size {recipe.batch_size}: {outcome.accuracy:.2%} of "
        f"{outcome.test_images:,} test images after {recipe.epochs} epochs, {outcome.seconds_per_step * 1000:.1f} ms a "
        f"forward. {output} has the record, the log and the last checkpoint."
    )


@contextmanager
def _mistakes_told(output: Path) -> Iterator[None]:
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
