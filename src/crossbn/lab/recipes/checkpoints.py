"""Checkpoints from which a run goes on bit for bit, after Ctrl-C or after a kill at any moment.

Lightning's ModelCheckpoint saves at the last batch of an epoch too, before its validation, which a resumed run then
leaves out; and its files pass through the system's temporary folder, from where they are copied if that is another
disk, which is not atomic. Here the moments are chosen so that nothing is half done: between two steps in the middle of
an epoch, and after an epoch with its validation.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from crossbn.integrations.engine import Checkpoint, LightningModule, TorchCheckpointIO, Trainer
from crossbn.lab.recipes.recipe import RecipeError

_FORWARDS_BETWEEN_VOTES = 10  # of several processes on whether to save


class InterruptedRun(Exception):  # noqa: N818  # no error: somebody wished it
    """A run has saved a checkpoint and stopped.

    Attributes:
        by: the signal that it was told by.
    """

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(f"stopped by {by.name}")
        self.by = by


@contextmanager
def interruptions_told() -> Iterator[None]:
    """Raise what Python knows for a run that was told to stop: KeyboardInterrupt, or SystemExit after SIGTERM."""
    try:
        yield
    except InterruptedRun as stop:
        raise (KeyboardInterrupt if stop.by is signal.SIGINT else SystemExit(128 + stop.by)) from None
    except SystemExit as error:
        # The engine turns a Ctrl-C of which we did not know into an exit, with a status of 1.
        if error.code == 1:
            raise KeyboardInterrupt from None
        raise


class CheckpointError(RecipeError):
    """A checkpoint cannot be written; the message is for the user."""


def part_of(path: Path) -> Path:
    """Return where a file is written before it takes its place."""
    return path.with_name(f"{path.name}.part")


def previous_of(path: Path) -> Path:
    """Return where a checkpoint is kept when the next one has taken its place."""
    return path.with_name(f"previous{path.suffix}")


class AtomicFiles(TorchCheckpointIO):
    """Writes beside the old file, then takes its place: there is a complete one at every moment.

    The old one is kept as well, in case that the disk damages the new one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Save; a crash of the machine, too, leaves the old file or the new one.

        Raises:
            CheckpointError: if the disk is full, for instance; the old file is kept.
        """
        del storage_options
        path = Path(path)
        part = part_of(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            cause = error if isinstance(error, OSError) else error.__context__  # torch hides it behind another
            if not isinstance(cause, OSError):
                raise
            raise CheckpointError(
                f"the checkpoint {path} cannot be written: {cause.strerror}; the one before it is kept, and the same "
                "command goes on from there"
            ) from error
        if path.exists():
            _keep(path, previous_of(path))
        part.replace(path)


def _keep(path: Path, previous: Path) -> None:
    """Let a file have a second name, or that instead of its first where a file can have one only."""
    previous.unlink(missing_ok=True)
    try:
        previous.hardlink_to(path)
    except OSError:
        path.replace(previous)


class Checkpoints(Checkpoint):
    """Saves after every epoch, on the way when so much time has passed, and when the run is to stop.

    Args:
        path: of the file, which is replaced.
        seconds: between two checkpoints within an epoch, at least.
        steps: between two checkpoints within an epoch, at most; None for no such limit.
    """

    def __init__(self, path: Path, seconds: float = 300.0, steps: int | None = None) -> None:
        super().__init__()
        self.path = path
        self.seconds = seconds
        self.steps = steps
        self.asked_to_stop = False
        self._saved = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save between two steps, if it is time; not in the midst of accumulation, and not before a validation."""
        del pl_module, outputs, batch
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and not trainer.is_last_batch:
            if self._is_due(trainer, batch_idx + 1):
                self._save(trainer)
            self._stop_if_asked(trainer, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after an epoch, whose validation is over."""
        del pl_module
        self._save(trainer)
        if self._agreed(trainer, self._is_to_stop(trainer)):
            self._stop()

    def _is_due(self, trainer: Trainer, forwards: int) -> bool:
        if self.steps is not None and forwards % (self.steps * trainer.accumulate_grad_batches) == 0:
            return True
        return self._vote(trainer, forwards, time.monotonic() - self._saved >= self.seconds)

    def _stop_if_asked(self, trainer: Trainer, forwards: int) -> None:
        if self._vote(trainer, forwards, self._is_to_stop(trainer)):
            self._save(trainer)
            self._stop()

    def _is_to_stop(self, trainer: Trainer) -> bool:
        return bool(self.asked_to_stop or trainer.received_sigterm)

    def _stop(self) -> NoReturn:
        raise InterruptedRun(signal.SIGINT if self.asked_to_stop else signal.SIGTERM)

    def _vote(self, trainer: Trainer, forwards: int, wish: bool) -> bool:
        """Tell what all processes do: a checkpoint has something from each, and their clocks differ."""
        if trainer.world_size == 1:
            return wish
        return forwards % _FORWARDS_BETWEEN_VOTES == 0 and self._agreed(trainer, wish)

    @staticmethod
    def _agreed(trainer: Trainer, wish: bool) -> bool:
        return bool(trainer.strategy.reduce_boolean_decision(wish, all=False))

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved = time.monotonic()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Stop in an orderly way at the first Ctrl-C; the second is Python's own."""
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # whoever started this process sees to it
        if ignored or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: object) -> None:
            self.asked_to_stop = True
            signal.signal(signal.SIGINT, signal.default_int_handler)

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
