"""`crossbn predict`: boxes and masks of a trained detector, drawn."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from crossbn.cli.extras import require
from crossbn.cli.printing import mistakes_told
from crossbn.lab.data import DataError
from crossbn.lab.recipes.recipe import RecipeError


def predict(
    checkpoint: Annotated[Path, typer.Argument(help="last.ckpt of `crossbn train detect`, or its directory.")],
    images: Annotated[list[Path], typer.Argument(help="Images, or directories of images.")],
    score: Annotated[float, typer.Option(min=0, max=1, help="The least of an object that is drawn.")] = 0.5,
    output: Annotated[
        Path, typer.Option("--output", "--out", file_okay=False, help="Directory of the drawings.")
    ] = Path("predict-results"),
) -> None:
    """Draw the boxes and masks that a trained detector finds in images.

    Writes NAME.png for each image, and objects.jsonl with the class, score and box of each object. The detector's batch
    norms are folded into its convolutions.
    """
    require("torchvision", "lightning", "pycocotools", extra="detect")
    from crossbn.lab.recipes.detection import predicting

    file = checkpoint / "last.ckpt" if checkpoint.is_dir() else checkpoint
    with mistakes_told(RecipeError, DataError, interrupted=f"{output} has the images that were done"):
        if not file.is_file():
            raise RecipeError(f"there is no checkpoint {file}")
        total = len(predicting.list_images(images))
        events = predicting.predict(file, images, output, score)
        counts = [len(found.names) for _, found in track(events, "drawing", total, disable=total < 3)]
    typer.echo(f"{sum(counts):,} objects in {total:,} images. {output} has the drawings and objects.jsonl.")
