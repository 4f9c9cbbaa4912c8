"""Images to train on, batch by batch without end: digits enlarged, or ImageNet from a folder."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from crossbn.compat import ensure_torchvision
from crossbn.lab.data import DATASETS, DataError, imagenet_folder
from crossbn.lab.experiments.cores import usable_cores
from crossbn.lab.experiments.digits import TRAIN_IMAGES, load_digits
from crossbn.lab.experiments.experiment import UnavailableError

CLASSES = {name: DATASETS[name].classes for name in ("digits", "imagenet")}
IMAGENET_IMAGES = DATASETS["imagenet"].train_images

Batch = tuple[Tensor, Tensor]
"""Images [N, 3, H, W] and their classes [N]."""


def check_pictures(data: str, train: bool = True) -> None:
    """Raise UnavailableError if a part of a data set is not there; digits always are."""
    if data != "imagenet":
        return
    try:
        imagenet_folder(train)
    except DataError as error:
        raise UnavailableError(str(error)) from error


def batches(data: str, image_size: int, batch_size: int) -> Iterator[Batch]:
    """Yield batches of a data set without end, in an order that torch's random numbers decide.

    Args:
        data: "digits" or "imagenet".
        image_size: height and width.
        batch_size: images each; those that do not fill a batch are left out until the next pass.
    """
    return _digits(image_size, batch_size) if data == "digits" else _imagenet(image_size, batch_size)


def _digits(image_size: int, batch_size: int) -> Iterator[Batch]:
    images, _ = load_digits(TRAIN_IMAGES)
    pixels = (images.pixels - images.pixels.mean()) / images.pixels.std()
    for chosen in _orders(len(pixels), batch_size):
        enlarged = F.interpolate(pixels[chosen], size=(image_size, image_size), mode="bilinear", align_corners=False)
        yield enlarged.expand(-1, 3, -1, -1), images.digits[chosen]


def _imagenet(image_size: int, batch_size: int) -> Iterator[Batch]:
    ensure_torchvision()
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [
        transforms.RandomResizedCrop(image_size),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    images = ImageFolder(imagenet_folder(train=True), transforms.Compose(steps))
    # Threads: a run's own process may not start others, and decoding does not hold Python's lock.
    with ThreadPoolExecutor(usable_cores()) as pool:
        for chosen in _orders(len(images), batch_size):
            pixels, classes = zip(*pool.map(images.__getitem__, chosen.tolist()), strict=True)
            yield torch.stack(pixels), torch.tensor(classes)


def _orders(images: int, batch_size: int) -> Iterator[Tensor]:
    while True:
        order = torch.randperm(images)
        yield from order[: images // batch_size * batch_size].split(batch_size)
