"""The network in training: loss, optimizer, schedule, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.integrations.engine import MulticlassAccuracy
from crossbn.lab.recipes.classification.norms import switch_norm_
from crossbn.lab.recipes.classification.order import Plan
from crossbn.lab.recipes.classification.recipe import Point, Progress, Recipe
from crossbn.lab.recipes.classification.resuming import STATE
from crossbn.lab.recipes.module import RunModule


class Classifier(RunModule):
    """A network with the paper's optimizer; test accuracy is taken at the end of each span of the plan.

    Args:
        network: with its norms.
        recipe: of the run.
        plan: of the run.
        classes: to tell apart.
        tested: images to test on, of all processes.
        watch: called with points and progress, in the first process only.
    """

    state_name = STATE

    def __init__(
        self,
        network: nn.Module,
        recipe: Recipe,
        plan: Plan,
        classes: int,
        tested: int,
        watch: Callable[[Point | Progress], None],
    ) -> None:
        super().__init__(network, recipe, plan, watch)
        self.recipe, self.tested = recipe, tested
        self.accuracy = MulticlassAccuracy(classes, average="micro", validate_args=False)

    def switch_norm_(self) -> None:
        """Turn the norms of the network into the recipe's other norm."""
        switch_norm_(self.network, self.recipe, self.plan)

    def point_of(self, saved: list[Any]) -> Point:
        """Return the point of the curve that a checkpoint has as a list."""
        return Point(*saved)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return SGD with weight decay on all parameters, and a cosine that ends at 0 with the run."""
        recipe, rate = self.recipe, self.recipe.effective_learning_rate
        optimizer = torch.optim.SGD(self.parameters(), rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.plan.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        self.tell_progress(batch_idx)
        images, classes = batch
        scores = self.network(images)
        loss = F.cross_entropy(scores, classes)
        self.tally.add(loss, scores, classes)
        self.log_loss(loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Count the test images that are classified correctly."""
        del batch_idx
        images, classes = batch
        self.accuracy.update(self.network(images), classes)

    def on_validation_epoch_end(self) -> None:
        """Add a point to the curve."""
        sums = self.trainer.strategy.reduce(self.tally.sums(self.device), reduce_op="sum")
        loss, correct, forwards, images = sums.tolist()
        test_accuracy = round(self.accuracy.compute().item() * self.tested) / self.tested  # it was a float32
        epoch = self.span.stop / self.plan.forwards_per_epoch
        point = Point(epoch, loss / forwards, correct / images, test_accuracy)
        self.accuracy.reset()
        self.add_point(point, point._asdict())
