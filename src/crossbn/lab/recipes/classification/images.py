"""The images that a recipe asks for."""

from pathlib import Path

from crossbn.lab.data import DATASETS, imagenet_folder, load_pictures, names_of
from crossbn.lab.data.drawing import choose
from crossbn.lab.data.folders import FolderImages
from crossbn.lab.data.memory import UPRIGHT, MemoryImages, Scaling, resize
from crossbn.lab.models import is_small
from crossbn.lab.recipes.classification.recipe import FOLDERS, Recipe
from crossbn.lab.recipes.loading import Images
from crossbn.lab.recipes.recipe import RecipeError

_SIZE = 224  # of images of all sizes
_MOST_PIXELS = 64 * 224 * 224  # of a batch to test on
_MOST_TEST_IMAGES = 500


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
    recipe.check_data()
    if recipe.data == "imagenet":
        return _from_folders(recipe, imagenet_folder(True, folder), imagenet_folder(False, folder))
    if recipe.data in names_of("pictures"):
        return _in_memory(recipe, folder)
    return _from_folders(recipe, *(Path(recipe.data, part) for part in FOLDERS))


def _in_memory(recipe: Recipe, folder: Path | None) -> Images:
    known = DATASETS[recipe.data]
    pictures = load_pictures(recipe.data, True, folder)
    others, skip = pictures, recipe.train_images or 0
    if not recipe.validate:
        others, skip = load_pictures(recipe.data, False, folder), 0
    elif skip >= len(pictures.classes):
        raise RecipeError("to validate, train_images must leave some of the training images")
    to_train = choose(len(pictures.classes), recipe.train_images)
    to_test = choose(len(others.classes), recipe.test_images, skip)
    train, test = (resize(each, recipe.image_size) for each in (pictures.images[to_train], others.images[to_test]))
    scaling, channels = Scaling.of(train), known.channels if is_small(recipe.model) else 3
    mirror = recipe.augment and recipe.data not in UPRIGHT
    return Images(
        MemoryImages(train, pictures.classes[to_train], scaling, channels, crop=recipe.augment, mirror=mirror),
        MemoryImages(test, others.classes[to_test], scaling, channels),
        known.classes,
        channels,
        _test_batch(train.shape[-1]),
        in_memory=True,
    )


def _from_folders(recipe: Recipe, train: Path, test: Path) -> Images:
    size = recipe.image_size or _SIZE
    if recipe.validate:
        raise RecipeError(f"only data sets in memory can be validated on: {', '.join(names_of('pictures'))}")
    found = (
        FolderImages(train, size, recipe.augment, recipe.train_images),
        FolderImages(test, size, augment=False, count=recipe.test_images),
    )
    if found[0].classes != found[1].classes:
        raise RecipeError(f"{train} and {test} have different classes")
    return Images(*found, len(found[0].classes), test_batch=_test_batch(size))


def _test_batch(size: int) -> int:
    return max(1, min(_MOST_TEST_IMAGES, _MOST_PIXELS // size**2))
