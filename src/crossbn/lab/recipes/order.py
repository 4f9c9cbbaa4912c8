"""Which images a step sees: a pure function of the seed and the step's number."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

from crossbn.lab.data.drawing import Draw, mix, permutation
from crossbn.lab.recipes.recipe import RecipeError, TrainingRecipe


@dataclass(frozen=True)
class Plan:
    """How many steps there are, and when test accuracy is taken.

    A step is `accumulate` forwards of `batch_size` images in each process. Images that do not fill a step are left out
    until the next epoch, whose order is another one.

    Attributes:
        images: to train on.
        batch_size: images per forward and process.
        accumulate: forwards of a step.
        processes: that train side by side.
        epochs: passes over the images.
        points: how often test accuracy is taken, at most; None for once an epoch.
    """

    images: int
    batch_size: int
    accumulate: int
    processes: int
    epochs: int
    points: int | None

    @classmethod
    def of(cls, recipe: TrainingRecipe[Any], images: int, processes: int) -> "Plan":
        """Return the plan of a recipe.

        Raises:
            RecipeError: if the images do not fill a step.
        """
        plan = cls(images, recipe.batch_size, recipe.accumulate, processes, recipe.epochs, recipe.points)
        if plan.steps_per_epoch == 0:
            raise RecipeError(
                f"{images} training images do not fill a step: {recipe.accumulate} batches of {recipe.batch_size} in "
                f"each of {processes} processes"
            )
        return plan

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.images // (self.batch_size * self.accumulate * self.processes)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.steps_per_epoch * self.epochs

    @property
    def forwards_per_epoch(self) -> int:
        """Forwards of a process in an epoch."""
        return self.steps_per_epoch * self.accumulate

    @property
    def forwards(self) -> int:
        """Forwards of a process in the run."""
        return self.steps * self.accumulate

    @property
    def spans(self) -> list[range]:
        """The forwards between two points of the curve, as evenly as steps allow; the last ends with the run."""
        points = self.points or self.epochs
        ends = sorted({-(-self.steps * i // points) * self.accumulate for i in range(points + 1)})
        return [range(a, b) for a, b in itertools.pairwise(ends)]


class Order(Sampler[Draw]):
    """What a process draws in a span of forwards.

    Args:
        plan: of the run.
        span: numbers of the forwards.
        seed: of the run.
        rank: of the process.
    """

    def __init__(self, plan: Plan, span: range, seed: int, rank: int = 0) -> None:
        self.plan = plan
        self.span = span
        self.seed = seed
        self.rank = rank
        self.done = 0

    def __len__(self) -> int:
        return len(self.span)

    def __iter__(self) -> Iterator[Draw]:
        """Yield the draws after the first `done`."""
        plan = self.plan
        known, order = -1, torch.empty(0, dtype=torch.int64)
        for number in self.span[self.done :]:
            epoch, place = divmod(number, plan.forwards_per_epoch)
            if epoch != known:
                known, order = epoch, permutation(plan.images, self.seed, epoch)
            first = (place * plan.processes + self.rank) * plan.batch_size
            yield Draw(order[first : first + plan.batch_size], mix(self.seed, epoch, place, self.rank))
