"""Doing one training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from crossbn.lab.recipes.classification.machine import Machine
from crossbn.lab.recipes.classification.recipe import Progress
from crossbn.lab.recipes.detection.recipe import Outcome, Point, Recipe


def train(
    recipe: Recipe,
    folder: Path | None = None,
    watch: Callable[[Point | Progress], None] = lambda _: None,
    machine: Machine | None = None,
    fresh: bool = False,
) -> Outcome:
    """Do what a recipe says.

    Args:
        recipe: what to train, and how.
        folder: where the checkpoint, TensorBoard's log and the record go; a run that was interrupted goes on from
            there. None for nothing to be written.
        watch: called with each point of the curve as soon as it is there, and several times between with the progress.
        machine: what to compute with; None for the one process and the device at hand.
        fresh: begin anew, whatever the folder has.

    Raises:
        RecipeError: if something that the recipe asks for cannot be had.
        OtherRunError: one of these; if the folder is of another run.
        DataError: if the images are not there, or something is wrong with them.
        KeyboardInterrupt: after Ctrl-C; with a folder, a checkpoint has been saved.
        SystemExit: the same after SIGTERM.
    """
    from crossbn.lab.recipes.detection.run import carry_out  # it imports the engine, which takes seconds

    return carry_out(recipe, folder, watch, machine or Machine(), fresh)
