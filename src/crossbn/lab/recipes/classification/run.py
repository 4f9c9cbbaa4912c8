"""Putting a recipe's parts together and letting the engine run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from crossbn.integrations.engine import Callback, rank_zero_only
from crossbn.integrations.lightning import HistoryInCheckpoints
from crossbn.lab.recipes.checkpoints import Checkpoints, interruptions_told
from crossbn.lab.recipes.classification.loading import Supply
from crossbn.lab.recipes.classification.machine import Machine
from crossbn.lab.recipes.classification.module import Classifier
from crossbn.lab.recipes.classification.networks import build_network
from crossbn.lab.recipes.classification.norms import give_norm_
from crossbn.lab.recipes.classification.order import Plan
from crossbn.lab.recipes.classification.recipe import Outcome, Point, Progress, Recipe, RecipeError
from crossbn.lab.recipes.classification.record import Record
from crossbn.lab.recipes.classification.resuming import check_checkpoint
from crossbn.lab.recipes.classification.sources import Images, load_images
from crossbn.lab.recipes.classification.trainer import Files, make_trainer
from crossbn.lab.recipes.quiet import quiet
from crossbn.lab.recipes.repeatable import repeatable
from crossbn.lab.records import append_lines
from crossbn.nn import NORMS

Watch = Callable[[Point | Progress], None]


def carry_out(recipe: Recipe, folder: Path | None, watch: Watch, machine: Machine, fresh: bool) -> Outcome:
    """Do what `train` promises."""
    files = None if folder is None else Files(folder)
    step = None
    if files is not None and fresh:
        # All processes begin anew, whether the first has removed the files by now or not.
        if rank_zero_only.rank == 0:
            files.forget()
    elif files is not None and files.checkpoint.exists():
        step = check_checkpoint(files.checkpoint, recipe, machine.processes)
    images = load_images(recipe, machine.data_folder)
    plan = Plan.of(recipe, len(images.train), machine.processes)
    with quiet(), repeatable(), _mistakes_told(recipe):
        module, norms = _build(recipe, plan, images, watch)
        callbacks: list[Callback] = [] if norms is None else [norms]
        listening: AbstractContextManager[None] = nullcontext()
        if files is not None:
            saving = Checkpoints(files.checkpoint, machine.checkpoint_seconds, machine.checkpoint_steps)
            # Norms of which nobody knows yet may be switched to, or be a wrapper's.
            callbacks = [norms or HistoryInCheckpoints(), saving]
            listening = saving.listening()
        trainer = make_trainer(recipe, plan, machine, callbacks, files, step)
        supply = Supply(images, plan, recipe.seed, images.workers if machine.workers is None else machine.workers)
        with listening:
            trainer.fit(module, supply, ckpt_path=None if files is None or step is None else files.checkpoint)
    times = module.clock.seconds, module.clock.seconds_per_step
    outcome = Outcome(recipe, tuple(module.curve), len(images.test), *times)
    record = Record(outcome, machine.processes, str(trainer.strategy.root_device))
    if files is not None and trainer.is_global_zero and not record.is_in(files.record):
        append_lines(files.record, [record])
    return outcome


def _build(recipe: Recipe, plan: Plan, images: Images, watch: Watch) -> tuple[Classifier, Callback | None]:
    network = build_network(recipe.model, images.channels, images.classes, recipe.width, recipe.seed)
    norms = give_norm_(network, recipe, plan)
    if recipe.wrap is not None:
        torch.manual_seed(recipe.seed)  # it may have weights of its own
        network = recipe.wrap(network, recipe)
    module = Classifier(network, recipe, plan, images.classes, len(images.test), watch)
    return module, norms


@contextmanager
def _mistakes_told(recipe: Recipe) -> Iterator[None]:
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
