"""What a training of a detector is told, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import nn

from crossbn.lab.recipes.classification.recipe import CROSS_ITERATION, RecipeError, check_least, check_switch
from crossbn.nn import NORMS
from crossbn.schedules import window_for

BASE_LEARNING_RATE, BASE_BATCH_SIZE = 0.02, 16
"""The paper's: the learning rate is proportional to the images of a step, of all processes."""
DECAYS = (9 / 12, 11 / 12)
"""Shares of the training after which the learning rate is divided by ten."""
WARM_UP_STEPS = 1000
HEADS, ALL = "heads", "all"
NO_NORM = "none"
OWN_MODELS = ("faster_rcnn", "mask_rcnn")
"""Built here, of torchvision's parts: with a backbone of choice and the paper's heads."""
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


@dataclass(frozen=True)
class Recipe:
    """What one training is told: equal recipes are the same work. Defaults are the paper's where it has one.

    Attributes:
        data: "shapes", "coco" (a folder in that of the data sets), or the path of a folder in COCO's format.
        model: "faster_rcnn" or "mask_rcnn", with the paper's heads, or one of torchvision's detectors.
        backbone: of the first two, one of `BACKBONES`. "efficientnet_lite0" comes with ImageNet's weights.
        backbone_weights: the path of a file of weights for the others, as torchvision saves them; None for random ones.
        where: "heads" for the norm in the heads, and the backbone's BN fixed; "all" for the norm everywhere but in the
            backbone's early stages, whose BN is fixed, and nowhere fixed where the backbone has random weights.
        norm: a key of `crossbn.nn.NORMS`, or "none" for heads without.
        norm_options: of `crossbn.convert_` for "cbn" and "naive_cbn", of `crossbn.swap_norm_` for the others.
        window: of "cbn" and "naive_cbn"; None for `crossbn.window_for(batch_size)`.
        batch_size: images per forward and process.
        epochs: passes over the training images.
        burn_in_epochs: with a window of 1, at the beginning.
        learning_rate: after warm-up; None for 0.02 / 16 for each image of a step.
        momentum: of SGD.
        weight_decay: on all parameters that are trained.
        accumulate: forwards whose gradients are averaged into one step.
        precision: as Lightning names it: "32", "bf16-mixed", "16-mixed", "64".
        train_images: how many to train on, the first of a fixed permutation; None for all.
        test_images: how many to test on; None for all.
        image_size: the shorter side of an image, unless the longer would exceed 5/3 of that.
        scales: further shorter sides, to choose from at random in training beside `image_size`.
        mirror: whether training images are mirrored half of the time.
        channels: of the pyramid and the heads of the first two models.
        proposals: regions of an image that the heads are trained on, of the R-CNNs.
        seed: of the initial weights, the order of the images, and what is drawn in training.
        points: how often to test; None for once an epoch.
        switch_norm: another norm, from `switch_epoch` on; None for the same until the end.
        switch_epoch: when, in epochs.
        switch_options: of the other norm.
        wrap: changes the network, which has its norms, in the caller's own way. No part of records.

    Raises:
        RecipeError: for a value that is out of range.

    Example:
        >>> Recipe(batch_size=4).effective_learning_rate(processes=4)
        0.02
    """

    data: str = "shapes"
    model: str = "faster_rcnn"
    backbone: str = "resnet50"
    backbone_weights: str | None = None
    where: str = HEADS
    norm: str = "cbn"
    norm_options: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    batch_size: int = 4
    epochs: int = 12
    burn_in_epochs: float = 0.0
    learning_rate: float | None = None
    momentum: float = 0.9
    weight_decay: float = 1e-4
    accumulate: int = 1
    precision: str = "32"
    train_images: int | None = None
    test_images: int | None = None
    image_size: int = 800
    scales: tuple[int, ...] = ()
    mirror: bool = True
    channels: int = 256
    proposals: int = 512
    seed: int = 0
    points: int | None = None
    switch_norm: str | None = None
    switch_epoch: float = 0.0
    switch_options: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[nn.Module, Recipe], nn.Module] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", tuple(self.scales))  # JSON has lists
        for name in ("batch_size", "epochs", "accumulate", "image_size", "channels", "proposals"):
            check_least(name, getattr(self, name), 1)
        for name in ("window", "train_images", "test_images", "points"):
            check_least(name, getattr(self, name), 1, optional=True)
        for name in ("burn_in_epochs", "momentum", "weight_decay", "switch_epoch"):
            check_least(name, getattr(self, name), 0)
        check_least("learning_rate", self.learning_rate, 0, optional=True)
        for size in self.scales:
            check_least("scales", size, 1)
        known = {"norm": (NO_NORM, *NORMS), "where": (HEADS, ALL), "backbone": BACKBONES}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise RecipeError(f"{name} must be one of {', '.join(values)}, got {getattr(self, name)!r}")
        self._check_norms()

    def _check_norms(self) -> None:
        if self.norm == NO_NORM and self.where == ALL:
            raise RecipeError(
                'norm "none" is for heads: a backbone without norms is another network; take where "heads"'
            )
        if self.norm == NO_NORM and self.model not in OWN_MODELS:
            raise RecipeError(f'norm "none" is for {" and ".join(OWN_MODELS)}, whose heads are built here')
        if self.switch_norm is not None:
            if self.switch_norm not in NORMS:
                raise RecipeError(f"switch_norm must be one of {', '.join(NORMS)}, got {self.switch_norm!r}")
            check_switch(self.norm, self.switch_norm)

    @property
    def effective_window(self) -> int:
        """The window of cross-iteration norms."""
        return self.window or window_for(self.batch_size)

    @property
    def has_masks(self) -> bool:
        """Whether objects are found with their masks."""
        return self.model.startswith(("mask_rcnn", "maskrcnn"))

    @property
    def is_cross_iteration(self) -> bool:
        """Whether the norm remembers steps."""
        return self.norm in CROSS_ITERATION

    def effective_learning_rate(self, processes: int) -> float:
        """Return the learning rate after warm-up."""
        if self.learning_rate is not None:
            return self.learning_rate
        return BASE_LEARNING_RATE * self.batch_size * self.accumulate * processes / BASE_BATCH_SIZE

    def settings(self) -> dict[str, Any]:
        """Return the fields that say what is computed, by name, as JSON has them."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "wrap"}
        found["scales"] = list(self.scales)
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}


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
class Outcome:
    """A finished training.

    Attributes:
        recipe: what was asked for.
        curve: measurements during training; the last is at its end.
        test_images: how many images the scores are of.
        seconds: wall-clock time of the training, tests on the way included.
        seconds_per_step: median over the last thousand forward-backward passes at most.
        waiting_share: of the time of training forwards and what belongs to them, what was spent waiting for images.
    """

    recipe: Recipe
    curve: tuple[Point, ...]
    test_images: int
    seconds: float
    seconds_per_step: float
    waiting_share: float

    @property
    def scores(self) -> Scores:
        """The scores at the end."""
        return self.curve[-1].scores
