"""Backbones with a feature pyramid: torchvision's residual networks, and EfficientNet-Lite0 with its weights."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbn.lab.models import build_pretrained
from crossbn.lab.recipes.recipe import RecipeError

PRETRAINED = "efficientnet_lite0"
EARLY = ("stem", "conv1", "bn1", "layer1")
"""The parts of a backbone that the paper calls conv1 and conv2; a trained one's stay as they are."""
_STAGES = ("layer1", "layer2", "layer3", "layer4")
# EfficientNet-Lite0's blocks before which the stages of stride 8, 16 and 32 begin, and the last one's end.
_BLOCKS = (0, 3, 5, 11, 16)
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_LITE = (127 / 255,) * 3, (128 / 255,) * 3  # EfficientNet-Lite's images are from -1 to 1


class Scaling(NamedTuple):
    """What a backbone's images are normalized with, channel by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def build_backbone(name: str, channels: int, norm_layer: Callable[..., nn.Module] | None) -> tuple[Any, Scaling]:
    """Return a backbone with a feature pyramid of five levels, and what its images are normalized with.

    Args:
        name: one of `recipe.BACKBONES`.
        channels: of the pyramid.
        norm_layer: makes the norms of the pyramid; None for none.
    """
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

    if name == PRETRAINED:
        body, widths, scaling = _efficientnet(), [24, 40, 112, 320], Scaling(*_LITE)
    else:
        body, scaling = _resnet(name), Scaling(*_IMAGENET)
        widths = [body.inplanes // 8 << stage for stage in range(len(_STAGES))]
    layers = {stage: str(number) for number, stage in enumerate(_STAGES)}
    return BackboneWithFPN(body, layers, widths, channels, norm_layer=norm_layer), scaling


def _resnet(name: str) -> Any:
    from torchvision import models

    return models.get_model(name, weights=None)


def _efficientnet() -> nn.Module:
    """Return EfficientNet-Lite0 with ImageNet's weights, in stages that are called as a residual network's."""
    network: Any = build_pretrained(classes=1)
    stem = nn.Sequential(network._conv_stem, network._bn0, network._swish)
    stages = [nn.Sequential(*network._blocks[first:last]) for first, last in pairwise(_BLOCKS)]
    return nn.Sequential(OrderedDict(zip(("stem", *_STAGES), (stem, *stages), strict=True)))


def load_backbone_(backbone: Any, path: Path) -> None:
    """Load weights of a classifier, as torchvision saves them, into the body of a backbone.

    Raises:
        RecipeError: if the file is something else, or of another network.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever a file makes it stumble over
        raise RecipeError(f"backbone weights {path} are no file of weights that torch can read") from error
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise RecipeError(f"backbone weights {path} are no weights by name, as torchvision saves a classifier's")
    for name, own in backbone.body.state_dict().items():  # the last layer is not the backbone's
        found = state.get(name)
        if not isinstance(found, Tensor) and not name.endswith("num_batches_tracked"):
            raise RecipeError(f"backbone weights {path} are of another network: they have no {name!r}")
        if isinstance(found, Tensor) and found.shape != own.shape:
            shapes = f"{list(found.shape)}, not {list(own.shape)}"
            raise RecipeError(f"backbone weights {path} are of another network: {name!r} is {shapes}")
    backbone.body.load_state_dict(state, strict=False)


def freeze_early_(backbone: Any) -> None:
    """Let the weights of the early stages be what they are."""
    for name, part in backbone.body.named_children():
        if name in EARLY:
            part.requires_grad_(False)
