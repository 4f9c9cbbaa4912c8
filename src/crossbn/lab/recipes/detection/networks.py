"""Detectors by name: Faster and Mask R-CNN with the paper's heads, and those of torchvision that have a ResNet-50.

Shaoqing Ren, Kaiming He, Ross Girshick, Jian Sun, "Faster R-CNN", NeurIPS 2015, https://arxiv.org/abs/1506.01497.
Kaiming He, Georgia Gkioxari, Piotr Dollár, Ross Girshick, "Mask R-CNN", ICCV 2017, https://arxiv.org/abs/1703.06870.
Tsung-Yi Lin et al., "Feature Pyramid Networks for Object Detection", CVPR 2017, https://arxiv.org/abs/1612.03144.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.compat import ensure_torchvision
from crossbn.lab.recipes.detection.backbones import PRETRAINED, build_backbone, freeze_early_, load_backbone_
from crossbn.lab.recipes.detection.recipe import ALL, HEADS, NO_NORM, OWN_MODELS, Recipe, weights_file
from crossbn.lab.recipes.recipe import RecipeError
from crossbn.messages import no_such

_FAMILIES = ("fasterrcnn_resnet", "maskrcnn_resnet", "retinanet_resnet", "fcos_resnet")
_FULL_SIZE, _FULL_PROPOSALS = 800, 512
_ANCHORS = (32, 64, 128, 256, 512)  # sides at full size, one for each level of the pyramid
_KEPT, _LEAST_KEPT = 2000, 250  # proposals of an image after suppression, at full number and at least


def model_names() -> list[str]:
    """Return the names of all detectors."""
    ensure_torchvision()
    from torchvision import models

    known = models.list_models(module=models.detection)
    return [*OWN_MODELS, *(name for name in known if name.startswith(_FAMILIES))]


def check_model(name: str) -> None:
    """Raise RecipeError if there is no detector of that name."""
    if name not in model_names():
        raise RecipeError(no_such("model", name, model_names()))


def is_pretrained(recipe: Recipe) -> bool:
    """Tell whether a recipe's backbone begins with trained weights."""
    comes_with_them = recipe.model in OWN_MODELS and recipe.backbone == PRETRAINED
    return recipe.backbone_weights is not None or comes_with_them


def build_network(recipe: Recipe, classes: int, trained: bool = False) -> nn.Module:
    """Return a detector with BatchNorm wherever a norm can be chosen; equal seeds give equal weights.

    The early stages of a trained backbone are not trained on.

    Args:
        recipe: of the run.
        classes: to find, without the background.
        trained: whether weights of the whole detector will be loaded; a file of backbone weights is then not needed.

    Raises:
        RecipeError: if there is no such detector, or its weights cannot be had.
    """
    recipe.check_model()
    if (recipe.where == HEADS or recipe.frozen_backbone) and not is_pretrained(recipe):
        fixed = 'where "heads" fixes the norms' if recipe.where == HEADS else "frozen_backbone fixes the weights"
        raise RecipeError(
            f"{fixed} of the backbone, which has no weights that they could belong to: give backbone_weights (the "
            f"command looks for {weights_file(recipe.backbone)} in the folder of the data sets), take the backbone "
            f'{PRETRAINED}, or train with where "all"'
        )
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        network: Any = _own(recipe, classes) if recipe.model in OWN_MODELS else _torchvision(recipe, classes)
    if recipe.backbone_weights is not None and not trained:
        load_backbone_(network.backbone, Path(recipe.backbone_weights))
    if is_pretrained(recipe):
        freeze_early_(network.backbone)
    if recipe.frozen_backbone:
        network.backbone.body.requires_grad_(False)
    for each in network.backbone.body.modules():
        if recipe.norm_momentum is not None and isinstance(each, nn.BatchNorm2d):
            each.momentum = recipe.norm_momentum
    return network


