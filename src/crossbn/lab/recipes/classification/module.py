"""The network in training: loss, optimizer, schedule, and what is measured on the way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.integrations.engine import MulticlassAccuracy
from crossbn.lab.models import build_network
from crossbn.lab.recipes.classification.images import load_images
from crossbn.lab.recipes.classification.norms import give_norm_
from crossbn.lab.recipes.classification.recipe import Point, Recipe
from crossbn.lab.recipes.loading import Images
from crossbn.lab.recipes.module import RunModule


class Classifier(RunModule):
    """A network with the paper's optimizer; test accuracy is taken at the end of each span of the plan."""

    state_name = "classification"
    load_images = staticmethod(load_images)
    give_norm_ = staticmethod(give_norm_)

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.accuracy = MulticlassAccuracy(self.images.classes, average="micro", validate_args=False)

    @staticmethod
    def build(recipe: Recipe, images: Images) -> nn.Module:
        """Return the recipe's network."""
        return build_network(recipe.model, images.channels, images.classes, recipe.width, recipe.seed)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return SGD with weight decay on all parameters, and a cosine that ends at 0 with the run."""
        recipe, rate = self.recipe, self.recipe.effective_learning_rate()
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
        tested = len(self.images.test)
        test_accuracy = round(self.accuracy.compute().item() * tested) / tested  # it was a float32
        epoch = self.span.stop / self.plan.forwards_per_epoch
        point = Point(epoch, loss / forwards, correct / images, test_accuracy)
        self.accuracy.reset()
        self.add_point(point, point._asdict())
