"""Doing one training."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from crossbn.lab import environment, records
from crossbn.lab.recipes.machine import Machine
from crossbn.lab.recipes.recipe import OutcomeT, TrainingRecipe

RECORD = "record.jsonl"
"""In the folder of a run: a line for it when it is finished."""


def train(
    recipe: TrainingRecipe[OutcomeT],
    folder: Path | None = None,
    watch: Callable[[Any], None] = lambda _: None,
    machine: Machine | None = None,
    fresh: bool = False,
) -> OutcomeT:
    """Do what a recipe says, or tell what came of it if the folder has the record of an equal run.

    Args:
        recipe: what to train, and how.
        folder: where checkpoints, TensorBoard's log and the record go; a run that was interrupted goes on from there.
            None for nothing to be written.
        watch: called with each point of the curve as soon as it is there, and several times between with the progress.
        machine: what to compute with; None for the one process and the device at hand.
        fresh: begin anew, whatever the folder has.

    Raises:
        RecipeError: if something that the recipe asks for cannot be had.
        OtherRunError: one of these; if the folder is of another run.
        DivergedError: one of these; if the loss is not finite any more.
        ModelError: if there is no such network.
        DataError: if the images are not there, or something is wrong with them.
        RecordError: if the folder's file of records is damaged, or another process works there.
        CheckpointError: if a checkpoint cannot be written.
        KeyboardInterrupt: after Ctrl-C; with a folder, a checkpoint has been saved.
        SystemExit: the same after SIGTERM.

    Example:
        >>> from crossbn.lab.recipes.classification import Recipe
        >>> recipe = Recipe(data="digits", model="resnet8", width=4, epochs=1, train_images=8, test_images=10)
        >>> outcome = train(recipe)
        >>> outcome.test_images, [point.epoch for point in outcome.curve]
        (10, [1.0])
    """
    machine = machine or Machine()
    if folder is not None and not fresh and (known := finished(recipe, folder, machine.processes)) is not None:
        return known
    run = import_module("crossbn.lab.recipes.run")  # it imports the engine, which takes seconds
    outcome: OutcomeT = run.carry_out(recipe, folder, watch, machine, fresh)
    return outcome


def finished(recipe: TrainingRecipe[OutcomeT], folder: Path, processes: int) -> OutcomeT | None:
    """Return what came of a run of which the folder has a record, None if it has none.

    Raises:
        RecordError: if the file of records is damaged.
    """
    key = _record(recipe, processes, {}, {}).key
    for found in records.read(folder / RECORD):
        if found.key == key:
            values = found.values
            curve = tuple(recipe.point(point) for point in values["curve"])
            names = ("tested_images", "seconds", "seconds_per_step")
            return recipe.outcome(curve, *(values[name] for name in names), values.get("waiting_share", 0.0))
    return None


def record_of(outcome: Any, processes: int, device: str) -> records.Record:
    """Return the record of a finished run."""
    recipe = outcome.recipe
    values = {
        **outcome.final(),
        "curve": [point._asdict() for point in outcome.curve],
        "tested_images": outcome.test_images,
        "seconds": outcome.seconds,
        "seconds_per_step": outcome.seconds_per_step,
        "waiting_share": outcome.waiting_share,
        "window_used": recipe.effective_window,
        "learning_rate_used": recipe.effective_learning_rate(processes),
    }
    return _record(recipe, processes, values, environment.stamp(device, recipe.packages))


def _record(recipe: Any, processes: int, values: dict[str, Any], stamp: dict[str, Any]) -> records.Record:
    settings = {**recipe.portable_settings(), "processes": processes}
    return records.Record(recipe.kind, "", recipe.seed, settings, values, stamp)
