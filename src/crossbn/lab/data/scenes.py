"""Images with the objects in them, wherever they come from, and batches as torchvision's detectors take them."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from crossbn.lab.data.drawing import Draw

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]
"""Images [3, H, W], 0 to 1, of any sizes, and what is in each of them, by name."""


class Scene(NamedTuple):
    """An image and its objects."""

    image: Tensor
    """uint8 [3, H, W]."""
    boxes: Tensor
    """float32 [N, 4]: left, top, right, bottom, in pixels."""
    labels: Tensor
    """int64 [N], from 1 on; 0 is the background's."""
    masks: Tensor | None
    """uint8 [N, H, W], 1 where an object is; None if nobody asked for them."""
    crowds: Tensor
    """bool [N]: regions of many objects, which are neither trained on nor counted."""
    areas: Tensor
    """float32 [N] in pixels, which decide what is a small, medium or large object."""

    def keep(self, chosen: Tensor) -> "Scene":
        """Return the scene with those objects only for which `chosen` [N] is true."""
        masks = None if self.masks is None else self.masks[chosen]
        return Scene(
            self.image, self.boxes[chosen], self.labels[chosen], masks, self.crowds[chosen], self.areas[chosen]
        )

    def mirrored(self) -> "Scene":
        """Return the scene as a mirror shows it."""
        width = self.image.shape[-1]
        left, top, right, bottom = self.boxes.unbind(1)
        boxes = torch.stack([width - right, top, width - left, bottom], dim=1)
        masks = None if self.masks is None else self.masks.flip(-1)
        return self._replace(image=self.image.flip(-1), boxes=boxes, masks=masks)


class Scenes(Protocol):
    """A part of a data set.

    Attributes:
        classes: their names; the label of the first is 1.
    """

    classes: list[str]

    def __len__(self) -> int:
        """Return how many images there are."""
        ...

    def has_objects(self, number: int) -> bool:
        """Tell whether an image has an object to train on."""
        ...

    def load(self, number: int, masks: bool) -> Scene:
        """Return an image with its objects; of these the masks only if they are asked for."""
        ...


class SceneImages(Dataset[Batch]):
    """Images with their objects; an item is a whole batch.

    Args:
        scenes: a part of a data set.
        chosen: numbers of its images.
        masks: whether objects have masks.
        training: whether crowds are left out, and images mirrored half of the time if `mirror` says so.
        mirror: whether to.
    """

    def __init__(self, scenes: Scenes, chosen: Tensor, masks: bool, training: bool, mirror: bool = False) -> None:
        self.scenes, self.chosen, self.masks = scenes, chosen, masks
        self.training, self.mirror = training, mirror

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, draw: Draw) -> Batch:
        """Return the images of a draw."""
        scenes = [self.scenes.load(int(number), self.masks) for number in self.chosen[draw.images]]
        if self.training and self.mirror:
            chances = torch.rand(len(scenes), generator=torch.Generator().manual_seed(draw.seed))
            scenes = [each.mirrored() if chance < 0.5 else each for each, chance in zip(scenes, chances, strict=True)]
        return [each.image.float() / 255 for each in scenes], [self._target(each) for each in scenes]

    def _target(self, scene: Scene) -> dict[str, Tensor]:
        if self.training:
            scene = scene.keep(~scene.crowds)
        target = {"boxes": scene.boxes, "labels": scene.labels}
        if scene.masks is not None:
            target["masks"] = scene.masks
        if not self.training:
            target |= {"iscrowd": scene.crowds.long(), "area": scene.areas}
        return target
