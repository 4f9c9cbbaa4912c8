"""`crossbn train detect`: detectors, any norm, data in COCO's format or drawn."""

from pathlib import Path
from typing import Annotated

import typer

from crossbn.cli import runs
from crossbn.cli.extras import require
from crossbn.cli.options import DataFolder
from crossbn.lab.data import places
from crossbn.lab.norm_names import NORM_NAMES
from crossbn.lab.recipes.detection import Machine, Outcome, Point, Recipe
from crossbn.lab.recipes.detection.recipe import ALL, BACKBONES, HEADS, NO_NORM, OWN_MODELS, weights_file


def detect(
    model: Annotated[
        str,
        typer.Option(help=f"{', '.join(OWN_MODELS)}, or one of torchvision's, retinanet_resnet50_fpn for instance."),
    ] = "faster_rcnn",
    backbone: Annotated[str, typer.Option(help=f"One of {', '.join(BACKBONES)}.")] = "resnet50",
    backbone_weights: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A file of the backbone's weights.",
            show_default=f"BACKBONE.pth in --data-folder, with {HEADS}",
        ),
    ] = None,
    norm: Annotated[str, typer.Option(help=f"One of {', '.join((NO_NORM, *NORM_NAMES))}.")] = "cbn",
    where: Annotated[
        str, typer.Option(help=f"{HEADS}: the norm in the heads, the backbone's BN fixed; {ALL}: but in early stages.")
    ] = HEADS,
    frozen_backbone: Annotated[
        bool,
        typer.Option("--frozen-backbone/--trained-backbone", help="Whether the backbone's weights stay as they are."),
    ] = False,
    norm_momentum: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of the backbone's running statistics.", show_default="its own")
    ] = None,
    plain_pyramid: Annotated[
        bool,
        typer.Option("--plain-pyramid", help=f"No norms in the feature pyramid, where {ALL} else has them."),
    ] = False,
    data: Annotated[str, typer.Option(help="shapes, coco, or a folder in COCO's format.")] = "shapes",
    batch_size: runs.BatchSize = 4,
    epochs: runs.Epochs = 12,
    image_size: Annotated[int, typer.Option(min=1, help="The shorter side of an image.")] = 800,
    scales: Annotated[str, typer.Option(help="More shorter sides to train at, at random: 640,672,704.")] = "",
    mirror: Annotated[bool, typer.Option(help="Mirror training images at random.")] = True,
    channels: Annotated[int, typer.Option(min=1, help="Of the pyramid and the heads.")] = 256,
    proposals: Annotated[int, typer.Option(min=1, help="Regions of an image that heads are trained on.")] = 512,
    norm_option: runs.NormOptions = None,
    window: runs.Window = None,
    burn_in_epochs: runs.BurnIn = 0.0,
    lr: Annotated[
        float | None, typer.Option(min=0, help="After warm-up.", show_default="0.02 / 16 for each image of a step")
    ] = None,
    momentum: runs.Momentum = 0.9,
    weight_decay: runs.WeightDecay = 1e-4,
    accumulate: runs.Accumulate = 1,
    precision: runs.Precision = "32",
    train_images: runs.TrainImages = None,
    test_images: runs.TestImages = None,
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
    """Train a detector as the paper does: Faster or Mask R-CNN with a feature pyramid, or one of torchvision's.

    SGD with a learning rate proportional to the images of a step, warmed up over an epoch or 1,000 steps and divided by
    ten after 9/12 and 11/12 of the training. Writes last.ckpt, from which the same command goes on after an
    interruption and `crossbn predict` draws what is found, log for TensorBoard, and at the end record.jsonl. Under
    torchrun it trains in all its processes.
    """
    require("lightning", "tensorboard", "torchmetrics", "torchvision", "pycocotools", extra="detect")
    if backbone_weights is None and where == HEADS and (name := weights_file(backbone)):
        looked_for = places.data_folder(data_folder) / name
        backbone_weights = looked_for if looked_for.is_file() else None
    with runs.told_as_usage():
        recipe = Recipe(
            data=data,
            model=model,
            backbone=backbone,
            backbone_weights=None if backbone_weights is None else str(backbone_weights),
            where=where,
            frozen_backbone=frozen_backbone,
            norm_momentum=norm_momentum,
            plain_pyramid=plain_pyramid,
            norm=norm,
            norm_options=runs.parse_options(norm_option, "--norm-option"),
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
            switch_options=runs.parse_options(switch_option, "--switch-option"),
        )
    machine = Machine(
        accelerator, devices, nodes, strategy, workers, data_folder, 60 * checkpoint_minutes, keep_going=keep_going
    )
    outcome = runs.carry_out(recipe, machine, output, fresh, _describe)
    if runs.is_first():
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
        f"{recipe.model} with {recipe.norms_in_words} at batch size {recipe.batch_size}: {told} on "
        f"{outcome.test_images:,} test images after {recipe.epochs} epochs, "
        f"{outcome.seconds_per_step * 1000:.0f} ms a forward, {outcome.waiting_share:.1%} of the time waiting for "
        f"images. {output} has the record, the log and the last checkpoint."
    )