def _sizes(recipe: Recipe) -> dict[str, Any]:
    """Return the sizes that images are brought to; torchvision tests at the last one."""
    others = [size for size in recipe.scales if size != recipe.image_size]
    return {"min_size": (*others, recipe.image_size), "max_size": recipe.image_size * 5 // 3}


def _proposals(recipe: Recipe) -> dict[str, int]:
    """Return how many regions an R-CNN looks at, in proportion to those that its heads are trained on."""
    kept = max(_LEAST_KEPT, round(_KEPT * recipe.proposals / _FULL_PROPOSALS))
    names = (f"rpn_{when}_nms_top_n_{mode}" for when in ("pre", "post") for mode in ("train", "test"))
    halves = {"train": kept, "test": max(1, kept // 2)}
    counts = {name: halves[name.rpartition("_")[2]] for name in names}
    return {**counts, "box_batch_size_per_image": recipe.proposals}


def _own(recipe: Recipe, classes: int) -> nn.Module:
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FasterRCNN, FastRCNNConvFCHead, FastRCNNPredictor
    from torchvision.models.detection.mask_rcnn import MaskRCNN, MaskRCNNHeads, MaskRCNNPredictor

    channels, norm_layer = recipe.channels, None if recipe.norm == NO_NORM else nn.BatchNorm2d
    pyramid_norm = norm_layer if recipe.where == ALL and not recipe.plain_pyramid else None
    backbone, scaling = build_backbone(recipe.backbone, channels, pyramid_norm)
    # Objects are as large as the images are; anchors keep the size that they have among them.
    sides = tuple((max(1, side * recipe.image_size // _FULL_SIZE),) for side in _ANCHORS)
    parts: dict[str, Any] = {
        "rpn_anchor_generator": AnchorGenerator(sides, ((0.5, 1.0, 2.0),) * len(sides)),
        "box_head": FastRCNNConvFCHead((channels, 7, 7), [channels] * 4, [4 * channels], norm_layer),
        "box_predictor": FastRCNNPredictor(4 * channels, classes + 1),
        **{"image_mean": list(scaling.mean), "image_std": list(scaling.std)},
        **_sizes(recipe),
        **_proposals(recipe),
    }
    if not recipe.has_masks:
        return FasterRCNN(backbone, **parts)
    parts["mask_head"] = MaskRCNNHeads(channels, [channels] * 4, 1, norm_layer)
    parts["mask_predictor"] = MaskRCNNPredictor(channels, channels, classes + 1)
    return MaskRCNN(backbone, **parts)


def _torchvision(recipe: Recipe, classes: int) -> nn.Module:
    """Return one of torchvision's detectors; heads that have GroupNorm there have BatchNorm here, to choose from."""
    from torchvision import models

    options = _proposals(recipe) if "rcnn" in recipe.model else {}
    network = models.get_model(
        recipe.model, weights=None, weights_backbone=None, num_classes=classes + 1, **_sizes(recipe), **options
    )
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.GroupNorm):
                setattr(parent, name, nn.BatchNorm2d(child.num_channels))
    if hasattr(network, "head"):
        network.head = LevelHeads(network.head, len(network.anchor_generator.sizes))
    return network


class LevelHeads(nn.Module):
    """A head that runs on every level of a pyramid, as one for each: only running statistics are the level's own.

    Levels differ in their statistics. With an average of these BatchNorm would normalize none of them in evaluation.

    Args:
        head: of the first level; the others have its parameters.
        levels: how many there are.
    """

    def __init__(self, head: Any, levels: int) -> None:
        super().__init__()
        shared = {id(each): each for each in head.parameters()}
        self.heads = nn.ModuleList([head, *(copy.deepcopy(head, dict(shared)) for _ in range(levels - 1))])

    def forward(self, features: list[Tensor]) -> dict[str, Tensor]:
        """Return what the heads say of all levels, one after the other, by name."""
        outputs = [head([level]) for head, level in zip(self.heads, features, strict=True)]
        return {name: torch.cat([output[name] for output in outputs], dim=1) for name in outputs[0]}

    def compute_loss(self, *told: Any) -> Any:
        """Return the losses by name; the arguments are the head's."""
        head: Any = self.heads[0]
        return head.compute_loss(*told)
