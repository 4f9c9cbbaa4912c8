"""A detector whose cost can be measured as a classifier's is: it takes a batch of images and nothing else."""

from typing import Any

import torch
from torch import Tensor, nn

from crossbn.lab.recipes.detection.networks import build_network
from crossbn.lab.recipes.detection.recipe import ALL, Recipe

_CLASSES = 3
_BOXES = ((0.1, 0.1, 0.4, 0.5), (0.3, 0.5, 0.9, 0.8), (0.6, 0.1, 0.8, 0.3))  # of each image, relative to its size


class CostedDetector(nn.Module):
    """A detector that knows what is in all images; in training it returns its losses, else what it finds."""

    boxes: Tensor
    labels: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("boxes", torch.tensor(_BOXES), persistent=False)
        self.register_buffer("labels", torch.arange(1, _CLASSES + 1), persistent=False)

    def forward(self, images: Tensor) -> Any:
        """Return losses by name, or for each image boxes, labels and scores; `images` is [N, 3, H, W]."""
        if not self.training:
            return self.network(list(images))
        height, width = images.shape[-2:]
        scale = torch.tensor([width, height, width, height], device=images.device)
        target = {"boxes": self.boxes * scale, "labels": self.labels}
        return self.network(list(images), [target] * len(images))


def faster_rcnn_resnet18() -> nn.Module:
    """Return a Faster R-CNN of ResNet-18 with a norm everywhere, for images of 256 pixels."""
    return CostedDetector(
        build_network(
            Recipe(backbone="resnet18", where=ALL, norm="bn", image_size=256, channels=128, proposals=64), _CLASSES
        )
    )
