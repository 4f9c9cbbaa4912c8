"""A data set that needs no download: overlapping coloured shapes on textured ground, with boxes and exact masks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from crossbn.lab.data.drawing import mix
from crossbn.lab.data.scenes import Scene

CLASSES = ["ellipse", "rectangle", "triangle"]
_SIDES = (112, 160)  # of an image, at least and below
_MOST_SHAPES = 6
_RADII = (8.0, 32.0)  # of a shape
_LEAST_VISIBLE = 30  # pixels of a shape; one that is hidden further is no object


class ShapeScenes:
    """Images that are drawn when they are asked for, each from its seed and number alone.

    Args:
        part: "train" or "val", which share no image.
        count: how many images.
        seed: of all of them.

    Example:
        >>> scene = ShapeScenes("train", 4).load(0, masks=True)
        >>> scene.image.shape[0], len(scene.boxes) == len(scene.labels) == len(scene.masks)
        (3, True)
    """

    def __init__(self, part: str, count: int, seed: int = 0) -> None:
        self.part, self.count, self.seed = part, count, seed
        self.classes = list(CLASSES)

    def __len__(self) -> int:
        return self.count

    def has_objects(self, number: int) -> bool:
        """Return True: the last shape that is drawn is always to be seen."""
        del number
        return True

    def load(self, number: int, masks: bool) -> Scene:
        """Draw an image."""
        generator = torch.Generator().manual_seed(mix(self.seed, self.part == "train", number))
        height, width = _integers(generator, *_SIDES, count=2)
        image = _ground(height, width, generator)
        count = _integers(generator, 1, _MOST_SHAPES + 1)[0]
        labels = torch.randint(1, len(CLASSES) + 1, (count,), generator=generator)
        owners = torch.zeros(height, width, dtype=torch.int64)  # the shape that is seen at each pixel, from 1 on
        for place, label in enumerate(labels.tolist(), start=1):
            inside = _draw(label, height, width, generator)
            colour, shade = torch.rand(3, 1, 1, generator=generator), _grating(height, width, generator)
            image = torch.where(inside, 0.85 * colour + 0.15 * shade, image)
            owners[inside] = place
        seen = owners == torch.arange(1, count + 1).reshape(-1, 1, 1)
        chosen = seen.sum((1, 2)) >= _LEAST_VISIBLE
        seen, labels = seen[chosen], labels[chosen]
        boxes = torch.tensor([_box(each) for each in seen])
        areas = seen.sum((1, 2)).float()
        pixels = (255 * image).round().clamp(0, 255).to(torch.uint8)
        found = seen.to(torch.uint8) if masks else None
        return Scene(pixels, boxes, labels, found, torch.zeros(len(labels), dtype=torch.bool), areas)


def _integers(generator: torch.Generator, low: int, high: int, count: int = 1) -> list[int]:
    return [int(each) for each in torch.randint(low, high, (count,), generator=generator)]


def _uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def _ground(height: int, width: int, generator: torch.Generator) -> Tensor:
    """Return a textured ground [3, H, W], 0 to 1: clouds, a grating and noise."""
    clouds = torch.rand(1, 3, 5, 5, generator=generator)
    smooth = F.interpolate(clouds, (height, width), mode="bilinear", align_corners=True)[0]
    noise = torch.rand(3, height, width, generator=generator)
    return 0.6 * smooth + 0.2 * _grating(height, width, generator) + 0.2 * noise


def _grating(height: int, width: int, generator: torch.Generator) -> Tensor:
    """Return waves [1, H, W], 0 to 1, of random direction and length."""
    angle, length = _uniform(generator, 0, math.pi), _uniform(generator, 4, 24)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    phase = (x * math.cos(angle) + y * math.sin(angle)) * (2 * math.pi / length)
    return (0.5 + 0.5 * phase.sin())[None]


def _draw(label: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Return which pixels [H, W] are in a shape of random place, size and direction; its centre is in the image."""
    centre = _uniform(generator, 8, height - 8), _uniform(generator, 8, width - 8)
    radius, ratio = _uniform(generator, *_RADII), _uniform(generator, 0.5, 1.0)
    angle = _uniform(generator, 0, 2 * math.pi)
    y, x = torch.meshgrid(torch.arange(height) - centre[0], torch.arange(width) - centre[1], indexing="ij")
    along = (x * math.cos(angle) + y * math.sin(angle)) / radius
    across = (y * math.cos(angle) - x * math.sin(angle)) / (radius * ratio)
    if CLASSES[label - 1] == "ellipse":
        return along.square() + across.square() <= 1
    if CLASSES[label - 1] == "rectangle":
        return (along.abs() <= 0.9) & (across.abs() <= 0.9)
    return (along >= -0.6) & (along + 1.5 * across.abs() <= 1)


def _box(mask: Tensor) -> list[float]:
    """Return the box around a mask [H, W]: the borders of its outermost pixels."""
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    ends = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    return [float(each) for each in ends]
