"""`crossbn train`: the recipes, any norm, any registered model and data set."""

from pathlib import Path
from typing import Annotated

import typer

from crossbn.cli.detect import detect
from crossbn.cli.extras import require
from crossbn.cli.runs import carry_out, is_first, mistakes_told, parse_options
from crossbn.lab.data import DATASETS, FOLDER_VARIABLE
from crossbn.lab.recipes.classification import Machine, Outcome, Point, Recipe, RecipeError
from crossbn.lab.recipes.classification import train as train_classifier
from crossbn.lab.recipes.classification.networks import check_model
from crossbn.nn import NORMS

train = typer.Typer(no_args_is_help=True, help="Train a network.", rich_markup_mode=None)
train.command()(detect)

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
            norm_options=parse_options(norm_option, "--norm-option"),
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
            switch_options=parse_options(switch_option, "--switch-option"),
        )
        check_model(model)
    except RecipeError as error:
        raise typer.BadParameter(str(error)) from None
    machine = Machine(accelerator, devices, nodes, strategy, workers, data_folder, 60 * checkpoint_minutes)
    with mistakes_told(output):
        outcome = carry_out(
            lambda watch: train_classifier(recipe, output, watch, machine, fresh),
            f"{model}, {norm}",
            epochs,
            _describe,
            output,
            fresh,
        )
    if is_first():
        _print(outcome, output)


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
