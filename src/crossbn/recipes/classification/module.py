"""The network in training: loss, optimizer, schedule, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from crossbn.integrations.engine import LightningModule
from crossbn.recipes.classification.order import Plan
from crossbn.recipes.classification.recipe import Point, Progress, Recipe


class Tally:
    """Sums over the forwards since the last point, in tensors that nobody waits for."""

    def __init__(self) -> None:
        self.loss: Tensor | float = 0.0
        self.correct: Tensor | int = 0
        self.forwards = 0
        self.images = 0

    def add(self, loss: Tensor, scores: Tensor, classes: Tensor) -> None:
        """Count one forward."""
        self.loss = self.loss + loss.detach().double()
        self.correct = self.correct + (scores.detach().argmax(1) == classes).sum()
        self.forwards += 1
        self.images += len(classes)

    @property
    def mean_loss(self) -> float:
        """Mean loss so far; waits for the device."""
        return float(self.loss) / max(1, self.forwards)

    def sums(self, device: torch.device) -> Tensor:
        """Return loss, correct images, forwards and images, summed."""
        return torch.stack(
            [
                torch.as_tensor(each, dtype=torch.float64, device=device)
                for each in (self.loss, self.correct, self.forwards, self.images)
            ]
        )


class Classifier(LightningModule):
    """A network with the paper's optimizer; test accuracy is taken at the end of each span of the plan.

    Lightning's epochs are the spans: nothing but whole ones lies between two validations, so a checkpoint on the way
    never has one half done.
    """

    def __init__(
        self,
        network: nn.Module,
        recipe: Recipe,
        plan: Plan,
        classes: int,
        watch: Callable[[Point | Progress], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.network = network
        self.recipe = recipe
        self.plan = plan
        self.watch = watch
        self.spans = plan.spans
        self.accuracy = MulticlassAccuracy(classes, average="micro", validate_args=False)
        self.tally = Tally()
        self.curve: list[Point] = []

    def __setattr__(self, name: str, value: Any) -> None:
        # The engine notes here which hook it is in, some forty times a step, and a module looks at whatever is set.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002  # the engine's
        """Return the loss of a batch."""
        images, classes = batch
        scores = self.network(images)
        loss = F.cross_entropy(scores, classes)
        self.tally.add(loss, scores, classes)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # noqa: ARG002  # the engine's
        """Count the test images that are classified correctly."""
        images, classes = batch
        self.accuracy.update(self.network(images), classes)

    def on_validation_epoch_end(self) -> None:
        """Add a point to the curve."""
        sums = self.tally.sums(self.device)
        loss, correct, forwards, images = (
            value.item() for value in self.trainer.strategy.reduce(sums, reduce_op="sum")
        )
        done = self.spans[self.trainer.current_epoch].stop
        epoch = done / self.plan.forwards_per_epoch
        tested = len(self.trainer.datamodule.images.test)
        test_accuracy = round(self.accuracy.compute().item() * tested) / tested  # it is a float32
        point = Point(epoch, loss / forwards, correct / images, test_accuracy)
        self.accuracy.reset()
        self.tally = Tally()
        self.curve.append(point)
        self.watch(point)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return SGD with weight decay on all parameters, and a cosine that ends at 0 with the run."""
        recipe = self.recipe
        optimizer = torch.optim.SGD(
            self.parameters(),
            recipe.effective_learning_rate,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.plan.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
