"""What a training of a classifier is told, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from crossbn.lab.data import names_of
from crossbn.lab.models import check_model, is_small
from crossbn.lab.norm_names import CROSS_ITERATION, NORM_NAMES
from crossbn.lab.recipes.recipe import RecipeError, TrainingOutcome, TrainingRecipe, options_blamed
from crossbn.messages import no_such

FOLDERS = ("train", "val")
"""In a folder of images, each with a folder for each class."""
BASE_LEARNING_RATE, BASE_BATCH_SIZE = 0.1, 32
"""The paper's: the learning rate is proportional to the batch of a process."""
NORM_ACTIVATIONS = {"evonorm_s0": "EvoNorm-S0", "frn_tlu": "FRN with TLU"}
"""Norms that are activations as well, by what they are called: each stands for a norm and the ReLU behind it."""


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


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingRecipe["Outcome"]):
    """What one training of a classifier is told; see `TrainingRecipe` for what all trainings are told.

    Attributes:
        data: a data set of `crossbn.lab.data.DATASETS`, or a folder with `train` and `val` in it, each with a folder
            for each class.
        model: a name of `crossbn.lab.models`.
        width: channels of the small networks at full resolution.
        norm: a key of `crossbn.nn.NORMS` or, in our small networks, of `NORM_ACTIVATIONS`.
        reparametrize: "wn" or "ws", of the weights; None for neither.
        learning_rate: at the beginning; it falls to 0 along a cosine. None for 0.1 * batch_size / 32.
        validate: whether to test on training images that are not trained on, to choose settings with. For data sets in
            memory only.
        image_size: height and width; None for the data set's own.
        augment: whether training images are cropped and flipped at random.

    Raises:
        RecipeError: for a value that is out of range, or contradicts another.

    Example:
        >>> Recipe(norm="cbn", batch_size=2).effective_learning_rate()
        0.00625
    """

    point_type: ClassVar[Any] = Point
    kind: ClassVar[str] = "classify"

    data: str = "cifar10"
    model: str = "resnet20"
    width: int = 16
    reparametrize: str | None = None
    epochs: int = 100
    image_size: int | None = None
    augment: bool = True
    validate: bool = False

    def __post_init__(self) -> None:
        self.check_least(1, "width")
        self.check_least(1, "image_size", optional=True)
        if self.reparametrize is not None:
            from crossbn.nn import REPARAMETRIZATIONS

            self.check_one_of("reparametrize", REPARAMETRIZATIONS, "reparametrization")
        if self.validate and not self.train_images:
            raise RecipeError("to validate, train_images must leave some of the training images")
        super().__post_init__()

    @property
    def norms(self) -> Iterable[str]:
        """The names of the norms that there are for such a training."""
        return (*NORM_NAMES, *NORM_ACTIVATIONS)

    def check_model(self) -> None:
        """Raise ModelError if there is no such classifier, or it has no BatchNorm; RecipeError for unfit options."""
        network = check_model(self.model, self.width)
        for norm, options in ((self.norm, self.norm_options), (self.switch_norm, self.switch_options)):
            if network is not None and options and norm in NORM_NAMES and norm not in CROSS_ITERATION:
                from crossbn.nn import NORMS
                from crossbn.swap import swap_norm_

                with options_blamed(NORMS[norm].title):
                    swap_norm_(network, norm, **options)

    def check_data(self) -> None:
        """Raise RecipeError if there is no such data set."""
        known = names_of("pictures", "folders")
        if self.data not in known and not all(Path(self.data, part).is_dir() for part in FOLDERS):
            raise RecipeError(
                f"{no_such('data set', self.data, known)} (or name a folder with train and val in it, each with a "
                "folder for each class)"
            )

    def default_options(self, norm: str) -> dict[str, Any]:
        """Return the options of a norm that follow the network, where none are given.

        "gn" and "evonorm_s0" have 32 groups, their papers' number, or fewer where these do not divide the channels,
        and `width / 2`, at most 32, in our small networks, where 32 groups would be instance normalization.
        """
        if norm not in ("gn", "evonorm_s0"):
            return {}
        if is_small(self.model):
            return {"groups": math.gcd(max(1, min(32, self.width // 2)), self.width)}
        return {"groups": 32} if norm == "evonorm_s0" else {}

    def effective_learning_rate(self, processes: int = 1) -> float:
        """Return the learning rate at the beginning, the same for any number of processes."""
        del processes
        if self.learning_rate is not None:
            return self.learning_rate
        return BASE_LEARNING_RATE * self.batch_size / BASE_BATCH_SIZE

    def outcome(self, *told: Any) -> Outcome:
        """Return what came of it."""
        return Outcome(self, *told)


@dataclass(frozen=True)
class Outcome(TrainingOutcome):
    """A finished training of a classifier."""

    @property
    def accuracy(self) -> float:
        """Test accuracy at the end, 0 to 1."""
        return float(self.curve[-1].test_accuracy)

    def final(self) -> dict[str, Any]:
        """Return what was measured at the end, by name."""
        return {"accuracy": self.accuracy}
