"""What a training of a detector is told, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from crossbn.lab.norm_names import NORM_NAMES
from crossbn.lab.recipes.recipe import RecipeError, TrainingOutcome, TrainingRecipe

BASE_LEARNING_RATE, BASE_BATCH_SIZE = 0.02, 16
"""The paper's: the learning rate is proportional to the images of a step, of all processes."""
DECAYS = (9 / 12, 11 / 12)
"""Shares of the training after which the learning rate is divided by ten."""
WARM_UP_STEPS = 1000
HEADS, ALL = "heads", "all"
NO_NORM = "none"
OWN_MODELS = ("faster_rcnn", "mask_rcnn")
"""Built here, of torchvision's parts: with a backbone of choice and the paper's heads."""
_OWN = ("backbone", "channels")
"""Fields that are of these only."""
_NEW = ("frozen_backbone", "norm_momentum", "plain_pyramid")
BACKBONES = ("resnet18", "resnet50", "resnet101", "efficientnet_lite0")
SCORES = ("AP", "AP50", "AP75", "APs", "APm", "APl")
"""COCO's, 0 to 1: the mean over overlaps of 0.5 to 0.95, at 0.5, at 0.75, and of small, medium and large objects."""
Scores = Mapping[str, float | None]
"""By name, those of masks with "mask " before them; None where there is no object of that size."""


