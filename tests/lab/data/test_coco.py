"""Folders in COCO's format: what is read, and what is told of broken ones."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from crossbn.lab.data import DataError
from crossbn.lab.data.coco import CocoScenes, read_image
from crossbn.lab.recipes.detection import RecipeError
from crossbn.lab.recipes.detection.images import load_images
from tests.lab.data.tiny import draw
from tests.lab.recipes.detection.runs import SIZES, SMALL, annotations, write_folder


def test_boxes_masks_and_labels(tmp_path: Path) -> None:
    scenes = CocoScenes(write_folder(tmp_path), "train", masks=True)
    assert (len(scenes), scenes.classes) == (4, ["square", "round"])
    wide = scenes.load(0, masks=True)
    assert wide.image.shape == (3, 30, 40)
    # One box has no inside, one is cut at the border of the image.
    assert wide.boxes.tolist() == [[5, 5, 15, 15], [35, 0, 40, 10]]
    assert wide.labels.tolist() == [2, 2]
    assert wide.masks is not None
    expected = torch.zeros(30, 40, dtype=torch.uint8)
    expected[5:15, 5:15] = 1
    assert torch.equal(wide.masks[0], expected)
    high = scenes.load(1, masks=True)
    assert (high.crowds.tolist(), high.areas.tolist()) == ([True, False], [500, 100])
    assert high.masks is not None
    assert high.masks[0, :, :10].all()
    assert not high.masks[0, :, 10:].any()
    assert scenes.load(0, masks=False).masks is None


def test_grey_images_have_three_equal_channels(tmp_path: Path) -> None:
    grey = CocoScenes(write_folder(tmp_path), "val", masks=False).load(2, masks=False)
    assert torch.equal(grey.image, torch.full((3, 32, 32), 100, dtype=torch.uint8))


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_grey_images_of_16_bits_keep_their_shades(suffix: str, tmp_path: Path) -> None:
    shades = np.array([[0, 257, 257 * 100, 65535]], dtype=np.uint16)
    Image.fromarray(shades).save(tmp_path / f"deep.{suffix}")
    expected = torch.tensor([[0, 1, 100, 255]], dtype=torch.uint8).expand(3, 1, 4)
    assert torch.equal(read_image(tmp_path / f"deep.{suffix}"), expected)


def test_images_without_objects_are_tested_on_only(tmp_path: Path) -> None:
    images = load_images(replace(SMALL, data=str(write_folder(tmp_path)), train_images=None, test_images=None))
    assert (images.train.chosen.tolist(), images.test.chosen.tolist()) == ([0, 1, 2], [0, 1, 2, 3])
    pixels, targets = images.test[draw(3)]
    assert pixels[0].shape == (3, 24, 32)
    assert targets[0]["boxes"].shape == (0, 4)


def test_crowds_are_not_trained_on_and_are_known_in_testing(tmp_path: Path) -> None:
    images = load_images(
        replace(SMALL, data=str(write_folder(tmp_path)), train_images=None, test_images=None, mirror=False)
    )
    (train,), (test,) = (part[draw(1)][1] for part in (images.train, images.test))
    assert train["boxes"].tolist() == [[5, 5, 15, 15]]
    assert test["iscrowd"].tolist() == [1, 0]


def test_mirrored(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    image = Image.new("RGB", (40, 30))
    image.paste((255, 255, 255), (5, 5, 15, 15))
    image.save(folder / "images" / "wide.png")
    scene = CocoScenes(folder, "train", masks=True).load(0, masks=True)
    mirrored = scene.mirrored()
    assert mirrored.boxes.tolist() == [[25, 5, 35, 15], [0, 0, 5, 10]]
    assert mirrored.masks is not None
    assert torch.equal(mirrored.masks[0].bool(), mirrored.image[0] == 255)
    found = load_images(replace(SMALL, model="mask_rcnn", data=str(folder), train_images=None)).train
    boxes = {tuple(found[draw(0, seed=seed)][1][0]["boxes"][0].tolist()) for seed in range(20)}
    assert boxes == {(5, 5, 15, 15), (25, 5, 35, 15)}


@pytest.mark.parametrize(
    ("annotations_file", "images"),
    [
        ("instances_{}.json", "images"),
        ("annotations/instances_{}2017.json", "{}2017"),
        ("{}/_annotations.coco.json", "{}"),
    ],
)
def test_layouts(annotations_file: str, images: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "plain")
    folder = tmp_path / "other"
    for part in ("train", "val"):
        for source, target in ((f"instances_{part}.json", annotations_file), ("images", images)):
            place = folder / target.format(part)
            place.parent.mkdir(parents=True, exist_ok=True)
            if source != "images":
                place.write_text((tmp_path / "plain" / source).read_text())
                continue
            place.mkdir(exist_ok=True)
            for file in (tmp_path / "plain" / "images").iterdir():
                (place / file.name).write_bytes(file.read_bytes())
    assert CocoScenes(folder, "val", masks=False).load(0, masks=False).boxes[0].tolist() == [5, 5, 15, 15]


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: c["images"][1].pop("width"), "the image 'high.png' has no 'width'"),
        (lambda c: c["images"][1].update(height=0), "the image 'high.png' has a size of 30 by 0"),
        (lambda c: c["images"][1].update(id=10), "'wide.png' and 'high.png' of 'images' have the same id"),
        (lambda c: c["images"][1].update(id="11"), "the ids of 'images' are numbers and texts, 'high.png' has '11'"),
        (lambda c: c["images"][1].update(id=[11]), "'high.png' of 'images' has an id that is neither .* text, .11."),
        (lambda c: c["images"][1].update(file_name=7), "the image 7 has a file_name that is no text"),
        (lambda c: c["images"].insert(1, "high.png"), "entry 1 of 'images' is no object, but 'high.png'"),
        (lambda c: c["annotations"].insert(1, [4]), r"entry 1 of 'annotations' is no object, but \[4\]"),
        (lambda c: c["annotations"][4].pop("id"), "entry 4 of 'annotations' of the image 'high.png' has an id that"),
        (lambda c: c["annotations"][4].update(image_id=[11]), r"annotation 4 is of the image with id \[11\]"),
        (lambda c: c["annotations"][4].update(category_id=[3]), r"'high.png' is of category \[3\]"),
        (lambda c: c["categories"].insert(1, None), "entry 1 of 'categories' is no object, but None"),
        (lambda c: c["categories"][1].update(id=7), "'round' and 'square' of 'categories' have the same id"),
        (lambda c: c["categories"][1].pop("name"), "the category with id 3 has no 'name'"),
        (lambda c: c["images"][1].update(file_name="no.png"), "tells of the image 'no.png', which is not in"),
        (lambda c: c["annotations"][4].update(image_id=99), "annotation 4 is of the image with id 99"),
        (lambda c: c["annotations"][4].update(category_id=8), "annotation 4 of the image 'high.png' is of category 8"),
        (lambda c: c["annotations"][4].update(bbox=[1, 2, 3]), r"'high.png' has a box that is not four .*\[1, 2, 3\]"),
        (lambda c: c["annotations"][4].update(bbox=[1, 2, 3, float("nan")]), "'high.png' has a box that is not four"),
        (lambda c: c["annotations"][4].update(bbox=[1, 2, 3, 10**400]), "'high.png' has a box that is not four"),
        (lambda c: c["annotations"][4].pop("segmentation"), "'high.png' has no mask, which the model needs"),
        (lambda c: c["annotations"][4].update(segmentation=[[1, 2, 3]]), "'high.png' has a mask with a polygon"),
        (lambda c: c["annotations"][3]["segmentation"].update(size=[9, 9]), "'high.png' has a mask of size"),
        (lambda c: c["annotations"][3]["segmentation"].update(counts=[7]), "'high.png' has a mask whose runs"),
        (lambda c: c["annotations"][3]["segmentation"].update(counts=[-1, 1501]), "'high.png' has a mask whose runs"),
        (lambda c: c["annotations"][3]["segmentation"].update(counts="PPPPP1"), "'high.png' has a mask whose runs"),
        (lambda c: c.pop("categories"), "is not in COCO's format: it has no list 'categories'"),
    ],
)
def test_broken_annotations_are_told_with_the_image(change: Change, sentence: str, tmp_path: Path) -> None:
    content = annotations()
    change(content)
    folder = write_folder(tmp_path, content)
    with pytest.raises(DataError, match=sentence):
        CocoScenes(folder, "train", masks=True)


def test_other_files_are_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "instances_val.json").write_text("{")
    with pytest.raises(DataError, match=r"instances_val\.json is not JSON"):
        CocoScenes(folder, "val", masks=False)
    (folder / "instances_val.json").unlink()
    with pytest.raises(DataError, match="has no COCO annotations for 'val'"):
        CocoScenes(folder, "val", masks=False)
    (folder / "instances_train_2.json").write_text("{}")
    with pytest.raises(DataError, match=r"several files .* instances_train\.json, instances_train_2\.json: leave one"):
        CocoScenes(folder, "train", masks=False)
    with pytest.raises(RecipeError, match="there is no data set 'no_such': there are coco, shapes"):
        load_images(replace(SMALL, data="no_such"))


@pytest.mark.parametrize("name", ["wide.png", "grey.png"])
def test_an_image_of_another_size_is_told_before_one_is_used(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    Image.new("RGB", (9, 8)).save(folder / "images" / name)
    with pytest.raises(DataError, match=rf"the image '{name}' is 9 by 8, where .* says {SIZES[name][0]} by"):
        CocoScenes(folder, "train", masks=False)


def test_images_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    cut = folder / "images" / "wide.png"
    cut.write_bytes(cut.read_bytes()[:60])
    scenes = CocoScenes(folder, "train", masks=False)  # its header is whole
    with pytest.raises(DataError, match=r"wide\.png cannot be read"):
        scenes.load(0, masks=False)
    (folder / "images" / "high.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"high\.png cannot be read"):
        CocoScenes(folder, "train", masks=False)


def test_classes_must_agree(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    content = annotations()
    content["categories"][0]["name"] = "oval"
    (folder / "instances_val.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="have different classes"):
        load_images(replace(SMALL, data=str(folder)))
