"""`crossbn train detect`: detectors, any norm, data in COCO's format or drawn."""

from pathlib import Path
from typing import Annotated

import typer

from crossbn.cli.extras import require
from crossbn.cli.runs import carry_out, is_first, mistakes_told, parse_options
from crossbn.lab.data import FOLDER_VARIABLE
from crossbn.lab.recipes.detection import Machine, Outcome, Point, Recipe, RecipeError
from crossbn.lab.recipes.detection import train as train_detector
from crossbn.lab.recipes.detection.recipe import ALL, BACKBONES, HEADS, NO_NORM, OWN_MODELS
from crossbn.nn import NORMS

_Options = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of the norm; may be repeated.")]


def detect(
    model: Annotated[
        str,
        typer.Option(help=f"{', '.join(OWN_MODELS)}, or one of torchvision's, retinanet_resnet50_fpn for instance."),
    ] = "faster_rcnn",
    backbone: Annotated[str, typer.Option(help=f"One of {', '.join(BACKBONES)}.")] = "resnet50",
    backbone_weights: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A file of the backbone's weights.")
    ] = None,
    norm: Annotated[str, typer.Option(help=f"One of {', '.join((NO_NORM, *NORMS))}.")] = "cbn",
    where: Annotated[
        str, typer.Option(help=f"{HEADS}: the norm in the heads, the backbone's BN fixed; {ALL}: but in early stages.")
    ] = HEADS,
    data: Annotated[str, typer.Option(help="shapes, coco, or a folder in COCO's format.")] = "shapes",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward and process.")] = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 12,
    image_size: Annotated[int, typer.Option(min=1, help="The shorter side of an image.")] = 800,
    scales: Annotated[str, typer.Option(help="More shorter sides to train at, at random: 640,672,704.")] = "",
    mirror: Annotated[bool, typer.Option(help="Mirror training images at random.")] = True,
    channels: Annotated[int, typer.Option(min=1, help="Of the pyramid and the heads.")] = 256,
    proposals: Annotated[int, typer.Option(min=1, help="Regions of an image that heads are trained on.")] = 512,
    norm_option: _Options = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Forwards to pool.", show_default="16 / batch size, at most 8")
    ] = None,
    burn_in_epochs: Annotated[float, typer.Option(min=0, help="Of window 1 first.")] = 0.0,
    lr: Annotated[
        float | None, typer.Option(min=0, help="After warm-up.", show_default="0.02 / 16 for each image of a step")
    ] = None,
    momentum: Annotated[float, typer.Option(min=0, help="Of SGD.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(min=0, help="On all parameters that are trained.")] = 1e-4,
    accumulate: Annotated[int, typer.Option(min=1, help="Forwards of a step.")] = 1,
    precision: Annotated[str, typer.Option(help="32, bf16-mixed, 16-mixed or 64.")] = "32",
    train_images: Annotated[int | None, typer.Option(min=1, help="To train on.", show_default="all")] = None,
    test_images: Annotated[int | None, typer.Option(min=1, help="To test on.", show_default="all")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, order and what is drawn.")] = 0,
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
    """Train a detector as the paper does: Faster or Mask R-CNN with a feature pyramid, or one of torchvision's.

    SGD with a learning rate proportional to the images of a step, warmed up over an epoch or 1,000 steps and divided by
    ten after 9/12 and 11/12 of the training. Writes last.ckpt, from which the same command goes on after an
    interruption and `crossbn predict` draws what is found, log for TensorBoard, and at the end record.jsonl. Under
    torchrun it trains in all its processes.
    """
    require("lightning", "tensorboard", "torchmetrics", "torchvision", "pycocotools", extra="detect")
    from crossbn.lab.recipes.detection.networks import check_model

    try:
        recipe = Recipe(
            data=data,
            model=model,
            backbone=backbone,
            backbone_weights=None if backbone_weights is None else str(backbone_weights),
            where=where,
            norm=norm,
            norm_options=parse_options(norm_option, "--norm-option"),
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
            scales=_parse_scales(scales),
            mirror=mirror,
            channels=channels,
            proposals=proposals,
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
            lambda watch: train_detector(recipe, output, watch, machine, fresh),
            f"{model}, {norm}",
            epochs,
            _describe,
            output,
            fresh,
        )
    if is_first():
        _print(outcome, output)


def _parse_scales(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not whole numbers, separated by commas", param_hint="--scales") from None


def _describe(point: Point) -> str:
    told = ", ".join(f"{name} {value:.1%}" for name, value in point.scores.items() if value is not None)
    return f"epoch {point.epoch:g}: loss {point.train_loss:.3f}, {told}"


def _print(outcome: Outcome, output: Path) -> None:
    recipe, scores = outcome.recipe, outcome.scores
    kinds = [name for name in ("AP", "mask AP") if scores.get(name) is not None]
    told = ", ".join(f"{name} {scores[name]:.1%}" for name in kinds) or "no objects to score"
    typer.echo(
        f"{recipe.model} with {recipe.norm} at batch size {recipe.batch_size}: {told} on {outcome.test_images:,} test "
        f"images after {recipe.epochs} epochs, {outcome.seconds_per_step * 1000:.0f} ms a forward, "
        f"{outcome.waiting_share:.1%} of the time waiting for images. {output} has the record, the log and the last "
        "checkpoint."
    )
