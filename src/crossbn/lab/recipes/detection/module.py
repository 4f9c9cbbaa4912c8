"""The detector in training: loss, optimizer, schedule, and what is measured on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from crossbn.lab.data.scenes import Batch
from crossbn.lab.recipes.detection.images import load_images
from crossbn.lab.recipes.detection.networks import build_network
from crossbn.lab.recipes.detection.norms import give_norm_
from crossbn.lab.recipes.detection.recipe import Point, Recipe, learning_rate_factor
from crossbn.lab.recipes.detection.scores import ScoreKeeper
from crossbn.lab.recipes.loading import Images
from crossbn.lab.recipes.module import RunModule

STATE = "detection"
"""The key of a run's state in a checkpoint."""


class Detector(RunModule):
    """A detector with the paper's optimizer; it is scored at the end of each span of the plan."""

    state_name = STATE
    load_images = staticmethod(load_images)
    give_norm_ = staticmethod(give_norm_)

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.keeper = ScoreKeeper(self.recipe.has_masks)

    @staticmethod
    def build(recipe: Recipe, images: Images) -> nn.Module:
        """Return the recipe's network."""
        return build_network(recipe, len(images.classes))

    def more_state(self) -> dict[str, Any]:
        """Return the names of what the network finds."""
        return {"classes": self.images.classes}

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
