"""A callback for Lightning: cross-iteration norms in somebody's own training, with everything that they need.

Lightning resumes models, optimizers and loops, but what the norms remember is working state of each process; and only
its Trainer knows how long an epoch is, how many batches make a step, and how large they are.
"""

import logging
from dataclasses import replace
from typing import Any

from torch import nn

from crossbn.conversion_report import ConversionReport
from crossbn.convert import check_options, convert_, cross_iteration_norms
from crossbn.histories import history_state, load_history_state
from crossbn.integrations.engine import Callback, LightningModule, Trainer, rank_zero_only
from crossbn.integrations.processes import gather
from crossbn.nn import CrossIterBatchNorm
from crossbn.schedules import window_for

LOGGER = logging.getLogger("lightning.pytorch.crossbn")
"""Below Lightning's own, so that lines appear where its lines do."""
KEY = "crossbn"
"""Of what the callback puts into a checkpoint."""


class HistoryInCheckpoints(Callback):
    """Keeps what the cross-iteration norms of each process remember in checkpoints, so that runs resume bit for bit."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what the norms of every process remember."""
        del trainer
        norms = cross_iteration_norms(pl_module)
        own = {name: tensor.cpu() for name, tensor in history_state(pl_module).items()}
        windows = {name: norm.settings.window for name, norm in norms.items()}
        checkpoint[KEY] = {"windows": windows, "histories": gather(own)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take it over, if the checkpoint has it; Lightning has loaded the weights before."""
        if trainer.state.fn != "fit" or KEY not in checkpoint:
            return
        self.prepare(pl_module)
        saved = checkpoint[KEY]
        for name, norm in cross_iteration_norms(pl_module).items():
            if name in saved["windows"]:
                norm.configure_(replace(norm.settings, window=saved["windows"][name]))
        if not cross_iteration_norms(pl_module):
            return  # they have become other norms since
        if trainer.global_rank < len(saved["histories"]):
            load_history_state(pl_module, saved["histories"][trainer.global_rank])
        else:
            LOGGER.info("the checkpoint has no history for process %d, which starts with none", trainer.global_rank)

    def prepare(self, module: LightningModule) -> None:
        """See to it that the norms are there whose history is loaded next."""


class CrossIterationNorm(HistoryInCheckpoints):
    """Train with cross-iteration norms.

    Converts the batch norms of the LightningModule before its optimizers are made, unless that has been done, sets
    window and burn-in when training starts, writes a line into the log when burn-in ends, and keeps what the norms of
    each process remember in checkpoints, so that a resumed run goes on bit for bit.

    A window counts forwards. With gradient accumulation these are micro-batches, among which weights do not change.

    Args:
        window: forwards to pool.
        batch_size: images per forward and process, for the paper's window. Without either it is the data loader's.
        burn_in_epochs: of plain BatchNorm first, the paper's 25 of 100 for instance.
        burn_in_steps: the same in optimizer steps.
        options: of `crossbn.convert_`.

    Attributes:
        report: what conversion did with each norm; None until then, or if the norms are somebody else's.

    Raises:
        ValueError: if both are given where one is meant, or one is out of range.
        TypeError: for an option that does not exist.

    Example:
        >>> CrossIterationNorm(batch_size=4, burn_in_epochs=25).window
        4
    """

    def __init__(
        self,
        window: int | None = None,
        batch_size: int | None = None,
        burn_in_epochs: float = 0.0,
        burn_in_steps: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        if window is not None and batch_size is not None:
            raise ValueError(f"give one of window and batch_size at most, got {window!r} and {batch_size!r}")
        if burn_in_epochs < 0 or burn_in_steps < 0 or (burn_in_epochs and burn_in_steps):
            raise ValueError(
                "give one of burn_in_epochs and burn_in_steps at most, and none below 0, got "
                f"{burn_in_epochs!r} and {burn_in_steps!r}"
            )
        if "burn_in" in options:
            raise TypeError("CrossIterationNorm has burn_in_epochs and burn_in_steps in place of burn_in")
        self.window = window_for(batch_size) if batch_size is not None else window
        check_options(window=1 if self.window is None else self.window, **options)
        self.report: ConversionReport | None = None
        self.burn_in_epochs = burn_in_epochs
        self.burn_in_steps = burn_in_steps
        self.options = options
        self._found = False  # the module's cross-iteration norms: ours, or somebody else's
        self._ours = False
        self._burning: CrossIterBatchNorm | None = None

    def convert_(self, model: nn.Module) -> None:
        """Convert the batch norms of a model, unless it has cross-iteration norms already."""
        if not cross_iteration_norms(model):
            self.report = convert_(model, window=self.window or 1, **self.options)
            self._ours = True
            if self.report.records:
                say(self.report.summary())
        self._found = bool(cross_iteration_norms(model))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Convert before there are optimizers; a model that `configure_model` makes is not there yet."""
        if stage != "fit":
            return
        if getattr(trainer.strategy, "_layer_sync", None) is not None:
            raise ValueError(
                "Trainer(sync_batchnorm=True) would replace the cross-iteration norms; CrossIterationNorm(sync=True) "
                "pools over processes too"
            )
        self.convert_(pl_module)

    def prepare(self, module: LightningModule) -> None:
        """Convert what `configure_model` has made."""
        if not self._found:
            self.convert_(module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002  # Lightning's
        """Convert before training at the latest."""
        self.prepare(pl_module)
        if not self._found:
            raise ValueError(f"{type(pl_module).__name__} has no batch norm that can be converted")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set window and burn-in, now that the data is known; somebody else's norms keep what is not given here."""
        changes: dict[str, Any] = {}
        if self._ours or self.window is not None:
            changes["window"] = self.window or window_for(_batch_size(trainer))
        if self._ours or self.burn_in_epochs or self.burn_in_steps:
            changes["burn_in"] = self._burn_in(trainer)
        norms = list(cross_iteration_norms(pl_module).values())
        for norm in norms:
            norm.configure_(replace(norm.settings, **changes))
        for norm in norms[:1]:
            self._tell_beginning(norm, trainer.accumulate_grad_batches)

    def _burn_in(self, trainer: Trainer) -> int:
        """Return the forwards of burn-in."""
        if not self.burn_in_epochs:
            return self.burn_in_steps * trainer.accumulate_grad_batches
        if trainer.num_training_batches == float("inf"):
            raise ValueError("epochs of this data loader have no length: give burn_in_steps in place of burn_in_epochs")
        return round(self.burn_in_epochs * trainer.num_training_batches)

    def _tell_beginning(self, norm: CrossIterBatchNorm, accumulated: int) -> None:
        window, left = norm.settings.window, norm.settings.burn_in - int(norm.burnt)
        if accumulated > 1:
            part = "all" if window >= accumulated else f"{window}"
            say(f"a step accumulates {accumulated} forwards: its last one is normalized with {part} of them")
        if left > 0:
            self._burning = norm
            say(f"burn-in: BatchNorm for {left} forwards, then a window of {window}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell when burn-in ends."""
        del pl_module, outputs, batch, batch_idx
        norm = self._burning
        if norm is None:
            return
        if not isinstance(norm, CrossIterBatchNorm):  # it has become another kind of norm since
            self._burning = None
        elif int(norm.burnt) >= norm.settings.burn_in:
            self._burning = None
            say(f"burn-in ended after step {trainer.global_step}: from now on a window of {norm.settings.window}")


@rank_zero_only  # type: ignore[untyped-decorator]  # Lightning ships no types
def say(sentence: str) -> None:
    """Write a line into the log, in the first process."""
    LOGGER.info(sentence)


def _batch_size(trainer: Trainer) -> int:
    """Return the batch size of the training data loader."""
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(size, int):
        raise ValueError(
            f"the batch size is not to be seen from {type(loader).__name__}: give CrossIterationNorm a window or a "
            "batch_size"
        )
    return size
