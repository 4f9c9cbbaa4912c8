"""The detector in training: loss, optimizer, schedule, and what is measured on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from crossbn.lab.recipes.classification.order import Plan
from crossbn.lab.recipes.classification.recipe import Progress
from crossbn.lab.recipes.detection.images import Batch
from crossbn.lab.recipes.detection.norms import switch_norm_
from crossbn.lab.recipes.detection.recipe import Point, Recipe, learning_rate_factor
from crossbn.lab.recipes.detection.scores import ScoreKeeper
from crossbn.lab.recipes.module import RunModule

STATE = "detection"
"""The key of a run's state in a checkpoint."""


class Detector(RunModule):
    """A detector with the paper's optimizer; it is scored at the end of each span of the plan.

    Args:
        network: with its norms.
        recipe: of the run.
        plan: of the run.
        classes: the names of what it finds.
        watch: called with points and progress, in the first process only.
    """

    state_name = STATE

    def __init__(
        self,
        network: nn.Module,
        recipe: Recipe,
        plan: Plan,
        classes: list[str],
        watch: Callable[[Point | Progress], None],
    ) -> None:
        super().__init__(network, recipe, plan, watch)
        self.recipe, self.classes = recipe, classes
        self.keeper = ScoreKeeper(recipe.has_masks)
        self._busy = self._started = 0.0
        self._earlier = {"busy": 0.0, "waited": 0.0}

    @property
    def waiting_share(self) -> float:
        """Of the time of training forwards and what belongs to them, what was spent waiting for images."""
        times = self._times()
        return times["waited"] / max(sum(times.values()), 1e-9)

    def _times(self) -> dict[str, float]:
        waited = self.trainer.datamodule.waited
        return {"busy": self._earlier["busy"] + self._busy, "waited": self._earlier["waited"] + waited}

    def switch_norm_(self) -> None:
        """Turn the norms of the network into the recipe's other norm."""
        switch_norm_(self.network, self.recipe, self.plan)

    def point_of(self, saved: list[Any]) -> Point:
        """Return the point of the curve that a checkpoint has as a list."""
        return Point(*saved)

    def more_state(self) -> dict[str, Any]:
        """Return the times, and the names of what the network finds."""
        return {"times": self._times(), "classes": self.classes}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the state of the run, its times included."""
        super().on_load_checkpoint(checkpoint)
        self._earlier = dict(checkpoint[STATE]["times"])

    def configure_optimizers(self) -> dict[str, Any]:
        """Return SGD with weight decay on all parameters that are trained, and the paper's schedule."""
        recipe, plan = self.recipe, self.plan
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        rate = recipe.effective_learning_rate(plan.processes)
        optimizer = torch.optim.SGD(trained, rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, plan.steps, plan.steps_per_epoch)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Switch the norm, when it is time."""
        self._started = time.perf_counter()
        super().on_train_batch_start(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the time that the step has taken."""
        del outputs, batch, batch_idx
        self._busy += time.perf_counter() - self._started

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the sum of the losses of a batch."""
        self.tell_progress(batch_idx)
        losses = self.network(*batch)
        loss = torch.stack(list(losses.values())).sum()
        self.tally.add_loss(loss)
        self.log_loss(loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Note what is found in test images."""
        del batch_idx
        images, targets = batch
        self.keeper.add(self.network(images), targets)

    def on_validation_epoch_end(self) -> None:
        """Add a point to the curve."""
        sums = self.trainer.strategy.reduce(self.tally.sums(self.device), reduce_op="sum")
        loss, _, forwards, _ = sums.tolist()
        point = Point(self.span.stop / self.plan.forwards_per_epoch, loss / forwards, self.keeper.scores())
        known = {name: value for name, value in point.scores.items() if value is not None}
        self.add_point(point, {"epoch": point.epoch, "train_loss": point.train_loss, **known})
