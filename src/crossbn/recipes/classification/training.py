"""Doing one training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from crossbn.recipes.classification.recipe import Outcome, Point, Progress, Recipe


def train(
    recipe: Recipe, folder: Path | None = None, watch: Callable[[Point | Progress], None] = lambda _: None
) -> Outcome:
    """Do what a recipe says.

    Args:
        recipe: what to train, and how.
        folder: where checkpoints, the log and the record go; a run that was interrupted goes on from there. None for
            nothing to be written.
        watch: called with each point of the curve as soon as it is there, and several times between with the progress.

    Raises:
        RecipeError: if something that the recipe asks for cannot be had.
        DataError: if the images are not there.
    """
    from crossbn.recipes.classification.run import carry_out  # it imports the engine, which takes seconds

    return carry_out(recipe, folder, watch)
