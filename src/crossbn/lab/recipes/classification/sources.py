"""The images that a recipe asks for."""

import os
from pathlib import Path
from typing import NamedTuple

from crossbn.lab.data import DATASETS, imagenet_folder, load_pictures
from crossbn.lab.recipes.classification.folders import FolderImages
from crossbn.lab.recipes.classification.images import UPRIGHT, MemoryImages, Scaling, choose, resize
from crossbn.lab.recipes.classification.networks import is_small
from crossbn.lab.recipes.classification.recipe import Recipe, RecipeError

_SIZE = 224  # of images of all sizes
_MOST_WORKERS = 8


class Images(NamedTuple):
    """What a run trains and tests on."""

    train: MemoryImages | FolderImages
    test: MemoryImages | FolderImages
    channels: int
    """That the network sees."""
    classes: int
    size: int
    """Height and width."""
    workers: int
    """Processes that prepare batches, unless somebody knows better."""


def load_images(recipe: Recipe, folder: Path | None = None) -> Images:
    """Return the images that a recipe trains and tests on.

    Args:
        recipe: whose `data` is a data set's name, or a folder with `train` and `val` in it, each with a folder for each
            class.
        folder: of the data sets; None for the variable CROSSBN_DATA's, else `data`.

    Raises:
        RecipeError: if there is no such data set.
        DataError: if its images are not there.
    """
    if recipe.data == "imagenet":
        return _from_folders(recipe, imagenet_folder(True, folder), imagenet_folder(False, folder))
    if recipe.data in DATASETS:
        return _in_memory(recipe, folder)
    parts = [Path(recipe.data) / part for part in ("train", "val")]
    if not all(part.is_dir() for part in parts):
        raise RecipeError(
            f"there is no data set {recipe.data!r}: there are {', '.join(DATASETS)}, or a folder with train and val in "
            "it, each with a folder for each class"
        )
    return _from_folders(recipe, *parts)


def _in_memory(recipe: Recipe, folder: Path | None) -> Images:
    known = DATASETS[recipe.data]
    pictures = load_pictures(recipe.data, True, folder)
    train, train_classes = choose(*pictures, recipe.train_images)
    if recipe.validate:
        if not recipe.train_images or recipe.train_images >= len(pictures[1]):
            raise RecipeError("to validate, train_images must leave some of the training images")
        test, test_classes = choose(*pictures, recipe.test_images, skip=recipe.train_images)
    else:
        test, test_classes = choose(*load_pictures(recipe.data, False, folder), recipe.test_images)
    train, test = (resize(each, recipe.image_size) for each in (train, test))
    scaling, channels = Scaling.of(train), known.channels if is_small(recipe.model) else 3
    mirror = recipe.augment and recipe.data not in UPRIGHT
    return Images(
        MemoryImages(train, train_classes, scaling, channels, crop=recipe.augment, mirror=mirror),
        MemoryImages(test, test_classes, scaling, channels),
        channels,
        known.classes,
        train.shape[-1],
        workers=0,
    )


def _from_folders(recipe: Recipe, train: Path, test: Path) -> Images:
    size = recipe.image_size or _SIZE
    if recipe.validate:
        raise RecipeError(f"only data sets in memory can be validated on: {', '.join(DATASETS)}")
    try:
        found = (
            FolderImages(train, size, recipe.augment, recipe.train_images),
            FolderImages(test, size, augment=False, count=recipe.test_images),
        )
    except FileNotFoundError as error:  # torchvision's, for a folder without images
        raise RecipeError(str(error).replace("\n", " ")) from error
    if found[0].classes != found[1].classes:
        raise RecipeError(f"{train} and {test} have different classes")
    workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    return Images(*found, channels=3, classes=len(found[0].classes), size=size, workers=workers)