class Point(NamedTuple):
    """A measurement during training."""

    epoch: float
    """Passes over the training images so far."""
    train_loss: float
    """Mean over the steps since the previous point."""
    scores: Scores
    """On the test images."""


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingRecipe["Outcome"]):
    """What one training of a detector is told; see `TrainingRecipe` for what all trainings are told.

    Attributes:
        data: "shapes", "coco" (a folder in that of the data sets), or the path of a folder in COCO's format.
        model: "faster_rcnn" or "mask_rcnn", with the paper's heads, or one of torchvision's detectors.
        backbone: of the first two, one of `BACKBONES`. "efficientnet_lite0" comes with ImageNet's weights.
        backbone_weights: the path of a file of weights for the others, as torchvision saves them; None for random ones.
        where: "heads" for the norm in the heads, and the backbone's BN fixed; "all" for the norm everywhere but in the
            backbone's early stages, whose BN is fixed, and nowhere fixed where the backbone has random weights.
        norm: a key of `crossbn.nn.NORMS`, or "none" for heads without.
        frozen_backbone: whether the weights of a trained backbone stay as they are, all of them; the pyramid's do not.
        norm_momentum: of the running statistics of the backbone's norms; None for its own.
        plain_pyramid: whether the feature pyramid has no norms where "all" else has them; its smallest maps are a few
            positions.
        learning_rate: after warm-up; None for 0.02 / 16 for each image of a step.
        image_size: the shorter side of an image, unless the longer would exceed 5/3 of that.
        scales: further shorter sides, to choose from at random in training beside `image_size`.
        mirror: whether training images are mirrored half of the time.
        channels: of the pyramid and the heads of the first two models.
        proposals: regions of an image that the heads are trained on, of the R-CNNs.

    Raises:
        RecipeError: for a value that is out of range, or contradicts another.

    Example:
        >>> Recipe(batch_size=4).effective_learning_rate(processes=4)
        0.02
    """

    point_type: ClassVar[Any] = Point
    kind: ClassVar[str] = "detect"
    packages: ClassVar[tuple[str, ...]] = (*TrainingRecipe.packages, "pycocotools", "faster-coco-eval")

    data: str = "shapes"
    model: str = "faster_rcnn"
    backbone: str = "resnet50"
    backbone_weights: str | None = None
    where: str = HEADS
    frozen_backbone: bool = False
    norm_momentum: float | None = None
    plain_pyramid: bool = False
    epochs: int = 12
    image_size: int = 800
    scales: tuple[int, ...] = ()
    mirror: bool = True
    channels: int = 256
    proposals: int = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", tuple(self.scales))  # JSON has lists
        self.check_least(1, "image_size", "channels", "proposals")
        self.check_least(0, "norm_momentum", optional=True)
        if any(size < 1 for size in self.scales):
            raise RecipeError(f"scales must be at least 1, got {self.scales!r}")
        if self.where not in (HEADS, ALL):
            raise RecipeError(f"where must be {HEADS} or {ALL}, got {self.where!r}")
        self.check_one_of("backbone", BACKBONES)
        super().__post_init__()
        if self.norm == NO_NORM and self.where == ALL:
            raise RecipeError(
                'norm "none" is for heads: a backbone without norms is another network; take where "heads"'
            )
        if self.norm == NO_NORM and self.model not in OWN_MODELS:
            raise RecipeError(f'norm "none" is for {" and ".join(OWN_MODELS)}, whose heads are built here')

    @property
    def norms(self) -> Iterable[str]:
        """The names of the norms that there are for such a training."""
        return (NO_NORM, *NORM_NAMES)

    def check_model(self) -> None:
        """Raise RecipeError if there is no such detector, or it would ignore a field."""
        from crossbn.lab.recipes.detection.networks import check_model

        check_model(self.model)
        ignored = [each.name for each in fields(self) if each.name in _OWN and getattr(self, each.name) != each.default]
        if ignored and self.model not in OWN_MODELS:
            raise RecipeError(f"{ignored[0]} is of {' and '.join(OWN_MODELS)}: {self.model} comes with its own")

    @property
    def has_masks(self) -> bool:
        """Whether objects are found with their masks."""
        return self.model.startswith(("mask_rcnn", "maskrcnn"))

    def effective_learning_rate(self, processes: int = 1) -> float:
        """Return the learning rate after warm-up."""
        if self.learning_rate is not None:
            return self.learning_rate
        return BASE_LEARNING_RATE * self.batch_size * self.accumulate * processes / BASE_BATCH_SIZE

    def settings(self) -> dict[str, Any]:
        """Return the fields that say what is computed, by name, as JSON has them."""
        found = {**super().settings(), "scales": list(self.scales)}
        # Records and checkpoints of before have none of these.
        return {name: value for name, value in found.items() if name not in _NEW or value not in (None, False)}

    def portable_settings(self) -> dict[str, Any]:
        """Return the settings but for the seed, with names of files and folders in place of their paths."""
        weights = None if self.backbone_weights is None else Path(self.backbone_weights).name
        return {**super().portable_settings(), "backbone_weights": weights}

    def outcome(self, *told: Any) -> Outcome:
        """Return what came of it."""
        return Outcome(self, *told)


def weights_file(backbone: str) -> str | None:
    """Return the name under which a backbone's weights are looked for among the data sets; None if it needs none.

    Example:
        >>> weights_file("resnet50")
        'resnet50.pth'
    """
    return f"{backbone}.pth" if backbone.startswith("resnet") else None


def learning_rate_factor(step: int, steps: int, steps_per_epoch: int) -> float:
    """Return what the learning rate is multiplied by at a step: a linear warm-up, then 1, 0.1 and 0.01.

    Example:
        >>> [learning_rate_factor(step, 1200, 100) for step in (0, 50, 100, 900, 1100)]
        [0.01, 0.51, 1.0, 0.1, 0.01]
    """
    warm_up = min(WARM_UP_STEPS, steps_per_epoch)
    decayed = sum(step >= round(share * steps) for share in DECAYS)
    return min(1.0, (step + 1) / warm_up) * [1.0, 0.1, 0.01][decayed]


@dataclass(frozen=True)
class Outcome(TrainingOutcome):
    """A finished training of a detector."""

    @property
    def scores(self) -> Scores:
        """The scores at the end."""
        found: Scores = self.curve[-1].scores
        return found

    def final(self) -> dict[str, Any]:
        """Return what was measured at the end, by name."""
        return {"scores": dict(self.scores)}
