"""The network in training: loss, optimizer, schedule, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from crossbn.integrations.engine import LightningModule, MulticlassAccuracy
from crossbn.integrations.processes import gather
from crossbn.lab.recipes.classification.clock import Clock
from crossbn.lab.recipes.classification.norms import switch_norm_
from crossbn.lab.recipes.classification.order import Plan, mix
from crossbn.lab.recipes.classification.recipe import Point, Progress, Recipe
from crossbn.lab.recipes.classification.resuming import STATE, identity, random_state, set_random_state
from crossbn.lab.recipes.classification.tally import Tally


class Classifier(LightningModule):
    """A network with the paper's optimizer; test accuracy is taken at the end of each span of the plan.

    Lightning's epochs are the spans: nothing but whole ones lies between two validations, so a checkpoint on the way
    never has one half done.

    Args:
        network: with its norms.
        recipe: of the run.
        plan: of the run.
        classes: to tell apart.
        tested: images to test on, of all processes.
        watch: called with points and progress, in the first process only.
    """

    def __init__(
        self,
        network: nn.Module,
        recipe: Recipe,
        plan: Plan,
        classes: int,
        tested: int,
        watch: Callable[[Point | Progress], None],
    ) -> None:
        super().__init__()
        self.network = network
        self.recipe, self.plan, self.tested, self.watch = recipe, plan, tested, watch
        self.spans = plan.spans
        self.switched = False
        self.switch_at = round(recipe.switch_epoch * plan.steps_per_epoch) * plan.accumulate
        self.accuracy = MulticlassAccuracy(classes, average="micro", validate_args=False)
        self.tally = Tally()
        self.curve: list[Point] = []
        self.clock = Clock()
        self._random: list[Tensor] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # The engine notes here which hook it is in, some forty times a step, and a module looks at whatever is set.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def span(self) -> range:
        """The forwards between the last point of the curve and the next."""
        return self.spans[min(self.trainer.current_epoch, len(self.spans) - 1)]

    def configure_optimizers(self) -> dict[str, Any]:
        """Return SGD with weight decay on all parameters, and a cosine that ends at 0 with the run."""
        recipe, rate = self.recipe, self.recipe.effective_learning_rate
        optimizer = torch.optim.SGD(self.parameters(), rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.plan.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Switch the norm, when it is time."""
        del batch
        if self.recipe.switch_norm is not None and self.span.start + batch_idx == self.switch_at:
            self._switch_()

    def _switch_(self) -> None:
        switch_norm_(self.network, self.recipe, self.plan)
        self.switched = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of the run; the order of images and their augmentation need none."""
        checkpoint[STATE] = {
            "recipe": identity(self.recipe, self.trainer.world_size),
            "switched": self.switched,
            "curve": [list(point) for point in self.curve],
            "seconds": self.clock.seconds,
            "seconds_per_step": self.clock.seconds_per_step,
            "processes": gather({"tally": self.tally.sums(), "random": random_state(self.device)}),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it over, and have the norm that the weights are of before they are loaded."""
        saved = checkpoint[STATE]
        if saved.get("switched") and not self.switched:
            self._switch_()
        own = saved["processes"][self.trainer.global_rank]
        self.tally = Tally.of(own["tally"], self.trainer.strategy.root_device)
        self._random = own["random"]
        self.curve[:] = [Point(*point) for point in saved["curve"]]
        self.clock.go_on(saved["seconds"], saved["seconds_per_step"])

    def on_train_start(self) -> None:
        """Begin with random numbers of this seed and process, or go on with them; they are the model's alone."""
        if self._random is None:
            torch.manual_seed(mix(self.recipe.seed, self.trainer.global_rank))
        else:
            set_random_state(self._random, self.device)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        if self.clock.tick() and self.tally.forwards and self.trainer.is_global_zero:
            share = (self.span.start + batch_idx) / self.plan.forwards
            self.watch(Progress(share, f"loss {self.tally.mean_loss:.3f}"))
        images, classes = batch
        scores = self.network(images)
        loss = F.cross_entropy(scores, classes)
        self.tally.add(loss, scores, classes)
        # Asked more often than it writes, the engine's log would cost more than a small network's step.
        if self.trainer.loggers and (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0:
            self.log("loss", loss)
        return loss

    def on_validation_start(self) -> None:
        """Let all processes test the same network: the first one's, whose running statistics are saved."""
        if self.trainer.world_size > 1:
            for buffer in self.network.buffers():
                dist.broadcast(buffer, 0)

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
        self.tally = Tally()
        self.curve.append(point)
        for logger in self.trainer.loggers:
            logger.log_metrics(point._asdict(), self.trainer.global_step)
        if self.trainer.is_global_zero:
            self.watch(point)
