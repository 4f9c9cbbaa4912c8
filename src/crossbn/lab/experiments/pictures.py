"""Images for plain trainings, batch by batch: digits enlarged, or ImageNet from a folder."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from crossbn.lab.data import DataError, imagenet_folder, load_pictures
from crossbn.lab.data.drawing import Draw
from crossbn.lab.data.folders import FolderImages
from crossbn.lab.environment import usable_cores
from crossbn.lab.experiments.experiment import UnavailableError
from crossbn.lab.records import Task
from crossbn.lab.training import Batch, draw

_INK = 16  # what a pixel of a digit counts to
_TESTED_AT_ONCE = 100


def check_pictures(tasks: Sequence[Task], *, test: bool = False) -> None:
    """Raise UnavailableError if ImageNet is not there for runs that need it; digits always are."""
    if all(task.settings["data"] != "imagenet" for task in tasks):
        return
    try:
        for train in (True, False) if test else (True,):
            imagenet_folder(train)
    except DataError as error:
        raise UnavailableError(str(error)) from error


def load_digits(train: bool) -> Batch:
    """Return the pixels of digits [N, 1, 8, 8], 0 to 1 as scikit-learn has them, and the digit each image shows."""
    images, digits = load_pictures("digits", train)
    return (images * (_INK / 255)).round() / _INK, digits


def batches(data: str, image_size: int, batch_size: int) -> Iterator[Batch]:
    """Yield batches to train on without end, in an order that torch's random numbers decide.

    Args:
        data: "digits" or "imagenet".
        image_size: height and width.
        batch_size: images each.
    """
    if data == "imagenet":
        yield from _imagenet(image_size, batch_size, train=True)
    pixels, digits = load_digits(train=True)
    scaled = _scale(pixels)
    for chosen in draw(len(digits), batch_size):
        yield _enlarge(scaled[chosen], image_size), digits[chosen]


def batches_to_test(data: str, image_size: int) -> Iterable[Batch]:
    """Return the images to test on once, prepared as those to train on are."""
    if data == "imagenet":
        return _imagenet(image_size, _TESTED_AT_ONCE, train=False)
    pixels, digits = load_digits(train=False)
    return [(_enlarge(_scale(pixels), image_size), digits)]


def _scale(pixels: Tensor) -> Tensor:
    known, _ = load_digits(train=True)
    return (pixels - known.mean()) / known.std()


def _enlarge(pixels: Tensor, size: int) -> Tensor:
    return F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)


def _imagenet(image_size: int, batch_size: int, train: bool) -> Iterable[Batch]:
    images = FolderImages(imagenet_folder(train), image_size, augment=train)
    chosen = draw(len(images), batch_size) if train else torch.arange(len(images)).split(batch_size)
    draws = (Draw(each, number) for number, each in enumerate(chosen))
    return DataLoader(images, sampler=draws, batch_size=None, num_workers=usable_cores(), generator=torch.Generator())
