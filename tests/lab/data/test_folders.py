"""Images in folders."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from crossbn.lab.data import DataError
from crossbn.lab.data.folders import FolderImages
from crossbn.lab.recipes.classification import Machine, RecipeError, train
from crossbn.lab.recipes.classification.images import load_images
from tests.lab.data.tiny import draw
from tests.lab.recipes.classification.runs import SMALL

COLOURS = {"blue": (20, 40, 230), "red": (230, 40, 20)}
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def write_images(place: Path) -> Path:
    """Write eight images to train on and four to test on, wider than high, each class of its colour."""
    for part, count in (("train", 4), ("val", 2)):
        for name, colour in COLOURS.items():
            (place / part / name).mkdir(parents=True)
            for i in range(count):
                image = Image.new("RGB", (20, 16), colour)
                image.putpixel((i, i), (0, 0, 0))
                image.save(place / part / name / f"{i}.png")
    return place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_images(tmp_path)


def test_a_batch_is_resized_normalized_and_of_its_classes(folder: Path) -> None:
    images = FolderImages(folder / "val", 7, augment=False)
    assert (len(images), images.classes) == (4, ["blue", "red"])
    pixels, classes = images[draw(3, 0)]
    assert pixels.shape == (2, 3, 7, 7)
    assert classes.tolist() == [1, 0]
    centre = pixels[:, :, -1, -1] * STD + MEAN
    expected = torch.tensor([COLOURS["red"], COLOURS["blue"]]) / 255
    torch.testing.assert_close(centre, expected, rtol=0, atol=0.01)


def test_augmentation_is_of_the_draw_alone(folder: Path) -> None:
    images = FolderImages(folder / "train", 6, augment=True)
    torch.manual_seed(1)
    first = images[draw(0, 1, 2, seed=4)][0]
    after = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(2), after)
    assert torch.equal(images[draw(0, 1, 2, seed=4)][0], first)
    assert not torch.equal(images[draw(0, 1, 2, seed=5)][0], first)


def test_fewer_images_are_always_the_same(folder: Path) -> None:
    few, more = (FolderImages(folder / "train", 4, False, count).chosen.tolist() for count in (3, 5))
    assert len(few) == 3
    assert more[:3] == few


def test_own_folders_have_the_usual_size_of_images(folder: Path) -> None:
    images = load_images(replace(SMALL, data=str(folder)))
    assert (images.classes, images.channels) == (2, 3)
    assert images.train[draw(0)][0].shape == (1, 3, 224, 224)


def test_threads_read_the_same(folder: Path) -> None:
    alone, together = (FolderImages(folder / "train", 4, True, threads=threads) for threads in (0, 2))
    both = [images[draw(0, 3, 1, seed=7)] for images in (alone, together)]
    assert torch.equal(both[0][0], both[1][0])
    assert torch.equal(both[0][1], both[1][1])


def test_different_classes_are_refused(folder: Path) -> None:
    (folder / "val" / "red").rename(folder / "val" / "green")
    with pytest.raises(RecipeError, match="have different classes"):
        load_images(replace(SMALL, data=str(folder)))


def test_a_class_without_images_is_refused(folder: Path) -> None:
    (folder / "train" / "green").mkdir()
    with pytest.raises(DataError, match="no valid file for the classes green"):
        load_images(replace(SMALL, data=str(folder)))


def test_imagenet_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ImageNet is not in"):
        train(replace(SMALL, data="imagenet"), machine=Machine(data_folder=tmp_path))
