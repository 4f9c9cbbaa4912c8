"""Images and objects of a folder in COCO's format, checked before anything is trained on them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossbn.lab.data.annotations import check_annotations, decode, find_annotations, read_annotations
from crossbn.lab.data.dataset import DataError
from crossbn.lab.data.scenes import Scene

_LEAST_SIDE = 1e-3  # of a box in pixels; narrower ones have no inside that could be found


class CocoScenes:
    """One part of a folder: COCO 2017's own, or any other that is laid out like it.

    Objects of crowds are told apart. Boxes are cut at the image's border, and those without an inside left out.

    Args:
        folder: with `instances_train*.json` and `instances_val*.json` in it or in `annotations`, and images in a folder
            of the same name (`train2017`), in `images` or beside the file; or with `_annotations.coco.json` in
            `train` and `valid`, among the images.
        part: "train" or "val".
        masks: whether every object must have a mask.

    Raises:
        DataError: if something is missing, or wrong; the sentence names the image.
    """

    def __init__(self, folder: Path, part: str, masks: bool) -> None:
        from pycocotools.coco import COCO

        self.path = find_annotations(folder, part)
        content = read_annotations(self.path)
        check_annotations(content, self.path, masks)
        self.coco = COCO()
        self.coco.dataset = content
        with redirect_stdout(StringIO()):  # it tells how long it takes
            self.coco.createIndex()
        self.numbers = sorted(self.coco.imgs)
        categories = sorted(self.coco.cats)
        self.classes = [str(self.coco.cats[each]["name"]) for each in categories]
        self._labels = {category: label for label, category in enumerate(categories, start=1)}
        self.images = self._find_images(folder)

    def _find_images(self, folder: Path) -> Path:
        """Return the folder of the images, after a look whether all are there."""
        name = self.path.stem.removeprefix("instances_")
        beside = self.path.parent
        places = [beside, folder / name, folder / "images" / name, folder / "images", folder]
        wanted = [self.coco.imgs[number]["file_name"] for number in self.numbers]
        for place in places:
            if (place / wanted[0]).is_file():
                for number in self.numbers:
                    self._check_image(self.coco.imgs[number], place)
                return place
        looked = ", ".join(str(place) for place in dict.fromkeys(places))
        raise DataError(f"{self.path} tells of the image {wanted[0]!r}, which is in none of {looked}")

    def _check_image(self, image: Mapping[str, Any], place: Path) -> None:
        """Compare an image's size with what the annotations say; its pixels are not read."""
        name, told = image["file_name"], (image["width"], image["height"])
        if not (place / name).is_file():
            raise DataError(f"{self.path} tells of the image {name!r}, which is not in {place}")
        with opened(place / name) as found:
            if found.size != told:
                sizes = " by ".join(map(str, found.size)), " by ".join(map(str, told))
                raise DataError(f"the image {name!r} is {sizes[0]}, where {self.path} says {sizes[1]}")

    def __len__(self) -> int:
        return len(self.numbers)

    def has_objects(self, number: int) -> bool:
        """Tell whether an image has an object to train on."""
        image = self.coco.imgs[self.numbers[number]]
        found = self.coco.imgToAnns[self.numbers[number]]
        return any(not each.get("iscrowd") and _has_inside(_corners(each, image)) for each in found)

    def load(self, number: int, masks: bool) -> Scene:
        """Return an image with its objects.

        Raises:
            DataError: if its file cannot be read.
        """
        image = self.coco.imgs[self.numbers[number]]
        pixels = read_image(self.images / image["file_name"])
        found = [each for each in self.coco.imgToAnns[image["id"]] if _has_inside(_corners(each, image))]
        boxes = torch.tensor([_corners(each, image) for each in found]).reshape(-1, 4)
        areas = [each.get("area", each["bbox"][2] * each["bbox"][3]) for each in found]
        return Scene(
            pixels,
            boxes,
            torch.tensor([self._labels[each["category_id"]] for each in found], dtype=torch.int64),
            self._masks(found, pixels) if masks else None,
            torch.tensor([bool(each.get("iscrowd")) for each in found], dtype=torch.bool),
            torch.tensor(areas, dtype=torch.float32),
        )

    def _masks(self, found: list[dict[str, Any]], pixels: Tensor) -> Tensor:
        masks = torch.zeros(len(found), *pixels.shape[1:], dtype=torch.uint8)
        for mask, each in zip(masks, found, strict=True):
            mask.copy_(torch.from_numpy(decode(self.coco.annToRLE(each))))
        return masks


def read_image(path: Path) -> Tensor:
    """Return an image of any kind as uint8 [3, H, W]; grey ones, of 16 bits too, have three channels that are alike.

    Raises:
        DataError: if it cannot be read.
    """
    import numpy as np

    with opened(path) as image:
        if image.mode.startswith("I"):  # Pillow would cut off what is above 255
            grey = (np.array(image) / 257).round().clip(0, 255).astype(np.uint8)
            pixels = np.stack([grey] * 3, axis=-1)
        else:
            pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open an image of which nothing but the header is read yet.

    Raises:
        DataError: if it, or what is asked of it, cannot be read.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except (OSError, ValueError) as error:
        raise DataError(f"the image {path} cannot be read: {error}") from error


def _corners(annotation: Mapping[str, Any], image: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom, within the image."""
    left, top, width, height = annotation["bbox"]
    across, down = image["width"], image["height"]
    ends = max(0.0, left), max(0.0, top), min(across, left + width), min(down, top + height)
    return tuple(map(float, ends))  # type: ignore[return-value]  # four of them


def _has_inside(corners: tuple[float, float, float, float]) -> bool:
    left, top, right, bottom = corners
    return right - left >= _LEAST_SIDE and bottom - top >= _LEAST_SIDE
