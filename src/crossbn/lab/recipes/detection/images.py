"""The images that a recipe asks for."""

import logging
from pathlib import Path

import torch

from crossbn.integrations.lightning import LOGGER
from crossbn.lab.data import DATASETS, DataError, data_folder, names_of
from crossbn.lab.data.coco import CocoScenes
from crossbn.lab.data.drawing import choose
from crossbn.lab.data.scenes import SceneImages, Scenes
from crossbn.lab.data.shapes import ShapeScenes
from crossbn.lab.recipes.detection.recipe import Recipe
from crossbn.lab.recipes.loading import Images
from crossbn.lab.recipes.recipe import RecipeError
from crossbn.messages import no_such

SHAPES, COCO = "shapes", "coco"


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
    chosen = choose(len(train), recipe.train_images)
    with_objects = torch.tensor([train.has_objects(int(number)) for number in chosen])
    if not bool(with_objects.all()):
        left = int((~with_objects).sum())
        LOGGER.log(logging.INFO, "%d of %d training images have no objects and are left out", left, len(chosen))
    return Images(
        SceneImages(train, chosen[with_objects], recipe.has_masks, training=True, mirror=recipe.mirror),
        SceneImages(test, choose(len(test), recipe.test_images), recipe.has_masks, training=False),
        train.classes,
        in_memory=recipe.data == SHAPES,
    )


def _scenes(recipe: Recipe, folder: Path | None) -> tuple[Scenes, Scenes]:
    if recipe.data == SHAPES:
        known = DATASETS[SHAPES]
        train, test = recipe.train_images or known.train_images, recipe.test_images or known.test_images
        return ShapeScenes("train", train), ShapeScenes("val", test)
    place = data_folder(folder) / COCO if recipe.data == COCO else Path(recipe.data)
    if not place.is_dir():
        what = (
            f"COCO is not in {place}" if recipe.data == COCO else no_such("data set", recipe.data, names_of("scenes"))
        )
        raise RecipeError(f"{what} (or name a folder in COCO's format)")
    return CocoScenes(place, "train", recipe.has_masks), CocoScenes(place, "val", recipe.has_masks)
