"""What every training is told, whatever is trained, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from crossbn.lab.data import DATASETS
from crossbn.lab.norm_names import CROSS_ITERATION, NORM_NAMES
from crossbn.messages import no_such
from crossbn.schedules import window_for

if TYPE_CHECKING:  # whoever asks for a run that is finished does not wait for it
    from torch import nn

PRECISIONS = ("32", "64", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "32-true", "64-true")
"""As Lightning names them."""
_USUAL_WINDOW = 8  # the paper's largest
_SAME_PARAMETERS = ("bn", "sync_bn", "brn", "kn", *CROSS_ITERATION)

OutcomeT = TypeVar("OutcomeT", bound="TrainingOutcome")


class RecipeError(ValueError):
    """Something that the recipe asks for cannot be had; the message is for the user."""


class OtherRunError(RecipeError):
    """The folder of a run has something else in it."""


class DivergedError(RecipeError):
    """The loss of a training is not finite any more."""


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe(Generic[OutcomeT]):
    """What one training is told: equal recipes are the same work. Defaults are the paper's where it has one.

    Attributes:
        data: the name of a data set, or a folder.
        model: the name of a network.
        norm: a key of `crossbn.nn.NORMS`.
        norm_options: of `crossbn.convert_` for "cbn" and "naive_cbn", of `crossbn.swap_norm_` for the others.
        window: of "cbn" and "naive_cbn"; None for `crossbn.window_for(batch_size)`.
        batch_size: images per forward and process.
        epochs: passes over the training images.
        burn_in_epochs: with a window of 1, at the beginning.
        learning_rate: the highest; None for one that is proportional to the batch.
        momentum: of SGD.
        weight_decay: on all parameters that are trained, gamma and beta included.
        accumulate: forwards whose gradients are averaged into one step.
        precision: one of `PRECISIONS`.
        train_images: how many to train on, the first of a fixed permutation; None for all.
        test_images: how many to test on; None for all.
        seed: of the initial weights, the order of the images and what is random in preparing them.
        points: how often to test; None for once an epoch.
        switch_norm: another norm, from `switch_epoch` on; None for the same until the end.
        switch_epoch: when, in epochs.
        switch_options: of the other norm.
        wrap: changes the network, which has its norms, in the caller's own way. No part of records.

    Raises:
        RecipeError: for a value that is out of range, or contradicts another.
    """

    kind: ClassVar[str]
    """Of the records."""
    point_type: ClassVar[Any]
    """Of the measurements, a named tuple."""
    packages: ClassVar[tuple[str, ...]] = ("lightning", "torchmetrics", "torchvision")
    """Whose versions matter."""

    data: str
    model: str
    norm: str = "cbn"
    norm_options: Mapping[str, Any] = field(default_factory=dict)
    window: int | None = None
    batch_size: int = 4
    epochs: int
    burn_in_epochs: float = 0.0
    learning_rate: float | None = None
    momentum: float = 0.9
    weight_decay: float = 1e-4
    accumulate: int = 1
    precision: str = "32"
    train_images: int | None = None
    test_images: int | None = None
    seed: int = 0
    points: int | None = None
    switch_norm: str | None = None
    switch_epoch: float = 0.0
    switch_options: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[nn.Module, Any], nn.Module] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.check_least(1, "batch_size", "epochs", "accumulate")
        self.check_least(1, "window", "train_images", "test_images", "points", optional=True)
        self.check_least(0, "burn_in_epochs", "momentum", "weight_decay", "switch_epoch")
        self.check_least(0, "learning_rate", optional=True)
        self.check_one_of("norm", self.norms)
        self.check_one_of("precision", PRECISIONS)
        self._check_switch()
        if self.window is not None and not {self.norm, self.switch_norm} & {*CROSS_ITERATION}:
            told = f"norm {self.norm!r} and window {self.window}"
            raise RecipeError(f"a window is of {' and '.join(CROSS_ITERATION)}, got {told}: leave one of them out")
        self.check_norm_options(self.norm, self.norm_options)

    @property
    def norms(self) -> Iterable[str]:
        """The names of the norms that there are for such a training."""
        return NORM_NAMES

    def check_least(self, least: int, *names: str, optional: bool = False) -> None:
        """Raise RecipeError for a field below the least value; None is one only if it is optional."""
        for name in names:
            value = getattr(self, name)
            if not (optional and value is None) and (value is None or value < least):
                raise RecipeError(f"{name} must be at least {least}, got {value!r}")

    def check_one_of(self, name: str, known: Iterable[str], what: str = "") -> None:
        """Raise RecipeError for a field that names something unknown, of a kind that is called `what`."""
        if getattr(self, name) not in known:
            raise RecipeError(no_such(what or name, getattr(self, name), known))

    def check_norm_options(self, norm: str, options: Mapping[str, Any]) -> None:
        """Raise RecipeError for an option that a norm does not have, with those that it has."""
        if norm not in NORM_NAMES or (not options and self.effective_window <= _USUAL_WINDOW):
            return  # there is nothing to look at, and torch takes a second to import
        from crossbn.convert import check_options
        from crossbn.nn import NORMS

        with options_blamed(NORMS[norm].title):
            if norm in CROSS_ITERATION:
                check_options(**{"window": self.effective_window, **as_torch_has_them(options)})
            else:
                NORMS[norm].check_options(options)

    def _check_switch(self) -> None:
        """Raise RecipeError if a network cannot go on with the other norm in the midst of training."""
        if self.switch_norm is None:
            if self.switch_epoch or self.switch_options:
                raise RecipeError("switch_epoch and switch_options are of a switch_norm, which is not given")
            return
        self.check_one_of("switch_norm", NORM_NAMES, "norm")
        # An optimizer goes on with the parameters that it has; gamma and beta are all of them in these norms.
        after = (*_SAME_PARAMETERS, "gn", "ln", "in")
        if self.norm not in _SAME_PARAMETERS or self.switch_norm not in after:
            raise RecipeError(
                f"norms can be switched from {', '.join(_SAME_PARAMETERS)}, to these and gn, ln, in; not from "
                f"{self.norm} to {self.switch_norm}"
            )
        if self.switch_epoch >= self.epochs:
            raise RecipeError(f"switch_epoch {self.switch_epoch:g} is not before the end, after {self.epochs} epochs")
        self.check_norm_options(self.switch_norm, self.switch_options)

    @property
    def effective_window(self) -> int:
        """The window of cross-iteration norms."""
        return self.window or window_for(self.batch_size)

    def check_model(self) -> None:
        """Raise RecipeError or ModelError if there is no such network for such a training."""
        raise NotImplementedError

    def check_data(self) -> None:
        """Raise RecipeError if there is no such data set."""

    def default_options(self, norm: str) -> dict[str, Any]:
        """Return the options of a norm that follow the network, where none are given."""
        del norm
        return {}

    def effective_learning_rate(self, processes: int = 1) -> float:
        """Return the highest learning rate."""
        raise NotImplementedError

    def outcome(self, *told: Any) -> OutcomeT:
        """Return what came of it; the arguments are those of `TrainingOutcome` but the first."""
        raise NotImplementedError

    def point(self, saved: Mapping[str, Any]) -> Any:
        """Return a point of the curve as records have it, with None for a loss that was not finite."""
        return self.point_type(**{name: math.nan if value is None else value for name, value in saved.items()})

    def settings(self) -> dict[str, Any]:
        """Return the fields that say what is computed, by name, as JSON has them."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "wrap"}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}

    def portable_settings(self) -> dict[str, Any]:
        """Return the settings but for the seed, with the name of a folder in place of its path."""
        found = self.settings()
        del found["seed"]
        return found if self.data in DATASETS else {**found, "data": Path(self.data).resolve().name}

    @property
    def norms_in_words(self) -> str:
        """The norm and, if it is switched, the other one."""
        then = "" if self.switch_norm is None else f", {self.switch_norm} from epoch {self.switch_epoch:g} on"
        return f"{self.norm}{then}"


@dataclass(frozen=True)
class TrainingOutcome:
    """A finished training.

    Attributes:
        recipe: what was asked for.
        curve: measurements during training; the last is at its end.
        test_images: how many images were tested on.
        seconds: wall-clock time of the training, tests on the way included.
        seconds_per_step: median over the last thousand forward-backward passes at most.
        waiting_share: of the time of training forwards and what belongs to them, what was spent waiting for images.
    """

    recipe: Any
    curve: tuple[Any, ...]
    test_images: int
    seconds: float
    seconds_per_step: float
    waiting_share: float = 0.0

    def final(self) -> dict[str, Any]:
        """Return what was measured at the end, by name."""
        raise NotImplementedError


@contextmanager
def options_blamed(title: str) -> Iterator[None]:
    """Raise RecipeError, with the name of the norm, for what its options make it raise."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RecipeError(str(error) if str(error).startswith(title) else f"{title}: {error}") from error


def as_torch_has_them(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as they are, but for a type given by name, as records and commands have it."""
    import torch

    return {
        name: getattr(torch, value, value) if name == "history_dtype" and isinstance(value, str) else value
        for name, value in options.items()
    }
