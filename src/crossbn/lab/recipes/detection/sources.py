"""The images that a recipe asks for."""

import logging
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from crossbn.integrations.lightning import LOGGER
from crossbn.lab.data import DataError, data_folder
from crossbn.lab.recipes.classification.order import permutation
from crossbn.lab.recipes.classification.recipe import RecipeError
from crossbn.lab.recipes.detection import shapes
from crossbn.lab.recipes.detection.coco import CocoScenes
from crossbn.lab.recipes.detection.images import DetectionImages
from crossbn.lab.recipes.detection.recipe import Recipe
from crossbn.lab.recipes.detection.scenes import Scenes

SHAPES, COCO = "shapes", "coco"
_MOST_WORKERS = 8


class Images(NamedTuple):
    """What a run trains and tests on."""

    train: DetectionImages
    test: DetectionImages
    classes: list[str]
    """Their names, without the background."""
    workers: int
    """Processes that prepare batches, unless somebody knows better."""


def load_images(recipe: Recipe, folder: Path | None = None) -> Images:
    """Return the images that a recipe trains and tests on; those without objects are tested on only.

    Args:
        recipe: of the run.
        folder: of the data sets, where "coco" is looked for; None for the variable CROSSBN_DATA's, else `data`.

    Raises:
        RecipeError: if there is no such data set.
        DataError: if it is not there, or something is wrong with it.
    """
    train, test = _scenes(recipe, folder)
    if train.classes != test.classes:
        raise DataError(f"the training and test images of {recipe.data} have different classes")
    chosen = _choose(len(train), recipe.train_images)
    with_objects = torch.tensor([train.has_objects(int(number)) for number in chosen])
    if not bool(with_objects.all()):
        left = int((~with_objects).sum())
        LOGGER.log(logging.INFO, "%d of %d training images have no objects and are left out", left, len(chosen))
    masks = recipe.has_masks
    return Images(
        DetectionImages(train, chosen[with_objects], masks, training=True, mirror=recipe.mirror),
        DetectionImages(test, _choose(len(test), recipe.test_images), masks, training=False),
        train.classes,
        workers=0 if recipe.data == SHAPES else min(_MOST_WORKERS, _cores()),
    )


def _scenes(recipe: Recipe, folder: Path | None) -> tuple[Scenes, Scenes]:
    if recipe.data == SHAPES:
        train, test = recipe.train_images or shapes.TRAIN_IMAGES, recipe.test_images or shapes.TEST_IMAGES
        return shapes.ShapeScenes("train", train), shapes.ShapeScenes("val", test)
    place = data_folder(folder) / COCO if recipe.data == COCO else Path(recipe.data)
    if not place.is_dir():
        what = f"COCO is not in {place}" if recipe.data == COCO else f"there is no data set {recipe.data!r}"
        raise RecipeError(f"{what}: data is {SHAPES}, {COCO}, or a folder in COCO's format")
    return CocoScenes(place, "train", recipe.has_masks), CocoScenes(place, "val", recipe.has_masks)


def _choose(count: int, wanted: int | None) -> Tensor:
    """Return the first of a permutation that is always the same; None for all, in their order."""
    return torch.arange(count) if wanted is None or wanted >= count else permutation(count, 0)[:wanted]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
