"""The engine, set up for a run: without its advice, with the same result each time, and without a trace."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crossbn.integrations.engine import (
    Callback,
    LearningRateMonitor,
    MisconfigurationException,
    TensorBoardLogger,
    Trainer,
)
from crossbn.lab.recipes.checkpoints import AtomicFiles, Checkpoints, part_of, previous_of
from crossbn.lab.recipes.machine import Machine
from crossbn.lab.recipes.order import Plan
from crossbn.lab.recipes.recipe import RecipeError, TrainingRecipe
from crossbn.lab.recipes.training import RECORD

_LOG_EVERY = 50  # steps
_IGNORED = (
    (".*does not have many workers.*", UserWarning),  # images in memory need none
    (".*LeafSpec.*", FutureWarning),  # the engine asks torch in an old way
    (".*`srun` command is available.*", UserWarning),  # who wants it takes it
    (".*TypedStorage is deprecated.*", UserWarning),
)


@dataclass(frozen=True)
class Files:
    """What is in the folder of a run."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        """From which an interrupted run goes on."""
        return self.folder / "last.ckpt"

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        """The same, and the one before, in case that it is damaged."""
        return self.checkpoint, previous_of(self.checkpoint)

    @property
    def record(self) -> Path:
        """A line of JSON for the finished run."""
        return self.folder / RECORD

    @property
    def log(self) -> Path:
        """TensorBoard's, a folder."""
        return self.folder / "log"

    def forget(self) -> None:
        """Remove what there is of an earlier run."""
        for file in (*self.checkpoints, part_of(self.checkpoint), self.record):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.log, ignore_errors=True)


def make_trainer(
    recipe: TrainingRecipe[Any],
    plan: Plan,
    machine: Machine,
    callbacks: Sequence[Callback],
    files: Files | None,
    step: int | None,
) -> Trainer:
    """Return a Trainer whose epochs are the spans of the plan.

    Args:
        recipe: of the run.
        plan: of the run.
        machine: what to compute with.
        callbacks: of the run; a Checkpoints among them, if there are files.
        files: where to write; None for nowhere.
        step: from which the run goes on; None for a new one.

    Raises:
        RecipeError: for what the engine does not know or this machine does not have.
    """
    logger = None
    if files is not None:
        # What was logged after the checkpoint will be logged again.
        logger = TensorBoardLogger(files.folder, name="", version=files.log.name, purge_step=step)
        callbacks = [*callbacks, LearningRateMonitor("step")]
    try:
        trainer = Trainer(
            accelerator=machine.accelerator,
            devices=machine.processes_per_node,
            num_nodes=machine.nodes_used,
            strategy=machine.strategy,
            precision=recipe.precision,
            accumulate_grad_batches=recipe.accumulate,
            max_epochs=len(plan.spans),
            reload_dataloaders_every_n_epochs=1,  # spans may differ in length
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            callbacks=list(callbacks),
            plugins=[AtomicFiles()],
            logger=logger or False,
            log_every_n_steps=min(_LOG_EVERY, *map(len, plan.spans)),
            enable_checkpointing=any(isinstance(each, Checkpoints) for each in callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except (ValueError, MisconfigurationException) as error:
        raise RecipeError(str(error).partition("\n")[0]) from error
    if trainer.strategy.launcher is not None and "MultiProcessing" in type(trainer.strategy.launcher).__name__:
        raise RecipeError(f"strategy {machine.strategy!r} starts processes that cannot bring results back; take ddp")
    return trainer


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what Lightning says about itself, its tips and such warnings out of the way."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message, category in _IGNORED:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def repeatable() -> Iterator[None]:
    """Leave the caller's random numbers alone, and have cuDNN compute the same thing each time."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        with torch.random.fork_rng():
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
