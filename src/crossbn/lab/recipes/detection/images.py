"""Scenes of a recipe as batches: mirrored at random, in the form that torchvision's detectors take."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from crossbn.lab.recipes.classification.order import Draw
from crossbn.lab.recipes.detection.scenes import Scene, Scenes

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]
"""Images [3, H, W], 0 to 1, of any sizes, and what is in each of them, by name."""


class DetectionImages(Dataset[Batch]):
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
