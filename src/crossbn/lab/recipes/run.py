"""Putting a recipe's parts together and letting the engine run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crossbn.integrations.engine import Callback, rank_zero_only
from crossbn.integrations.lightning import HistoryInCheckpoints
from crossbn.lab import records
from crossbn.lab.recipes.checkpoints import Checkpoints, interruptions_told
from crossbn.lab.recipes.loading import Batches, Images
from crossbn.lab.recipes.machine import Machine
from crossbn.lab.recipes.module import RunModule
from crossbn.lab.recipes.order import Plan
from crossbn.lab.recipes.recipe import RecipeError, TrainingRecipe
from crossbn.lab.recipes.resuming import find_checkpoint
from crossbn.lab.recipes.trainer import Files, make_trainer, quiet, repeatable
from crossbn.lab.recipes.training import record_of
from crossbn.nn import NORMS

Watch = Callable[[Any], None]


def carry_out(recipe: TrainingRecipe[Any], folder: Path | None, watch: Watch, machine: Machine, fresh: bool) -> Any:
    """Do what `train` promises."""
    kind = _module_of(recipe)
    images = kind.load_images(recipe, machine.data_folder)  # first: without them the folder stays as it is
    if folder is None:
        return _carry_out(recipe, kind, images, None, watch, machine, fresh)
    # The other processes of a training work in the same folder.
    with records.locked(folder) if rank_zero_only.rank == 0 else nullcontext():
        return _carry_out(recipe, kind, images, Files(folder), watch, machine, fresh)


def _carry_out(
    recipe: TrainingRecipe[Any],
    kind: type[RunModule],
    images: Images,
    files: Files | None,
    watch: Watch,
    machine: Machine,
    fresh: bool,
) -> Any:
    found = None
    if files is not None and fresh:
        # All processes begin anew, whether the first has removed the files by now or not.
        if rank_zero_only.rank == 0:
            files.forget()
    elif files is not None:
        found = find_checkpoint(files, recipe, machine.processes, kind.state_name)
    plan = Plan.of(recipe, len(images.train), machine.processes)
    with quiet(), repeatable(), _mistakes_told(recipe):
        network, norms = _build(kind, recipe, plan, images)
        module = kind(network, recipe, plan, images, watch, machine.keep_going)
        callbacks: list[Callback] = [] if norms is None else [norms]
        listening: AbstractContextManager[None] = nullcontext()
        if files is not None:
            saving = Checkpoints(files.checkpoint, machine.checkpoint_seconds, machine.checkpoint_steps)
            # Norms of which nobody knows yet may be switched to, or be a wrapper's.
            callbacks = [norms or HistoryInCheckpoints(), saving]
            listening = saving.listening()
        trainer = make_trainer(recipe, plan, machine, callbacks, files, None if found is None else found.step)
        batches = Batches(images, plan, recipe.seed, machine.workers)
        with listening:
            trainer.fit(module, batches, ckpt_path=None if found is None else found.path)
    times = module.clock.seconds, module.clock.seconds_per_step, module.waiting_share
    outcome = recipe.outcome(tuple(module.curve), len(images.test), *times)
    if files is not None and trainer.is_global_zero:
        records.append(files.record, [record_of(outcome, machine.processes, str(trainer.strategy.root_device))])
    return outcome


def _module_of(recipe: TrainingRecipe[Any]) -> type[RunModule]:
    if recipe.kind == "detect":
        from crossbn.lab.recipes.detection.module import Detector

        return Detector
    from crossbn.lab.recipes.classification.module import Classifier

    return Classifier


def _build(
    kind: type[RunModule], recipe: TrainingRecipe[Any], plan: Plan, images: Images
) -> tuple[nn.Module, Callback | None]:
    network = kind.build(recipe, images)
    norms = kind.give_norm_(network, recipe, plan)
    if recipe.wrap is not None:
        torch.manual_seed(recipe.seed)  # it may have weights of its own
        network = recipe.wrap(network, recipe)
    return network, norms


@contextmanager
def _mistakes_told(recipe: TrainingRecipe[Any]) -> Iterator[None]:
    """Say what happened in the caller's terms."""
    try:
        with interruptions_told():
            yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise RecipeError(
            f"{NORMS[recipe.norm].title} has a single value per channel to normalize with, in a batch of "
            f"{recipe.batch_size} whose last maps are 1 by 1: take larger batches or images, or another norm"
        ) from error
