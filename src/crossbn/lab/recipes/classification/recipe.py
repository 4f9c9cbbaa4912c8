"""What a training is told, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import nn

from crossbn.nn import NORMS, REPARAMETRIZATIONS
from crossbn.schedules import window_for

BASE_LEARNING_RATE, BASE_BATCH_SIZE = 0.1, 32
"""The paper's: the learning rate is proportional to the batch of a process."""


CROSS_ITERATION = ("cbn", "naive_cbn")
NORM_ACTIVATIONS = {"evonorm_s0": "EvoNorm-S0", "frn_tlu": "FRN with TLU"}
"""Norms that are activations as well, by what they are called: each stands for a norm and the ReLU behind it."""
_SAME_PARAMETERS = ("bn", "sync_bn", "brn", "kn", *CROSS_ITERATION)


class RecipeError(ValueError):
    """Something that the recipe asks for cannot be had; the message is for the user."""


class OtherRunError(RecipeError):
    """The folder of a run has something else in it."""


class Point(NamedTuple):
    """A measurement during training."""

    epoch: float
    """Passes over the training images so far."""
    train_loss: float
    """Mean over the steps since the previous point."""
    train_accuracy: float
    """The share of their images that were classified correctly, 0 to 1, by the network in training mode."""
    test_accuracy: float
    """The share of the test images, 0 to 1, in evaluation mode."""


class Progress(NamedTuple):
    """Where a training stands."""

    share: float
    """How much of it is done, 0 to 1."""
    phrase: str
    """The latest number."""


@dataclass(frozen=True)
class Recipe:
    """What one training is told: equal recipes are the same work. Defaults are the paper's where it has one.

    Attributes:
        data: a key of `crossbn.lab.data.DATASETS`.
        model: one of torchvision's classifiers, or "resnet8", "resnet14", "resnet20" and so on (6n + 2 layers) for the
            small residual networks of CIFAR, "resnet8_norm_last" and so on for those with norms after activations,
            "plain8" and so on for those without shortcuts, "convmixer4" for a ConvMixer of that depth,
            "efficientnet_lite0" for one that is trained on ImageNet; where both have a name it is torchvision's.
        width: channels of the small networks at full resolution.
        norm: a key of `crossbn.nn.NORMS` or, in our small networks, of `NORM_ACTIVATIONS`.
        norm_options: of `crossbn.convert_` for "cbn" and "naive_cbn", of `crossbn.swap_norm_` for the others. Defaults
            that follow the run: see `norms.default_options`.
        reparametrize: "wn" or "ws", of the weights; None for neither.
        window: of "cbn" and "naive_cbn"; None for `crossbn.window_for(batch_size)`.
        batch_size: images per forward and process.
        epochs: passes over the training images.
        burn_in_epochs: with a window of 1, at the beginning.
        learning_rate: at the beginning; it falls to 0 along a cosine. None for 0.1 * batch_size / 32.
        momentum: of SGD.
        weight_decay: on all parameters, gamma and beta included.
        accumulate: forwards whose gradients are averaged into one step.
        precision: as Lightning names it: "32", "bf16-mixed", "16-mixed", "64".
        train_images: how many to train on, the first of a fixed permutation; None for all.
        test_images: how many to test on; None for all.
        validate: whether these are training images that are not trained on, to choose settings with. For data sets in
            memory only.
        image_size: height and width; None for the data set's own.
        augment: whether training images are cropped and flipped at random.
        seed: of the initial weights, the order of the images and their augmentation.
        points: how often test accuracy is taken; None for once an epoch.
        switch_norm: another norm, from `switch_epoch` on; None for the same until the end.
        switch_epoch: when, in epochs.
        switch_options: of the other norm.
        wrap: changes the network, which has its norms, in the caller's own way. No part of records.

    Raises:
        RecipeError: for a value that is out of range.

    Example:
        >>> Recipe(norm="cbn", batch_size=2).effective_learning_rate
        0.00625
    """

    data: str = "cifar10"
    model: str = "resnet20"
    width: int = 16
    norm: str = "cbn"
    norm_options: Mapping[str, Any] = field(default_factory=dict)
    reparametrize: str | None = None
    window: int | None = None
    batch_size: int = 4
    epochs: int = 100
    burn_in_epochs: float = 0.0
    learning_rate: float | None = None
    momentum: float = 0.9
    weight_decay: float = 1e-4
    accumulate: int = 1
    precision: str = "32"
    train_images: int | None = None
    test_images: int | None = None
    image_size: int | None = None
    augment: bool = True
    validate: bool = False
    seed: int = 0
    points: int | None = None
    switch_norm: str | None = None
    switch_epoch: float = 0.0
    switch_options: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[nn.Module, Recipe], nn.Module] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("width", "batch_size", "epochs", "accumulate"):
            check_least(name, getattr(self, name), 1)
        for name in ("window", "train_images", "test_images", "image_size", "points"):
            check_least(name, getattr(self, name), 1, optional=True)
        for name in ("burn_in_epochs", "momentum", "weight_decay", "switch_epoch"):
            check_least(name, getattr(self, name), 0)
        check_least("learning_rate", self.learning_rate, 0, optional=True)
        for name, known in (
            ("norm", (*NORMS, *NORM_ACTIVATIONS)),
            ("switch_norm", NORMS),
            ("reparametrize", REPARAMETRIZATIONS),
        ):
            value = getattr(self, name)
            if value not in known and not (value is None and name != "norm"):
                raise RecipeError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if self.switch_norm is not None:
            check_switch(self.norm, self.switch_norm)

    @property
    def effective_window(self) -> int:
        """The window of cross-iteration norms."""
        return self.window or window_for(self.batch_size)

    @property
    def effective_learning_rate(self) -> float:
        """The learning rate at the beginning."""
        if self.learning_rate is not None:
            return self.learning_rate
        return BASE_LEARNING_RATE * self.batch_size / BASE_BATCH_SIZE

    def settings(self) -> dict[str, Any]:
        """Return the fields that say what is computed, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "wrap"}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}


def check_least(name: str, value: float | None, least: int, optional: bool = False) -> None:
    """Raise RecipeError for a value below the least one; None is one only if it is optional."""
    if not (optional and value is None) and (value is None or value < least):
        raise RecipeError(f"{name} must be at least {least}, got {value!r}")


def check_switch(norm: str, switch_norm: str) -> None:
    """Raise RecipeError if a network cannot go on with another norm in the midst of training."""
    # An optimizer goes on with the parameters that it has; gamma and beta are all of them in these norms.
    after = (*_SAME_PARAMETERS, "gn", "ln", "in")
    if norm not in _SAME_PARAMETERS or switch_norm not in after:
        raise RecipeError(
            f"norms can be switched from {', '.join(_SAME_PARAMETERS)}, to these and gn, ln, in; not from "
            f"{norm} to {switch_norm}"
        )


@dataclass(frozen=True)
class Outcome:
    """A finished training.

    Attributes:
        recipe: what was asked for.
        curve: measurements during training; the last is at its end.
        test_images: how many images the test accuracies are shares of.
        seconds: wall-clock time of the training, tests on the way included.
        seconds_per_step: median over the last thousand forward-backward passes at most.
    """

    recipe: Recipe
    curve: tuple[Point, ...]
    test_images: int
    seconds: float
    seconds_per_step: float

    @property
    def accuracy(self) -> float:
        """Test accuracy at the end, 0 to 1."""
        return self.curve[-1].test_accuracy
