"""Small data sets, all of whose images are in memory: drawn, cropped, flipped and normalized a batch at a time."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from crossbn.lab.data.drawing import Draw

_CHUNK = 1024  # images whose pixels are looked at as float64 at once
UPRIGHT = frozenset({"digits", "mnist", "svhn"})
"""Data sets whose images mean something else in a mirror."""


class Scaling(NamedTuple):
    """By which pixels of each channel become numbers of mean 0 and variance 1: [C, 1, 1] each."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, images: Tensor) -> "Scaling":
        """Return the scaling for uint8 images [N, C, H, W]."""
        channels, pixels = images.shape[1], images[:, 0].numel()
        total, squares = torch.zeros(2, channels, dtype=torch.float64)
        for part in images.split(_CHUNK):
            values = part.double()
            total += values.sum((0, 2, 3))
            squares += values.square().sum((0, 2, 3))
        mean = total / pixels
        std = (squares / pixels - mean.square()).clamp(min=1e-12).sqrt()
        return cls(*(each.float().reshape(channels, 1, 1) for each in (mean, std)))


class MemoryImages(Dataset[tuple[Tensor, Tensor]]):
    """Images and their classes; an item is a whole batch, prepared.

    Augmentation is that of small images: a crop of the image with an eighth of its size added on each side, black as
    the normalized mean, mirrored half of the time.

    Args:
        images: uint8 [N, C, H, W].
        classes: int64 [N].
        scaling: from the training images.
        channels: of the network; grey images are repeated.
        crop: whether to crop at random.
        mirror: whether to mirror at random.
    """

    def __init__(
        self, images: Tensor, classes: Tensor, scaling: Scaling, channels: int, crop: bool = False, mirror: bool = False
    ) -> None:
        self.images, self.classes = images, classes
        self.scaling = scaling
        self.channels = channels
        self.crop, self.mirror = crop, mirror
        self.margin = max(1, images.shape[-1] // 8) if crop else 0

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Return images [N, C, H, W], normalized, and classes [N]."""
        pixels = (self.images[draw.images].float() - self.scaling.mean) / self.scaling.std
        if self.crop or self.mirror:
            pixels = self._augment(pixels, torch.Generator().manual_seed(draw.seed))
        return pixels.expand(-1, self.channels, -1, -1), self.classes[draw.images]

    def _augment(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        count, channels, height, width = pixels.shape
        margin = self.margin
        rows, columns = torch.arange(height).expand(count, -1), torch.arange(width).expand(count, -1)
        if self.mirror:
            mirrored = torch.rand(count, 1, generator=generator) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
        if self.crop:
            shifts = torch.randint(2 * margin + 1, (2, count, 1), generator=generator)
            rows, columns = rows + shifts[0], columns + shifts[1]
            pixels = F.pad(pixels, (margin, margin, margin, margin))
        image, channel = torch.arange(count).reshape(-1, 1, 1, 1), torch.arange(channels).reshape(1, -1, 1, 1)
        return pixels[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def resize(images: Tensor, size: int | None) -> Tensor:
    """Return uint8 images [N, C, size, size]; None for the size they have."""
    if size is None or images.shape[-2:] == (size, size):
        return images
    resized = [
        F.interpolate(part.float(), (size, size), mode="bilinear", align_corners=False, antialias=True)
        for part in images.split(_CHUNK)
    ]
    return torch.cat([part.round().clamp(0, 255).to(torch.uint8) for part in resized])
