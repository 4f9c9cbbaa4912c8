"""`crossbn train`: the recipes, any norm, any registered model and data set."""

from pathlib import Path
from typing import Annotated

import typer

from crossbn.cli import runs
from crossbn.cli.detect import detect
from crossbn.cli.extras import require
from crossbn.cli.options import DataFolder
from crossbn.lab.data import names_of
from crossbn.lab.norm_names import NORM_NAMES
from crossbn.lab.recipes.classification import Machine, Outcome, Point, Recipe

train = typer.Typer(no_args_is_help=True, help="Train a network.", rich_markup_mode=None)
train.command()(detect)


@train.command()
def classify(
    model: Annotated[
        str,
        typer.Option(
            help="A torchvision classifier, resnet8, resnet14, ..., convmixer4 for small images, or "
            "package.module:function."
        ),
    ] = "resnet20",
    norm: Annotated[str, runs.of_norm(help=f"One of {', '.join(NORM_NAMES)}.")] = "cbn",
    data: Annotated[
        str,
        runs.of_images(
            help=f"One of {', '.join(names_of('pictures', 'folders'))}, or a folder with train and val in it."
        ),
    ] = "cifar10",
    batch_size: runs.BatchSize = 4,
    epochs: runs.Epochs = 100,
    width: Annotated[int, typer.Option(min=1, help="Of a small network, channels of its first stage.")] = 16,
    norm_option: runs.NormOptions = None,
    reparametrize: Annotated[str | None, runs.of_norm(help="Of weights: wn or ws.")] = None,
    window: runs.Window = None,
    burn_in_epochs: runs.BurnIn = 0.0,
    lr: Annotated[
        float | None, runs.of_training(min=0, help="At the beginning.", show_default="0.1 * batch size / 32")
    ] = None,
    momentum: runs.Momentum = 0.9,
    weight_decay: runs.WeightDecay = 1e-4,
    accumulate: runs.Accumulate = 1,
    precision: runs.Precision = "32",
    train_images: runs.TrainImages = None,
    test_images: runs.TestImages = None,
    image_size: Annotated[
        int | None, runs.of_images(min=1, help="Height and width.", show_default="the data's")
    ] = None,
    augment: Annotated[bool, runs.of_images(help="Crop and mirror training images at random.")] = True,
    seed: runs.Seed = 0,
    points: runs.Points = None,
    switch_norm: runs.SwitchNorm = None,
    switch_epoch: runs.SwitchEpoch = 0.0,
    switch_option: runs.NormOptions = None,
    accelerator: runs.Accelerator = "auto",
    devices: runs.Devices = None,
    nodes: runs.Nodes = None,
    strategy: runs.Strategy = "auto",
    workers: runs.Workers = None,
    checkpoint_minutes: runs.CheckpointMinutes = 5.0,
    data_folder: DataFolder = None,
    output: runs.Output = Path("train-results"),
    fresh: runs.Fresh = False,
    keep_going: runs.KeepGoing = False,
) -> None:
    """Train a classifier as the paper does.

    SGD with weight decay on all parameters, a learning rate proportional to the batch that falls to 0 along a cosine,
    crops and mirror images. Writes last.ckpt, from which the same command goes on after an interruption, log for
    TensorBoard, and at the end record.jsonl. Under torchrun it trains in all its processes.
    """
    require("lightning", "tensorboard", "torchmetrics", "torchvision", extra="train")
    with runs.told_as_usage():
        recipe = Recipe(
            data=data,
            model=model,
            width=width,
            norm=norm,
            norm_options=runs.parse_options(norm_option, "--norm-option"),
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
            switch_options=runs.parse_options(switch_option, "--switch-option"),
        )
    machine = Machine(
        accelerator, devices, nodes, strategy, workers, data_folder, 60 * checkpoint_minutes, keep_going=keep_going
    )
    outcome = runs.carry_out(recipe, machine, output, fresh, _describe)
    if runs.is_first():
        _print(outcome, output)


def _describe(point: Point) -> str:
    return (
        f"epoch {point.epoch:g}: loss {point.train_loss:.3f}, accuracy {point.train_accuracy:.1%} in training, "
        f"{point.test_accuracy:.1%} on test images"
    )


def _print(outcome: Outcome, output: Path) -> None:
    recipe = outcome.recipe
    typer.echo(
        f"{recipe.model} with {recipe.norms_in_words} at batch size {recipe.batch_size}: {outcome.accuracy:.2%} of "
        f"{outcome.test_images:,} test images after {recipe.epochs} epochs, {outcome.seconds_per_step * 1000:.1f} ms a "
        f"forward. {output} has the record, the log and the last checkpoint."
    )
