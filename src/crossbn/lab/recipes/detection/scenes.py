"""An image with the objects in it, wherever it comes from."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


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
